// Several runs: their evidence on the same rows, their curves together, and the settings that differ.

import { clear, h, number, plural, select } from "./dom.js";
import { pictureTools } from "./export.js";
import { fileName, inWords, LinePlot, swatch } from "./curves.js";
import { INK, whiskers } from "./histogram.js";
import { interpolate, joined, nearest } from "./series.js";

const VERDICTS = {
  best: "best",
  worse: "worse than the best",
  "not told apart": "cannot be told from the best",
  "not decided": "not decided",
};
const DASHES = [undefined, [7, 4], [2, 3], [9, 3, 2, 3]]; // after ten colours, lines differ by dashes

/** The comparison of the runs of a document; null if it has only one run. */
export function comparePart(page) {
  if (page.runs.length < 2) return null;
  const view = new Together(page.runs);
  const body = h("div", {});
  const element = h("section", { class: "part", id: "comparison", "aria-labelledby": "comparison-title" },
    h("h2", { id: "comparison-title" }, "Comparison"), body);
  const draw = (comparison) => {
    clear(body).append(...[
      table(comparison),
      h("h3", {}, "Curves of all runs"), view.element,
      settings(comparison, page.runs),
    ].flat(3).filter(Boolean));
    view.show();
  };
  draw(page.comparison);
  return {
    element,
    update: (now) => {
      view.runs = now.runs;
      draw(now.comparison);
    },
    theme: () => view.plot.redraw(),
  };
}

// Evidence -----------------------------------------------------------------------------------------

