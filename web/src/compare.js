// Several runs: their evidence on the same rows, their curves together, and the settings that differ.

import { clear, h, number, plural, select } from "./dom.js";
import { pictureTools } from "./export.js";
import { curvesOf, fileName, inWords, LinePlot, swatch } from "./curves.js";
import { histogram, INK, whiskers } from "./histogram.js";
import { along, course, joined, nearest } from "./series.js";

const VERDICTS = {
  best: "best",
  worse: "worse than the best",
  "not told apart": "cannot be told from the best",
  "not decided": "not decided",
};
const DASHES = [undefined, [7, 4], [2, 3], [9, 3, 2, 3]]; // after ten colours, lines differ by dashes

/**
 * The comparison of the runs of a document; null if it has only one run. `update()` shows another
 * comparison, `grow()` longer curves.
 */
export function comparePart(page) {
  if (page.runs.length < 2) return null;
  const view = new Together(page.runs);
  const [evidence, rest] = [h("div", {}), h("div", {})];
  const element = h("section", { class: "part", id: "comparison", "aria-labelledby": "comparison-title" },
    h("h2", { id: "comparison-title" }, "Comparison"), evidence, h("h3", {}, "Curves of all runs"), view.element, rest);
  let shown = null;
  const update = () => {
    view.show();
    const { comparison, uncompared } = page;
    if (shown !== null && shown === (comparison ?? uncompared)) return;
    shown = comparison ?? uncompared;
    clear(evidence).append(...[table(comparison, uncompared)].flat(3).filter(Boolean));
    clear(rest).append(...[settings(comparison)].flat(3).filter(Boolean));
  };
  update();
  return { element, update, grow: () => view.show(), theme: () => view.plot.redraw(), destroy: () => view.plot.destroy() };
}

// Evidence -----------------------------------------------------------------------------------------

