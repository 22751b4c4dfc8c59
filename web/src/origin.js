// Where the values come from that are decoded: a row, a point, or a draw, and what was set by hand.
import { h, number } from "./dom.js";

const NAMED = 4; // most entries set by hand that are listed

export class Origin {
  constructor(parents) {
    this.parents = parents; // of each variable of p
    this.element = h("p", { class: "quiet origin" }, "Choose a row, or drag the point ⊕ in the map.");
    this.base = { full: "", short: "", held: [], row: null, own: {} };
    this.clear();
  }

  clear() {
    this.hand = new Map(); // what was set by hand since then, by its label: the variable
    this.freed = new Set(); // latents that p gives since then
    this.drawn = false;
  }

  // All values come from one place. `row` is the name of a row, `held` are the latents that it gives,
  // and `own` its classes of given variables, by name.
  say(full, { held = [], row = null, own = {}, drawn = false } = {}) {
    this.clear();
    Object.assign(this, { base: { full, short: full.replace(/\.$/, ""), held, row, own }, drawn });
    this.element.textContent = full;
  }

  // Another origin's words, after the page was updated.
  take({ base, hand, freed, drawn, element }) {
    Object.assign(this, { base, hand, freed, drawn });
    this.element.textContent = element.textContent;
  }

  // `label` of a variable was set by hand; the `freed` latents now follow from p.
  set(variable, label, { given = false, whole = false, freed = [] } = {}) {
    for (const [old, one] of this.hand) {
      if ((whole && one.variable === variable) || freed.includes(one.variable)) this.hand.delete(old);
    }
    this.hand.set(label, { variable, given, whole });
    this.freed.delete(variable);
    for (const name of freed) this.freed.add(name);
    this.element.textContent = this.text();
  }

  // p chooses a variable.
  release(variable) {
    for (const [old, one] of this.hand) if (one.variable === variable) this.hand.delete(old);
    this.freed.add(variable);
    this.element.textContent = this.text();
  }

  text() {
    const { full, row, own } = this.base;
    const hand = [...this.hand], freed = [...this.freed];
    if (!hand.length && !freed.length) return full;
    const replaced = new Set([...freed, ...hand.filter(([, one]) => one.whole).map(([, one]) => one.variable)]);
    const kept = row === null ? [] : this.base.held.filter((name) => !replaced.has(name));
    const short = row === null ? this.base.short : kept.length ? `${kept.join(", ")} of ${row}` : "";
    const set = hand.filter(([, { given }]) => !given || row === null).map(([label]) => label);
    const conditions = row === null ? [] : hand.filter(([, { given }]) => given);
    const listed = set.length > NAMED ? `${set.slice(0, NAMED - 1).join(", ")} and ${number(set.length - NAMED + 1)} others` : set.join(", ");
    let words = short;
    if (conditions.length) {
      const before = conditions.map(([, { variable }]) => variable in own && `${variable} = ${own[variable]}`).filter(Boolean);
      words += words && before.length ? ` (${before.join(", ")})` : "";
    }
    if (listed) words = words ? `${words}, ${listed} set by hand` : `${listed} set by hand`;
    if (conditions.length) words += `${words ? ", decoded" : "Decoded"} with ${conditions.map(([label]) => label).join(" and ")}`;
    for (const [, { variable }] of conditions) {
      const below = Object.keys(this.parents).filter((name) => this.parents[name].includes(variable) && this.isLatent(name) && !this.freed.has(name));
      for (const name of below) words += `; p(${name}|${this.parents[name].join(", ")}) depends on ${variable}, so ${name} may still say what ${variable} was`;
    }
    const follow = freed.length ? ` ${freed.join(", ")}: ${this.drawn ? "a draw of p" : "p's mean or most probable class"}.` : "";
    return `${words}${words ? "." : ""}${follow}`.trim();
  }

  isLatent(name) {
    return this.latents?.has(name) ?? false;
  }
}
