// A straight line in latent space between two rows, decoded on the way.
import { h, clear, number } from "./dom.js";
import { pictureOf, pictureTools } from "./export.js";
import { conditions, meanCodes } from "./conditions.js";

const FRAMES = 9;

export function interpolationPanel(panel, map) {
  clear(panel);
  const { space } = map;
  panel.hidden = !map.explorer || !space.latent || Boolean(space.step) || !space.codes || space.whole
    || !map.decoding.reaches(space);
  if (panel.hidden) return;
  panel.append(h("h3", {}, "Between two rows"));
  if (map.pinned < 0 || map.other < 0 || map.other === map.pinned) {
    const choose = h("button", { type: "button", class: "tiny", disabled: map.pinned < 0, on: { click: () => {
      map.pin(farthest(map), true);
    } } }, "take the farthest row");
    panel.append(h("p", { class: "quiet" }, map.pinned < 0 ? "Click a row, then shift-click another one. "
      : "Shift-click a second row. ", choose));
    return;
  }
  const [a, b] = [map.pinned, map.other].map((point) => map.code(point));
  const strip = h("div", { class: "strip frames" });
  const names = [map.pinned, map.other].map((point) => map.contents.name(map.rowOf(point)));
  const rows = [map.rowOf(map.pinned)], { values, words } = conditions(map.map, rows);
  // The other latents and classes are those of the first row; what p draws from the latent follows.
  const below = map.decoding.below(space.latent), codes = Object.entries(meanCodes(map.map, rows))
    .filter(([name]) => name !== space.latent && !below.has(name));
  Object.assign(values, Object.fromEntries(codes));
  for (const name of below) delete values[name];
  const held = map.decoding.free ? [...words.filter((word) => !below.has(word.split(" = ")[0])), ...codes.map(([name]) => name)] : [];
  const figure = h("figure", { class: "picture" }, strip, h("figcaption", {},
    `From ${names[0]} to ${names[1]}, in a straight line of ${space.latent}${held.length ? `; held as in ${names[0]}: ${held.join(", ")}` : ""}.`));
  panel.append(figure);
  const decoded = [];
  const at = (t) => Float32Array.from(a, (v, k) => v + (b[k] - v) * t);
  Promise.all(Array.from({ length: FRAMES }, async (_, i) => {
    const t = i / (FRAMES - 1);
    const found = await map.decoding.run({ ...values, [space.latent]: at(t) }, { about: space.latent, purpose: `frame ${i}` });
    if (found) decoded[i] = { t, observed: found.observed };
  })).then(() => {
    const frames = decoded.filter(Boolean);
    const step = (t, ...content) => h("button", { type: "button", class: "tile", title: `Decode at ${t}`, on: { click: () =>
      map.explorer.set(space.latent, at(t), { alone: true, from: `At ${t} between ${names[0]} and ${names[1]}.` }) } },
    ...content, h("span", { class: "quiet" }, `${t}`));
    const images = map.map.contents.kind === "image";
    if (images) strip.append(...frames.map(({ t, observed }) => step(t, drawn(map, observed, t))));
    else if (frames.length) strip.append(asTable(map, frames, step));
  }, (error) => strip.append(h("p", { class: "bad" }, `The line could not be decoded: ${error.message}`)));
  pictureTools(figure, { name: "interpolation", png: () => pictureOf(figure), csv: () => ({
    columns: ["t", "variable", "entry", "kind", "value"],
    rows: decoded.filter(Boolean).flatMap(({ t, observed }) => Object.entries(observed)
      .flatMap(([name, one]) => map.contents.exported(name, one).map((row) => [t, name, ...row]))),
  }) });
}

function drawn(map, observed, t) {
  const name = map.map.firstObserved in observed ? map.map.firstObserved : Object.keys(observed)[0];
  return map.contents.decoded(name, observed[name].mean, { size: 72, label: `${name} at ${t}` });
}

// Numbers and cells: a line for each step of the way.
function asTable(map, frames, step) {
  const cells = ({ observed }) => Object.entries(observed).flatMap(([name, one]) => map.contents
    .exported(name, { ...one, sd: null, draw: null })
    .map(([entry, kind, value]) => [`${typeof entry === "number" ? name : ""}${entry}${kind === "mean" ? "" : ` (${kind})`}`, value]));
  return h("table", { class: "cells" },
    h("thead", {}, h("tr", {}, ["at", ...cells(frames[0]).map(([name]) => name)].map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, frames.map((frame) => h("tr", {}, h("th", { scope: "row" }, step(frame.t)),
      cells(frame).map(([, value]) => h("td", {}, typeof value === "number" ? number(value, 4) : value))))));
}

function farthest(map) {
  const { codes, size } = map.space, from = map.pinned * size;
  let best = 0, most = -1;
  for (let i = 0; i < codes.shape[0]; i++) {
    let far = 0;
    for (let k = 0; k < size; k++) far += (codes.array[i * size + k] - codes.array[from + k]) ** 2;
    if (far > most) [best, most] = [i, far];
  }
  return best;
}
