// The parts of the page: one of each kind for the chosen run, shown again when their data change.
import { h, clear, plural, number } from "./dom.js";
import { State } from "./state.js";
import { MapPart } from "./map.js";
import { carryOver, keepFocus } from "./map_update.js";
import { clustersPart } from "./clusters.js";
import { sequencesPart } from "./sequences.js";
import { modelPart } from "./model.js";
import { curvesOf, curvesPart } from "./curves.js";
import { findingsPart, evidencePart, latentsPart, calibrationPart, predictivePart } from "./checks.js";
import { comparePart } from "./compare.js";
import { waitingText } from "./waiting.js";
import * as live from "./live.js";

const TITLES = {
  findings: "Findings", comparison: "Comparison", curves: "Training", map: "Latent map", clusters: "Clusters",
  sequences: "Sequences", latents: "Latents", evidence: "Evidence", calibration: "Calibration", check: "Predictive check", model: "Model",
};

const ORDER = Object.keys(TITLES);
// The parts that each piece of the document gives.
const GROUPS = {
  summary: ["comparison", "curves", "model"],
  map: ["map", "clusters", "sequences"],
  // log p(x) is a line in the curves, and a dead class has no clusters
  checks: ["findings", "clusters", "latents", "evidence", "calibration", "check", "curves"],
};

/**
 * A part is {element, update(run), theme(), destroy()}, all but the element optional. One with
 * `update` shows new data in place; another one is made anew.
 */
