// The checks of a model: findings, evidence and gap, use of the latents, calibration, predictive check.

import { clear, h, number, plural, s } from "./dom.js";
import { pictureTools } from "./export.js";
import { fileName } from "./curves.js";
import { waitingText } from "./waiting.js";
import { bars, histogram, INK, lineChart, picture } from "./histogram.js";
import { binned, compact, uniformBand } from "./series.js";

const LEVELS = ["problem", "warning", "note", "ok"]; // the gravest first
const PLACES = {
  curves: "in the curves",
  map: "in the map",
  clusters: "in the clusters",
  latents: "in the latents",
  calibration: "in the calibration",
  check: "in the predictive check",
  evidence: "in the evidence",
};
const MOST_ENTRIES = 60; // bars of the entries of a latent
const FIRST = 12; // pictures that are shown before a button shows the others

/** A section that is drawn from a run, and drawn again by `update(run)`. */
function part(id, title, run, draw) {
  const body = h("div", {});
  const element = h("section", { class: "part", id, "aria-labelledby": `${id}-title` },
    h("h2", { id: `${id}-title` }, title), body);
  const update = (now) => {
    clear(body).append(...[draw(now)].flat(4).filter(Boolean));
  };
  update(run);
  return { element, update, theme: () => {} };
}

const waiting = (run, what) =>
  h("p", { class: "quiet" }, run.checks ? what : waitingText(run, "checks") || "The checks were not computed.");

function figure(name, drawing, caption, { csv = null, kind = "" } = {}) {
  const element = h("figure", { class: `picture ${kind}` }, h("figcaption", {}, caption), drawing);
  pictureTools(element, { name, svg: () => drawing, csv });
  return element;
}

const plusMinus = (value, error) =>
  `${number(value)}${error ? ` ± ${number(error, 2)}` : ""}`;

// Findings -----------------------------------------------------------------------------------------

/** A sign of a level, which differs by shape and not only by colour. */
export function sign(level) {
  const shapes = {
    ok: [s("circle", { cx: 8, cy: 8, r: 7, fill: INK.good }),
      s("path", { d: "M4.5,8.2 l2.4,2.5 l4.6,-5", fill: "none", stroke: "#fff", "stroke-width": 1.8 })],
    note: [s("rect", { x: 1, y: 1, width: 14, height: 14, rx: 2, fill: "var(--note, #56b4e9)" }),
      s("path", { d: "M8,3.4 v1.8 M8,7 v5.6", stroke: "#fff", "stroke-width": 2 })],
    warning: [s("path", { d: "M8,1 L15.5,15 H0.5 Z", fill: INK.warn }),
      s("path", { d: "M8,6 v4.4 M8,11.8 v1.8", stroke: "#fff", "stroke-width": 1.8 })],
    problem: [s("path", { d: "M5,1 h6 l4,4 v6 l-4,4 h-6 l-4,-4 v-6 z", fill: INK.bad }),
      s("path", { d: "M5,5 l6,6 M11,5 l-6,6", stroke: "#fff", "stroke-width": 2 })],
  };
  return s("svg", { width: 16, height: 16, viewBox: "0 0 16 16", "aria-hidden": "true" },
    shapes[level] ?? shapes.note);
}

function findingItem(finding, context) {
  const place = PLACES[finding.picture];
  return h("li", { class: "finding" },
    sign(finding.level),
    h("span", { class: `level level-${LEVELS.includes(finding.level) ? finding.level : "note"}` },
      finding.level),
    h("div", { class: "words" },
      h("p", {}, minus(finding.text)),
      finding.remedy && h("p", { class: "remedy" }, finding.remedy)),
    place && context.go
      ? h("button", {
        type: "button", class: "tiny", "aria-label": `Show ${finding.kind} ${place}`,
        on: { click: () => context.go(finding.picture) },
      }, "show")
      : h("span", {}));
}

// log p under Evidence is in the units of the data, the diagnosis in those of the model.
const withUnits = (finding, checks) => (finding.kind === "elbo" && checks.shifted
  ? { ...finding, text: `${finding.text} This is for standardised columns; log p under Evidence is in the units of the data.` } : finding);

const withRows = (finding, rows) => (finding.kind === "elbo"
  ? { ...finding, text: `${finding.text} It is the mean of ${plural(rows, "row")}.` } : finding);

