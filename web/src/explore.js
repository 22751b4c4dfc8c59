// Decoding by hand: values of the latents, and what p makes of them.
import { h, clear, number, select } from "./dom.js";
import { createDecoder } from "./decode.js";
import { createRandom } from "./random.js";
import { pictureTools } from "./export.js";

// Decode through the page's own networks, through the server, or from a grid made beforehand.
export class Decoding {
  constructor(map, live) {
    this.program = map.decoder;
    this.map = map;
    this.live = live;
    this.decoder = map.decoder.runs ? createDecoder(map.decoder) : null;
    this.seed = 1;
  }

  get possible() {
    return Boolean(this.decoder || this.live || this.map.decoder.planes.length);
  }

  get how() {
    if (this.decoder) {
      const bits = this.program.precision === "f2" ? "half" : "single";
      return `p's network runs in this page, with weights in ${bits} precision (largest difference from the model ${number(this.program.error, 2)}).`;
    }
    if (this.live) return "The server decodes with the trained model.";
    if (this.map.decoder.planes.length) {
      return `${this.program.why} The page shows the nearest of ${this.map.decoder.planes[0].steps ** 2} points that were decoded beforehand.`;
    }
    return this.program.why;
  }

  // {latents, observed} for the values of some latents and given variables.
  async run(values, { fixed = null, draw = false, plane = null } = {}) {
    if (this.decoder) {
      const random = createRandom(this.seed);
      return this.decoder.forward(values, { fixed: fixed ?? new Set(Object.keys(values)), draw, random });
    }
    if (this.live) {
      const kept = fixed ? Object.fromEntries(Object.entries(values).filter(([name]) => fixed.has(name))) : values;
      return this.live({ values: kept, draw, seed: this.seed });
    }
    const grid = plane && this.map.decoder.planes.find((one) => one.space === plane.space);
    if (!grid) return null;
    const { steps, values: numbers } = grid;
    const cell = (t) => Math.max(0, Math.min(steps - 1, Math.round(t * (steps - 1))));
    const at = cell(plane.v) * steps + cell(plane.u), size = numbers.shape[1];
    const mean = numbers.array.subarray(at * size, (at + 1) * size);
    return { latents: {}, observed: { [this.map.firstObserved]: { mean, draw: null, sd: null } } };
  }
}

// Sliders for the entries of the latents, choices of classes and given variables, and the result.
export class Explorer {
  constructor(map, contents, decoding, changed) {
    Object.assign(this, { map, contents, decoding, changed, values: {}, fixed: new Set() });
    this.draw = false;
    this.shownRow = null; // whose codes are decoded; null for values from elsewhere
    this.result = h("div", { class: "decoded", "aria-live": "polite" });
    this.sliders = h("div", { class: "sliders" });
    this.origin = h("p", { class: "quiet" }, "Choose a row, or drag the point ⊕ in the map.");
    this.pending = false;
    this.spaceOf = Object.fromEntries(map.spaces.filter((one) => one.latent).map((one) => [one.latent, one]));
    this.variables = this.described();
    this.controls = h("div", { class: "controls" });
    this.figure = h("figure", { class: "picture" }, this.result,
      h("figcaption", {}, this.decoding.how));
    pictureTools(this.figure, {
      name: "decoded",
      png: map.contents.kind === "image" ? () => this.result.querySelector("canvas") ?? blank() : null,
      csv: () => this.csv(),
    });
    this.element = h("div", { class: "panel explorer" }, h("h3", {}, "Decode"), this.origin,
      this.controls, this.figure, this.sliders);
    this.buildControls();
    this.buildSliders();
  }

  described() {
    const decoder = this.decoding.decoder;
    if (decoder) return { latents: decoder.latents, given: decoder.given };
    const latents = this.map.spaces.filter((one) => one.latent && !one.step)
      .map((one) => ({ name: one.latent, size: one.size, categorical: false }));
    const classes = this.map.clusters.map((one) => ({ name: one.latent, size: one.count, categorical: true }));
    return { latents: [...latents, ...classes], given: [] };
  }

  buildControls() {
    const choice = (variable, given) => select(
      `${variable.name}${given ? " (given)" : variable.name === "part" ? " of the density (no cluster)" : ""}`,
      [...(given ? [] : [["", "as p expects"]]),
        ...Array.from({ length: variable.size }, (_, k) => [k, `${k}`])],
      "", (value) => {
        if (value === "") this.release(variable.name);
        else this.set(variable.name, oneHot(variable.size, Number(value)), { alone: !given });
      });
    clear(this.controls).append(
      ...this.variables.latents.filter((one) => one.categorical).map((one) => choice(one, false)),
      ...this.variables.given.filter((one) => one.categorical).map((one) => choice(one, true)),
      h("div", { class: "buttons", role: "group", "aria-label": "What to show" },
        this.modeButton("mean", false), this.modeButton("draw", true),
        h("button", { type: "button", class: "tiny", title: "Draw the latents from p", on: { click: () => this.fromPrior() } }, "a new draw of p")));
    for (const one of this.variables.given) {
      if (one.categorical) this.values[one.name] = oneHot(one.size, 0);
      else this.values[one.name] = new Float32Array(one.size);
      this.fixed.add(one.name);
    }
  }

  modeButton(label, draw) {
    return h("button", {
      type: "button", class: "tiny", "aria-pressed": String(this.draw === draw), on: {
        click: (event) => {
          this.draw = draw;
          if (draw) this.decoding.seed++;
          for (const other of event.target.parentElement.querySelectorAll("[aria-pressed]")) {
            other.setAttribute("aria-pressed", String(other === event.target));
          }
          this.update();
        },
      },
    }, label);
  }

