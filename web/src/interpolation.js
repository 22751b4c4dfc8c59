// A straight line in latent space between two rows, decoded on the way.
import { h, clear } from "./dom.js";
import { pictureTools } from "./export.js";

const FRAMES = 9;

export function interpolationPanel(panel, map) {
  clear(panel);
  const { space } = map;
  panel.hidden = !map.explorer || !space.latent || Boolean(space.step) || !space.codes;
  if (panel.hidden) return;
  panel.append(h("h3", {}, "Between two rows"));
  if (map.pinned < 0 || map.other === null || map.other === map.pinned) {
    const choose = h("button", { type: "button", class: "tiny", disabled: map.pinned < 0, on: { click: () => {
      map.other = farthest(map);
      interpolationPanel(panel, map);
      map.drawOver();
    } } }, "take the farthest row");
    panel.append(h("p", { class: "quiet" }, map.pinned < 0 ? "Click a row, then shift-click another one. "
      : "Shift-click a second row. ", choose));
    return;
  }
  const [a, b] = [map.pinned, map.other].map((point) => map.code(point));
  const strip = h("div", { class: "strip frames" });
  const names = [map.pinned, map.other].map((point) => map.contents.name(map.rowOf(point)));
  const figure = h("figure", { class: "picture" }, strip, h("figcaption", {}, `From ${names[0]} to ${names[1]}, in a straight line of ${space.latent}`));
  panel.append(figure);
  const decoded = [];
  const at = (t) => Float32Array.from(a, (v, k) => v + (b[k] - v) * t);
  const values = map.explorer.values, fixed = new Set([...map.explorer.fixed, space.latent]);
  Promise.all(Array.from({ length: FRAMES }, async (_, i) => {
    const t = i / (FRAMES - 1);
    const found = await map.decoding.run({ ...values, [space.latent]: at(t) }, { fixed });
    if (found) decoded[i] = { t, observed: found.observed };
  })).then(() => {
    for (const { t, observed } of decoded.filter(Boolean)) {
      const name = map.map.firstObserved in observed ? map.map.firstObserved : Object.keys(observed)[0];
      const frame = h("button", { type: "button", class: "tile", title: `Decode at ${t}`, on: { click: () =>
        map.explorer.set(space.latent, at(t), { alone: true, from: `At ${t} between ${names[0]} and ${names[1]}.` }) } },
      map.contents.decoded(name, observed[name].mean, { size: 72 }), h("span", { class: "quiet" }, `${t}`));
      strip.append(frame);
    }
  });
  pictureTools(figure, { name: "interpolation", csv: () => ({
    columns: ["t", "variable", "entry", "mean"],
    rows: decoded.filter(Boolean).flatMap(({ t, observed }) => Object.entries(observed)
      .flatMap(([name, { mean }]) => Array.from(mean, (v, k) => [t, name, k, v]))),
  }) });
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