// Sentences write their numbers with a hyphen; the page has true minus signs.
const minus = (text) => text.replace(/(^|[\s(=])-(?=\d)/g, "$1−");

/** The findings of the doctor, the gravest first. */
export function findingsPart(run, context = {}) {
  return part("findings", "Findings", run, (now) => {
    const checks = now.checks;
    const problems = checks?.problems ?? [];
    const failed = problems.length > 0 && h("details", { open: !checks.diagnosis },
      h("summary", {}, `${plural(problems.length, "remark")} on the checks`),
      h("ul", {}, problems.map((text) => h("li", {}, text))));
    const diagnosis = checks?.diagnosis;
    if (!diagnosis) return [waiting(now, "There is no diagnosis."), failed];
    const order = (one) => (LEVELS.indexOf(one.level) + LEVELS.length) % LEVELS.length;
    const missed = (checks.predictive?.comparisons ?? []).filter((one) => one.extreme).map((one) => one.label);
    const added = missed.length ? [{ level: "note", kind: "predictive check", about: "run", picture: "check", remedy: "",
      text: `p does not reproduce ${missed.join(", ")} of the data (posterior predictive check).` }] : [];
    const found = [...diagnosis.findings.map((one) => withUnits(withRows(one, diagnosis.rows), checks)), ...added].sort((a, b) => order(a) - order(b));
    const grave = found.filter((one) => one.level !== "ok");
    const fine = found.filter((one) => one.level === "ok");
    const counts = LEVELS.slice(0, 3)
      .map((level) => [level, grave.filter((one) => one.level === level).length])
      .filter(([, n]) => n)
      .map(([level, n]) => plural(n, level));
    return [
      h("p", {}, `${plural(diagnosis.rows, "row")} examined${checks.rows ? ` of ${checks.rows}` : ""}: `,
        h("strong", {}, counts.join(", ") || "nothing is wrong"), "."),
      grave.length > 0 &&
        h("ul", { class: "findings" }, grave.map((one) => findingItem(one, context))),
      fine.length > 0 && h("details", { open: grave.length === 0 },
        h("summary", {}, `${plural(fine.length, "check")} found nothing wrong`),
        h("ul", { class: "findings" }, fine.map((one) => findingItem(one, context)))),
      failed,
    ];
  });
}

// Whether every latent has its exact posterior in place of a network.
const isExact = (run) => {
  const own = (run.summary?.model?.entries ?? []).filter((one) => one.side === "q");
  return own.length > 0 && own.every((one) => one.spec.startsWith("Exact"));
};

const summedLatents = (run) => (run.summary?.model?.latents ?? [])
  .filter((one) => one.draw.startsWith("enumerate")).map((one) => one.name);

// Evidence -----------------------------------------------------------------------------------------

/** log p(x) of the rows, the bound by samples, and the parts of the gap. */
export function evidencePart(run) {
  return part("evidence", "Evidence", run, (now) => {
    const { evidence, curve, gap } = now.checks ?? {};
    if (!evidence && !gap) return waiting(now, "log p(x) could not be computed.");
    const name = now.name ?? "run";
    return [
      evidence && evidenceWords(evidence),
      h("div", { class: "check-pair" },
        evidence?.histogram && evidencePicture(name, evidence),
        curve && curvePicture(name, curve, evidence, summedLatents(now))),
      gap && gapWords(name, gap, isExact(now)),
    ];
  });
}

function evidenceWords(evidence) {
  const sampled = evidence.method !== "exact", doubtful = evidence.untrusted ?? 0;
  const lowest = doubtful > 0 && doubtful === evidence.rows;
  return [
    h("p", {}, `log p(x) ${lowest ? "is at least about" : "="} `,
      h("strong", {}, lowest ? number(evidence.mean) : plusMinus(evidence.mean, evidence.stderr)),
      ` nats per example, the mean of ${plural(evidence.rows, "row")} (${evidence.method}).`,
      lowest && h("span", { class: "warn" }, " This is too low: a few samples carry the estimates of all rows, so that the error is not known."),
      !lowest && doubtful > 0 && h("span", { class: "warn" }, ` ${doubtful === 1 ? "The estimate of 1 of these rows is" : `The estimates of ${doubtful} of these rows are`} too low, and the error too small.`),
      sampled && !lowest && evidence.stderr !== null && " ± is the sampling error for these rows.",
      evidence.between !== null && evidence.between !== undefined &&
        ` Other rows of the same kind would give a mean within about ${number(2 * evidence.between, 2)} nats.`),
    evidence.notes.length > 0 && h("ul", {}, evidence.notes.map((text) => h("li", {}, text))),
  ];
}

function evidencePicture(name, evidence) {
  const { counts, low, high } = evidence.histogram;
  const values = evidence.values.array;
  const drawing = histogram({
    counts, low, high, marker: evidence.mean, markerColour: INK.second, width: 420, height: 200,
    xTicks: 5,
    label: `Histogram of log p(x) of ${plural(evidence.rows, "row")}, from ${number(low)} to ` +
      `${number(high)}, mean ${number(evidence.mean)}`,
  });
  return figure(fileName(name, "evidence"), drawing, `log p(x) of ${plural(evidence.rows, "row")}, nats; the line is the mean`, {
    csv: () => ({ columns: ["row", "log p"], rows: Array.from(values, (value, i) => [evidence.numbers.array[i], value]) }),
  });
}

function curvePicture(name, curve, evidence, summed) {
  const drawing = lineChart({
    x: curve.ks, y: curve.mean, error: curve.error, logarithmic: true, xLabel: "samples per row",
    reference: evidence ? { value: evidence.mean, label: `log p(x) ${number(evidence.mean)}` } : null,
    label: `The importance-weighted bound rises from ${number(curve.mean[0])} with one sample to ` +
      `${number(curve.mean.at(-1))} with ${plural(curve.ks.at(-1), "sample")}`,
  });
  return figure(fileName(name, "bound-by-samples"), drawing,
    `Importance-weighted bound by the number of samples${evidence ? `, mean of ${plural(evidence.rows, "row")}` : ""}; with one sample it is ` +
      (summed.length ? `above the ELBO, because ${summed.join(", ")} is summed inside the logarithm` : "the ELBO"), {
      csv: () => ({
        columns: ["samples", "bound", "standard error"],
        rows: curve.ks.map((k, i) => [k, curve.mean[i], curve.error[i]]),
      }),
    });
}

// What a part of the gap is, and what to do if there is one.
const advice = (key, gap, words, remedy) => (gap[key].mean > Math.max(0.005, 2 * (gap[key].error ?? 0)) ? `${words} ${remedy}` : words);

function gapWords(name, gap, exact) {
  const drawing = gapPicture(gap);
  const terms = [
    ["amortisation", "Amortisation gap", INK.bar,
      exact ? "q is the exact posterior of each row, so nothing is lost here."
        : advice("amortisation", gap, "What one network for all rows loses against the best q of each row.", "Train q longer, or give it a larger network.")],
    ["approximation", "Approximation gap", INK.second,
      exact ? "q is the exact posterior, so its family has the right shape."
        : advice("approximation", gap, "What the best q of each row still lacks, because q's family cannot have the shape of the posterior.", "Use a richer family for q.")],
  ];
  return [
    h("h3", {}, "Why the bound is below log p(x)"),
    figure(fileName(name, "gap"), drawing,
      `ELBO ${plusMinus(gap.elbo.mean, gap.elbo.error)}, log p(x) ` +
      `${plusMinus(gap.evidence.mean, gap.evidence.error)} (${gap.method}, ${plural(gap.rows, "row")})`, {
        csv: () => ({
          columns: ["quantity", "nats per example", "standard error"],
          rows: ["elbo", "amortisation", "best", "approximation", "evidence"].map((key) =>
            [key, gap[key].mean, gap[key].error]),
        }),
      }),
    h("dl", {}, terms.map(([key, title, colour, meaning]) => [
      h("dt", {}, s("svg", { width: 12, height: 12, "aria-hidden": "true" },
        s("rect", { width: 12, height: 12, fill: colour })),
      ` ${title}: ${plusMinus(gap[key].mean, gap[key].error)} nats`),
      h("dd", {}, meaning),
    ])),
    gap.notes.length > 0 && h("ul", {}, gap.notes.map((text) => h("li", {}, text))),
  ];
}

function gapPicture(gap) {
  const [width, height] = [520, 66];
  const parts = [["amortisation", INK.bar], ["approximation", INK.second]].map(([key, fill]) => ({
    key, fill, value: Math.max(0, gap[key].mean ?? 0), error: gap[key].error ?? 0,
  }));
  const total = parts.reduce((sum, one) => sum + one.value, 0) || 1;
  let x = 8;
  const label = `The gap of ${number(gap.total.mean)} nats is ${number(gap.amortisation.mean)} amortisation ` +
    `and ${number(gap.approximation.mean)} approximation gap`;
  const text = { "font-size": 11, "font-family": "system-ui, sans-serif", fill: INK.ink };
  return picture(width, height, label,
    parts.map((one) => {
      const wide = ((width - 16) * one.value) / total;
      const half = Math.min(width - 8, ((width - 16) * one.error) / total);
      const drawn = s("g", {},
        s("rect", { x, y: 20, width: wide, height: 24, fill: one.fill, "fill-opacity": 0.85 },
          s("title", {}, `${one.key} gap: ${plusMinus(one.value, one.error)} nats`)),
        wide > 0 && s("line", {
          x1: Math.max(8, x + wide - half), x2: Math.min(width - 8, x + wide + half), y1: 32, y2: 32,
          stroke: INK.ink,
        }));
      x += wide;
      return drawn;
    }),
    s("text", { ...text, x: 8, y: 13 }, `ELBO ${compact(gap.elbo.mean ?? NaN)}`),
    s("text", { ...text, x: width - 8, y: 13, "text-anchor": "end" },
      `log p(x) ${compact(gap.evidence.mean ?? NaN)}`),
    s("text", { ...text, x: width / 2, y: 60, "text-anchor": "middle" },
      `${number(gap.total.mean)} nats`));
}

// Latents ------------------------------------------------------------------------------------------

/** How much each entry of each latent is used. */
export function latentsPart(run) {
  return part("latents", "Use of the latents", run, (now) => {
    const latents = now.checks?.latents;
    if (!latents?.length) return waiting(now, "The use of the latents was not measured.");
    return latents.map((latent) => latentPicture(now.name ?? "run", latent));
  });
}

function latentPicture(name, latent) {
  const each = latent.sequence ? `, ${number(latent.kl / latent.steps)} per step` : "";
  const title = h("h3", {}, `${latent.name}: ${number(latent.kl)} nats per example${each}`);
  if (latent.classes) {
    const drawing = bars({
      items: latent.classes.slice(0, MOST_ENTRIES).map((share, i) => ({ label: String(i), value: share })),
      label: `Share of the rows in each of the ${latent.classes.length} classes of ${latent.name}`,
      xLabel: "share of the rows",
      marker: 1 / latent.classes.length,
    });
    return [title, figure(fileName(name, latent.name, "classes"), drawing,
      `Share of the rows in each class; the dashed line is an even share${latent.classes.length > MOST_ENTRIES
        ? `; the first ${MOST_ENTRIES} of ${latent.classes.length} classes are drawn` : ""}`, {
        csv: () => ({ columns: ["class", "share"], rows: latent.classes.map((one, i) => [i, one]) }),
      })];
  }
  const [kl, activity, active] = ["kl", "activity", "active"].map((key) =>
    latent.entries[key]?.array ?? null);
  const measure = kl ?? activity;
  if (measure === null) return [title, h("p", { class: "quiet" }, "Its entries cannot be measured one by one.")];
  const order = Array.from(measure.keys()).sort((a, b) => measure[b] - measure[a]);
  const used = active === null ? null : active.reduce((sum, one) => sum + one, 0);
  const drawing = bars({
    items: order.slice(0, MOST_ENTRIES).map((i) => ({
      label: latent.size === 1 ? latent.name : `${latent.name}${i}`, value: measure[i], pale: active !== null && !active[i],
    })),
    label: `${kl ? "KL" : "Activity"} of the entries of ${latent.name}, the largest first`,
    xLabel: kl ? "KL, nats per example" : "activity (variance of the posterior mean / of the prior)",
  });
  const caption = [
    used === null ? null : `${used} of ${plural(measure.length, "entry").replace("entrys", "entries")} are active`,
    used !== null && used < measure.length ? "those without filling are not" : null,
    order.length > MOST_ENTRIES ? `the ${MOST_ENTRIES} largest are shown` : null,
  ].filter(Boolean).join("; ");
  return [title, figure(fileName(name, latent.name, "entries"), drawing, caption || "Entries", {
    csv: () => ({
      columns: ["entry", "kl", "activity", "active"],
      rows: order.map((i) => [i, kl?.[i] ?? null, activity?.[i] ?? null, active?.[i] ?? null]),
    }),
  })];
}

// Calibration --------------------------------------------------------------------------------------

/** Ranks of the true latents among draws of q, for data simulated from p. */
export function calibrationPart(run) {
  return part("calibration", "Calibration of q", run, (now) => {
    const found = now.checks?.calibration;
    if (!found || !Object.keys(found).length) return waiting(now, "The calibration was not checked.");
    const findings = now.checks.diagnosis?.findings ?? [];
    return [
      h("p", {}, "Latents and data are drawn from p, and each latent is ranked among draws of q. If q " +
        "is the posterior, the ranks are uniform: 99 % of the bars end in the band. Bars that rise at " +
        "both ends mean that q is too narrow, in the middle that it is too wide, at one end that it " +
        "is biased."),
      Object.entries(found).map(([latent, { ranks, n }]) => [
        h("h3", {}, latent),
        findings.filter((one) => one.kind === "calibration" && one.about === latent)
          .map((one) => h("p", {}, sign(one.level), " ", one.text)),
        some(entries(now.name ?? "run", latent, ranks, n)),
      ]),
    ];
  });
}

function entries(name, latent, ranks, n) {
  const [d, bins] = ranks.shape;
  const band = uniformBand(n, bins);
  const found = Array.from({ length: d }, (_, i) => {
    const counts = Array.from(ranks.array.subarray(i * bins, (i + 1) * bins));
    const far = counts.reduce((sum, count) => sum + (count - n / bins) ** 2, 0);
    return { i, counts, far };
  });
  found.sort((a, b) => b.far - a.far);
  return found.map(({ i, counts }) => () => {
    const title = d === 1 ? latent : `${latent}${i}`;
    const outside = counts.filter((count) => count < band[0] || count > band[1]).length;
    const drawing = histogram({
      counts, low: 0, high: 1, band, xTicks: 2,
      label: `Ranks of ${title}: ${outside} of ${bins} bars lie outside the band of uniform ranks`,
    });
    return figure(fileName(name, "ranks", title), drawing, title, {
      csv: () => ({
        columns: ["from", "to", "count"],
        rows: counts.map((count, j) => [j / bins, (j + 1) / bins, count]),
      }),
    });
  });
}

/** The first pictures, and a button that draws the others. */
function some(makers) {
  const box = h("div", { class: "small-pictures" }, makers.slice(0, FIRST).map((make) => make()));
  if (makers.length <= FIRST) return box;
  const more = h("button", {
    type: "button",
    on: {
      click: () => {
        box.append(...makers.slice(FIRST).map((make) => make()));
        more.remove();
      },
    },
  }, `Show ${makers.length - FIRST} more`);
  return [box, more];
}

// Predictive check ---------------------------------------------------------------------------------

/** Statistics of the data among those of data simulated from the model. */
export function predictivePart(run) {
  return part("check", "Posterior predictive check", run, (now) => {
    const check = now.checks?.predictive;
    if (!check) return waiting(now, "No predictive check was made.");
    const extreme = check.comparisons.filter((one) => one.extreme).sort((a, b) => a.p - b.p);
    const others = check.comparisons.filter((one) => !one.extreme);
    return [
      h("p", {}, `Each statistic of ${plural(check.rows, "row")} (line) is compared with those of ` +
        `${plural(check.replicates, "data set")} simulated from the model (bars), ${check.kind} ` +
        "predictive. ",
      h("strong", {}, extreme.length
        ? `The model does not reproduce ${extreme.map((one) => one.label).join(", ")}.`
        : "The model reproduces all of them."), ` ${(check.notes ?? []).join(" ")}`),
      some([...extreme, ...others].map((one) => () => predictivePicture(now.name ?? "run", one))),
    ];
  });
}

function predictivePicture(name, one) {
  const values = one.replicates.array;
  const kinds = new Set(values).size, least = 2 / (1 + values.length);
  const p = `p ${one.p <= 1.000001 * least ? "≤" : "="} ${number(one.p, 2)}`; // fewer replicates show no less
  const { counts, low, high } = binned(values, Math.min(30, Math.max(1, kinds)));
  const drawing = histogram({
    counts, low, high, marker: one.observed, markerColour: one.extreme ? INK.bad : INK.second,
    colour: one.extreme ? INK.warn : INK.bar, xTicks: 3,
    label: `${one.label}: data ${number(one.observed)}, simulated ${number(low)} to ${number(high)}, ` +
      `${p}${one.extreme ? ", not reproduced" : ""}`,
  });
  return figure(fileName(name, "check", one.label), drawing,
    `${one.extreme ? "▲ " : ""}${one.label}, ${p}${one.extreme ? ", not reproduced" : ""}`, {
      kind: one.extreme ? "extreme" : "",
      csv: () => ({
        columns: ["source", one.label],
        rows: [["data", one.observed], ...Array.from(values, (value) => ["simulated", value])],
      }),
    });
}
