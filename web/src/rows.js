// Showing a row: an image, the cells of a table, a sequence, or numbers. What p decodes is shown in
// the same way.
import { h, s, number, css } from "./dom.js";
import { inUnits, valueAt, valuesOf } from "./data.js";
import { inkAndPaper, classColour, rgb } from "./colours.js";

const LINES = 6; // most entries of a sequence that are lines, not an image

// Contents of the rows of a map, by position.
export class Contents {
  constructor(map) {
    this.map = map;
    this.contents = map.contents;
    this.places = null;
    if (this.contents.detail) {
      this.places = new Map();
      this.contents.detail.array.forEach((row, place) => this.places.set(row, place));
    }
    this.units = map.units ?? {};
  }

  place(row) {
    return this.places ? this.places.get(row) ?? -1 : row;
  }

  has(row) {
    return this.place(row) >= 0;
  }

  // The name of a row for people: its split and its number there.
  name(row) {
    const { splits, split, numbers } = this.map.rows;
    const which = split ? splits[split.array[row]] : splits[0];
    const at = numbers ? numbers.array[row] : row;
    return `${which ? `${which} ` : ""}row ${at}`;
  }

  values(row, variable) {
    const size = variable.shape.slice(1).reduce((a, b) => a * b, 1);
    return valuesOf(variable.numbers, this.place(row) * size, size);
  }

  show(row, { size = 160 } = {}) {
    if (!this.has(row)) {
      return h("p", { class: "quiet" },
        `The page holds the contents of ${this.contents.count.toLocaleString("en")} random rows, and not of this one. `,
        "A page of fewer rows holds the contents of all of them: ",
        h("code", {}, `aevb page RUN --rows ${this.contents.count}`), ".");
    }
    const { kind } = this.contents;
    if (kind === "cells") return this.cells(row);
    return h("div", { class: "row-content" }, this.contents.variables.map((variable) =>
      this.drawing(variable, this.values(row, variable), { size, label: `${variable.name} of ${this.name(row)}` })));
  }

  // One variable of a row, or of what p decodes, in the units of the data.
  drawing(variable, values, { size = 160, mark = null, label = variable.name } = {}) {
    if (variable.timed) return withNames(sequence(variable, values, { size, mark, label }), variable.columns, variable.shape.at(-1));
    if (variable.image) return image(values, variable.image, size, label, variable.light);
    if (variable.classes) return levels(variable.name, values.map((_, k) => `${k}`), values);
    return table(variable.columns ?? [variable.name], values);
  }

  cells(row) {
    const place = this.place(row);
    const shown = this.contents.columns.map((column) => [column, cellText(column, place)]);
    return cellTable([...shown.filter(([c]) => c.modelled), ...shown.filter(([c]) => !c.modelled)]
      .map(([column, text]) => [column.name, text, column.modelled ? "" : "not in the model"]));
  }

  // What p decodes for a variable (mean or draw, in the units of the model), as a drawing.
  decoded(name, values, { size = 160, sd = null, label = name } = {}) {
    const units = this.units[name];
    if (this.contents.kind === "cells") return decodedCells(units, values, sd);
    const variable = this.contents.variables.find((one) => one.name === name);
    return this.drawing({ ...variable, timed: false }, inUnits(units, values), { size, label });
  }

  // What p decodes for a variable as rows [entry, kind, value] of a file, in the units of the data.
  exported(name, { mean, sd, draw }) {
    const units = this.units[name], found = [];
    const variable = this.contents.variables?.find((one) => one.name === name);
    if (this.contents.kind === "cells" && units) return exportedCells(units, { mean, sd, draw });
    const entry = (j) => (variable?.columns?.length === mean.length ? variable.columns[j] : j);
    inUnits(units, mean).forEach((v, j) => found.push([entry(j), "mean", v]));
    if (sd) sd.forEach((v, j) => found.push([entry(j), "sd", Math.abs(units?.[j].scale ?? 1) * v]));
    if (draw) inUnits(units, draw).forEach((v, j) => found.push([entry(j), "draw", v]));
    return found;
  }

  // A label for tooltips and screen readers.
  summary(row) {
    if (!this.has(row)) return this.name(row);
    if (this.contents.kind !== "cells") return this.name(row);
    const place = this.place(row);
    const some = this.contents.columns.slice(0, 3).map((c) => `${c.name} ${cellText(c, place)}`);
    return `${this.name(row)}: ${some.join(", ")}`;
  }
}

// A cell as the table has it: all its digits, and no separators, as a year is no amount.
export function cellText(column, place) {
  if (column.numbers) {
    const value = valueAt(column.numbers, place);
    return Number.isNaN(value) ? "–" : String(value).replaceAll("-", "−");
  }
  const code = column.codes.array[place];
  return code < column.levels.length ? column.levels[code] : "–";
}

