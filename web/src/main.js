// The page: reads the document, or asks the server for it, and puts the parts together.
import { h, clear, plural, number } from "./dom.js";
import { revive } from "./data.js";
import { State } from "./state.js";
import { MapPart } from "./map.js";
import { clustersPart } from "./clusters.js";
import { sequencesPart } from "./sequences.js";
import { modelPart } from "./model.js";
import { curvesPart } from "./curves.js";
import { findingsPart, evidencePart, latentsPart, calibrationPart, predictivePart } from "./checks.js";
import { comparePart } from "./compare.js";
import { LiveCurves } from "./live_curves.js";
import { LatentMapUpdate } from "./map_update.js";
import * as live from "./live.js";

const TITLES = {
  findings: "Findings", comparison: "Comparison", curves: "Training", map: "Latent map", clusters: "Clusters",
  sequences: "Sequences", latents: "Latents", evidence: "Evidence", calibration: "Calibration", check: "Predictive check", model: "Model",
};

class Page {
  constructor(content) {
    this.content = content;
    this.state = new State();
    this.index = Math.min(Number(this.state.get("run", 0)) || 0, Math.max(0, content.runs.length - 1));
    this.parts = {};
    this.root = document.getElementById("page");
    this.applyTheme(this.state.get("theme"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.retheme());
    this.build();
  }

  get run() {
    return this.content.runs[this.index];
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
      h("footer", { class: "quiet" }, `Made by aevb ${this.content.aevb}. This page sends nothing.`),
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
    this.head.append(this.title, this.facts, h("div", { class: "buttons" }, chooser,
      h("button", { type: "button", class: "tiny", on: { click: () => this.switchTheme() } }, "light / dark")));
    return this.head;
  }

  describe() {
    const { run } = this;
    document.title = `${run.name} – aevb`;
    this.title.textContent = run.name;
    const { summary } = run;
    const words = [];
    if (run.state === "training") words.push("training");
    if (run.state === "stopped") words.push("stopped before its end");
    if (summary?.steps) words.push(plural(summary.steps, "step"));
    if (summary?.seconds) words.push(`${number(summary.seconds, 3)} s`);
    for (const [name, text] of summary?.data ?? []) if (name === "data") words.push(text);
    if (run.map?.rows) words.push(plural(run.map.rows.total, "row"));
    this.facts.textContent = words.join(" · ");
    this.head.dataset.state = run.state;
  }

  fill() {
    const { run } = this;
    this.describe();
    clear(this.body);
    this.parts = {};
    this.problems = h("div", {});
    this.body.append(this.problems);
    this.showProblems();
    const add = (id, part) => {
      if (!part) return;
      this.parts[id] = part;
      this.body.append(part.element ?? part);
    };
    const context = this.context();
    add("findings", this.guard("findings", () => findingsPart(run, context)));
    add("comparison", this.guard("comparison", () => comparePart(this.content, context)));
    if (run.summary?.curves) add("curves", this.guard("curves", () => curvesPart(run, context)));
    if (run.map && !run.map.failed && run.map.spaces) {
      const map = this.guard("map", () => new MapPart(run, context));
      add("map", map);
      if (map instanceof MapPart) {
        this.mapPart = map;
        add("clusters", this.guard("clusters", () => clustersPart(run, map)));
        add("sequences", this.guard("sequences", () => sequencesPart(run)));
      }
    } else if (run.waiting?.map) add("map", waitingPart("map", run.waiting.map));
    if (run.checks && !run.checks.failed) {
      for (const [id, make] of [["latents", latentsPart], ["evidence", evidencePart], ["calibration", calibrationPart], ["check", predictivePart]]) {
        add(id, this.guard(id, () => make(run, context)));
      }
    }
    if (run.summary) add("model", this.guard("model", () => modelPart(run)));
    clear(this.nav).append(...Object.keys(this.parts).map((id) =>
      h("a", { href: `#${id}`, on: { click: (event) => { event.preventDefault(); this.go(id); } } }, TITLES[id] ?? id)));
    this.root.dataset.ready = "1";
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
    this.state.set({ run: i || null, view: null, lasso: null, row: null, x: null, y: null, zoom: null });
    this.fill();
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
  }
}

const waitingPart = (id, text) => h("section", { class: "part", id }, h("h2", {}, TITLES[id]), h("p", { class: "quiet", "aria-busy": "true" }, text));

// Live ---------------------------------------------------------------------------------------------

async function followServer(root) {
  const list = await live.fetchRuns();
  const runs = list.map((one) => ({ ...one, name: one.name, state: one.state, problems: [], summary: null, map: null, checks: null,
    waiting: { map: "The map is being computed …" } }));
  const page = new Page({ format: "aevb page", version: 1, aevb: root.dataset.version ?? "", runs, comparison: null, live: true });
  const growing = runs.map(() => new LiveCurves());
  const asked = new Map();
  const load = async (i, part, version = "") => {
    const key = `${i} ${part}`;
    if (asked.get(key) === version && version) return;
    asked.set(key, version);
    let found;
    try {
      found = await live.fetchPart(i, part);
    } catch (error) {
      runs[i].problems.push(error.message);
      if (i === page.index) page.showProblems();
      return;
    }
    if (found.waiting) {
      runs[i].waiting = { ...runs[i].waiting, [part]: found.waiting };
      return;
    }
    const content = await revive(found.content.content);
    const before = runs[i][part];
    runs[i].problems = [...new Set([...runs[i].problems, ...(found.content.problems ?? [])])];
    if (part === "summary" && growing[i].rows && content) content.curves = growing[i].curves(content.curves);
    runs[i][part] = content;
    if (i !== page.index) return;
    // A new map of a run that trains replaces the points and keeps the view.
    if (part === "map" && before && page.mapPart && content?.spaces) LatentMapUpdate(page, content);
    else page.fill();
  };
  const loadRun = async (i) => {
    await load(i, "summary");
    await load(i, "map");
    if (runs[i].state !== "training") await load(i, "checks");
  };
  page.choose = ((choose) => (i) => {
    choose.call(page, i);
    loadRun(i);
  })(page.choose);
  live.connect({
    reset: ({ run }) => growing[run].reset(),
    rows: (event) => {
      growing[event.run].add(event);
      const run = runs[event.run];
      if (!run.summary) return;
      run.summary.curves = growing[event.run].curves(run.summary.curves);
      run.lastRow = performance.now();
      if (event.run !== page.index) return;
      if (page.parts.curves) page.parts.curves.update(run.summary.curves);
      else page.fill();
    },
    state: ({ run, state, step, total }) => {
      const before = runs[run].state;
      Object.assign(runs[run], { state, step, total });
      if (run === page.index) page.describe();
      if (before === "training" && state !== "training") loadRun(run);
    },
    version: ({ run, part, version }) => {
      if (part === "summary") return;
      if (run === page.index && (part === "map" || runs[run].state !== "training")) load(run, part, version);
    },
    connection: (open) => { root.dataset.connected = open ? "1" : "0"; },
  });
  await loadRun(page.index);
  if (runs.length > 1) {
    for (let i = 0; i < runs.length; i++) if (i !== page.index) await load(i, "summary");
    try {
      const found = await live.fetchComparison();
      if (!found.waiting) {
        page.content.comparison = await revive(found.content);
        page.parts.comparison?.update(page.content);
      }
    } catch (error) {
      runs[page.index].problems.push(error.message);
      page.showProblems();
    }
  }
  return page;
}

async function start() {
  const root = document.getElementById("page");
  try {
    if (live.isLive()) {
      window.aevb = await followServer(root);
      return;
    }
    const element = document.getElementById("data");
    const text = element.textContent;
    element.remove();
    window.aevb = new Page(await revive(JSON.parse(text)));
  } catch (error) {
    console.error(error);
    clear(root).append(h("p", { class: "bad" }, `The page cannot be shown: ${error.message}`));
    root.dataset.ready = "failed";
  }
}

start();