function table(comparison) {
  if (!comparison) return h("p", { class: "quiet" }, "The runs were not compared.");
  if (comparison.problem) return [h("p", {}, comparison.problem), notes(comparison.notes)];
  const { models } = comparison;
  const cell = (...children) => h("td", { class: "figure" }, ...children);
  const rows = models.map((one) => h("tr", {},
    h("th", { scope: "row" }, one.name),
    cell(number(one.mean, 6), one.method !== "exact" && ` ± ${number(one.error, 2)}`),
    cell(one.difference
      ? `${number(one.difference.mean, 4)} ± ${number(one.difference.stderr, 2)}` : ""),
    h("td", {}, VERDICTS[one.verdict] ?? one.verdict, one.flags.length > 0 && " (not to be trusted)"),
    cell(number(one.parameters)), cell(number(one.parameters_q ?? null)),
    cell(one.seconds === null ? "–" : number(one.seconds, 3)),
    h("td", {}, one.method)));
  return [
    comparison.what && h("p", {}, `${comparison.what}.`),
    h("div", { class: "table-box" }, h("table", {},
      h("thead", {}, h("tr", {}, [
        "model", "log p", "difference", "verdict", "parameters of p", "of q", "seconds", "method",
      ].map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, rows))),
    models.length > 1 && differences(models),
    comparison.units && h("p", {}, comparison.units),
    notes(comparison.notes),
  ];
}

const notes = (texts) =>
  texts?.length > 0 && h("ul", {}, texts.map((text) => h("li", {}, text)));

function differences(models) {
  const items = models.map((one) => ({
    label: one.name,
    value: one.difference ? one.difference.mean : one.mean === null ? null : 0,
    error: one.difference?.stderr ?? 0,
    hollow: one.verdict === "not decided" || one.flags.length > 0,
    colour: one.verdict === "worse" ? INK.warn : INK.bar,
  }));
  const drawing = whiskers({
    items, xLabel: "log p − log p of the best, nats per example (± 2 standard errors)", width: 560,
    label: `Differences to ${models[0].name}: ` + models.slice(1).map((one) =>
      `${one.name} ${number(one.difference?.mean ?? null)}, ${VERDICTS[one.verdict] ?? one.verdict}`).join("; "),
  });
  const figure = h("figure", { class: "picture" },
    h("figcaption", {}, "Paired differences to the best model. Orange: worse than the best. Hollow: not to be trusted, or not decided."),
    drawing);
  pictureTools(figure, {
    name: "comparison",
    svg: () => drawing,
    csv: () => ({
      columns: ["model", "log p", "error", "difference", "standard error", "verdict", "method"],
      rows: models.map((one) => [one.name, one.mean, one.error, one.difference?.mean ?? null,
        one.difference?.stderr ?? null, one.verdict, one.method]),
    }),
  });
  return figure;
}

// Curves -------------------------------------------------------------------------------------------

/** The same curve of all runs in one plot. */
class Together {
  constructor(runs) {
    this.runs = runs;
    this.range = null;
    this.unit = "step";
    this.key = null;
    this.readout = h("p", { class: "curves-readout" });
    this.legend = h("ul", { class: "curves-legend" });
    this.choice = h("div", { class: "curves-controls" });
    this.plot = new LinePlot({
      label: "Curves of all runs", height: 300, sync: "together",
      zoomed: (range) => {
        this.range = range;
        this.show();
      },
      hovered: (x) => this.hover(x),
    });
    const figure = h("figure", { class: "picture curves-main" }, this.choice, this.plot.element);
    pictureTools(figure, {
      name: fileName("runs"),
      png: () => this.plot.canvas(),
      csv: () => ({
        columns: [this.unit, ...this.plot.lines.map((line) => line.label)], rows: joined(this.plot.lines),
      }),
    });
    this.element = h("div", {}, figure, this.legend, this.readout);
    requestAnimationFrame(() => this.show());
  }

  static curves(run) {
    return run.summary?.curves ?? run.curves ?? null;
  }

  keys() {
    const kinds = ["bound", "term", "kl", "besides"];
    const found = new Map();
    for (const run of this.runs) {
      for (const one of Together.curves(run)?.series ?? []) {
        const before = found.get(one.key);
        const validated = one.validation ? 0 : 0.5;
        found.set(one.key, { rank: kinds.indexOf(one.kind) + validated, runs: (before?.runs ?? 0) + 1 });
      }
    }
    return [...found].sort(([, a], [, b]) => b.runs - a.runs || a.rank - b.rank).map(([key]) => key);
  }

  lines() {
    return this.runs.flatMap((run, i) => {
      const curves = Together.curves(run);
      const one = curves?.series.find((other) => other.key === this.key);
      const clock = this.unit === "step" ? null : curves?.[this.unit];
      if (!one || (this.unit !== "step" && !clock)) return [];
      const x = clock === null ? one.step.array : Float64Array.from(one.step.array, (step) =>
        interpolate(clock.step.array, clock.value.array, step));
      return [{
        label: run.name, x, y: one.value.array, colour: `--c${i % 10}`, width: 1.6,
        dash: DASHES[Math.floor(i / 10) % DASHES.length],
      }];
    });
  }

  show() {
    const keys = this.keys();
    if (!keys.length) {
      clear(this.choice).append(h("p", { class: "quiet" }, "No run has a history."));
      return;
    }
    if (!keys.includes(this.key)) this.key = keys[0];
    const change = (values) => {
      Object.assign(this, values, { range: null });
      this.show();
    };
    const units = [["step", "steps"], ["epochs", "epochs"], ["seconds", "seconds"]].filter(([unit]) =>
      unit === "step" || this.runs.every((run) => Together.curves(run)?.[unit]));
    clear(this.choice).append(
      select("Curve", keys.map((key) => [key, key]), this.key, (key) => change({ key })),
      select("Over", units, this.unit, (unit) => change({ unit })),
      h("button", {
        type: "button", class: "tiny", disabled: this.range === null,
        on: { click: () => change({}) },
      }, "Show everything"));
    const lines = this.lines();
    const ends = lines.filter(({ x }) => x.length).flatMap(({ x }) => [x[0], x[x.length - 1]]);
    const [low, high] = ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
    const full = high > low ? [low, high] : [low - 1, high + 1];
    const range = this.range && [Math.max(full[0], this.range[0]), Math.min(full[1], this.range[1])];
    this.plot.title = this.key;
    this.plot.set(lines, range && range[1] > range[0] ? range : full, {
      zoom: Boolean(range),
      label: `${this.key} of ${plural(lines.length, "run")}: ` +
        `${lines.map((line) => inWords(line.label, line.y)).join("; ")}.`,
    });
    clear(this.legend).append(...lines.map((line) => h("li", {}, swatch(line), line.label)));
  }

  hover(x) {
    this.readout.textContent = x === null ? "" : [
      `${this.unit} ${number(this.unit === "step" ? Math.round(x) : x)}`,
      ...this.plot.lines.map((line) => `${line.label} ${number(line.y[nearest(line.x, x)])}`),
    ].join(" · ");
  }
}

// Settings -----------------------------------------------------------------------------------------

function settings(comparison, runs) {
  const found = comparison?.settings ?? [];
  if (!comparison) return null;
  if (!found.length) return [h("h3", {}, "Settings"), h("p", {}, "The runs have the same settings.")];
  const names = comparison.names ?? runs.map((run) => run.name);
  return [
    h("h3", {}, "Settings that differ"),
    h("div", { class: "table-box" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"),
        names.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, found.map((one) => h("tr", {}, h("th", { scope: "row" }, one.name),
        one.values.map((value) => h("td", {}, value))))))),
  ];
}
