// Decoding by hand: values of the latents, and what p makes of them.
import { h, clear, number, select } from "./dom.js";
import { inUnits } from "./data.js";
import { createDecoder } from "./decode.js";
import { createRandom } from "./random.js";
import { largest, oneHot, usualWords } from "./conditions.js";
import { pictureOf, pictureTools } from "./export.js";
import { Origin } from "./origin.js";

// The place of a latent in a view, as shares of the plane's sides; of a latent with one entry, the
// height has no meaning.
export function placeIn({ across, up, origin, axes }, value) {
  const along = (axis) => axis.reduce((sum, w, k) => sum + w * (value[k] - origin[k]), 0);
  const share = (side, v) => (v - side.low) / (side.high - side.low || 1);
  return [share(across, along(axes[0])), value.length === 1 ? 0.5 : share(up, along(axes[1]))];
}

// Decode through the page's own networks, through the server, or from a grid made beforehand.
export class Decoding {
  constructor(map, live) {
    this.program = map.decoder;
    this.map = map;
    this.decoder = map.decoder.runs ? createDecoder(map.decoder) : null;
    this.live = map.decoder.static ? live : null;
    this.seed = 1;
  }

  get possible() {
    return this.free || this.program.planes.length > 0;
  }

  // Whether every variable can have any value. Otherwise only the points of some planes are known.
  get free() {
    return Boolean(this.decoder || this.live);
  }

  // Whether any value of the latent of a space can be decoded, if only the nearest one of a grid.
  reaches(space) {
    return this.free || (space.size <= 2 && Boolean(this.grid(space.latent)));
  }

  grid(latent) {
    const place = this.map.spaces.findIndex((space) => space.latent === latent);
    return this.program.planes.find((one) => one.space === place) ?? null;
  }

  get how() {
    if (this.decoder) {
      const bits = this.program.precision === "f2" ? "half" : "single";
      return `p's network runs in this page, with weights in ${bits} precision (largest difference from the model ${number(this.program.error, 2)}).`;
    }
    if (this.live) return "The server decodes with the trained model.";
    const { planes } = this.program;
    if (!planes.length) return this.program.why;
    const flat = planes.some((one) => this.map.spaces[one.space].size > 2);
    const held = Object.entries(this.map.given).map(([name, one]) => usualWords(name, one));
    return `${this.program.why} The page shows the nearest of ${planes[0].steps ** 2} points that were decoded beforehand` +
      `${flat ? ", all of them in the plane of the first two principal components" : ""}` +
      `${held.length ? `, with ${held.join(" and ")}` : ""}. Other variables cannot be set here; aevb serve decodes them.`;
  }

  // Variables that p draws given this one.
  below(name) {
    const found = new Set(), { parents } = this.program;
    const visit = (one) => {
      for (const [child, above] of Object.entries(parents)) {
        if (above.includes(one) && !found.has(child)) {
          found.add(child);
          visit(child);
        }
      }
    };
    visit(name);
    return found;
  }

  // {latents, observed} for the values of the variables in `fixed`; `about` is the latent whose
  // grid is read. The result is null where nothing was decoded, and undefined if a newer request
  // for the same `purpose` has replaced this one.
  async run(values, { fixed = new Set(Object.keys(values)), draw = false, about = null, purpose = "by hand" } = {}) {
    if (this.decoder) return this.decoder.forward(values, { fixed, draw, random: createRandom(this.seed) });
    if (this.live) {
      const kept = Object.entries(values).filter(([name]) => fixed.has(name));
      // A typed array would become an object.
      const plain = Object.fromEntries(kept.map(([name, value]) => [name, Array.from(value)]));
      return (await this.live({ values: plain, draw, seed: this.seed }, purpose)) ?? undefined;
    }
    return this.nearest(about, values[about]);
  }

  nearest(latent, value) {
    const grid = this.grid(latent);
    if (!grid || !value) return null;
    const { steps, values: numbers } = grid;
    const [u, v] = placeIn(this.map.spaces[grid.space].views[0], value);
    const cell = (t) => Math.max(0, Math.min(steps - 1, Math.round(t * (steps - 1))));
    const size = numbers.shape[1], at = (cell(v) * steps + cell(u)) * size;
    return { latents: {}, observed: { [this.map.firstObserved]: { mean: numbers.array.subarray(at, at + size), draw: null, sd: null } } };
  }
}

