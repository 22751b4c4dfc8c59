// The latent map: every row is a point. Zoom, pan, lasso, search, and decode by hand.
import { h, s, clear, plural, select, announce } from "./dom.js";
import { Points, Camera, paint, pointStyle } from "./scatter.js";
import { indexed, paperWord, colourText } from "./colours.js";
import { Contents } from "./rows.js";
import { Decoding, Explorer, placeIn } from "./explore.js";
import { conditions } from "./conditions.js";
import { listen } from "./gestures.js";
import { drawLegend, snapshot } from "./legend.js";
import { selectionPanel } from "./selection.js";
import { csvOf, restoreSelection, search } from "./selecting.js";
import { interpolationPanel } from "./interpolation.js";
import { printLight } from "./print.js";
import { pathOf } from "./sequences.js";
import { pictureOf, pictureTools, save, toCsv } from "./export.js";

const NEAR = 12; // pixels within which a point is found
const TOOLS = [
  ["move", "Move", "Drag to move the map; pinch, Ctrl and wheel, or after a click the wheel to zoom (key m)"],
  ["lasso", "Lasso", "Draw around rows to select them (key l)"],
  ["decode", "Decode", "Drag the point ⊕ and see what p makes of it (key d)"],
];

export class MapPart {
  constructor(run, context) {
    this.run = run;
    this.context = context;
    this.map = run.map;
    this.map.firstObserved = run.map.contents.variables?.[0]?.name ?? Object.keys(run.map.units)[0];
    this.contents = new Contents(run.map);
    this.decoding = new Decoding(run.map, context.live ? (request, purpose) => context.live.decode(context.index, request, purpose) : null);
    this.camera = new Camera();
    this.tool = "move";
    this.selection = null;
    this.message = ""; // what is said instead of a selection
    this.outline = null; // the lasso while it is drawn
    this.hovered = -1;
    this.pinned = -1;
    this.cross = null;
    this.other = -1;
    this.build();
  }

  // Layout --------------------------------------------------------------------------------------