  buildSliders() {
    clear(this.sliders);
    this.inputs = {};
    for (const latent of this.variables.latents.filter((one) => !one.categorical)) {
      const space = this.spaceOf[latent.name];
      const sd = space?.sd ?? [], order = Array.from({ length: latent.size }, (_, j) => j)
        .sort((a, b) => (sd[b] ?? 0) - (sd[a] ?? 0));
      const list = h("div", { class: "slider-list" });
      this.inputs[latent.name] = [];
      order.forEach((j, place) => {
        const reach = Math.max(3, Math.abs(space?.low?.[j] ?? 0), Math.abs(space?.high?.[j] ?? 0));
        const shown = h("output", {}, "0");
        const input = h("input", {
          type: "range", min: -reach, max: reach, step: reach / 200, value: 0,
          "aria-label": `${latent.name}${j + 1}`, on: {
            input: () => {
              const values = Float32Array.from(this.values[latent.name] ?? new Float32Array(latent.size));
              values[j] = Number(input.value);
              this.set(latent.name, values, { alone: true, from: "Set by hand." });
            },
          },
        });
        this.inputs[latent.name][j] = { input, shown };
        const title = sd.length ? `standard deviation of its codes ${number(sd[j], 3)}` : "";
        const dead = sd.length && sd[j] < 0.05;
        list.append(h("label", { class: `slider${place >= 8 ? " more" : ""}${dead ? " dead" : ""}`, title },
          h("span", {}, `${latent.name}${j + 1}`), input, shown));
      });
      this.sliders.append(h("details", { open: true }, h("summary", {},
        `${latent.name}: ${latent.size} ${latent.size === 1 ? "entry" : "entries"}`,
        latent.size > 1 && sd.length ? ", most used first" : ""), list,
      latent.size > 8 ? h("button", { type: "button", class: "tiny", on: {
        click: (event) => { list.classList.add("all"); event.target.remove(); },
      } }, `all ${latent.size}`) : null));
    }
  }

  // Give a variable a value. With `alone`, latents that p draws given it follow from it.
  set(name, value, { alone = false, from = null, plane = null } = {}) {
    this.values[name] = value;
    this.shownRow = null;
    this.fixed.add(name);
    this.plane = plane;
    if (alone) this.free(name);
    if (from !== null) this.origin.textContent = from;
    this.update();
  }

  release(name) {
    this.shownRow = null;
    this.fixed.delete(name);
    this.update();
  }

  // p's descendants of a latent are recomputed from it.
  free(name) {
    const nodes = this.decoding.program.nodes ?? [];
    const below = new Set([name]);
    for (const node of nodes) {
      if (node.parents?.some((parent) => below.has(parent))) {
        below.add(node.name);
        this.fixed.delete(node.name);
      }
    }
    this.fixed.add(name);
  }

  fromPrior() {
    this.decoding.seed++;
    this.shownRow = null;
    for (const { name } of this.variables.latents) this.fixed.delete(name);
    this.origin.textContent = "A draw of the latents from p.";
    this.update({ latentsDrawn: true });
  }

  // Show the codes of a row.
  row(row, codes, classes) {
    this.shownRow = row;
    for (const { name } of this.variables.latents) this.fixed.delete(name);
    for (const [name, value] of Object.entries({ ...classes, ...codes })) {
      this.values[name] = value;
      this.fixed.add(name);
    }
    const unknown = this.variables.latents.filter(({ name }) => !this.fixed.has(name)).map(({ name }) => name);
    this.plane = null;
    this.origin.textContent = `The latents of ${this.contents.name(row)}: posterior means, and most probable classes.` +
      (unknown.length ? ` The page does not hold ${unknown.join(", ")} of this row, which is as p expects.` : "");
    this.update();
  }

  update(options = {}) {
    this.options = options;
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(async () => {
      this.pending = false;
      await this.show();
    });
  }

  async show() {
    const draw = Boolean(this.options?.latentsDrawn);
    const found = await this.decoding.run(this.values, { fixed: this.fixed, draw: draw || this.draw, plane: this.plane });
    if (!found) return;
    for (const [name, value] of Object.entries(found.latents)) this.values[name] = value;
    this.found = found;
    clear(this.result);
    for (const [name, { mean, draw: drawn, sd }] of Object.entries(found.observed)) {
      const values = this.draw && drawn ? drawn : mean;
      this.result.append(this.contents.decoded(name, values, { sd: this.draw ? null : sd, size: 168 }));
    }
    for (const [name, inputs] of Object.entries(this.inputs)) {
      const value = this.values[name];
      if (!value) continue;
      inputs.forEach(({ input, shown }, j) => {
        input.value = value[j];
        shown.textContent = number(value[j], 3);
      });
    }
    this.changed(this.values);
  }

  csv() {
    const rows = [];
    for (const [name, value] of Object.entries(this.values)) {
      value.forEach((v, j) => rows.push([name, j, v]));
    }
    for (const [name, { mean }] of Object.entries(this.found?.observed ?? {})) {
      mean.forEach((v, j) => rows.push([name, j, v]));
    }
    return { columns: ["variable", "entry", "value"], rows };
  }
}

export const oneHot = (size, k) => {
  const found = new Float32Array(size);
  found[k] = 1;
  return found;
};

function blank() {
  return h("canvas", { width: 1, height: 1 });
}