// Sliders for the entries of the latents, choices of classes and given variables, and the result.
export class Explorer {
  constructor(map, contents, decoding, changed, usage = () => ({ kl: null, active: null })) {
    Object.assign(this, { map, contents, decoding, changed, usage, values: {}, fixed: new Set() });
    this.draw = false;
    this.latentsDrawn = false; // latents without a value are draws of p instead of its means
    this.shownRow = null; // whose codes are decoded; null for values from elsewhere
    this.about = null; // the latent that was set last
    this.result = h("div", { class: "decoded" });
    this.sliders = h("div", { class: "sliders" });
    this.origin = new Origin(map.decoder.parents ?? {});
    this.pending = false;
    this.spaceOf = Object.fromEntries(map.spaces.filter((one) => one.latent).map((one) => [one.latent, one]));
    this.variables = this.described();
    this.origin.latents = new Set(this.variables.latents.map((one) => one.name));
    this.controls = h("div", { class: "controls" });
    this.figure = h("figure", { class: "picture" }, this.result,
      h("figcaption", {}, this.decoding.how));
    pictureTools(this.figure, {
      name: "decoded", png: () => pictureOf(this.result), csv: () => this.csv(),
    });
    this.element = h("div", { class: "panel explorer" }, h("h3", {}, "Decode"), this.origin.element,
      this.controls, this.figure, this.sliders);
    for (const one of this.variables.given) {
      this.values[one.name] = Float32Array.from(one.usual);
      this.fixed.add(one.name);
    }
    this.buildControls();
    this.buildSliders();
  }

  described() {
    const { decoder } = this.decoding;
    const given = Object.entries(this.map.given).map(([name, one]) => ({ ...one, name }));
    if (decoder) return { latents: decoder.latents, given };
    const latents = this.map.spaces.filter((one) => one.latent && !one.step)
      .map((one) => ({ name: one.latent, size: one.size, categorical: false }));
    const classes = Object.entries(this.map.classes).map(([name, one]) => ({ name, size: one.size, categorical: true }));
    return { latents: [...latents, ...classes], given };
  }

  buildControls() {
    this.choices = {};
    clear(this.controls);
    if (!this.decoding.free) return;
    const choice = (variable, given) => {
      const label = `${variable.name}${given ? " (given)" : variable.name === "part" ? " of the density (no cluster)" : ""}`;
      const options = Array.from({ length: variable.size }, (_, k) => [k, `${k}`]);
      const field = select(label, given ? options : [["", "p chooses"], ...options], "", (value) => {
        if (value === "") this.release(variable.name);
        else this.set(variable.name, oneHot(variable.size, Number(value)), { alone: !given, hand: `${variable.name} = ${value}`, given, whole: true });
      });
      this.choices[variable.name] = field.querySelector("select");
      return field;
    };
    const latents = this.variables.latents.map((one) => one.name);
    const drawn = latents.length > 3 ? "the latents" : latents.join(" and ");
    this.controls.append(
      ...this.variables.latents.filter((one) => one.categorical).map((one) => choice(one, false)),
      ...this.variables.given.filter((one) => one.categorical).map((one) => choice(one, true)),
      h("div", { class: "buttons", role: "group", "aria-label": "What to show" },
        this.modeButton("mean", false), this.modeButton("draw", true),
        h("button", { type: "button", class: "tiny", title: `Draw ${drawn} from p, and decode the draw`, on: { click: () => this.fromPrior() } }, `draw ${drawn} from p`)));
    this.showChoices();
  }

  // The menus say what is decoded.
  showChoices() {
    for (const [name, field] of Object.entries(this.choices)) {
      const value = this.values[name], k = value ? largest(Array.from(value)) : null;
      const own = field.querySelector("option[value='']");
      if (own) own.textContent = k === null || this.fixed.has(name) ? "p chooses" : `p chooses: ${k}`;
      field.value = this.fixed.has(name) && k !== null ? k : "";
    }
  }

