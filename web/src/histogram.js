// Small pictures in SVG: histograms, rank histograms, bars, and lines with error bars.

import { s } from "./dom.js";
import { compact, ticks } from "./series.js";

// The second colour is that of an exported file, which has no custom properties.
export const INK = {
  bar: "var(--c0, #0072b2)",
  pale: "var(--line, #d5d9de)",
  text: "var(--quiet, #5b6470)",
  ink: "var(--ink, #1b1f24)",
  line: "var(--line, #d5d9de)",
  accent: "var(--accent, #0072b2)",
  good: "var(--good, #009e73)",
  warn: "var(--warn, #d55e00)",
  bad: "var(--bad, #b3261e)",
  second: "var(--c1, #e69f00)",
};

const TEXT = { "font-size": 10, "font-family": "system-ui, sans-serif", fill: INK.text };

/** The root of a picture, with a name for screen readers. */
export function picture(width, height, label, ...children) {
  return s(
    "svg",
    {
      viewBox: `0 0 ${width} ${height}`,
      width,
      height,
      role: "img",
      "aria-label": label,
      class: "small-picture",
      preserveAspectRatio: "xMidYMid meet",
    },
    s("title", {}, label),
    ...children,
  );
}

/** The ticks and numbers of a horizontal axis. `place` maps a value to pixels. */
export function axis(values, place, y, { text = compact } = {}) {
  return values.map((value) =>
    s(
      "g",
      {},
      s("line", { x1: place(value), x2: place(value), y1: y, y2: y + 3, stroke: INK.line }),
      s("text", { ...TEXT, x: place(value), y: y + 13, "text-anchor": "middle" }, text(value)),
    ),
  );
}

const linear = (low, high, start, end) => (value) =>
  start + ((value - low) / (high > low ? high - low : 1)) * (end - start);

/**
 * A histogram. `low` and `high` are the ends of the bins, `marker` is a value to mark by a line,
 * and `band` the two heights between which uniform counts lie.
 */
export function histogram({
  counts,
  low,
  high,
  label,
  marker = null,
  markerColour = INK.warn,
  colour = INK.bar,
  band = null,
  xTicks = 3,
  width = 240,
  height = 110,
}) {
  const [left, right, top, bottom] = [8, width - 8, 8, height - 20];
  const outside = marker !== null && Number.isFinite(marker);
  const [least, most] = outside ? [Math.min(low, marker), Math.max(high, marker)] : [low, high];
  const place = linear(least, most, left, right);
  const tallest = Math.max(1, ...counts, band ? band[1] : 0);
  const heightOf = (count) => (count / tallest) * (bottom - top);
  const each = (high - low) / counts.length;
  return picture(
    width,
    height,
    label,
    band &&
      s("rect", {
        x: left,
        width: right - left,
        y: bottom - heightOf(band[1]),
        height: Math.max(1, heightOf(band[1]) - heightOf(band[0])),
        fill: INK.pale,
        "fill-opacity": 0.6,
      }),
    counts.map((count, i) => {
      const [from, to] = [place(low + i * each), place(low + (i + 1) * each)];
      return s(
        "rect",
        {
          x: from + 0.5,
          width: Math.max(0.5, to - from - 1),
          y: bottom - heightOf(count),
          height: heightOf(count),
          fill: colour,
          "fill-opacity": 0.75,
        },
        s("title", {}, `${compact(low + i * each)} to ${compact(low + (i + 1) * each)}: ${count}`),
      );
    }),
    s("line", { x1: left, x2: right, y1: bottom, y2: bottom, stroke: INK.line }),
    axis(ticks(least, most, xTicks), place, bottom),
    outside && [
      s("line", {
        x1: place(marker),
        x2: place(marker),
        y1: top - 4,
        y2: bottom,
        stroke: markerColour,
        "stroke-width": 2,
      }),
      s("path", {
        d: `M${place(marker) - 4},${top - 6} h8 l-4,6 z`,
        fill: markerColour,
      }),
    ],
  );
}

