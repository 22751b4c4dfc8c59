// Colours: eight that colour-blind people tell apart (Okabe and Ito), and one scale (viridis-like).
import { css, number } from "./dom.js";
import { valueAt } from "./data.js";

const CLASSES = [
  "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c7a00", "#7f3c8d",
  "#4d4d4d", "#a5aa99",
];
// The same hues on dark paper.
const ON_DARK = [
  "#2f8fd8", "#f0b93c", "#3cc99c", "#dd9cc0", "#86cdf2", "#f28544", "#c4b03c", "#b87fc6",
  "#a8a8a8", "#d9dccf",
];
const SCALE = [
  [68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129],
  [92, 200, 99], [170, 220, 50], [253, 231, 37],
];

const hex = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
const word = ([r, g, b]) => (0xff000000 | (b << 16) | (g << 8) | r) >>> 0;

export const DISTINCT = 20; // classes whose colours can be told apart

export function classColour(k) {
  const base = hex((isDark() ? ON_DARK : CLASSES)[k % CLASSES.length]);
  const round = Math.floor(k / CLASSES.length);
  if (!round) return base;
  // More than ten classes: the same hues, lighter and darker.
  const toward = round % 2 ? 255 : 0, share = 0.25 + 0.15 * Math.floor(round / 2);
  return base.map((value) => Math.round(value + (toward - value) * Math.min(share, 0.7)));
}

// The ends of the scale that stand out from the paper: yellow vanishes on white, violet on black.
const ends = () => (isDark() ? [0.25, 1] : [0, 0.76]);

export function scaleColour(t, [from, to] = ends()) {
  const at = (from + (to - from) * Math.max(0, Math.min(1, t))) * (SCALE.length - 1), i = Math.min(SCALE.length - 2, Math.floor(at));
  return SCALE[i].map((value, k) => Math.round(value + (SCALE[i + 1][k] - value) * (at - i)));
}

export const rgb = (colour) => `rgb(${colour.join(" ")})`;

export function parseColour(text) {
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = text;
  probe.fillRect(0, 0, 1, 1);
  return [...probe.getImageData(0, 0, 1, 1).data.slice(0, 3)];
}

export const paperWord = () => word(parseColour(css("--paper")));
export const inkAndPaper = () => [parseColour(css("--ink")), parseColour(css("--paper"))];
const isDark = () => parseColour(css("--paper")).reduce((a, b) => a + b) < 300;

// Points without a value are rings of a grey that no class has.
export const unknownColour = () => (isDark() ? [92, 96, 100] : [196, 198, 200]);

// What a row has of a colour, as a text with no more digits than are stored.
export function colourText(colour, row) {
  if (colour.kind === "class") return colour.levels[colour.values.array[row]] ?? "–";
  return colourNumber(colour, valueAt(colour, row));
}

export function colourNumber(colour, value, most = 5) {
  if (!Number.isFinite(value)) return number(value);
  if (colour.date) return new Date(value * 864e5).toISOString().slice(0, Number.isInteger(value) ? 10 : 16).replace("T", " ");
  const step = colour.low === undefined ? 0 : (colour.high - colour.low) / 65534;
  const known = step > 0 ? Math.floor(Math.log10(Math.abs(value) / step)) + 1 : most;
  return known < 1 ? "0" : number(value, Math.min(most, known));
}

// For each point its place in a palette of words. `rows` maps points to rows (null: the same). The
// last place is that of points without a value, `hollow`.
export function indexed(colour, count, rows) {
  const row = rows ? (i) => rows[i] : (i) => i;
  const index = new Uint8Array(count);
  if (!colour) return { index, palette: Uint32Array.of(word(classColour(0))) };
  const values = colour.values.array;
  if (colour.kind === "class") {
    const levels = colour.levels.length;
    const palette = new Uint32Array(levels + 1);
    for (let k = 0; k < levels; k++) palette[k] = word(classColour(k));
    palette[levels] = word(unknownColour());
    for (let i = 0; i < count; i++) index[i] = Math.min(values[row(i)], levels);
    return { index, palette, hollow: levels };
  }
  const palette = new Uint32Array(256);
  const shown = ends();
  for (let k = 0; k < 255; k++) palette[k] = word(scaleColour(k / 254, shown));
  palette[255] = word(unknownColour());
  if (colour.low === undefined) {
    const steps = 254 / (colour.to - colour.from || 1);
    for (let i = 0; i < count; i++) {
      const value = values[row(i)];
      index[i] = Number.isNaN(value) ? 255 : Math.max(0, Math.min(254, (value - colour.from) * steps));
    }
    return { index, palette, hollow: 255 };
  }
  const span = colour.high - colour.low || 1;
  const first = ((colour.from - colour.low) / span) * 65534;
  const last = ((colour.to - colour.low) / span) * 65534;
  const steps = 254 / (last - first || 1);
  for (let i = 0; i < count; i++) {
    const value = values[row(i)];
    index[i] = value === 65535 ? 255 : Math.max(0, Math.min(254, (value - first) * steps));
  }
  return { index, palette, hollow: 255 };
}