  modeButton(label, draw) {
    return h("button", {
      type: "button", class: "tiny", "aria-pressed": String(this.draw === draw),
      title: draw ? "A draw of the data given these latents" : "The mean of the data given these latents", on: {
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
    for (const given of this.variables.given.filter((one) => !one.categorical && this.decoding.free)) {
      const ends = (j) => ({ low: given.low[j], high: given.high[j], step: (given.high[j] - given.low[j]) / 200 || 1 });
      this.list(given, given.names, ends, { title: `${given.name} (given), from its mean` });
    }
    for (const latent of this.variables.latents.filter((one) => !one.categorical)) {
      const space = this.spaceOf[latent.name];
      if (!this.decoding.reaches(space ?? { latent: latent.name, size: latent.size })) continue;
      const sd = space?.sd ?? [], used = this.usage(latent.name);
      const names = Array.from({ length: latent.size }, (_, j) => (latent.size === 1 ? latent.name : `${latent.name}${j}`));
      this.list(latent, names, (j) => reach(space, j), {
        sd, ...used, title: `${latent.name}: ${latent.size} ${latent.size === 1 ? "entry" : "entries"}${latent.size < 2 ? ""
          : used.kl ? ", largest KL first" : sd.length ? ", largest spread of the codes first" : ""}`,
      });
    }
  }

  // Sliders of a variable: the entries with the largest KL come first, as in the checks, or those
  // whose codes vary most.
  list(variable, names, ends, { sd = [], kl = null, active = null, title }) {
    const { name, size, units } = variable;
    const order = Array.from({ length: size }, (_, j) => j).sort((a, b) => (kl ? kl[b] - kl[a] : (sd[b] ?? 0) - (sd[a] ?? 0)));
    const list = h("div", { class: "slider-list" });
    this.inputs[name] = [];
    order.forEach((j, place) => {
      const { low, high, step } = ends(j), shown = h("output", {}, "–");
      const input = h("input", {
        type: "range", min: low, max: high, step, value: this.values[name]?.[j] ?? Math.max(low, Math.min(high, 0)),
        "aria-label": names[j], on: {
          input: () => {
            const values = Float32Array.from(this.values[name] ?? new Float32Array(size));
            values[j] = Number(input.value);
            this.set(name, values, { alone: !units, hand: names[j] });
          },
        },
      });
      this.inputs[name][j] = { input, shown };
      const dead = active ? !active[j] : sd.length && sd[j] < 0.05;
      list.append(h("label", { class: `slider${place >= 8 ? " more" : ""}${dead ? " dead" : ""}`,
        title: [kl ? `KL ${number(kl[j], 3)} nats` : "", sd.length ? `standard deviation of its codes ${number(sd[j], 3)}` : ""].filter(Boolean).join(", ") },
      h("span", {}, names[j]), input, shown));
    });
    this.sliders.append(h("details", { open: true }, h("summary", {}, title), list,
      size > 8 ? h("button", { type: "button", class: "tiny", on: {
        click: (event) => { list.classList.add("all"); event.target.remove(); },
      } }, `all ${size}`) : null));
    this.showSliders(variable);
  }

  showSliders({ name, units }) {
    const value = this.values[name];
    if (!value || !this.inputs[name]) return;
    this.inputs[name].forEach(({ input, shown }, j) => {
      input.value = value[j];
      shown.textContent = number(units ? units[j].location + units[j].scale * value[j] : value[j], 3);
    });
  }

  // Give a variable a value. With `alone`, latents that p draws given it follow from it.
  // `from` says where all values come from now, `hand` what of the variable was set by hand.
  set(name, value, { alone = false, from = null, hand = null, given = false, whole = false } = {}) {
    this.values[name] = value;
    this.shownRow = null;
    this.fixed.add(name);
    if (this.spaceOf[name]) this.about = name;
    const below = alone ? [...this.decoding.below(name)] : [];
    const freed = below.filter((one) => this.fixed.delete(one) && this.origin.isLatent(one));
    if (hand !== null) this.origin.set(name, hand, { given, whole, freed });
    if (from !== null) {
      this.latentsDrawn = false;
      this.origin.say(from);
    }
    this.update();
  }

  release(name) {
    this.shownRow = null;
    this.fixed.delete(name);
    this.origin.release(name);
    this.update();
  }

  fromPrior() {
    this.decoding.seed++;
    this.shownRow = null;
    for (const { name } of this.variables.latents) this.fixed.delete(name);
    this.latentsDrawn = true;
    this.origin.say("A draw of the latents from p.", { drawn: true });
    this.update();
  }

  // Show the codes of a row, with its classes and given variables.
  row(row, { values, unknown, about, partly }) {
    this.shownRow = row;
    this.about = about;
    this.latentsDrawn = false;
    for (const { name } of this.variables.latents) this.fixed.delete(name);
    for (const [name, value] of Object.entries(values)) {
      this.values[name] = value;
      this.fixed.add(name);
    }
    const name = this.contents.name(row), left = this.variables.latents.filter((one) => !this.fixed.has(one.name)).map((one) => one.name);
    const own = Object.fromEntries(this.variables.given.filter((one) => one.categorical && values[one.name] && !unknown.includes(one.name))
      .map((one) => [one.name, largest(Array.from(values[one.name]))]));
    const held = this.variables.latents.filter((one) => this.fixed.has(one.name)).map((one) => one.name);
    this.origin.say([
      partly ? `Only the first two principal components of ${partly} of ${name}: the page does not hold the others.`
        : `The latents of ${name}: posterior means, and most probable classes.`,
      left.length ? `The page does not hold ${left.join(", ")} of this row, so p chooses.` : "",
      ...unknown.map((one) => `The page does not hold ${one} of this row: ${usualWords(one, this.map.given[one])}.`),
    ].filter(Boolean).join(" "), { held, row: name, own });
    this.update();
  }

  update() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(async () => {
      this.pending = false;
      await this.show();
    });
  }

  async show() {
    let found;
    try {
      found = await this.decoding.run(this.values, { fixed: this.fixed, draw: this.latentsDrawn || this.draw, about: this.about });
    } catch (error) {
      this.found = null;
      clear(this.result).append(h("p", { class: "bad", role: "alert" }, `This could not be decoded: ${error.message}`));
      return;
    }
    if (found === undefined) return;
    this.found = found;
    clear(this.result);
    for (const [name, value] of Object.entries(found?.latents ?? {})) this.values[name] = value;
    if (!found) this.result.append(h("p", { class: "quiet" }, "This point was not decoded beforehand."));
    for (const [name, { mean, draw, sd }] of Object.entries(found?.observed ?? {})) {
      const values = this.draw && draw ? draw : mean;
      this.result.append(this.contents.decoded(name, values, { sd: this.draw ? null : sd, size: 168, label: `${name}, decoded` }));
    }
    for (const one of [...this.variables.latents, ...this.variables.given]) this.showSliders(one);
    this.showChoices();
    this.changed(this.values);
  }

  // Latents and given variables, and what is decoded, in the units of the data.
  csv() {
    const rows = [];
    const names = new Set([...this.variables.latents, ...this.variables.given].map((one) => one.name));
    for (const [name, value] of Object.entries(this.values)) {
      if (!names.has(name) || this.found?.observed?.[name]) continue;
      inUnits(this.map.given[name]?.units, value).forEach((v, j) => rows.push([name, j, "value", v]));
    }
    for (const [name, one] of Object.entries(this.found?.observed ?? {})) {
      rows.push(...this.contents.exported(name, one).map((row) => [name, ...row]));
    }
    return { columns: ["variable", "entry", "kind", "value"], rows };
  }
}

// The range of a slider: that of the codes and of most draws of p, within the latent's support.
function reach(space, j) {
  const [least, most] = space?.support ?? [null, null];
  const far = Math.max(3, Math.abs(space?.low?.[j] ?? 0), Math.abs(space?.high?.[j] ?? 0));
  const low = least ?? -far, high = most ?? far;
  return { low, high, step: space?.whole ? 1 : (high - low) / 400 };
}
