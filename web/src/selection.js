// What the rows of a selection share, against all others.
import { h, clear, number, plural } from "./dom.js";
import { valueAt } from "./data.js";
import { imageCanvas } from "./rows.js";
import { conditions, meanCodes } from "./conditions.js";
import { pictureOf, pictureTools } from "./export.js";

const SHOWN = 8; // most differences, and most example rows

export function selectionPanel(panel, map) {
  clear(panel).append(h("h3", {}, "Selection"));
  delete panel.dataset.count;
  const { selection } = map;
  if (!selection) {
    panel.append(h("p", { class: map.message ? "" : "quiet" }, map.message ||
      "Draw around points with the lasso, or click a colour of the legend, to see what these rows share."));
    return;
  }
  const rows = selectedRows(map);
  const unit = map.rows ? `${plural(selection.count, "point")} of ${plural(rows.length, "row")}` : plural(rows.length, "row");
  const share = (100 * rows.length) / map.map.rows.count;
  panel.dataset.count = selection.count;
  panel.append(h("p", {}, h("strong", { class: "count" }, unit), ` (${selection.what}; ${number(share, 2)} % of the rows on the map). `,
    selection.note ? `${selection.note} ` : "",
    h("button", { type: "button", class: "tiny", on: { click: () => map.clearSelection() } }, "clear"), " ",
    h("button", { type: "button", class: "tiny", title: "Save the selected rows as CSV", on: { click: () => map.saveSelection() } }, "save as CSV")));
  const found = differences(map, rows).filter((one) => one.of !== selection.own);
  if (found.length) {
    panel.append(h("table", { class: "cells" },
      h("caption", {}, "What they share, against the other rows; largest differences first. In brackets: the most common other level"),
      h("thead", {}, h("tr", {}, ["", "selected", "others", "effect size"].map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, found.slice(0, SHOWN).map(({ name, mine, theirs, effect }) => h("tr", {},
        h("th", { scope: "row" }, name), h("td", {}, mine), h("td", {}, theirs), h("td", {}, effect))))));
  }
  panel.append(...pictures(map, rows));
  pictureTools(panel, { name: "selection", png: () => pictureOf(panel) });
}

export function selectedRows(map) {
  const found = new Set();
  for (let i = 0; i < map.points.count; i++) if (map.selection.mask[i]) found.add(map.rowOf(i));
  return [...found];
}

// Every number and class that rows have, as {name, value(row), level(row), levels}.
function quantities(map) {
  const found = map.map.colours.map((colour) => colour.kind === "class"
    ? { name: colour.name, levels: colour.levels, level: (row) => colour.values.array[row] }
    : { name: colour.name, value: (row) => valueAt(colour, row) });
  const { contents } = map.contents;
  const known = new Set(found.map((one) => one.name));
  for (const column of contents.kind === "cells" ? contents.columns : []) {
    if (known.has(column.name)) continue;
    const place = (row) => map.contents.place(row);
    if (column.numbers) {
      found.push({ name: column.name, value: (row) => (place(row) < 0 ? NaN : valueAt(column.numbers, place(row))) });
    } else if (column.levels.length <= 40) {
      found.push({ name: column.name, levels: column.levels, level: (row) => (place(row) < 0 ? -1 : column.codes.array[place(row)]) });
    }
  }
  return found;
}

export function differences(map, rows) {
  const total = map.map.rows.count, mine = new Uint8Array(total);
  for (const row of rows) mine[row] = 1;
  const found = [];
  for (const one of quantities(map)) {
    if (one.levels) {
      const counts = [new Float64Array(one.levels.length), new Float64Array(one.levels.length)];
      for (let row = 0; row < total; row++) {
        const k = one.level(row);
        if (k >= 0 && k < one.levels.length) counts[mine[row]][k]++;
      }
      const sums = counts.map((side) => side.reduce((a, b) => a + b, 0));
      if (!sums[0] || !sums[1]) continue;
      let best = 0, most = -1;
      one.levels.forEach((_, k) => {
        const gap = Math.abs(counts[1][k] / sums[1] - counts[0][k] / sums[0]);
        if (gap > most) [best, most] = [k, gap];
      });
      const next = runnerUp(counts[1], best);
    const shares = [1, 0].map((side) => counts[side][best] / sums[side]);
      // Cohen's h puts differences of shares on the scale of those of means.
      const effect = 2 * Math.asin(Math.sqrt(shares[0])) - 2 * Math.asin(Math.sqrt(shares[1]));
      found.push({ name: `${one.name} = ${one.levels[best]}`, of: one.name,
        mine: `${number(100 * shares[0], 3)} %${next < 0 ? "" : ` (${one.levels[next]}: ${number((100 * counts[1][next]) / sums[1], 2)} %)`}`,
        theirs: `${number(100 * shares[1], 3)} %`, effect: signed(effect), size: Math.abs(effect) });
      continue;
    }
    const n = [0, 0], sum = [0, 0], squares = [0, 0];
    for (let row = 0; row < total; row++) {
      const value = one.value(row);
      if (!Number.isFinite(value)) continue;
      const side = mine[row];
      n[side]++;
      const step = value - sum[side];
      sum[side] += step / n[side];
      squares[side] += step * (value - sum[side]);
    }
    if (n[0] < 2 || n[1] < 1) continue;
    const sd = Math.sqrt((squares[0] + squares[1]) / Math.max(1, n[0] + n[1] - 2));
    const effect = sd > 0 ? (sum[1] - sum[0]) / sd : 0;
    found.push({ name: one.name, of: one.name, mine: number(sum[1], 4), theirs: number(sum[0], 4), effect: `${signed(effect)} sd`, size: Math.abs(effect) });
  }
  return found.sort((a, b) => b.size - a.size);
}

// The most common level but one that is named already; −1 if there is no other.
function runnerUp(counts, named) {
  let found = -1;
  counts.forEach((count, k) => { if (k !== named && count > 0 && (found < 0 || count > counts[found])) found = k; });
  return found;
}

const signed = (value) => `${value > 0 ? "+" : ""}${number(value, 2)}`;

// Some rows, the mean image of the selection, and the decoded mean of its codes.
function pictures(map, rows) {
  const found = [];
  const { contents } = map.contents;
  const known = rows.filter((row) => map.contents.has(row));
  const variable = contents.variables?.find((one) => one.image);
  if (variable && known.length) {
    const size = variable.shape[1], sum = new Float64Array(size);
    for (const row of known) {
      const values = map.contents.values(row, variable);
      for (let i = 0; i < size; i++) sum[i] += values[i];
    }
    found.push(h("div", { class: "strip" },
      tile(imageCanvas(sum.map((v) => v / known.length), variable.image, "mean image of the selection", variable.light), "mean image"),
      h("div", { class: "tile mean-decoded" }),
      spread(known, SHOWN).map((row) => tile(imageCanvas(map.contents.values(row, variable), variable.image, map.contents.name(row), variable.light), map.contents.name(row)))));
  } else found.push(h("div", { class: "strip" }, h("div", { class: "tile mean-decoded wide" })));
  decodeMean(map, rows, found[0].querySelector(".mean-decoded"));
  return found;
}

// The mean code of the rows, decoded with their most frequent classes and mean given values.
async function decodeMean(map, rows, place) {
  const { space, decoding } = map;
  if (!map.explorer || !space.latent || space.step) return place.remove();
  const { values, words } = conditions(map.map, rows);
  Object.assign(values, meanCodes(map.map, rows));
  const flat = !space.codes && map.view.axes;
  if (flat) values[space.latent] = meanOfPoints(map);
  let result = null, failure = "";
  try {
    if (values[space.latent]) result = await decoding.run(values, { about: space.latent, purpose: "selection" });
  } catch (error) {
    failure = error.message;
  }
  if (failure) return place.append(h("span", { class: "bad" }, `Their mean code could not be decoded: ${failure}`));
  if (!result || !place.isConnected) return place.remove();
  const held = !decoding.free ? ": the nearest point that was decoded beforehand"
    : words.length ? `, with ${words.join(", ")}` : "";
  const text = `their mean code${flat && space.size > 2 ? " (of two principal components only)" : ""}, decoded${held}`;
  place.append(...Object.entries(result.observed).map(([name, { mean: decoded }]) =>
    map.contents.decoded(name, decoded, { size: 72, label: `${name}: ${text}` })), h("span", { class: "quiet" }, text));
  return undefined;
}

// The mean place of the selected points in the plane, as a latent.
function meanOfPoints(map) {
  const { across, up } = map.points;
  let x = 0, y = 0, n = 0;
  for (let i = 0; i < map.points.count; i++) {
    if (!map.selection.mask[i] || across[i] === 65535) continue;
    x += across[i];
    y += up[i];
    n++;
  }
  return n ? map.latentAt(x / n, y / n) : null;
}

const tile = (picture, text) => h("div", { class: "tile" }, picture, h("span", { class: "quiet" }, text));

export const spread = (rows, most) => {
  const step = Math.max(1, rows.length / most);
  return Array.from({ length: Math.min(most, rows.length) }, (_, i) => rows[Math.floor(i * step)]);
};