  build() {
    const { map } = this;
    const views = map.spaces.flatMap((space, i) => [
      ...space.views.map((view, j) => [`${i}.${j}`, `${space.latent ?? "rows"}: ${view.title}`]),
      ...(space.codes && space.size > 2 && !space.step && !space.whole ? [[`${i}.e`, `${space.latent ?? "rows"}: two entries …`]] : []),
    ]);
    const wanted = this.context.state.get("view");
    this.viewKey = views.some(([key]) => key === wanted) ? wanted : views[0][0];
    this.entries = [0, 1].map((k) => this.context.state.whole("entries", k) ?? k);
    if (this.entries[0] === this.entries[1]) this.entries = [0, 1];
    const colours = [["", "nothing"], ...map.colours.map((colour) => [colour.name, colour.name])];
    const colour = this.context.state.get("colour", map.colours[0]?.name ?? "");
    this.colourName = colours.some(([key]) => key === colour) ? colour : "";
    this.canvas = h("canvas", {
      class: "map", tabindex: "0", role: "application",
      "aria-label": "Map of the rows. Arrow keys move it, plus and minus zoom, n and p go to the next and previous row, s selects what is shown, d decodes at the centre.",
    });
    this.over = s("svg", { class: "over", "aria-hidden": "true" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.hint = h("div", { class: "tip hint", hidden: true });
    this.frame = h("div", { class: "frame", dataset: { tool: this.tool } }, this.canvas, this.over, this.tip, this.hint);
    this.legend = h("div", { class: "legend" });
    this.note = h("p", { class: "quiet" });
    this.entryChoice = h("span", { class: "entries" });
    this.colourChoice = select("Colour by", colours, this.colourName, (name) => this.showColour(name));
    this.toolbar = h("div", { class: "toolbar", role: "toolbar", "aria-label": "Map" },
      select("Show", views, this.viewKey, (key) => this.showView(key)), this.entryChoice,
      this.colourChoice,
      h("div", { class: "buttons", role: "group", "aria-label": "Tool" }, TOOLS.map(([key, label, title]) =>
        h("button", { type: "button", dataset: { tool: key }, title, "aria-pressed": String(key === this.tool), on: { click: () => this.useTool(key) } }, label))),
      h("div", { class: "buttons" },
        h("button", { type: "button", title: "Zoom in", "aria-label": "Zoom in", on: { click: () => this.zoomBy(1.5) } }, "+"),
        h("button", { type: "button", title: "Zoom out", "aria-label": "Zoom out", on: { click: () => this.zoomBy(1 / 1.5) } }, "−"),
        h("button", { type: "button", title: "Show all", on: { click: () => { this.camera.reset(); this.moved(); } } }, "All"),
        h("button", { type: "button", title: "Select all points in the visible part of the map (key s)", on: { click: () => this.selectShown() } }, "Select shown")),
      this.searchField());
    this.figure = h("figure", { class: "picture map-figure" }, this.frame, this.legend,
      h("figcaption", {}, this.note));
    pictureTools(this.figure, { name: "map", png: () => snapshot(this), csv: () => csvOf(this), what: "all points" });
    this.inspector = h("div", { class: "panel inspector" }, h("h3", {}, "Row"),
      h("p", { class: "quiet" }, "Move over a point to see its row; click to keep it."));
    this.explorer = this.decoding.possible
      ? new Explorer(map, this.contents, this.decoding, (values) => this.decodedAt(values), (name) => this.usage(name)) : null;
    this.selected = h("div", { class: "panel selection" });
    this.between = h("div", { class: "panel between" });
    const say = map.decoder.runs || this.explorer ? null
      : h("div", { class: "panel" }, h("h3", {}, "Decode"), h("p", { class: "quiet" }, map.decoder.why));
    this.element = h("section", { class: "part", id: "map", "aria-labelledby": "map-title" },
      h("h2", { id: "map-title" }, "Latent map"), this.toolbar,
      h("div", { class: "split" },
        h("div", { class: "main" }, this.figure, this.selected, this.between),
        h("div", { class: "side" }, this.inspector, this.explorer?.element ?? say)));
    listen(this);
    this.showView(this.viewKey, true);
    this.showSelection();
    this.showBetween();
    printLight(this);
    new ResizeObserver(() => this.resize()).observe(this.frame);
  }

  // {kl, active} of the entries of a latent, as far as the checks have measured them.
  usage(name) {
    const entries = this.run.checks?.latents?.find((one) => one.name === name)?.entries;
    return { kl: entries?.kl?.array ?? null, active: entries?.active?.array ?? null };
  }

  searchField() {
    const input = h("input", { type: "search", placeholder: "row 8, label 3, text", "aria-label": "Find rows", on: {
      keydown: (event) => { if (event.key === "Enter") search(this, input.value.trim()); },
    } });
    return h("label", { class: "field" }, h("span", {}, "Find"), input);
  }

  // The space, its points and its colours --------------------------------------------------------

  showView(key, first = false) {
    const [i, j] = key.split(".");
    const kept = this.space && [this.pinned, this.other].map((point) => (point < 0 ? null : this.identity(point)));
    const elsewhere = this.space !== this.map.spaces[Number(i)];
    this.viewKey = key;
    this.spaceIndex = Number(i);
    this.space = this.map.spaces[this.spaceIndex];
    clear(this.entryChoice);
    if (j === "e") {
      const names = Array.from({ length: this.space.size }, (_, k) => [k, `${this.space.latent ?? "entry "}${k}`]);
      const choose = (which) => (value) => {
        const before = this.entries[which];
        this.entries[which] = Number(value);
        if (this.entries[0] === this.entries[1]) this.entries[1 - which] = before;
        this.context.state.set({ entries: this.entries.join(",") });
        this.showView(key);
      };
      this.entryChoice.append(select("across", names, this.entries[0], choose(0)), select("up", names, this.entries[1], choose(1)));
      this.view = this.entryView(this.entries);
    } else this.view = this.space.views[Number(j)];
    const same = this.points && this.points.across === this.view.across.values.array;
    if (!same) this.points = new Points(this.view.across.values.array, this.view.up.values.array);
    this.rows = this.space.row?.array ?? null;
    if (!first) {
      this.camera.scale = 0;
      this.camera.x = this.camera.y = 32768;
      this.context.state.set({ view: key, x: null, y: null, zoom: null });
    }
    if (elsewhere && kept) {
      // Another latent has other points. Views of the same latent share their points.
      if (this.selection) this.clearSelection();
      [this.pinned, this.other] = kept.map((one) => (one ? this.pointOfRow(one.row, one.step) : -1));
      this.hovered = -1;
      this.tellRows();
      if (this.pinned >= 0) this.inspect(this.pinned);
      this.showBetween();
    }
    this.cross = null;
    const decode = this.toolbar.querySelector("[data-tool=decode]");
    decode.disabled = !this.explorer || !this.space.latent || Boolean(this.space.step)
      || !(this.decoding.free || this.decoding.grid(this.space.latent));
    if (decode.disabled && this.tool === "decode") this.useTool("move");
    this.resize();
    if (first && !this.context.before) this.restore(); // a later map takes over from the one before
    this.showColour(this.colourName, true);
    const { count, total } = this.map.rows;
    const some = total > count ? ` ${count.toLocaleString("en")} random ones of ${total.toLocaleString("en")} rows.` : "";
    const by = this.map.posterior === "exact" ? "exact posterior" : "q";
    const what = this.space.latent === null ? "This model has no continuous latent, so the map shows the rows themselves. "
      : `Posterior means of ${this.space.latent} by ${by}${this.space.step ? ", one point per row and step" : ""}. `;
    this.note.textContent = `${what}${plural(this.points.count, "point")}.${some} ${this.view.note ?? ""}`;
  }

  entryView(entries) {
    const { codes, size } = this.space, n = codes.shape[0];
    const side = (k) => {
      const low = this.space.low[k], high = this.space.high[k], steps = 65534 / (high - low || 1);
      const values = new Uint16Array(n);
      // Codes in half precision may lie beyond the ends.
      for (let i = 0; i < n; i++) {
        const code = codes.array[i * size + k];
        values[i] = Number.isFinite(code) ? Math.max(0, Math.min(65534, Math.round((code - low) * steps))) : 65535;
      }
      return { low, high, values: { array: values, shape: [n] } };
    };
    const [a, b] = entries.map((k) => Math.min(k, size - 1));
    const axis = (k) => Array.from({ length: size }, (_, at) => (at === k ? 1 : 0));
    const origin = this.space.mean.map((value, k) => (k === a || k === b ? 0 : value));
    const name = this.space.latent ?? "entry ";
    return { kind: "entries", across: side(a), up: side(b), origin, axes: [axis(a), axis(b)],
      x: `${name}${a}`, y: `${name}${b}`, note: "A decoded point has the mean code in all other entries." };
  }

  rowOf(point) {
    return this.rows ? this.rows[point] : point;
  }

  showColour(name, quiet = false) {
    this.colourName = name;
    this.colour = this.map.colours.find((one) => one.name === name) ?? null;
    this.colourChoice.querySelector("select").value = this.colour ? name : "";
    if (!quiet) this.context.state.set({ colour: name || "-" });
    Object.assign(this, { paintIndex: indexed(this.colour, this.points.count, this.rows) });
    this.drawLegend();
    this.redraw();
  }

  drawLegend() {
    drawLegend(this);
  }

  // Drawing --------------------------------------------------------------------------------------

  resize() {
    const box = this.frame.getBoundingClientRect();
    const width = Math.max(40, Math.round(box.width)), height = Math.max(40, Math.round(box.height));
    if (!box.width) return;
    this.ratio = Math.min(2, window.devicePixelRatio || 1);
    const { across, up } = this.view;
    // A step of the plane is as long up as across, except where the two axes have unlike ranges.
    const spans = [across.high - across.low || 1, up.high - up.low || 1];
    const aspect = Math.max(0.25, Math.min(1.6, spans[1] / spans[0]));
    const wide = Math.round(width * this.ratio), tall = Math.round(height * this.ratio);
    if (this.canvas.width !== wide || this.canvas.height !== tall || !this.image) {
      this.canvas.width = wide;
      this.canvas.height = tall;
      this.image = this.canvas.getContext("2d").createImageData(wide, tall);
      this.over.setAttribute("viewBox", `0 0 ${width} ${height}`);
    }
    const zoom = this.camera.scale ? this.camera.scale / this.camera.base : 1;
    this.camera.fit(width, height, aspect);
    this.camera.scale = this.camera.base * zoom;
    this.redraw();
  }

  redraw() {
    if (this.waiting || !this.image) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  draw() {
    const began = performance.now();
    const style = pointStyle(this.points.count, this.camera, this.ratio);
    paint(this.image, this.points, this.camera, this.ratio, {
      ...this.paintIndex, ...style, mask: this.selection?.mask ?? null, paper: paperWord(),
    });
    this.canvas.getContext("2d").putImageData(this.image, 0, 0);
    this.drawOver();
    this.drawn = performance.now() - began;
    this.draws = (this.draws ?? 0) + 1;
  }

  drawOver() {
    clear(this.over);
    if (!this.camera.width) return;
    const { width, height } = this.camera;
    if (!width) return; // the map is not on the page yet
    const view = this.view;
    if (view.x) this.over.append(s("text", { x: width / 2, y: height - 8, class: "axis", "text-anchor": "middle" }, view.x));
    if (view.y) this.over.append(s("text", { x: 12, y: height / 2, class: "axis", "text-anchor": "middle", transform: `rotate(-90 12 ${height / 2})` }, view.y));
    const path = this.pinned >= 0 ? pathOf(this, this.rowOf(this.pinned)) : null;
    if (path) this.over.append(s("path", { d: path, class: "path" }));
    const polygon = this.outline ?? (this.selection?.of === this.viewName() ? this.polygon : null);
    if (polygon) {
      const corners = polygon.map(([x, y]) => this.camera.toPixel(x, y).map((v) => v.toFixed(1)).join(","));
      this.over.append(s("polygon", { points: corners.join(" "), class: "lasso" }));
    }
    for (const [point, kind] of [[this.pinned, "pinned"], [this.other, "other"], [this.hovered, "hovered"]]) {
      if (point < 0) continue;
      const [x, y] = this.camera.toPixel(this.points.across[point], this.points.up[point]);
      this.over.append(s("circle", { cx: x, cy: y, r: 7, class: kind }));
    }
    if (this.cross) {
      const [x, y] = this.camera.toPixel(...this.cross);
      this.over.append(s("g", { class: "cross", transform: `translate(${x} ${y})` },
        s("circle", { r: 10 }), s("path", { d: "M-14 0H14M0-14V14" })));
    }
  }

  moved() {
    const { camera } = this;
    const all = Math.abs(camera.scale - camera.base) < 1e-9 && camera.x === 32768 && camera.y === 32768;
    this.context.state.set(all ? { x: null, y: null, zoom: null }
      : { x: Math.round(camera.x), y: Math.round(camera.y), zoom: (camera.scale / camera.base).toPrecision(4) });
    this.redraw();
  }

  restore() {
    const { state } = this.context;
    const [zoom] = state.numbers("zoom") ?? [0];
    if (zoom > 0) {
      this.camera.scale = this.camera.base * Math.max(0.5, Math.min(4000, zoom));
      const at = (name) => Math.max(-65536, Math.min(131072, state.numbers(name)?.[0] ?? 32768));
      this.camera.x = at("x");
      this.camera.y = at("y");
    }
    restoreSelection(this);
    const [row, other] = ["row", "other"].map((name) => this.pointNamed(state.get(name, "")));
    if (row < 0) return;
    queueMicrotask(() => {
      this.pin(row);
      if (other >= 0) this.pin(other, true);
    });
  }

  // Rows and their points --------------------------------------------------------------------------

  identity(point) {
    return { row: this.rowOf(point), step: this.space.step?.array[point] ?? null };
  }

  // The point of a row at a step, or its first one; −1 if it has none on this map.
  pointOfRow(row, step = null) {
    if (!this.rows) return row < this.points.count ? row : -1;
    const first = this.rows.indexOf(row), steps = this.space.step?.array;
    if (step !== null && steps) {
      for (let i = Math.max(0, first); i < this.rows.length; i++) if (this.rows[i] === row && steps[i] === step) return i;
    }
    return first;
  }

  // A point as the address names it, whichever rows a map shows: its split, the number of its row
  // there, and its step.
  nameOf(point) {
    if (point < 0) return null;
    const { row, step } = this.identity(point), { split, numbers } = this.map.rows;
    return [split ? split.array[row] : 0, numbers ? numbers.array[row] : row, ...(step === null ? [] : [step])].join(".");
  }

  pointNamed(name) {
    if (!/^\d+\.\d+(\.\d+)?$/.test(name)) return -1;
    const [which, at, step = null] = name.split(".").map(Number), { split, numbers, count } = this.map.rows;
    for (let row = 0; row < count; row++) {
      if ((numbers ? numbers.array[row] : row) === at && (split ? split.array[row] : 0) === which) return this.pointOfRow(row, step);
    }
    return -1;
  }

  // Keep the rows that are marked in the address.
  tellRows() {
    this.context.state.set({ row: this.nameOf(this.pinned), other: this.nameOf(this.other) });
  }

  // Mark a row, if it has a point on this map, and show it in any case.
  pinRow(row) {
    const point = this.pointOfRow(row);
    if (point >= 0) {
      this.pin(point);
      return;
    }
    this.inspectRow(row, null);
    this.inspector.append(h("p", { class: "quiet" }, "This row has no point on the map, which shows some rows only."));
    announce(`${this.contents.name(row)} has no point on this map`);
  }

  // Pointer and keyboard -------------------------------------------------------------------------

  step(by) {
    this.pin(this.pinned < 0 ? 0 : (this.pinned + by + this.points.count) % this.points.count);
  }

  zoomBy(factor) {
    this.camera.zoom(factor, this.camera.width / 2, this.camera.height / 2);
    this.moved();
  }

  useTool(tool) {
    if (tool === "decode" && !this.explorer) {
      announce(this.map.decoder.why);
      return;
    }
    this.tool = tool;
    this.frame.dataset.tool = tool;
    for (const button of this.toolbar.querySelectorAll("[data-tool]")) {
      button.setAttribute("aria-pressed", String(button.dataset.tool === tool));
    }
    if (tool === "decode" && !this.cross) this.moveCross([this.camera.width / 2, this.camera.height / 2]);
  }

  // A sentence over the map, for a moment.
  say(text) {
    if (this.hint.textContent !== text) announce(text);
    this.hint.textContent = text;
    this.hint.hidden = false;
    clearTimeout(this.hintTimer);
    this.hintTimer = setTimeout(() => { this.hint.hidden = true; }, 2500);
  }

  near([px, py]) {
    const [x, y] = this.camera.toPlane(px, py);
    const reach = NEAR / this.camera.scale;
    return this.points.nearest(x, y, reach, reach / this.camera.aspect);
  }

  hover(at) {
    const point = at ? this.near(at) : -1;
    if (point === this.hovered) return;
    this.hovered = point;
    this.drawOver();
    if (point < 0) {
      this.tip.hidden = true;
      if (this.pinned >= 0) this.inspect(this.pinned);
      return;
    }
    const [x, y] = this.camera.toPixel(this.points.across[point], this.points.up[point]);
    this.tip.textContent = this.contents.summary(this.rowOf(point)) + (this.space.step ? `, step ${this.space.step.array[point]}` : "");
    this.tip.hidden = false;
    const right = x > this.camera.width * 0.6;
    this.tip.style.setProperty("left", `${x + (right ? -10 : 10)}px`);
    this.tip.style.setProperty("top", `${Math.min(y + 10, this.camera.height - 30)}px`);
    this.tip.style.setProperty("transform", right ? "translateX(-100%)" : "none");
    this.inspect(point);
  }

  pin(point, second = false) {
    if (second && this.pinned >= 0) this.other = point;
    else this.pinned = point;
    this.tellRows();
    this.inspect(point);
    const row = this.rowOf(point);
    announce(this.contents.summary(row));
    if (!second) this.decodeRow(point);
    this.showBetween();
    this.drawOver();
  }

  inspect(point) {
    const { row, step } = this.identity(point);
    this.inspectRow(row, step);
    this.inspector.dataset.point = point;
  }

  inspectRow(row, step) {
    // The cells of a table are shown above, so that only what is not a column remains.
    const columns = new Set((this.contents.contents.columns ?? []).map((column) => column.name));
    const numbers = this.map.colours.filter((colour) => !columns.has(colour.name)).map((colour) =>
      h("tr", {}, h("th", { scope: "row" }, colour.name), h("td", {}, colourText(colour, row))));
    const shown = this.contents.contents.kind === "sequence" && this.contents.has(row)
      ? this.contents.contents.variables.map((one) => this.contents.drawing(one, this.contents.values(row, one), { size: 150, mark: step, label: `${one.name} of ${this.contents.name(row)}` }))
      : this.contents.show(row);
    clear(this.inspector).append(h("h3", {}, this.contents.name(row), step === null ? "" : `, step ${step}`),
      ...[shown].flat(), h("table", { class: "cells" }, h("tbody", {}, numbers)));
    this.inspector.dataset.row = row;
    delete this.inspector.dataset.point;
    pictureTools(this.inspector, { name: "row", png: () => pictureOf(this.inspector) });
  }

  // Decoding -------------------------------------------------------------------------------------

  code(point) {
    const { space } = this;
    if (space.codes) return space.codes.array.slice(point * space.size, (point + 1) * space.size);
    return this.view.axes ? this.latentAt(this.points.across[point], this.points.up[point]) : null;
  }

  // The latent at a place of the plane, within its support.
  latentAt(x, y) {
    const { across, up, origin, axes } = this.view;
    const a = across.low + ((across.high - across.low) * x) / 65534;
    const b = up.low + ((up.high - up.low) * y) / 65534;
    const [least, most] = this.space.support;
    return Float32Array.from(origin, (o, k) => Math.min(most ?? Infinity, Math.max(least ?? -Infinity, o + a * axes[0][k] + b * axes[1][k])));
  }

  decodeRow(point) {
    if (!this.explorer) return;
    const row = this.rowOf(point), { values, unknown } = conditions(this.map, [row]);
    let partly = null;
    for (const space of this.map.spaces) {
      if (!space.latent || space.step) continue;
      if (space.codes) values[space.latent] = space.codes.array.slice(row * space.size, (row + 1) * space.size);
      else if (space === this.space && this.view.axes) {
        values[space.latent] = this.code(point);
        if (space.size > 2) partly = space.latent;
      }
      // A posterior that is not finite gives no code.
      if (!values[space.latent]?.every(Number.isFinite)) delete values[space.latent];
    }
    this.cross = [this.points.across[point], this.points.up[point]];
    this.explorer.row(row, { values, unknown, partly, about: this.space.latent });
  }

  moveCross([px, py]) {
    if (!this.explorer || !this.space.latent || this.space.step) {
      announce("This map has no latent to decode.");
      return;
    }
    let [x, y] = this.camera.toPlane(px, py);
    let from = `A point of the map (${this.view.title ?? `${this.view.x} and ${this.view.y}`}).`;
    let latent;
    if (this.view.axes) latent = this.latentAt(x, y);
    else {
      const point = this.points.nearest(x, y, 65536, 65536);
      latent = this.code(point);
      [x, y] = [this.points.across[point], this.points.up[point]];
      from = `The code of ${this.contents.name(this.rowOf(point))}, the nearest row: this map has no way back to the latent.`;
      if (!latent) {
        this.say("The page does not hold the codes of these rows.");
        return;
      }
    }
    this.cross = [x, y];
    this.decoded = latent;
    this.explorer.set(this.space.latent, latent, { alone: true, from });
    this.drawOver();
  }

  // The sliders moved: show where the latent lies in the plane.
  decodedAt(values) {
    const value = values[this.space.latent];
    if (!value || !this.view.axes || !this.view.origin) return;
    this.cross = placeIn(this.view, value).map((share) => share * 65534);
    this.drawOver();
  }

  // Selections -----------------------------------------------------------------------------------

  // The only place that changes the selection: what is drawn, listed and saved, and its `key` in the
  // address, are one. `message` is said instead of a selection; `own` is the column that defines it.
  select(mask, count, what, { key = {}, polygon = null, note = "", message = "", own = null } = {}) {
    this.selection = count ? { mask, count, what, note, polygon, own, of: this.viewName(), space: this.spaceIndex } : null;
    this.message = this.selection ? "" : message;
    this.context.state.set({ lasso: null, in: null, select: null, ...(this.selection ? key : {}) });
    announce(message || `${plural(count, "point")} selected`);
    this.showSelection();
    this.redraw();
  }

  clearSelection(message = "") {
    this.select(null, 0, "", { message });
  }

  get polygon() {
    return this.selection?.polygon ?? null;
  }

  // The view, and which entries it shows, as the address names it.
  viewName() {
    return this.viewKey.endsWith("e") ? `${this.viewKey}.${this.entries.join(".")}` : this.viewKey;
  }

  // The points inside a polygon of this view, or of another view of the same latent.
  lasso(corners, what = "lasso", name = this.viewName()) {
    const view = name === this.viewName() ? this.view : this.viewOf(name);
    if (!view) return;
    // Whole numbers, so that the address gives the same selection again.
    const polygon = corners.map((corner) => corner.map(Math.round));
    const points = view === this.view ? this.points : new Points(view.across.values.array, view.up.values.array);
    const { mask, count } = points.inside(polygon);
    this.select(mask, count, what, { polygon, key: { lasso: polygon.join(","), in: name }, message: count ? "" : "No point lies inside." });
    if (this.selection) this.selection.of = name;
    this.drawOver();
  }

  viewOf(name) {
    const [i, j, ...entries] = name.split(".");
    if (Number(i) !== this.spaceIndex) return null;
    if (j !== "e") return this.space.views[Number(j)] ?? null;
    const own = this.space.codes && entries.length === 2 && entries.map(Number);
    return own && own.every((k) => Number.isInteger(k) && k >= 0 && k < this.space.size) ? this.entryView(own) : null;
  }

  // All points in the part of the map that is visible.
  selectShown() {
    const { width, height } = this.camera;
    this.lasso([[0, 0], [width, 0], [width, height], [0, height]].map(([x, y]) => this.camera.toPlane(x, y)), "what was visible");
  }

  selectLevel(level) {
    const { name, values, levels } = this.colour, mask = new Uint8Array(this.points.count);
    let count = 0;
    for (let i = 0; i < mask.length; i++) {
      if (values.array[this.rowOf(i)] === level) {
        mask[i] = 1;
        count++;
      }
    }
    this.select(mask, count, `${name} ${levels[level] ?? "unknown"}`, { key: { select: `class:${name}:${level}` }, own: name });
  }

  selectRows(rows, what, more) {
    const wanted = new Set(rows), mask = new Uint8Array(this.points.count);
    let count = 0;
    for (let i = 0; i < mask.length; i++) {
      if (wanted.has(this.rowOf(i))) {
        mask[i] = 1;
        count++;
      }
    }
    this.select(mask, count, what, more);
  }

  showSelection() {
    selectionPanel(this.selected, this);
  }

  showBetween() {
    interpolationPanel(this.between, this);
  }

  // Saving ---------------------------------------------------------------------------------------

  saveSelection() {
    const { columns, rows } = csvOf(this, this.selection);
    save("selection.csv", "text/csv", toCsv(columns, rows));
  }

  theme() {
    this.paintIndex = indexed(this.colour, this.points.count, this.rows);
    this.drawLegend();
    this.redraw();
    if (this.pinned >= 0) this.inspect(this.pinned);
    this.explorer?.update();
  }
}
