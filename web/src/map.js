// The latent map: every row is a point. Zoom, pan, lasso, search, and decode by hand.
import { h, s, clear, number, plural, select, announce } from "./dom.js";
import { valueAt } from "./data.js";
import { Points, Camera, paint, pointStyle } from "./scatter.js";
import { indexed, paperWord, classColour, scaleColour, rgb } from "./colours.js";
import { Contents } from "./rows.js";
import { Decoding, Explorer, oneHot } from "./explore.js";
import { selectionPanel } from "./selection.js";
import { interpolationPanel } from "./interpolation.js";
import { pathOf } from "./sequences.js";
import { pictureTools, save, toCsv } from "./export.js";

const NEAR = 12; // pixels within which a point is found
const TOOLS = [
  ["move", "Move", "Drag to move the map, wheel or pinch to zoom (key m)"],
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
    this.decoding = new Decoding(run.map, context.live ? (request) => context.live.decode(context.index, request) : null);
    this.camera = new Camera();
    this.tool = "move";
    this.selection = null;
    this.polygon = null;
    this.hovered = -1;
    this.pinned = -1;
    this.cross = null;
    this.other = null;
    this.build();
  }

  // Layout --------------------------------------------------------------------------------------

  build() {
    const { map } = this;
    const views = map.spaces.flatMap((space, i) => [
      ...space.views.map((view, j) => [`${i}.${j}`, `${space.latent ?? "rows"}: ${view.title}`]),
      ...(space.codes && space.size > 2 && !space.step ? [[`${i}.e`, `${space.latent ?? "rows"}: two entries …`]] : []),
    ]);
    const wanted = this.context.state.get("view");
    this.viewKey = views.some(([key]) => key === wanted) ? wanted : views[0][0];
    this.entries = [0, 1].map((k) => this.context.state.whole("entries", k) ?? k);
    const colours = [["", "nothing"], ...map.colours.map((colour) => [colour.name, colour.name])];
    this.colourName = this.context.state.get("colour", map.colours[0]?.name ?? "");
    if (!colours.some(([key]) => key === this.colourName)) this.colourName = "";
    this.canvas = h("canvas", {
      class: "map", tabindex: "0", role: "application",
      "aria-label": "Map of the rows. Arrow keys move it, plus and minus zoom, n and p go to the next and previous row, d decodes at the centre.",
    });
    this.over = s("svg", { class: "over", "aria-hidden": "true" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.frame = h("div", { class: "frame" }, this.canvas, this.over, this.tip);
    this.legend = h("div", { class: "legend" });
    this.note = h("p", { class: "quiet" });
    this.entryChoice = h("span", { class: "entries" });
    this.toolbar = h("div", { class: "toolbar", role: "toolbar", "aria-label": "Map" },
      select("Show", views, this.viewKey, (key) => this.showView(key)), this.entryChoice,
      select("Colour by", colours, this.colourName, (name) => this.showColour(name)),
      h("div", { class: "buttons", role: "group", "aria-label": "Tool" }, TOOLS.map(([key, label, title]) =>
        h("button", { type: "button", dataset: { tool: key }, title, "aria-pressed": String(key === this.tool), on: { click: () => this.useTool(key) } }, label))),
      h("div", { class: "buttons" },
        h("button", { type: "button", title: "Zoom in", "aria-label": "Zoom in", on: { click: () => this.zoomBy(1.5) } }, "+"),
        h("button", { type: "button", title: "Zoom out", "aria-label": "Zoom out", on: { click: () => this.zoomBy(1 / 1.5) } }, "−"),
        h("button", { type: "button", title: "Show all", on: { click: () => { this.camera.reset(); this.moved(); } } }, "All")),
      this.searchField());
    this.figure = h("figure", { class: "picture map-figure" }, this.frame, this.legend,
      h("figcaption", {}, this.note));
    pictureTools(this.figure, { name: "map", png: () => this.snapshot(), csv: () => this.csv() });
    this.inspector = h("div", { class: "panel inspector" }, h("h3", {}, "Row"),
      h("p", { class: "quiet" }, "Move over a point to see its row; click to keep it."));
    this.explorer = this.decoding.possible
      ? new Explorer(map, this.contents, this.decoding, (values) => this.decodedAt(values)) : null;
    this.selected = h("div", { class: "panel selection", "aria-live": "polite" });
    this.between = h("div", { class: "panel between" });
    const say = map.decoder.runs || this.explorer ? null
      : h("div", { class: "panel" }, h("h3", {}, "Decode"), h("p", { class: "quiet" }, map.decoder.why));
    this.element = h("section", { class: "part", id: "map", "aria-labelledby": "map-title" },
      h("h2", { id: "map-title" }, "Latent map"), this.toolbar,
      h("div", { class: "split" },
        h("div", { class: "main" }, this.figure, this.selected, this.between),
        h("div", { class: "side" }, this.inspector, this.explorer?.element ?? say)));
    this.listen();
    this.showView(this.viewKey, true);
    this.showSelection();
    this.showBetween();
    new ResizeObserver(() => this.resize()).observe(this.frame);
  }

  searchField() {
    const input = h("input", { type: "search", placeholder: "number or text", "aria-label": "Find rows", on: {
      keydown: (event) => { if (event.key === "Enter") this.search(input.value.trim()); },
    } });
    return h("label", { class: "field" }, h("span", {}, "Find"), input);
  }

  // The space, its points and its colours --------------------------------------------------------

  showView(key, first = false) {
    const [i, j] = key.split(".");
    this.viewKey = key;
    this.spaceIndex = Number(i);
    this.space = this.map.spaces[this.spaceIndex];
    clear(this.entryChoice);
    if (j === "e") {
      const names = Array.from({ length: this.space.size }, (_, k) => [k, `${this.space.latent ?? "entry "}${k + 1}`]);
      const choose = (which) => (value) => {
        this.entries[which] = Number(value);
        this.context.state.set({ entries: this.entries.join(",") });
        this.showView(key);
      };
      this.entryChoice.append(select("across", names, this.entries[0], choose(0)), select("up", names, this.entries[1], choose(1)));
      this.view = this.entryView();
    } else this.view = this.space.views[Number(j)];
    const same = this.points && this.points.across === this.view.across.values.array;
    if (!same) this.points = new Points(this.view.across.values.array, this.view.up.values.array);
    this.rows = this.space.row?.array ?? null;
    if (!first) {
      this.camera.scale = 0;
      this.camera.x = this.camera.y = 32768;
      this.context.state.set({ view: key, x: null, y: null, zoom: null });
      // Another view of the same latent has the same points, so that a group can be found again.
      const before = this.selection;
      this.clearSelection();
      if (before && before.space === this.spaceIndex) this.select(before.mask, before.count, before.what);
    }
    this.cross = null;
    const decode = this.toolbar.querySelector("[data-tool=decode]");
    decode.disabled = !this.explorer || !this.space.latent || Boolean(this.space.step);
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

  entryView() {
    const { codes, size } = this.space, n = codes.shape[0];
    const side = (k) => {
      const low = this.space.low[k], high = this.space.high[k], steps = 65534 / (high - low || 1);
      const values = new Uint16Array(n);
      // Codes in half precision may lie beyond the ends.
      for (let i = 0; i < n; i++) values[i] = Math.max(0, Math.min(65534, Math.round((codes.array[i * size + k] - low) * steps)));
      return { low, high, values: { array: values, shape: [n] } };
    };
    const [a, b] = this.entries.map((k) => Math.min(k, size - 1));
    const axis = (k) => Array.from({ length: size }, (_, at) => (at === k ? 1 : 0));
    const origin = this.space.mean.map((value, k) => (k === a || k === b ? 0 : value));
    const name = this.space.latent ?? "entry ";
    return { kind: "entries", across: side(a), up: side(b), origin, axes: [axis(a), axis(b)],
      x: `${name}${a + 1}`, y: `${name}${b + 1}`, note: "A decoded point has the mean code in all other entries." };
  }

  rowOf(point) {
    return this.rows ? this.rows[point] : point;
  }

  showColour(name, quiet = false) {
    this.colourName = name;
    this.colour = this.map.colours.find((one) => one.name === name) ?? null;
    if (!quiet) this.context.state.set({ colour: name || null });
    Object.assign(this, { paintIndex: indexed(this.colour, this.points.count, this.rows) });
    this.drawLegend();
    this.redraw();
  }

  drawLegend() {
    clear(this.legend);
    const { colour } = this;
    if (!colour) return;
    this.legend.setAttribute("aria-label", `Colours: ${colour.name}`);
    if (colour.kind === "class") {
      const counts = new Array(colour.levels.length + 1).fill(0);
      for (const code of colour.values.array) counts[code]++;
      this.legend.append(h("strong", {}, colour.name), ...colour.levels.map((level, k) => {
        const chip = h("button", { type: "button", class: "chip", title: `Select the ${counts[k]} rows`, on: { click: () => this.selectLevel(k) } },
          h("span", { class: "dot" }), `${level} (${counts[k].toLocaleString("en")})`);
        chip.firstChild.style.setProperty("background", rgb(classColour(k)));
        return chip;
      }), counts.at(-1) ? h("span", { class: "quiet" }, `unknown (${counts.at(-1)})`) : "");
      return;
    }
    const stops = Array.from({ length: 9 }, (_, k) => rgb(scaleColour(k / 8))).join(", ");
    const bar = h("span", { class: "scale" });
    bar.style.setProperty("background", `linear-gradient(to right, ${stops})`);
    this.legend.append(h("strong", {}, colour.name), h("span", {}, `≤ ${number(colour.from, 4)}`), bar,
      h("span", {}, `≥ ${number(colour.to, 4)}`), h("span", { class: "quiet" }, colour.note ?? "", " Grey: none."),
      this.extremes(colour, "Lowest", 1), this.extremes(colour, "Highest", -1));
  }

  // The rows with the smallest or largest numbers, as buttons.
  extremes(colour, text, sign) {
    const worst = [];
    const { array } = colour.values;
    for (let row = 0; row < array.length; row++) {
      if (array[row] === 65535) continue;
      const key = sign * array[row];
      if (worst.length < 3 || key < worst.at(-1)[0]) {
        worst.push([key, row]);
        worst.sort((a, b) => a[0] - b[0]);
        worst.length = Math.min(worst.length, 3);
      }
    }
    return h("span", {}, `${text}: `, worst.map(([, row]) => h("button", { type: "button", class: "tiny", on: {
      click: () => this.pin(this.rows ? this.rows.indexOf(row) : row),
    } }, `${this.contents.name(row)} (${number(valueAt(colour, row), 4)})`)));
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
    if (this.polygon) {
      const corners = this.polygon.map(([x, y]) => this.camera.toPixel(x, y).map((v) => v.toFixed(1)).join(","));
      this.over.append(s("polygon", { points: corners.join(" "), class: "lasso" }));
    }
    for (const [point, kind] of [[this.pinned, "pinned"], [this.other ?? -1, "other"], [this.hovered, "hovered"]]) {
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
    const corners = state.numbers("lasso");
    if (corners && corners.length >= 6) {
      this.lasso(Array.from({ length: corners.length / 2 }, (_, i) => [corners[2 * i], corners[2 * i + 1]]));
    }
    const row = state.whole("row");
    if (row !== null && row < this.points.count) {
      queueMicrotask(() => {
        this.pin(row);
        const other = state.whole("other");
        if (other !== null && other < this.points.count) this.pin(other, true);
      });
    }
  }

  // Pointer and keyboard -------------------------------------------------------------------------

  listen() {
    const { canvas } = this;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const fingers = new Map();
    let start = null;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.hover(null);
      fingers.set(event.pointerId, place(event));
      start = { at: place(event), moved: false };
      if (fingers.size > 1) return;
      if (this.tool === "lasso") this.polygon = [this.camera.toPlane(...place(event))];
      if (this.tool === "decode") this.moveCross(place(event));
    });
    canvas.addEventListener("pointermove", (event) => {
      const now = place(event), before = fingers.get(event.pointerId);
      if (!before) { this.hover(now); return; }
      if (fingers.size === 2) {
        const [a, b] = [...fingers.keys()];
        const far = (p, q) => Math.hypot(p[0] - q[0], p[1] - q[1]);
        const old = far(fingers.get(a), fingers.get(b));
        fingers.set(event.pointerId, now);
        const next = far(fingers.get(a), fingers.get(b));
        const middle = [0, 1].map((k) => (fingers.get(a)[k] + fingers.get(b)[k]) / 2);
        if (old > 0) this.camera.zoom(next / old, ...middle);
        this.moved();
        return;
      }
      fingers.set(event.pointerId, now);
      if (Math.hypot(now[0] - start.at[0], now[1] - start.at[1]) > 3) start.moved = true;
      if (this.tool === "lasso") {
        this.polygon.push(this.camera.toPlane(...now));
        this.drawOver();
      } else if (this.tool === "decode") this.moveCross(now);
      else if (start.moved) {
        this.camera.pan(now[0] - before[0], now[1] - before[1]);
        this.moved();
      }
    });
    const end = (event) => {
      if (!fingers.delete(event.pointerId) || fingers.size) return;
      if (this.tool === "lasso" && this.polygon) {
        if (this.polygon.length > 2) this.lasso(simplified(this.polygon));
        else this.clearSelection();
      } else if (this.tool === "move" && start && !start.moved) {
        const point = this.near(place(event));
        if (point >= 0) this.pin(point, event.shiftKey);
      }
    };
    canvas.addEventListener("pointerup", end);
    canvas.addEventListener("pointercancel", end);
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.camera.zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), ...place(event));
      this.moved();
    }, { passive: false });
    canvas.addEventListener("dblclick", (event) => {
      this.camera.zoom(2, ...place(event));
      this.moved();
    });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const steps = { ArrowLeft: [1, 0], ArrowRight: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
    const move = steps[event.key];
    const act = {
      "+": () => this.zoomBy(1.5), "=": () => this.zoomBy(1.5), "-": () => this.zoomBy(1 / 1.5),
      0: () => { this.camera.reset(); this.moved(); },
      n: () => this.step(1), p: () => this.step(-1), m: () => this.useTool("move"), l: () => this.useTool("lasso"),
      d: () => { this.useTool("decode"); this.moveCross([this.camera.width / 2, this.camera.height / 2]); },
      Escape: () => this.clearSelection(),
    }[event.key];
    if (move) {
      if (this.tool === "decode" && this.cross) {
        const at = this.camera.toPixel(...this.cross);
        this.moveCross([at[0] - 6 * move[0], at[1] - 6 * move[1]]);
      } else {
        this.camera.pan(40 * move[0], 40 * move[1]);
        this.moved();
      }
    } else if (act) act();
    else return;
    event.preventDefault();
  }

  step(by) {
    const next = this.pinned < 0 ? 0 : (this.pinned + by + this.points.count) % this.points.count;
    this.pin(next);
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
    if (second && this.pinned >= 0) {
      this.other = point;
      this.context.state.set({ other: point });
    } else {
      this.pinned = point;
      this.context.state.set({ row: point });
    }
    this.inspect(point);
    const row = this.rowOf(point);
    announce(this.contents.summary(row));
    if (!second) this.decodeRow(point);
    this.showBetween();
    this.drawOver();
  }

  inspect(point) {
    const row = this.rowOf(point);
    // The cells of a table are shown above, so that only what is not a column remains.
    const columns = new Set((this.contents.contents.columns ?? []).map((column) => column.name));
    const numbers = this.map.colours.filter((colour) => !columns.has(colour.name)).map((colour) => {
      const value = colour.kind === "class" ? colour.levels[colour.values.array[row]] ?? "–" : number(valueAt(colour, row), 5);
      return h("tr", {}, h("th", { scope: "row" }, colour.name), h("td", {}, value));
    });
    const step = this.space.step?.array[point] ?? null;
    const shown = this.contents.contents.kind === "sequence" && this.contents.has(row)
      ? this.contents.contents.variables.map((one) => this.contents.drawing(one, this.contents.values(row, one), { size: 150, mark: step }))
      : this.contents.show(row);
    clear(this.inspector).append(h("h3", {}, this.contents.name(row), step === null ? "" : `, step ${step}`),
      ...[shown].flat(), h("table", { class: "cells" }, h("tbody", {}, numbers)));
    this.inspector.dataset.row = row;
    this.inspector.dataset.point = point;
  }

  // Decoding -------------------------------------------------------------------------------------

  code(point) {
    const { space } = this;
    if (space.codes) return space.codes.array.slice(point * space.size, (point + 1) * space.size);
    return this.view.axes ? this.latentAt(this.points.across[point], this.points.up[point]) : null;
  }

  // The latent at a place of the plane.
  latentAt(x, y) {
    const { across, up, origin, axes } = this.view;
    const a = across.low + ((across.high - across.low) * x) / 65534;
    const b = up.low + ((up.high - up.low) * y) / 65534;
    return Float32Array.from(origin, (o, k) => o + a * axes[0][k] + b * axes[1][k]);
  }

  decodeRow(point) {
    if (!this.explorer || this.map.spaces.some((space) => space.step)) return;
    const row = this.rowOf(point), codes = {};
    for (const space of this.map.spaces) {
      if (space.latent && !space.step && space.codes) {
        codes[space.latent] = space.codes.array.slice(row * space.size, (row + 1) * space.size);
      } else if (space === this.space && space.latent) codes[space.latent] = this.code(point);
    }
    const { given, latents } = this.explorer.variables;
    const classes = {};
    for (const { name, size, categorical } of [...given, ...latents]) {
      const found = categorical && this.map.classes[name];
      if (found) classes[name] = oneHot(size, found.array[row]);
    }
    this.cross = [this.points.across[point], this.points.up[point]];
    this.explorer.row(row, codes, classes);
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
      if (!latent) return;
    }
    this.cross = [x, y];
    this.decoded = latent;
    this.explorer.set(this.space.latent, latent, {
      alone: true, from, plane: { space: this.spaceIndex, u: x / 65534, v: y / 65534 },
    });
    this.drawOver();
  }

  // The sliders moved: show where the latent lies in the plane.
  decodedAt(values) {
    const value = values[this.space.latent];
    if (!value || !this.view.axes || !this.view.origin) return;
    const { across, up, origin, axes } = this.view;
    const along = (axis) => axis.reduce((sum, w, k) => sum + w * (value[k] - origin[k]), 0);
    const place = (side, v) => ((v - side.low) / (side.high - side.low || 1)) * 65534;
    this.cross = [place(across, along(axes[0])), this.space.size === 1 ? 32768 : place(up, along(axes[1]))];
    this.drawOver();
  }

  // Selections -----------------------------------------------------------------------------------

  lasso(corners) {
    // Whole numbers, so that the address gives the same selection again.
    const polygon = corners.map((corner) => corner.map(Math.round));
    this.polygon = polygon;
    const { mask, count } = this.points.inside(polygon);
    this.select(mask, count, "lasso");
    this.context.state.set({ lasso: polygon.join(",") });
  }

  selectLevel(level) {
    this.polygon = null;
    this.context.state.set({ lasso: null });
    const mask = new Uint8Array(this.points.count);
    let count = 0;
    for (let i = 0; i < mask.length; i++) {
      if (this.colour.values.array[this.rowOf(i)] === level) {
        mask[i] = 1;
        count++;
      }
    }
    this.select(mask, count, `${this.colour.name} ${this.colour.levels[level]}`);
  }

  selectRows(rows, what) {
    const wanted = new Set(rows), mask = new Uint8Array(this.points.count);
    let count = 0;
    for (let i = 0; i < mask.length; i++) {
      if (wanted.has(this.rowOf(i))) {
        mask[i] = 1;
        count++;
      }
    }
    this.select(mask, count, what);
  }

  select(mask, count, what) {
    this.selection = count ? { mask, count, what, space: this.spaceIndex } : null;
    announce(`${plural(count, "point")} selected`);
    this.showSelection();
    this.redraw();
  }

  clearSelection() {
    this.selection = null;
    this.polygon = null;
    this.context.state.set({ lasso: null });
    this.showSelection();
    this.redraw();
  }

  showSelection() {
    selectionPanel(this.selected, this);
  }

  showBetween() {
    interpolationPanel(this.between, this);
  }

  search(text) {
    if (!text) return this.clearSelection();
    const rows = [];
    const { numbers, count } = this.map.rows;
    if (/^\d+$/.test(text)) {
      const wanted = Number(text);
      for (let i = 0; i < count; i++) if ((numbers ? numbers.array[i] : i) === wanted) rows.push(i);
    } else if (this.contents.contents.kind === "cells") {
      const low = text.toLowerCase();
      for (const column of this.contents.contents.columns) {
        if (!column.levels) continue;
        const hits = new Set(column.levels.flatMap((level, k) => (level.toLowerCase().includes(low) ? [k] : [])));
        if (!hits.size) continue;
        for (let i = 0; i < count; i++) {
          const place = this.contents.place(i);
          if (place >= 0 && hits.has(column.codes.array[place])) rows.push(i);
        }
      }
    }
    if (!rows.length) {
      announce(`No row matches ${text}`);
      clear(this.selected).append(h("h3", {}, "Selection"), h("p", {}, `No row matches “${text}”. Search for a row's number, or for a text in its cells.`));
      return undefined;
    }
    this.selectRows(rows, `“${text}”`);
    if (this.points && !this.rows) this.pin(rows[0]);
    return undefined;
  }

  // Saving ---------------------------------------------------------------------------------------

  snapshot() {
    const copy = h("canvas", { width: this.canvas.width, height: this.canvas.height });
    copy.getContext("2d").drawImage(this.canvas, 0, 0);
    return copy;
  }

  csv() {
    const { splits, split } = this.map.rows, { step } = this.space;
    const cells = new Map((this.contents.contents.columns ?? []).map((column) => [column.name, column]));
    // The map rounds numbers for their colours; the cells have them as they are.
    const value = (colour, row) => {
      const cell = cells.get(colour.name), place = this.contents.place(row);
      if (cell?.numbers && place >= 0) return valueAt(cell.numbers, place);
      return colour.kind === "class" ? colour.levels[colour.values.array[row]] ?? "" : valueAt(colour, row);
    };
    // The split is the first column already. A table may have a column of that name, too.
    const own = split ? this.map.colours.findIndex((c) => c.name === "split") : -1;
    const colours = this.map.colours.filter((_, k) => k !== own);
    const columns = ["split", "row", ...(step ? ["step"] : []), this.view.x || "x", this.view.y || "y", ...colours.map((c) => c.name)];
    const rows = function* rows(map) {
      for (let i = 0; i < map.points.count; i++) {
        if (map.selection && !map.selection.mask[i]) continue;
        const row = map.rowOf(i);
        yield [splits[split ? split.array[row] : 0], map.map.rows.numbers?.array[row] ?? row, ...(step ? [step.array[i]] : []),
          valueAt(map.view.across, i), valueAt(map.view.up, i), ...colours.map((c) => value(c, row))];
      }
    };
    return { columns, rows: [...rows(this)] };
  }

  saveSelection() {
    const { columns, rows } = this.csv();
    save("selection.csv", "text/csv", toCsv(columns, rows));
  }

  theme() {
    this.drawLegend();
    this.redraw();
    if (this.pinned >= 0) this.inspect(this.pinned);
    this.explorer?.update();
  }
}

// A polygon with fewer corners, none of which moves by more than a pixel or so.
export function simplified(polygon, most = 120) {
  const step = Math.max(1, Math.ceil(polygon.length / most));
  return polygon.filter((_, i) => i % step === 0);
}