export class Page {
  /** `chosen(i)` is called after the user has chosen a run. */
  constructor(content, { chosen = null } = {}) {
    this.content = content;
    this.chosen = chosen;
    this.state = new State();
    this.index = Math.min(this.state.whole("run") ?? 0, Math.max(0, content.runs.length - 1));
    this.parts = {};
    this.root = document.getElementById("page");
    this.applyTheme(this.state.get("theme"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.retheme());
    this.build();
  }

  get run() {
    return this.content.runs[this.index];
  }

  get mapPart() {
    return this.parts.map instanceof MapPart ? this.parts.map : null;
  }

  context() {
    return {
      state: this.state, index: this.index, go: (id) => this.go(id), open: (i) => this.choose(i),
      live: this.content.live ? live : null,
    };
  }

  build() {
    this.nav = h("nav", { "aria-label": "Parts of the page" });
    this.body = h("main", {});
    clear(this.root).append(
      h("a", { class: "skip", href: "#map" }, "To the map"), this.header(), this.nav, this.body,
      h("footer", { class: "quiet" }, this.content.live ? `aevb ${this.content.aevb}, served from the machine that has the runs.`
        : `Made by aevb ${this.content.aevb}. This page needs no network and sends nothing.`),
      h("div", { id: "announcer", class: "hidden", "aria-live": "polite" }));
    this.root.removeAttribute("aria-busy");
    this.fill();
  }

  header() {
    const { runs } = this.content;
    this.head = h("header", {});
    const chooser = runs.length > 1
      ? h("label", { class: "field" }, h("span", {}, "Run"), h("select", { on: { change: (event) => this.choose(Number(event.target.value)) } },
        runs.map((run, i) => h("option", { value: i, selected: i === this.index }, run.name)))) : null;
    this.title = h("h1", {});
    this.facts = h("p", { class: "quiet facts" });
    this.link = h("p", { class: "warn link", role: "status" });
    this.head.append(this.title, this.facts, h("div", { class: "buttons" }, chooser,
      h("button", { type: "button", class: "tiny", on: { click: () => this.switchTheme() } }, "light / dark")), this.link);
    return this.head;
  }

  describe() {
    const { run } = this;
    document.title = `${run.name} – aevb`;
    this.title.textContent = run.name;
    const { summary } = run;
    const words = [];
    const step = run.state === "training" ? Math.max(run.step ?? 0, run.lastStep ?? 0) : summary?.steps;
    if (run.state === "training") {
      words.push(`training${step ? `, step ${number(step)}${run.total ? ` of ${number(run.total)}` : ""}` : ""}`);
    } else if (step) words.push(plural(step, "step"));
    if (run.state === "waiting") words.push("has not begun");
    if (run.state === "stopped") words.push("stopped before its end");
    if (summary?.seconds && run.state !== "training") words.push(`${number(summary.seconds, 3)} s`);
    for (const [name, text] of summary?.data ?? []) if (name === "data") words.push(text);
    if (run.map?.rows) words.push(plural(run.map.rows.total, "row"));
    this.facts.textContent = words.join(" · ");
    this.head.dataset.state = run.state;
  }

  /** Say whether the server answers. */
  connected(open) {
    this.root.dataset.connected = open ? "1" : "0";
    this.link.textContent = open ? ""
      : "The connection to the server is lost, so the page shows an earlier state. It tries to connect again.";
  }

  fill() {
    this.describe();
    for (const part of Object.values(this.parts)) part.destroy?.();
    this.parts = {};
    clear(this.body);
    this.problems = h("div", {});
    this.body.append(this.problems);
    this.showProblems();
    for (const group of Object.keys(GROUPS)) this.refresh(group);
    this.root.dataset.ready = "1";
  }

  /** Show the parts that come from one piece of the document; the others stay as they are. */
  refresh(group) {
    keepFocus(this.body, () => {
      const before = this.mapPart;
      for (const id of GROUPS[group]) {
        this.show(id);
        if (id === "map" && before && this.mapPart) this.guard("map", () => carryOver(before, this.mapPart));
      }
    });
  }

  // Links to the parts that are there.
  writeLinks() {
    const ids = ORDER.filter((id) => this.parts[id]);
    if (ids.join() === this.linked) return;
    this.linked = ids.join();
    clear(this.nav).append(...ids.map((id) =>
      h("a", { href: `#${id}`, on: { click: (event) => { event.preventDefault(); this.go(id); } } }, TITLES[id])));
  }

  show(id) {
    const before = this.parts[id] ?? null;
    const part = this.guard(id, () => this.made(id, before)) || null;
    if (part === before) return;
    this.put(id, part instanceof Node ? { element: part } : part);
    this.writeLinks();
  }

  // The part `id` of the chosen run: the one that is shown, if it can show new data itself.
  made(id, before) {
    const { run } = this, context = this.context();
    const renewed = (make) => {
      if (!before?.update) return make();
      before.update(run);
      return before;
    };
    const check = (make) => run.checks && !run.checks.failed && renewed(() => make(run, context));
    const makers = {
      findings: () => renewed(() => findingsPart(run, context)),
      comparison: () => renewed(() => comparePart(this.content)),
      curves: () => (curvesOf(run) || before?.update) && renewed(() => curvesPart(run, context)),
      map: () => {
        if (run.map?.spaces) return new MapPart(run, { ...context, before: this.mapPart });
        return run.waiting?.map && renewed(() => waitingPart("map", run));
      },
      clusters: () => this.mapPart && clustersPart(run, this.mapPart),
      sequences: () => run.map?.spaces && sequencesPart(run),
      model: () => {
        if (!run.summary) return null;
        const { curves, ...rest } = run.summary;
        const shown = JSON.stringify(rest);
        return before?.shown === shown ? before : { element: modelPart(run), shown };
      },
      latents: () => check(latentsPart),
      evidence: () => check(evidencePart),
      calibration: () => check(calibrationPart),
      check: () => check(predictivePart),
    };
    return makers[id]();
  }

  put(id, part) {
    const before = this.parts[id];
    delete this.parts[id];
    if (part) {
      this.parts[id] = part;
      const next = ORDER.slice(ORDER.indexOf(id) + 1).find((other) => this.parts[other]);
      this.body.insertBefore(part.element, next ? this.parts[next].element : null);
    }
    before?.element.remove();
    before?.destroy?.();
  }

  // A part that fails must not take the others with it.
  guard(id, make) {
    try {
      return make();
    } catch (error) {
      console.error(error);
      return h("section", { class: "part", id }, h("h2", {}, TITLES[id] ?? id),
        h("p", { class: "bad" }, `This part cannot be shown: ${error.message}`));
    }
  }

  showProblems() {
    const texts = this.run.problems ?? [];
    clear(this.problems);
    if (!texts.length) return;
    this.problems.append(h("section", { class: "part problems", role: "note", "aria-label": "Remarks" },
      h("details", { open: texts.some((text) => /cannot|damaged|missing/.test(text)) },
        h("summary", {}, plural(texts.length, "remark"), " on this run"), h("ul", {}, texts.map((text) => h("li", {}, text))))));
  }

  choose(i) {
    this.index = i;
    this.state.set({ run: i || null, view: null, entries: null, colour: null, lasso: null, in: null, select: null, row: null, other: null, x: null, y: null, zoom: null });
    this.fill();
    this.chosen?.(i);
  }

  go(id) {
    const part = document.getElementById(id);
    if (!part) return;
    part.scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    part.setAttribute("tabindex", "-1");
    part.focus({ preventScroll: true });
  }

  applyTheme(theme) {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  }

  switchTheme() {
    const dark = document.documentElement.dataset.theme
      ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    const theme = dark ? "light" : "dark";
    this.applyTheme(theme);
    this.state.set({ theme });
    this.retheme();
  }

  retheme() {
    for (const part of Object.values(this.parts)) part.theme?.();
    // Thumbnails are painted in the colours of the theme.
    this.show("clusters");
    this.show("sequences");
  }
}

function waitingPart(id, run) {
  const text = h("p", { class: "quiet", "aria-busy": "true" });
  const update = (now) => { text.textContent = waitingText(now, id); };
  update(run);
  return { element: h("section", { class: "part", id }, h("h2", {}, TITLES[id]), text), update };
}