function cellTable(cells) {
  return h("table", { class: "cells" }, h("tbody", {}, cells.map(([name, text, note]) =>
    h("tr", { class: note ? "quiet" : null }, h("th", { scope: "row" }, name),
      h("td", {}, text, note ? h("span", { class: "note" }, ` (${note})`) : null)))));
}

// p's means of a table's variable as cells: numbers in their units, levels by their probability.
function decodedCells(units, values, sd) {
  if (!units) return null;
  const first = units[0];
  if (first.kind === "category" || first.kind === "ordered") {
    return levels(first.column, first.levels, values);
  }
  return cellTable(units.map((unit, j) => {
    if (unit.kind === "binary") {
      const p = values[j];
      const likely = p >= 0.5 ? 1 : 0;
      return [unit.column, `${unit.levels[likely]} (${number(likely ? p : 1 - p, 2)})`, ""];
    }
    if (unit.scale === undefined) return [unit.column, number(values[j], 4), ""];
    const at = unit.location + unit.scale * values[j];
    if (unit.kind === "date") {
      return [unit.column, new Date(at * 864e5).toISOString().slice(0, 10), ""];
    }
    const spread = sd ? Math.abs(unit.scale) * sd[j] : null;
    if (unit.kind === "positive") {
      const times = spread === null ? "" : ` ×÷ ${number(Math.exp(spread), 3)}`;
      return [unit.column, `${number(Math.exp(at), 4)}${times}`, ""];
    }
    return [unit.column, `${number(at, 4)}${spread === null ? "" : ` ± ${number(spread, 2)}`}`, ""];
  }));
}

// The same as rows of a file. A positive number is modelled by its logarithm: it has a median, and a
// factor for one standard deviation.
function exportedCells(units, { mean, sd, draw }) {
  const first = units[0], found = [];
  if (first.kind === "category" || first.kind === "ordered") {
    first.levels.forEach((level, k) => found.push([`${first.column} = ${level}`, "probability", mean[k]]));
    if (draw) found.push([first.column, "draw", first.levels[Array.from(draw).indexOf(Math.max(...draw))]]);
    return found;
  }
  units.forEach((unit, j) => {
    if (unit.kind === "binary") {
      found.push([`${unit.column} = ${unit.levels[1]}`, "probability", mean[j]]);
      if (draw) found.push([unit.column, "draw", unit.levels[Math.round(draw[j])]]);
      return;
    }
    const at = (v) => (unit.scale === undefined ? v : unit.location + unit.scale * v);
    const written = { date: (v) => new Date(v * 864e5).toISOString().slice(0, 10), positive: Math.exp }[unit.kind] ?? ((v) => v);
    const positive = unit.kind === "positive", spread = sd && Math.abs(unit.scale ?? 1) * sd[j];
    found.push([unit.column, positive ? "median" : "mean", written(at(mean[j]))]);
    if (sd) found.push([unit.column, positive ? "factor of one sd" : unit.kind === "date" ? "sd in days" : "sd", positive ? Math.exp(spread) : spread]);
    if (draw) found.push([unit.column, "draw", written(at(draw[j]))]);
  });
  return found;
}

// Probabilities of levels as bars.
export function levels(name, texts, values) {
  return h("div", { class: "levels", role: "group", "aria-label": name }, h("strong", {}, name),
    Array.from(texts, (text, k) => {
      const bar = h("span", { class: "bar" });
      bar.style.setProperty("--share", `${Math.max(0, Math.min(1, values[k])) * 100}%`);
      return h("div", { class: "level" }, h("span", {}, text), bar, h("span", {}, number(values[k], 2)));
    }));
}

function table(columns, values) {
  const shown = Array.from(columns).slice(0, 40);
  const rest = columns.length - shown.length;
  return h("div", {}, cellTable(shown.map((name, j) => [name, number(values[j], 5), ""])),
    rest > 0 ? h("p", { class: "quiet" }, `and ${rest} more`) : null);
}

// An image with values from 0 (paper) to 1 (ink), or if `light` from black to white, as photographs
// are. Three channels are colours.
export function imageCanvas(values, shape, label = "image", light = false) {
  const colour = shape.length === 3;
  const [height, width] = colour ? shape.slice(1) : shape;
  const canvas = h("canvas", { width, height, class: "pixels", role: "img", "aria-label": label });
  const context = canvas.getContext("2d");
  const picture = context.createImageData(width, height);
  const [ink, paper] = inkAndPaper();
  const area = height * width;
  for (let i = 0; i < area; i++) {
    for (let c = 0; c < 3; c++) {
      const v = colour ? values[c * area + i] : values[i];
      const t = Math.max(0, Math.min(1, Number.isNaN(v) ? 0.5 : v));
      picture.data[4 * i + c] = colour || light ? 255 * t : paper[c] + (ink[c] - paper[c]) * t;
    }
    picture.data[4 * i + 3] = 255;
  }
  context.putImageData(picture, 0, 0);
  return canvas;
}

