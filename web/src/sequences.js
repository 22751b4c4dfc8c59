// Sequences: the path of a row through latent space, its latents over time, and continuations.
import { h } from "./dom.js";
import { valuesOf } from "./data.js";
import { lines, sequence, withNames } from "./rows.js";
import { pictureOf, pictureTools } from "./export.js";

const PICTURES = 4; // most continuations of a row that are images

// The points of a row in the order of its steps, as a path of the map.
export function pathOf(map, row) {
  const { space, rows, points, camera } = map;
  if (!space.step) return null;
  const steps = [];
  for (let i = 0; i < points.count; i++) if (rows[i] === row) steps.push([space.step.array[i], i]);
  steps.sort((a, b) => a[0] - b[0]);
  return steps.map(([, i], k) => `${k ? "L" : "M"}${camera.toPixel(points.across[i], points.up[i]).map((v) => v.toFixed(1)).join(" ")}`).join("");
}

export function sequencesPart(run) {
  const { map } = run;
  const found = map?.continuations;
  const timed = map?.spaces.filter((space) => space.step && space.codes) ?? [];
  if (!found && !timed.length) return null;
  const part = h("section", { class: "part", id: "sequences", "aria-labelledby": "sequences-title" },
    h("h2", { id: "sequences-title" }, "Sequences"));
  if (found) part.append(continuations(map, found));
  if (timed.length) part.append(latentPaths(map, timed));
  return part;
}

function continuations(map, found) {
  const variable = map.contents.variables.find((one) => one.name === found.variable);
  const [rows, draws, steps, d] = found.shape;
  const at = (r, k) => valuesOf(found.numbers, (r * draws + k) * steps * d, steps * d);
  const given = (r) => valuesOf(found.data, r * steps * d, steps * d);
  const shown = Array.from({ length: rows }, (_, r) => {
    const curves = Array.from({ length: draws }, (_, k) => ({ values: at(r, k), steps, d, faint: true, from: found.start - 1 }));
    const past = { values: at(r, 0).slice(0, found.start * d), steps: found.start, d };
    const true_ = { values: given(r), steps, d, dashed: true, from: found.start - 1 };
    const heat = (values, text, label) => h("div", { class: "tile" },
      sequence({ shape: [0, steps, d], columns: variable?.columns }, values, { size: 90, mark: found.start - 0.5, label: `${label} of ${nameOf(map, found.rows[r])}` }),
      h("span", { class: "quiet" }, text));
    const picture = d <= 6 ? withNames(lines([...curves, past, true_], { size: 130, start: found.start - 1, names: variable?.columns, label: `row ${found.rows[r]} with ${draws} continuations` }), variable?.columns, d)
      : h("div", { class: "strip" }, heat(given(r), "data", "data"),
        Array.from({ length: Math.min(PICTURES, draws) }, (_, k) => heat(at(r, k), `draw ${k}`, `continuation ${k}`)));
    return h("div", { class: "tile wide" }, picture, h("span", { class: "quiet" }, nameOf(map, found.rows[r])));
  });
  const figure = h("figure", { class: "picture" }, h("div", { class: "strip" }, shown),
    h("figcaption", {}, `Continuations: up to step ${found.start - 1} the data, from there on draws of p, ${d <= 6
      ? `${draws} of each row; the dashed line is what the data did`
      : `${Math.min(PICTURES, draws)} of each row${draws > PICTURES ? ` (the CSV has ${draws})` : ""}; the first picture is the data themselves, and the dashed line is where the draws begin`}. The latents before the line are drawn from the posterior given the past.`));
  pictureTools(figure, { name: "continuations", png: () => pictureOf(figure), csv: () => ({ columns: ["row", "draw", "step", "entry", "value"],
    rows: Array.from({ length: rows * draws }, (_, rk) => [...at(Math.floor(rk / draws), rk % draws)].map((v, i) =>
      [nameOf(map, found.rows[Math.floor(rk / draws)]), rk % draws, Math.floor(i / d), i % d, v])).flat() }) });
  return figure;
}

const nameOf = (map, row) => {
  const { splits, split, numbers } = map.rows;
  const which = splits[split ? split.array[row] : 0];
  return `${which ? `${which} ` : ""}row ${numbers?.array[row] ?? row}`;
};

function latentPaths(map, spaces) {
  const pictures = spaces.flatMap((space) => {
    const size = space.size, shown = Math.min(size, 4);
    const byRow = new Map();
    for (let i = 0; i < space.row.array.length && byRow.size <= 20; i++) {
      const row = space.row.array[i];
      if (!byRow.has(row)) byRow.set(row, []);
      byRow.get(row).push(i);
    }
    const some = [...byRow.values()].slice(0, 20);
    const entry = (k) => (size === 1 ? space.latent : `${space.latent}${k}`);
    return Array.from({ length: shown }, (_, k) => h("div", { class: "tile wide" },
      lines(some.map((points) => ({ values: points.map((i) => space.codes.array[i * size + k]), steps: points.length, d: 1, faint: true })),
        { size: 130, label: `${entry(k)} over time, ${some.length} rows` }), h("span", { class: "quiet" }, entry(k))));
  });
  const sizes = spaces.map((space) => space.size);
  const figure = h("figure", { class: "picture" }, h("div", { class: "strip" }, pictures),
    h("figcaption", {}, "Latents over time: posterior means of the first 20 rows on the map, one line per row" +
      `${Math.max(...sizes) > 4 ? "; the first 4 entries of each latent" : ""}.`));
  pictureTools(figure, { name: "latents-over-time", png: () => pictureOf(figure) });
  return figure;
}
