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

const ORDER = Object.keys(TITLES);
// The parts that each piece of the document gives.
const GROUPS = {
  summary: ["comparison", "curves", "model"],
  map: ["map", "clusters", "sequences"],
  checks: ["findings", "latents", "evidence", "calibration", "check"],
};

class Page {
  constructor(content) {
    this.content = content;
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
    this.describe();
    clear(this.body);
    this.parts = {};
    this.mapPart = null;
    this.problems = h("div", {});
    this.body.append(this.problems);
    this.showProblems();
    for (const group of Object.keys(GROUPS)) this.refresh(group);
    this.root.dataset.ready = "1";
  }

  // Show the parts that come from one piece of the document; the others stay as they are.
  refresh(group) {
    const { run } = this, context = this.context();
    const make = {
      findings: () => findingsPart(run, context),
      comparison: () => comparePart(this.content, context),
      curves: () => run.summary?.curves && curvesPart(run, context),
      map: () => {
        if (run.map?.spaces) return new MapPart(run, context);
        return run.waiting?.map ? waitingPart("map", run.waiting.map) : null;
      },
      clusters: () => this.mapPart && clustersPart(run, this.mapPart),
      sequences: () => run.map?.spaces && sequencesPart(run),
      model: () => run.summary && modelPart(run),
    };
    const checks = { latents: latentsPart, evidence: evidencePart, calibration: calibrationPart, check: predictivePart };
    for (const [id, part] of Object.entries(checks)) {
      make[id] = () => run.checks && !run.checks.failed && part(run, context);
    }
    for (const id of GROUPS[group]) {
      const part = this.guard(id, make[id]);
      if (id === "map") this.mapPart = part instanceof MapPart ? part : null;
      this.put(id, part);
    }
    clear(this.nav).append(...ORDER.filter((id) => this.parts[id]).map((id) =>
      h("a", { href: `#${id}`, on: { click: (event) => { event.preventDefault(); this.go(id); } } }, TITLES[id])));
  }

  put(id, part) {
    const before = this.parts[id];
    (before?.element ?? before)?.remove();
    delete this.parts[id];
    if (!part) return;
    this.parts[id] = part;
    const next = ORDER.slice(ORDER.indexOf(id) + 1).find((other) => this.parts[other]);
    const place = next ? this.parts[next].element ?? this.parts[next] : null;
    this.body.insertBefore(part.element ?? part, place);
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
    if (this.mapPart) this.put("clusters", this.guard("clusters", () => clustersPart(this.run, this.mapPart)));
    this.put("sequences", this.guard("sequences", () => this.run.map?.spaces && sequencesPart(this.run)));
  }
}

const waitingPart = (id, text) => h("section", { class: "part", id }, h("h2", {}, TITLES[id]), h("p", { class: "quiet", "aria-busy": "true" }, text));

// Live ---------------------------------------------------------------------------------------------

async function followServer(root) {
  const list = await live.fetchRuns();
  const runs = list.map((one) => ({ ...one, name: one.name, state: one.state, problems: [], remarks: {}, summary: null, map: null, checks: null,
    waiting: { map: "The map is being computed …", checks: one.state === "training"
      ? "The checks are made when the training has ended." : "The checks are being made …" } }));
  const page = new Page({ format: "aevb page", version: 1, aevb: document.body.dataset.version, runs, comparison: null, live: true });
  window.aevb = page;
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
      runs[i].remarks[part] = [error.message];
      runs[i].problems = Object.values(runs[i].remarks).flat();
      if (i === page.index) page.showProblems();
      return;
    }
    if (found.waiting) {
      runs[i].waiting = { ...runs[i].waiting, [part]: found.waiting };
      if (i === page.index && !runs[i][part]) page.refresh(part);
      return;
    }
    const content = await revive(found.content.content);
    const before = runs[i][part];
    runs[i].remarks[part] = found.content.problems ?? [];
    runs[i].problems = [...new Set(Object.values(runs[i].remarks).flat())];
    if (part === "summary" && growing[i].rows && content) content.curves = growing[i].curves(content.curves);
    runs[i][part] = content;
    if (i !== page.index) return;
    // A new map of a run that trains replaces the points and keeps the view.
    if (part === "map" && before && page.mapPart && content?.spaces) LatentMapUpdate(page, content);
    else page.refresh(part);
    page.describe();
    page.showProblems();
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
      else page.refresh("summary");
    },
    state: ({ run, state, step, total }) => {
      const before = runs[run].state;
      Object.assign(runs[run], { state, step, total });
      if (run === page.index) page.describe();
      if (before === "training" && state !== "training") loadRun(run);
    },
    version: ({ run, part, version }) => {
      // The rows come as events; the settings are there from the first checkpoint on.
      if (part === "summary" && runs[run].summary?.settings?.length) return;
      if (run === page.index && (part !== "checks" || runs[run].state !== "training")) load(run, part, version);
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
      await followServer(root);
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
