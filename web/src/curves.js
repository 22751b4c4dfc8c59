// Learning curves: the bound in a large plot and its terms in small ones, with phases and events.

import uPlot from "uplot";
import { announce, clear, css, h, number, plural, s, select } from "./dom.js";
import { pictureTools } from "./export.js";
import {
  along, compact, course, decimated, interpolate, joined, limits, lowerBound, nearest,
} from "./series.js";

const FONT = "11px system-ui, sans-serif";
const UNITS = { step: "step", epochs: "epoch", seconds: "seconds" };
let count = 0; // of the groups of plots that share a cursor

// Plots --------------------------------------------------------------------------------------------

/**
 * A plot of lines over a common x. A line has `label`, `x`, `y` (typed arrays), `colour` (a custom
 * property), `width`, `alpha` and `dash`. `bands` are [start, end] in units of x, `marks` are
 * {x, label}, `point` is {x, y, label} and `reference` is {value, label}, a horizontal line.
 *
 * `zoomed([low, high] or null)` is called after a drag or a double click, `hovered(x or null)` when
 * the cursor moves. The owner sets the range of x, so that several plots keep the same.
 */
export class LinePlot {
  constructor({ label, title = "", height = 150, sync, zoomed, hovered }) {
    Object.assign(this, { title, height, zoomed, hovered, sync });
    this.lines = [];
    this.whole = false;
    this.range = [0, 1];
    this.zoom = false;
    this.extras = { bands: [], marks: [], point: null, reference: null };
    this.chart = null;
    this.element = h("div", {
      class: "line-plot", tabindex: 0, role: "img", "aria-label": label,
      on: { keydown: (event) => this.key(event) },
    });
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.element);
  }

  get width() {
    return Math.max(160, Math.floor(this.element.clientWidth));
  }

  /** Show lines in a range of x. `zoom` says that it is a part of the whole. */
  set(lines, range, { zoom = false, whole = false, label = null, ...extras } = {}) {
    const same =
      this.lines.length === lines.length &&
      lines.every((line, i) => line.label === this.lines[i].label);
    Object.assign(this, { lines, range, zoom, whole });
    Object.assign(this.extras, extras);
    if (label !== null) this.element.setAttribute("aria-label", label);
    if (!same && this.chart !== null) {
      this.chart.destroy();
      this.chart = null;
    }
    this.draw();
  }

  draw() {
    if (!this.element.isConnected || this.element.clientWidth === 0) return; // resize() comes later
    this.limits = this.yLimits();
    const data = this.data();
    if (this.chart === null) {
      this.chart = new uPlot(this.options(), data, this.element);
    }
    this.chart.batch(() => {
      this.chart.setData(data, false);
      this.chart.setScale("x", { min: this.range[0], max: this.range[1] });
    });
  }

  data() {
    const [low, high] = this.range;
    const tables = this.lines.map(({ x, y }) => decimated(x, y, low, high, this.width));
    return tables.length ? uPlot.join(tables) : [[]];
  }

  yLimits() {
    const [low, high] = this.range;
    const seen = this.lines.map(({ x, y }) =>
      this.zoom ? y.subarray(lowerBound(x, low), lowerBound(x, high) + 1) : y);
    const [least, most] = limits(seen, {
      skipped: this.zoom || this.whole ? 0 : 0.1,
      outliers: this.whole,
    });
    const value = this.extras.reference?.value;
    if (!Number.isFinite(value)) return [least, most];
    const margin = 0.06 * (most - least);
    return [Math.min(least, value - margin), Math.max(most, value + margin)];
  }

  options() {
    const axis = {
      stroke: () => css("--quiet"),
      font: FONT,
      grid: { stroke: () => css("--line"), width: 1 },
      ticks: { stroke: () => css("--line"), width: 1, size: 4 },
      values: (_, values) => values.map((value) => (value === null ? "" : compact(value))),
    };
    return {
      width: this.width,
      height: this.height,
      legend: { show: false },
      scales: {
        x: { time: false, auto: false },
        y: { range: () => this.limits },
      },
      axes: [
        { ...axis, size: 28, space: 60 },
        {
          ...axis, space: 28,
          size: (_, values) => 14 + 6.4 * Math.max(3, ...(values ?? []).map((text) => text.length)),
        },
      ],
      series: [
        {},
        ...this.lines.map((line) => ({
          label: line.label,
          stroke: () => css(line.colour),
          width: line.width ?? 1.5,
          alpha: line.alpha ?? 1,
          dash: line.dash,
          spanGaps: true,
          points: { show: line.x.length === 1 },
        })),
      ],
      cursor: {
        y: false,
        points: { size: 6 },
        drag: { x: true, y: false, setScale: false },
        sync: {
          key: this.sync,
          filters: { pub: (type) => type === "mousemove" || type === "mouseleave" },
        },
        bind: {
          dblclick: () => () => {
            this.zoomed?.(null);
            return null;
          },
        },
      },
      hooks: {
        drawClear: [(chart) => this.drawBands(chart)],
        draw: [(chart) => this.drawExtras(chart)],
        setSelect: [(chart) => this.selected(chart)],
        setCursor: [(chart) => this.moved(chart)],
      },
    };
  }

  selected(chart) {
    const { left, width } = chart.select;
    if (width < 3) return;
    const ends = [chart.posToVal(left, "x"), chart.posToVal(left + width, "x")];
    chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.zoomed?.(ends);
  }

  moved(chart) {
    const { left } = chart.cursor;
    this.hovered?.(left === null || left === undefined || left < 0 ? null : chart.posToVal(left, "x"));
  }

  /** Move the cursor of this plot, and of those that share it, to a value of x. */
  point(x) {
    if (this.chart === null) return;
    this.chart.setCursor({ left: this.chart.valToPos(x, "x"), top: this.height / 3 });
    this.hovered?.(x);
  }

  key(event) {
    const [low, high] = this.range;
    const middle = this.cursor ?? (low + high) / 2;
    const step = (high - low) / 50;
    const acts = {
      ArrowLeft: () => this.point((this.cursor = Math.max(low, middle - step))),
      ArrowRight: () => this.point((this.cursor = Math.min(high, middle + step))),
      "+": () => this.zoomed?.([middle - (high - low) / 4, middle + (high - low) / 4]),
      "-": () => this.zoomed?.([low - (high - low) / 2, high + (high - low) / 2]),
      Escape: () => this.zoomed?.(null),
    };
    if (acts[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      acts[event.key]();
    }
  }

  drawBands(chart) {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.fillStyle = css("--accent");
    for (const { start, end, share } of this.extras.bands) {
      const [from, to] = [start, end].map((x) => chart.valToPos(x, "x", true));
      if (to < bbox.left || from > bbox.left + bbox.width) continue;
      ctx.globalAlpha = 0.12 * share;
      ctx.fillRect(from, bbox.top, Math.max(1, to - from), bbox.height);
    }
    ctx.restore();
  }

  drawExtras(chart) {
    const { ctx, bbox } = chart;
    const { marks, point, reference } = this.extras;
    const ratio = uPlot.pxRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    for (const { x } of marks) {
      const at = chart.valToPos(x, "x", true);
      ctx.fillStyle = css("--warn");
      ctx.beginPath();
      ctx.moveTo(at - 5 * ratio, bbox.top + bbox.height);
      ctx.lineTo(at + 5 * ratio, bbox.top + bbox.height);
      ctx.lineTo(at, bbox.top + bbox.height - 9 * ratio);
      ctx.fill();
    }
    if (Number.isFinite(reference?.value)) {
      const y = chart.valToPos(reference.value, "y", true);
      ctx.strokeStyle = css("--c2");
      ctx.lineWidth = 1.5 * ratio;
      ctx.setLineDash([6 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.setLineDash([]);
      ctx.fillStyle = css("--ink");
      ctx.textAlign = "left"; // where the curves are low
      ctx.fillText(reference.label, bbox.left + 6 * ratio, y - 5 * ratio);
    }
    if (point) {
      const [x, y] = [chart.valToPos(point.x, "x", true), chart.valToPos(point.y, "y", true)];
      ctx.strokeStyle = css("--ink");
      ctx.lineWidth = 1.5 * ratio;
      ctx.beginPath();
      ctx.arc(x, y, 5 * ratio, 0, 2 * Math.PI);
      ctx.stroke();
      const right = x > bbox.left + bbox.width / 2;
      ctx.fillStyle = css("--ink");
      ctx.textAlign = right ? "right" : "left";
      ctx.fillText(point.label, x + (right ? -9 : 9) * ratio, y + 16 * ratio);
    }
    ctx.restore();
  }

  resize() {
    if (this.element.clientWidth === 0 || !this.lines.length) return;
    if (this.chart !== null && this.chart.width !== this.width) {
      this.chart.setSize({ width: this.width, height: this.height });
      this.draw();
    } else if (this.chart === null) this.draw();
  }

  redraw() {
    this.chart?.redraw();
  }

  /** The plot as a canvas with its title and the names of its lines, for a file. */
  canvas() {
    if (this.chart === null) this.draw();
    const source = this.chart?.ctx.canvas ?? h("canvas", { width: 1, height: 1 });
    const ratio = uPlot.pxRatio;
    const canvas = h("canvas", { width: source.width, height: source.height + 26 * ratio });
    const context = canvas.getContext("2d");
    context.fillStyle = css("--panel") || css("--paper") || "#ffffff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.font = `${12 * ratio}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    let x = 8 * ratio;
    const write = (text, colour) => {
      context.fillStyle = colour;
      context.fillText(text, x, 13 * ratio);
      x += context.measureText(text).width + 14 * ratio;
    };
    write(this.title, css("--ink"));
    for (const line of this.lines) {
      context.globalAlpha = line.alpha ?? 1;
      write(line.label, css(line.colour));
    }
    context.globalAlpha = 1;
    context.drawImage(source, 0, 26 * ratio);
    return canvas;
  }

  destroy() {
    this.observer.disconnect();
    this.chart?.destroy();
    this.chart = null;
  }
}

/** A sample of a line for a legend. */
export const swatch = (line) =>
  s("svg", { width: 22, height: 10, "aria-hidden": "true" },
    s("line", {
      x1: 0, x2: 22, y1: 5, y2: 5, stroke: `var(${line.colour})`,
      "stroke-width": (line.width ?? 1.5) + 0.5, "stroke-opacity": line.alpha ?? 1,
      "stroke-dasharray": line.dash?.join(" "),
    }));

export const fileName = (...parts) =>
  parts.join(" ").replaceAll(/[^\p{L}\p{N}._-]+/gu, "-").replaceAll(/^[-.]+|-+$/g, "");

/**
 * The curves of a run: of one that trains, those that grow. They are also there before the first
 * checkpoint, and until the summary of a run that has ended arrives.
 */
export const curvesOf = (run) => {
  const whole = run.summary?.curves ?? null;
  const unfinished = run.state === "training" || !whole?.series.length;
  return (unfinished && run.growing) || whole;
};

const courseOf = (value) => (value.course === undefined ? course(value.array) : value.course);

/** What a curve did, in words: "validation elbo rose from −40.1 to −24.6". */
export function inWords({ label, y, course: found }) {
  if (found === null) return `${label} has no finite value`;
  if (y.length === 1) return `${label} is ${number(found.last)}`;
  const verb = found.last > found.first ? "rose" : found.last < found.first ? "fell" : "stayed";
  return verb === "stayed"
    ? `${label} stayed at ${number(found.last)}`
    : `${label} ${verb} from ${number(found.first)} to ${number(found.last)}`;
}

// The part -----------------------------------------------------------------------------------------

const HIDDEN = new Set(["lr", "gradient", "kl weight"]); // panels that are shown on demand

/**
 * The learning curves of a run. `update(run)` shows a longer history, `theme()` new colours.
 */
export function curvesPart(run) {
  const view = new Curves(run);
  return {
    element: view.element,
    update: (now) => view.update(now),
    theme: () => view.theme(),
    destroy: () => view.destroy(),
  };
}

class Curves {
  constructor(run) {
    this.run = run;
    this.sync = `curves ${(count += 1)}`;
    this.unit = "step";
    this.whole = false;
    this.besides = false;
    this.range = null; // of x, in the chosen unit; null shows everything
    this.panels = [];
    this.body = h("div", {});
    this.readout = h("p", { class: "curves-readout" });
    this.element = h("section", { class: "part", id: "curves", "aria-labelledby": "curves-title" },
      h("h2", { id: "curves-title" }, "Training"), this.body);
    this.curves = curvesOf(run);
    this.build();
  }

  update(run) {
    const curves = curvesOf(run);
    const changed = this.names() !== this.names(curves);
    this.run = run;
    this.curves = curves;
    if (changed) this.build();
    else if (this.panels.length) {
      this.show();
      this.listEvents();
      this.writeTable();
    }
  }

  destroy() {
    for (const { plot } of this.panels) plot.destroy();
    this.panels = [];
  }

  theme() {
    for (const { plot } of this.panels) plot.redraw();
  }

  names(curves = this.curves) {
    return (curves?.series ?? []).map((one) => one.key).join("\n") +
      ["seconds", "epochs"].filter((name) => curves?.[name]).join();
  }

  // Building ---------------------------------------------------------------------------------------

  build() {
    this.destroy();
    if (this.unit !== "step" && !this.curves?.[this.unit]) Object.assign(this, { unit: "step", range: null });
    const open = this.table?.open;
    clear(this.body);
    const series = this.curves?.series ?? [];
    const bounds = series.filter((one) => one.kind === "bound");
    if (!series.length) {
      this.body.append(h("p", {}, "No history was recorded yet."));
      return;
    }
    const names = [...new Set(series.filter((one) => one.kind !== "bound").map((one) => one.name))];
    const rank = { term: 0, kl: 1, besides: 2 };
    const kindOf = (name) => series.find((one) => one.name === name).kind;
    const last = (name) => (name === "objective" || name === "gap" ? 0.5 : 0);
    names.sort((a, b) => rank[kindOf(a)] + last(a) - rank[kindOf(b)] - last(b));
    this.extra = names.some((name) => HIDDEN.has(name));
    this.grid = h("div", { class: "curves-grid" });
    this.legend = h("ul", { class: "curves-legend" });
    this.events = h("div", {});
    this.table = h("details", { open }, h("summary", {}, "The curves as a table"));
    this.items = new Map(); // the item of each event in the list
    this.cells = null; // of the table
    const main = bounds.length
      ? this.panel("bound", bounds.map((one) => one.key), "The bound, nats per example", 300)
      : null;
    this.body.append(this.controls(), ...[main].filter(Boolean), this.legend, this.readout, this.grid,
      this.events, this.table);
    main?.classList.add("curves-main");
    for (const name of names) {
      if (HIDDEN.has(name) && !this.besides) continue;
      const mine = series.filter((one) => one.name === name);
      this.grid.append(this.panel(name, mine.map((one) => one.key), mine[0].title ?? name, 150));
    }
    this.listEvents();
    this.writeTable();
    this.show();
    // Plots need their width, which they have once they are in the page.
    requestAnimationFrame(() => this.show());
  }

  panel(name, keys, title, height) {
    const plot = new LinePlot({
      label: title, title, height, sync: this.sync,
      zoomed: (range) => this.zoom(range),
      hovered: (x) => this.hover(x),
    });
    const figure = h("figure", { class: "picture" }, h("figcaption", {}, title), plot.element);
    this.panels.push({ name, keys, plot, title });
    pictureTools(figure, {
      name: fileName(this.run.name ?? "run", name),
      png: () => plot.canvas(),
      csv: () => {
        const lines = this.lines(keys, "step");
        return { columns: ["step", ...lines.map((line) => line.key)], rows: joined(lines) };
      },
    });
    return figure;
  }

  controls() {
    const units = [["step", "steps"]];
    if (this.curves.epochs) units.push(["epochs", "epochs"]);
    if (this.curves.seconds) units.push(["seconds", "seconds"]);
    const box = (text, checked, change) =>
      h("label", {}, h("input", {
        type: "checkbox", checked, on: { change: (event) => change(event.target.checked) },
      }), text);
    this.reset = h("button", {
      type: "button", class: "tiny", disabled: this.range === null,
      on: { click: () => this.zoom(null) },
    }, "Show all steps");
    return h("div", { class: "curves-controls" },
      units.length > 1 && select("Over", units, this.unit, (unit) => {
        this.unit = unit;
        this.zoom(null);
      }),
      box("whole range of values", this.whole, (on) => {
        this.whole = on;
        this.show();
      }),
      this.extra && box("learning rate and gradients", this.besides, (on) => {
        this.besides = on;
        this.build();
      }),
      this.reset,
      h("span", { class: "quiet" }, "Drag to zoom, double-click to show everything."));
  }

  // Showing ----------------------------------------------------------------------------------------

  /** The x of a step in the chosen unit. */
  at(step, unit = this.unit) {
    if (unit === "step") return step;
    const clock = this.curves[unit];
    return interpolate(clock.step.array, clock.value.array, step);
  }

  lines(keys, unit = this.unit) {
    const bounds = [...new Set(this.curves.series.filter((one) => one.kind === "bound")
      .map((one) => one.name))];
    const chosen = keys.map((key) => this.curves.series.find((other) => other.key === key));
    const clock = unit === "step" ? null : this.curves[unit];
    return chosen.map((one) => {
      const { key } = one;
      const alone = chosen.filter((other) => other.name === one.name).length === 1;
      const steps = one.step.array;
      const bold = one.validation || alone;
      return {
        key,
        label: `${one.name}, ${one.validation ? "validation" : "training"}`,
        x: clock ? along(clock.step.array, clock.value.array, steps) : steps,
        y: one.value.array,
        course: courseOf(one.value),
        colour: `--c${Math.max(0, bounds.indexOf(one.name)) % 10}`,
        width: bold ? 2 : 1,
        alpha: bold ? 1 : 0.4,
      };
    });
  }

  full(lines) {
    let [low, high] = [Infinity, -Infinity];
    for (const { x } of lines) {
      if (!x.length) continue;
      low = Math.min(low, x[0]);
      high = Math.max(high, x[x.length - 1]);
    }
    if (!(high >= low)) return [0, 1];
    return high > low ? [low, high] : [low - 1, high + 1];
  }

  show() {
    if (!this.panels.length) return;
    const every = this.panels.map(({ keys }) => this.lines(keys));
    const full = this.full(every.flat());
    const range = this.range ?? full;
    this.fullRange = full;
    this.reset.disabled = this.range === null;
    const bands = this.bands();
    const best = this.curves.best;
    const evidence = this.run.checks?.evidence ?? null;
    this.panels.forEach(({ name, plot, title }, i) => {
      const lines = every[i];
      const main = name === "bound";
      const line = main && Number.isFinite(evidence?.model_mean) ? { value: evidence.model_mean, label: reference(evidence) } : null;
      plot.set(lines, range, {
        zoom: this.range !== null,
        whole: this.whole,
        bands,
        label: `${title}: ${[...lines.map(inWords), ...(line ? [line.label] : [])].join("; ")}.`,
        marks: main ? this.curves.events.map((event) => ({ x: this.at(event.step) })) : [],
        point: main && best && lines.some((line) => line.label.endsWith("validation"))
          ? { x: this.at(best.step), y: best.value, label: `best ${number(best.value)} at step ${number(best.step)}` } : null,
        reference: line,
      });
    });
    this.writeLegend(this.panels[0].name === "bound" ? every[0] : [], bands);
  }

  bands() {
    const phases = this.curves.phases ?? [];
    const kinds = new Set(phases.map(([name]) => name));
    if (kinds.size < 2 && !kinds.has("E/M") && !kinds.has("M/E")) return [];
    return phases
      .filter(([name]) => name.split("/").includes("E"))
      .map(([name, start, end]) => ({
        start: this.at(start), end: this.at(end), share: 1 / name.split("/").length,
      }));
  }

  zoom(range) {
    const [low, high] = this.fullRange ?? [0, 1];
    const inside = range && [Math.max(low, range[0]), Math.min(high, range[1])];
    const part = inside && inside[1] > inside[0] && (inside[0] > low || inside[1] < high);
    this.range = part ? inside : null;
    this.show();
    if (this.range) {
      announce(`${UNITS[this.unit]} ${number(inside[0])} to ${number(inside[1])}`);
    }
  }

  hover(x) {
    if (x === null) {
      this.readout.textContent = "";
      return;
    }
    const parts = [`${UNITS[this.unit]} ${number(this.unit === "step" ? Math.round(x) : x)}`];
    for (const { plot } of this.panels) {
      for (const line of plot.lines) {
        const i = nearest(line.x, x);
        if (i >= 0) parts.push(`${line.label} ${number(line.y[i])}`);
      }
    }
    this.readout.textContent = parts.join(" · ");
  }

  // Words ------------------------------------------------------------------------------------------

  writeLegend(lines, bands) {
    clear(this.legend).append(
      ...lines.map((line) => h("li", {}, swatch(line), line.label)),
      ...(bands.length ? [h("li", {},
        s("svg", { width: 22, height: 12, "aria-hidden": "true" },
          s("rect", { width: 22, height: 12, fill: "var(--accent)", "fill-opacity": 0.16 })),
        "E-steps, which train q")] : []),
      ...(this.curves.events.length ? [h("li", {},
        s("svg", { width: 12, height: 12, "aria-hidden": "true" },
          s("path", { d: "M1,11 h10 l-5,-9 z", fill: "var(--warn)" })),
        plural(this.curves.noted, "event"))] : []));
  }

  // New events are added to the list, so that it keeps its place and the focus.
  listEvents() {
    const { events, noted } = this.curves;
    if (!events.length) {
      clear(this.events);
      this.items.clear();
      return;
    }
    if (!this.items.size) {
      this.heading = h("h3", {});
      this.list = h("ul", { class: "curves-events" });
      clear(this.events).append(this.heading, this.list);
    }
    this.heading.textContent = plural(noted, "event") +
      (noted > events.length ? `, of which the first and the last ${number(events.length / 2)} are listed` : "");
    const wanted = new Set(events);
    for (const [event, item] of this.items) {
      if (wanted.has(event)) continue;
      item.remove();
      this.items.delete(event);
    }
    for (const event of events) {
      if (this.items.has(event)) continue;
      this.items.set(event, this.eventItem(event));
      this.list.append(this.items.get(event));
    }
  }

  eventItem(event) {
    return h("li", {},
      h("button", {
        type: "button", class: "tiny",
        "aria-label": `Show step ${number(event.step)} in the curves`,
        on: { click: () => this.goTo(event.step) },
      }, `step ${number(event.step)}`),
      h("span", {}, event.text,
        event.remedy && [" ", h("span", { class: "remedy" }, event.remedy)]));
  }

  goTo(step) {
    const x = this.at(step);
    if (this.range && (x < this.range[0] || x > this.range[1])) this.zoom(null);
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.panels[0].plot.element.scrollIntoView({
      block: "nearest", behavior: still ? "auto" : "smooth",
    });
    this.panels[0].plot.point(x);
  }

  writeTable() {
    const { series } = this.curves;
    if (this.cells === null) {
      this.cells = series.map(() => ["entries", "first", "low", "high", "last"].map((key) => [key, h("td", { class: "figure" })]));
      this.table.append(h("div", { class: "table-box" }, h("table", {},
        h("thead", {}, h("tr", {}, ["curve", "entries", "first", "lowest", "highest", "last"].map((text) =>
          h("th", { scope: "col" }, text)))),
        h("tbody", {}, series.map((one, i) => h("tr", {},
          h("th", { scope: "row" }, `${one.name}, ${one.validation ? "validation" : "training"}`),
          this.cells[i].map(([, cell]) => cell)))))));
    }
    series.forEach(({ value }, i) => {
      const found = { entries: value.array.length, ...courseOf(value) };
      for (const [key, cell] of this.cells[i]) cell.textContent = number(found[key] ?? null);
    });
  }
}

// The curves are in the units of the model, and so is the line.
const reference = ({ mean, model_mean: value, rows }) =>
  `log p(x) ${number(value)}${mean === value ? "" : " in the units of the model"}, ${plural(rows, "row")}`;