function image(values, shape, size, label, light = false) {
  const canvas = imageCanvas(values, shape, label, light);
  const [height, width] = shape.slice(-2);
  canvas.style.setProperty("width", `${Math.round((size * width) / Math.max(height, width))}px`);
  return canvas;
}

// A sequence [T, d]: lines for a few entries, an image for many.
export function sequence(variable, values, { size = 160, mark = null, start = null, label = "" } = {}) {
  const d = variable.shape.at(-1);
  let steps = values.length / d;
  const missing = (t) => values.subarray(t * d, (t + 1) * d).every(Number.isNaN);
  while (steps > 1 && missing(steps - 1)) steps--;
  if (d > LINES) {
    const flat = new Float64Array(steps * d);
    let low = Infinity, high = -Infinity;
    for (let i = 0; i < steps * d; i++) {
      if (values[i] < low) low = values[i];
      if (values[i] > high) high = values[i];
    }
    if (low >= 0 && high <= 1) { low = 0; high = 1; }
    for (let i = 0; i < steps * d; i++) flat[i] = (values[i] - low) / (high - low || 1);
    const canvas = image(flat, [steps, d], size, `${label}: ${steps} steps from top to bottom, ${d} entries across`);
    const box = h("div", { class: "heat" }, canvas);
    if (mark !== null) {
      const line = h("span", { class: "mark" });
      line.style.setProperty("top", `${(100 * (mark + 0.5)) / steps}%`);
      box.append(line);
    }
    return box;
  }
  return lines([{ values, steps, d }], { size, mark, start, names: variable.columns });
}

// A drawing of lines with the names of its entries.
export function withNames(drawing, names, d) {
  if (d < 2 || d > LINES || !names) return drawing;
  return h("div", { class: "named-lines" }, drawing, h("div", { class: "legend" }, Array.from({ length: d }, (_, j) => {
    const dot = h("span", { class: "dot" });
    dot.style.setProperty("background", rgb(classColour(j)));
    return h("span", { class: "entry" }, dot, names[j] ?? `${j}`);
  })));
}

export function lines(curves, { size = 160, mark = null, start = null, names = null, label = "" } = {}) {
  const width = size * 2, height = size;
  let low = Infinity, high = -Infinity, last = 1;
  for (const { values, steps, d } of curves) {
    last = Math.max(last, steps - 1);
    for (let i = 0; i < steps * d; i++) {
      if (values[i] < low) low = values[i];
      if (values[i] > high) high = values[i];
    }
  }
  if (!(high > low)) { low -= 1; high += 1; }
  const x = (t) => 48 + (t / last) * (width - 56), y = (v) => 8 + ((high - v) / (high - low)) * (height - 28);
  const drawing = s("svg", {
    class: "lines", viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": label || `sequence of ${last + 1} steps from ${number(low, 3)} to ${number(high, 3)}`,
  });
  for (const { values, steps, d, faint, dashed, from = 0 } of curves) {
    for (let j = 0; j < d; j++) {
      let path = "", pen = false;
      for (let t = from; t < steps; t++) {
        const v = values[t * d + j];
        if (Number.isNaN(v)) { pen = false; continue; }
        path += `${pen ? "L" : "M"}${x(t).toFixed(1)} ${y(v).toFixed(1)}`;
        pen = true;
      }
      drawing.append(s("path", {
        d: path, fill: "none", stroke: rgb(classColour(j)), "stroke-width": faint ? 0.8 : 1.8,
        "stroke-opacity": faint ? 0.55 : 1, "stroke-dasharray": dashed ? "4 3" : null,
      }, s("title", {}, names ? names[j] ?? `${j}` : `${j}`)));
    }
  }
  for (const at of [mark, start]) {
    if (at !== null) {
      drawing.append(s("line", { x1: x(at), x2: x(at), y1: 6, y2: height - 18, class: "cursor-line" }));
    }
  }
  drawing.append(
    s("text", { x: 44, y: 14, class: "tick", "text-anchor": "end" }, number(high, 3)),
    s("text", { x: 44, y: height - 22, class: "tick", "text-anchor": "end" }, number(low, 3)),
    s("text", { x: 48, y: height - 5, class: "tick" }, "step 0"),
    s("text", { x: width - 8, y: height - 5, class: "tick", "text-anchor": "end" }, `${last}`));
  return drawing;
}
