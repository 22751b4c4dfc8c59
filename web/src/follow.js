// The page of `aevb serve`: its data arrive in parts, and again when they have changed.
import { clear } from "./dom.js";
import { revive } from "./data.js";
import { Page } from "./page.js";
import { LiveCurves } from "./live_curves.js";
import * as live from "./live.js";

const REDRAWS = 4; // redraws of the curves per second

/** Show the runs of the server and follow them. Return the page. */
export async function follow(root) {
  const runs = (await live.fetchRuns()).map((one) => ({
    ...one, problems: [], remarks: {}, summary: null, map: null, checks: null, progress: {}, waiting: {},
  }));
  clear(root);
  return new Follower(runs).page;
}

class Follower {
  constructor(runs) {
    this.runs = runs;
    this.growing = runs.map(() => new LiveCurves());
    this.asked = runs.map(() => ({})); // the versions of the parts that are here or on their way
    this.here = runs.map(() => ({})); // and of those that are here
    this.loading = new Map(); // by run and part: whether it has to be loaded once more
    this.grown = new Set(); // runs with rows that are not drawn yet
    this.drawn = 0;
    this.timer = null;
    this.pressed = false;
    this.later = new Set(); // parts to refresh when no button of the mouse is down
    runs.forEach((run) => this.explain(run));
    this.page = new Page({
      format: "aevb page", version: 1, aevb: document.body.dataset.version, runs, comparison: null, live: true,
      uncompared: "The runs are being compared …",
    }, { chosen: (i) => this.update(i) });
    this.comparing = null; // the versions that are compared or being compared
    for (const [kind, pressed] of [["pointerdown", true], ["pointerup", false], ["pointercancel", false]]) {
      document.addEventListener(kind, () => this.press(pressed), true);
    }
    this.connection = live.connect({
      hello: ({ runs: now }) => now.forEach((one, i) => this.described(i, one)),
      state: (one) => this.described(one.run, one),
      version: ({ run, part, version }) => this.described(run, { versions: { ...runs[run].versions, [part]: version } }),
      reset: ({ run }) => this.growing[run].reset(),
      rows: (event) => this.addRows(event),
      progress: ({ run, part, text }) => {
        runs[run].progress[part] = text;
        if (run === this.page.index) this.sayWaiting(part);
      },
      connection: (open) => this.page.connected(open),
    });
    this.update(this.page.index);
    runs.forEach((_, i) => this.update(i));
    this.compareSoon();
  }

  // What the server says of a run now: its state, or the versions of its parts.
  described(i, now) {
    const run = this.runs[i], before = run.state;
    Object.assign(run, now);
    if (before !== run.state) {
      this.explain(run);
      if (run.state === "training") { // it was resumed: the checks are those of an earlier model
        run.checks = null;
        delete this.asked[i].checks;
        delete this.here[i].checks;
      }
      if (i === this.page.index) this.page.refresh("checks");
      this.update(i);
    }
    if (i === this.page.index) this.page.describe();
    if (now.versions) this.update(i);
    this.compareSoon();
  }

  explain(run) {
    const { state } = run;
    run.waiting = {
      map: state === "waiting" ? "The run has not begun yet." : "The map is being computed …",
      checks: { waiting: "The run has not begun yet.", training: "The checks are made when the training has ended." }[state]
        ?? "The checks are being made …",
    };
  }

  sayWaiting(part) {
    const { run } = this.page;
    if (part === "checks" && !run.checks) this.page.show("findings");
    if (part === "map" && !run.map) this.page.show("map");
  }

  // Load the parts of a run that have changed: all of the run that is shown, and the curves of others.
  update(i) {
    const { state, versions } = this.runs[i];
    const parts = i !== this.page.index ? ["summary"] : state === "training" ? ["summary", "map"] : ["summary", "map", "checks"];
    for (const part of parts) {
      if (this.asked[i][part] === versions[part]) continue;
      this.asked[i][part] = versions[part];
      this.load(i, part);
    }
  }

  async load(i, part) {
    const key = `${i} ${part}`;
    if (this.loading.has(key)) {
      this.loading.set(key, true);
      return;
    }
    do {
      this.loading.set(key, false);
      await this.fetch(i, part);
    } while (this.loading.get(key));
    this.loading.delete(key);
  }

  async fetch(i, part) {
    const run = this.runs[i];
    let found;
    try {
      found = await live.fetchPart(i, part);
      if (found.version !== undefined && found.version === this.here[i][part]) return;
      run.waiting[part] = found.waiting ?? null;
      if (found.waiting) delete this.asked[i][part]; // ask again when its state has changed
      else {
        run[part] = await revive(found.content.content);
        run.remarks[part] = found.content.problems ?? [];
        this.asked[i][part] = this.here[i][part] = found.version;
      }
    } catch (error) {
      run.remarks[part] = [error.message];
      run.waiting[part] = null;
      delete this.asked[i][part]; // ask again when something has changed, or after a new connection
    }
    delete run.progress[part];
    run.problems = [...new Set(Object.values(run.remarks).flat())];
    if (part === "summary") this.draw(i);
    if (i !== this.page.index) return;
    if (!found?.waiting) this.refresh(part);
    this.sayWaiting(part);
    this.page.describe();
    this.page.showProblems();
  }

  // A map is not replaced while a hand draws or drags in it.
  refresh(part) {
    if (part === "map" && this.pressed && this.page.mapPart) this.later.add(part);
    else this.page.refresh(part);
  }

  press(pressed) {
    this.pressed = pressed;
    if (pressed) return;
    setTimeout(() => { // after the handlers of this event
      for (const part of this.later) this.page.refresh(part);
      this.later.clear();
    });
  }

  // Rows -------------------------------------------------------------------------------------------

  addRows(event) {
    this.growing[event.run].add(event);
    this.runs[event.run].lastStep = this.growing[event.run].lastStep;
    this.grown.add(event.run);
    if (this.timer !== null) return;
    this.timer = setTimeout(() => {
      this.timer = null;
      this.drawn = performance.now();
      for (const i of this.grown) this.draw(i);
      this.grown.clear();
    }, Math.max(0, this.drawn + 1000 / REDRAWS - performance.now()));
  }

  // Draw the curves of a run anew, here and among those of all runs.
  draw(i) {
    const run = this.runs[i];
    if (this.growing[i].rows) run.growing = this.growing[i].curves(run.summary?.curves);
    if (i === this.page.index) {
      this.page.show("curves");
      this.page.describe();
    }
    if (this.runs.length > 1) this.page.parts.comparison?.grow?.();
  }

  // The comparison ---------------------------------------------------------------------------------

  compareSoon() {
    clearTimeout(this.soon);
    if (this.runs.length > 1) this.soon = setTimeout(() => this.compare(), 50);
  }

  async compare() {
    const { content } = this.page;
    const versions = this.runs.map((run) => run.versions.checks).join();
    if (this.comparing === versions) return;
    this.comparing = versions;
    let found, text = "The runs are being compared …";
    if (!content.comparison) this.page.show("comparison");
    try {
      found = await live.fetchComparison();
      if (found.waiting) text = found.waiting;
    } catch (error) {
      text = error.message;
    }
    if (this.comparing !== versions) return; // a newer one is on its way
    if (!found) this.comparing = null;
    content.comparison = found && !found.waiting ? await revive(found.content) : null;
    content.uncompared = text;
    this.page.show("comparison");
  }
}