function table(comparison, uncompared) {
  if (!comparison) return h("p", { class: "quiet" }, uncompared ?? "The runs were not compared.");
  if (comparison.problem) return [h("p", {}, comparison.problem), notes(comparison.notes)];
  const { models } = comparison;
  const cell = (...children) => h("td", { class: "figure" }, ...children);
  const rows = models.map((one) => h("tr", {},
    h("th", { scope: "row" }, one.name),
    cell(number(one.mean, 6), one.method !== "exact" && ` ± ${number(one.error, 2)}`),
    cell(one.difference
      ? `${number(one.difference.mean, 4)} ± ${number(one.difference.stderr, 2)}` : ""),
    h("td", {}, VERDICTS[one.verdict] ?? one.verdict, one.flags.length > 0 && " (not to be trusted)"),
    cell(number(one.parameters)), cell(number(one.parameters_q ?? null)),
    cell(one.seconds === null ? "–" : number(one.seconds, 3)),
    h("td", {}, one.method, one.samples && `, ${plural(one.samples, "sample")} per row`)));
  return [
    comparison.what && h("p", {}, `${comparison.what}.`),
    h("div", { class: "table-box" }, h("table", {},
      h("thead", {}, h("tr", {}, [
        "model", "log p", "difference", "verdict", "parameters of p", "of q", "seconds", "method",
      ].map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, rows))),
    models.length > 1 && differences(models),
    models.length > 1 && rowByRow(models),
    comparison.units && h("p", {}, comparison.units),
    notes(comparison.notes),
  ];
}

const notes = (texts) =>
  texts?.length > 0 && h("ul", {}, texts.map((text) => h("li", {}, text)));

function differences(models) {
  const items = models.map((one) => ({
    label: one.name,
    value: one.difference ? one.difference.mean : one.mean === null ? null : 0,
    error: one.difference?.stderr ?? 0,
    hollow: one.verdict === "not decided" || one.flags.length > 0,
    colour: one.verdict === "worse" ? INK.warn : INK.bar,
  }));
  const drawing = whiskers({
    items, xLabel: "log p − log p of the best, nats per example (± 2 standard errors)", width: 560,
    label: `Differences to ${models[0].name}: ` + models.slice(1).map((one) =>
      `${one.name} ${number(one.difference?.mean ?? null)}, ${VERDICTS[one.verdict] ?? one.verdict}`).join("; "),
  });
  const figure = h("figure", { class: "picture" },
    h("figcaption", {}, "Paired differences to the best model. Orange: worse than the best. Hollow: not to be trusted, or not decided."),
    drawing);
  pictureTools(figure, {
    name: "comparison",
    svg: () => drawing,
    csv: () => ({
      columns: ["model", "log p", "error", "difference", "standard error", "verdict", "method"],
      rows: models.map((one) => [one.name, one.mean, one.error, one.difference?.mean ?? null,
        one.difference?.stderr ?? null, one.verdict, one.method]),
    }),
  });
  return figure;
}

// The differences of single rows to the best model: whether all rows differ, or a few by much.
function rowByRow([best, ...others]) {
  const pictures = others.filter((one) => one.difference?.histogram).map((one) => {
    const { counts, low, high } = one.difference.histogram;
    const words = `${number(one.difference.mean)} ± ${number(one.difference.stderr, 2)}`;
    const drawing = histogram({
      counts, low, high, marker: one.difference.mean, markerColour: INK.second,
      label: `log p of ${one.name} minus that of ${best.name}, row by row: from ${number(low)} to ${number(high)}, mean ${words}`,
    });
    const figure = h("figure", { class: "picture" }, h("figcaption", {}, `${one.name} − ${best.name}: mean ${words}`), drawing);
    pictureTools(figure, {
      name: fileName("differences", one.name),
      svg: () => drawing,
      csv: () => ({
        columns: ["from", "to", "rows"],
        rows: counts.map((count, i) => [0, 1].map((k) => low + ((i + k) * (high - low)) / counts.length).concat(count)),
      }),
    });
    return figure;
  });
  return pictures.length > 0 && [
    h("p", {}, "Differences of log p row by row, nats. The line is their mean, with its standard error over rows."),
    h("div", { class: "small-pictures" }, pictures),
  ];
}

// Curves -------------------------------------------------------------------------------------------

/** The same curve of all runs in one plot. */
class Together {
  constructor(runs) {
    this.runs = runs;
    this.range = null;
    this.unit = "step";
    this.key = null;
    this.controls = null; // which controls are there
    this.readout = h("p", { class: "curves-readout" });
    this.legend = h("ul", { class: "curves-legend" });
    this.choice = h("div", { class: "curves-controls" });
    this.plot = new LinePlot({
      label: "Curves of all runs", height: 300, sync: "together",
      zoomed: (range) => {
        this.range = range;
        this.show();
      },
      hovered: (x) => this.hover(x),
    });
    const figure = h("figure", { class: "picture curves-main" }, this.choice, this.plot.element);
    pictureTools(figure, {
      name: fileName("runs"),
      png: () => this.plot.canvas(),
      csv: () => ({
        columns: [this.unit, ...this.plot.lines.map((line) => line.label)], rows: joined(this.plot.lines),
      }),
    });
    this.element = h("div", {}, figure, this.legend, this.readout);
    requestAnimationFrame(() => this.show());
  }

  keys() {
    const kinds = ["bound", "term", "kl", "besides"];
    const found = new Map();
    for (const run of this.runs) {
      for (const one of curvesOf(run)?.series ?? []) {
        const before = found.get(one.key);
        const validated = one.validation ? 0 : 0.5;
        found.set(one.key, { rank: kinds.indexOf(one.kind) + validated, runs: (before?.runs ?? 0) + 1 });
      }
    }
    return [...found].sort(([, a], [, b]) => b.runs - a.runs || a.rank - b.rank).map(([key]) => key);
  }

  lines() {
    return this.runs.flatMap((run, i) => {
      const curves = curvesOf(run);
      const one = curves?.series.find((other) => other.key === this.key);
      const clock = this.unit === "step" ? null : curves?.[this.unit];
      if (!one || (this.unit !== "step" && !clock)) return [];
      const x = clock === null ? one.step.array : along(clock.step.array, clock.value.array, one.step.array);
      return [{
        label: run.name, x, y: one.value.array, course: one.value.course ?? course(one.value.array), colour: `--c${i % 10}`, width: 1.6,
        dash: DASHES[Math.floor(i / 10) % DASHES.length],
      }];
    });
  }

  change(values) {
    Object.assign(this, values, { range: null });
    this.show();
  }

  // The controls stay as they are while curves grow, so that they keep the focus.
  writeControls(keys) {
    const units = [["step", "steps"], ["epochs", "epochs"], ["seconds", "seconds"]].filter(([unit]) =>
      unit === "step" || this.runs.every((run) => curvesOf(run)?.[unit]));
    if (!keys.includes(this.key)) this.key = keys[0];
    if (!units.some(([unit]) => unit === this.unit)) this.unit = "step";
    const controls = [keys, units].join("\n");
    if (controls !== this.controls) {
      this.controls = controls;
      this.reset = h("button", { type: "button", class: "tiny", on: { click: () => this.change({}) } }, "Show everything");
      clear(this.choice).append(
        select("Curve", keys.map((key) => [key, key]), this.key, (key) => this.change({ key })),
        select("Over", units, this.unit, (unit) => this.change({ unit })), this.reset);
    }
    this.reset.disabled = this.range === null;
  }

  show() {
    const keys = this.keys();
    if (!keys.length) {
      this.controls = null;
      clear(this.choice).append(h("p", { class: "quiet" }, "No run has a history."));
      return;
    }
    this.writeControls(keys);
    const lines = this.lines();
    const ends = lines.filter(({ x }) => x.length).flatMap(({ x }) => [x[0], x[x.length - 1]]);
    const [low, high] = ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
    const full = high > low ? [low, high] : [low - 1, high + 1];
    const range = this.range && [Math.max(full[0], this.range[0]), Math.min(full[1], this.range[1])];
    this.plot.title = this.key;
    this.plot.set(lines, range && range[1] > range[0] ? range : full, {
      zoom: Boolean(range),
      label: `${this.key} of ${plural(lines.length, "run")}: ` +
        `${lines.map(inWords).join("; ")}.`,
    });
    clear(this.legend).append(...lines.map((line) => h("li", {}, swatch(line), line.label)));
  }

  hover(x) {
    this.readout.textContent = x === null ? "" : [
      `${this.unit} ${number(this.unit === "step" ? Math.round(x) : x)}`,
      ...this.plot.lines.map((line) => `${line.label} ${number(line.y[nearest(line.x, x)])}`),
    ].join(" · ");
  }
}

// Settings -----------------------------------------------------------------------------------------

function settings(comparison) {
  const found = comparison?.settings ?? [];
  if (!comparison) return null;
  if (!found.length) return [h("h3", {}, "Settings"), h("p", {}, "The runs have the same settings.")];
  return [
    h("h3", {}, "Settings that differ"),
    h("div", { class: "table-box" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"),
        comparison.names.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, found.map((one) => h("tr", {}, h("th", { scope: "row" }, one.name),
        one.values.map((value) => h("td", {}, value))))))),
  ];
}