/** A line of y over x with error bars; `logarithmic` is about x. Values may be null. */
export function lineChart({
  x,
  y,
  error = null,
  label,
  logarithmic = false,
  reference = null,
  xLabel = "",
  width = 420,
  height = 200,
}) {
  const [left, right, top, bottom] = [52, width - 12, 10, height - 34];
  const points = x
    .map((at, i) => ({ x: at, y: y[i], error: error?.[i] ?? 0 }))
    .filter((one) => Number.isFinite(one.y));
  if (!points.length) return picture(width, height, label);
  const transform = logarithmic ? Math.log10 : (value) => value;
  const across = linear(transform(x[0]), transform(x[x.length - 1]), left, right);
  const xs = (value) => across(transform(value));
  const ends = points.flatMap((one) => [one.y - one.error, one.y + one.error]);
  if (reference !== null && Number.isFinite(reference.value)) ends.push(reference.value);
  let [low, high] = [Math.min(...ends), Math.max(...ends)];
  const margin = 0.08 * (high - low) || 0.5;
  [low, high] = [low - margin, high + margin];
  const ys = linear(low, high, bottom, top);
  const shown = logarithmic
    ? x.filter((value) => Number.isInteger(Math.log10(value)))
    : ticks(x[0], x[x.length - 1]);
  return picture(
    width,
    height,
    label,
    ticks(low, high, 4).map((value) => [
      s("line", { x1: left, x2: right, y1: ys(value), y2: ys(value), stroke: INK.line }),
      s(
        "text",
        { ...TEXT, x: left - 5, y: ys(value) + 3, "text-anchor": "end" },
        compact(value),
      ),
    ]),
    axis(shown, xs, bottom),
    s("text", { ...TEXT, x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, xLabel),
    reference !== null &&
      Number.isFinite(reference.value) && [
        s("line", {
          x1: left,
          x2: right,
          y1: ys(reference.value),
          y2: ys(reference.value),
          stroke: INK.second,
          "stroke-width": 1.5,
          "stroke-dasharray": "5 4",
        }),
        s(
          "text",
          { ...TEXT, x: left + 4, y: ys(reference.value) - 4, fill: INK.ink },
          reference.label,
        ),
      ],
    s("path", {
      d: points.map((one, i) => `${i ? "L" : "M"}${xs(one.x)},${ys(one.y)}`).join(" "),
      fill: "none",
      stroke: INK.bar,
      "stroke-width": 1.8,
    }),
    points.map((one) =>
      s(
        "g",
        {},
        s("line", {
          x1: xs(one.x),
          x2: xs(one.x),
          y1: ys(one.y - one.error),
          y2: ys(one.y + one.error),
          stroke: INK.bar,
        }),
        s(
          "circle",
          { cx: xs(one.x), cy: ys(one.y), r: 3, fill: INK.bar },
          s("title", {}, `${compact(one.x)}: ${compact(one.y)}`),
        ),
      ),
    ),
  );
}

/**
 * Horizontal bars that share one axis. An item has a `label`, a `value` and perhaps `pale`, for a
 * bar that is not filled.
 */
export function bars({ items, label, xLabel = "", width = 420, row = 16, marker = null }) {
  const values = items.map((one) => one.value).filter(Number.isFinite);
  const most = Math.max(1e-12, ...values, marker ?? 0);
  const longest = Math.max(...items.map((one) => one.label.length));
  const [left, right] = [Math.min(width / 2, 14 + 6 * longest), width - 12];
  const bottom = 6 + row * items.length;
  const place = linear(0, most, left, right);
  return picture(
    width,
    bottom + 34,
    label,
    items.map((one, i) => [
      s(
        "text",
        { ...TEXT, x: left - 5, y: 6 + row * i + row / 2 + 3, "text-anchor": "end" },
        one.label,
      ),
      Number.isFinite(one.value) &&
        s(
          "rect",
          {
            x: left,
            y: 8 + row * i,
            width: Math.max(1, place(Math.max(0, one.value)) - left),
            height: row - 4,
            fill: one.pale ? "none" : INK.bar,
            stroke: one.pale ? INK.text : "none",
            "fill-opacity": 0.75,
          },
          s("title", {}, `${one.label}: ${compact(one.value)}`),
        ),
    ]),
    marker !== null &&
      s("line", {
        x1: place(marker),
        x2: place(marker),
        y1: 4,
        y2: bottom,
        stroke: INK.warn,
        "stroke-dasharray": "4 3",
      }),
    s("line", { x1: left, x2: right, y1: bottom, y2: bottom, stroke: INK.line }),
    axis(ticks(0, most, 4), place, bottom),
    s("text", { ...TEXT, x: (left + right) / 2, y: bottom + 28, "text-anchor": "middle" }, xLabel),
  );
}

/** Dots with whiskers on one axis, a row each: values with their errors, and a line at 0. */
export function whiskers({ items, label, xLabel = "", width = 420, row = 22, names = true }) {
  const ends = items
    .filter((one) => Number.isFinite(one.value))
    .flatMap((one) => [one.value - 2 * (one.error ?? 0), one.value + 2 * (one.error ?? 0)]);
  let [low, high] = [Math.min(0, ...ends), Math.max(0, ...ends)];
  const margin = 0.05 * (high - low) || 0.5;
  [low, high] = [low - margin, high + margin];
  const longest = names ? Math.max(...items.map((one) => one.label.length)) : 0;
  const [left, right] = [Math.min(width / 2, 14 + 6 * longest), width - 12];
  const bottom = 6 + row * items.length;
  const place = linear(low, high, left, right);
  return picture(
    width,
    bottom + 34,
    label,
    s("line", { x1: place(0), x2: place(0), y1: 2, y2: bottom, stroke: INK.text }),
    items.map((one, i) => {
      const y = 6 + row * i + row / 2;
      const error = one.error ?? 0;
      return [
        names &&
          s("text", { ...TEXT, x: left - 5, y: y + 3, "text-anchor": "end" }, one.label),
        Number.isFinite(one.value) && [
          s("line", {
            x1: place(one.value - 2 * error),
            x2: place(one.value + 2 * error),
            y1: y,
            y2: y,
            stroke: one.colour ?? INK.bar,
            "stroke-width": 1.6,
          }),
          s(
            "circle",
            {
              cx: place(one.value),
              cy: y,
              r: 4,
              fill: one.hollow ? "var(--panel, #fff)" : (one.colour ?? INK.bar),
              stroke: one.colour ?? INK.bar,
            },
            s("title", {}, `${one.label}: ${compact(one.value)} ± ${compact(error)}`),
          ),
        ],
      ];
    }),
    s("line", { x1: left, x2: right, y1: bottom, y2: bottom, stroke: INK.line }),
    axis(ticks(low, high, 4), place, bottom),
    s("text", { ...TEXT, x: (left + right) / 2, y: bottom + 28, "text-anchor": "middle" }, xLabel),
  );
}
