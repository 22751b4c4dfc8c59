// The classes and given variables with which rows are decoded.
import { number } from "./dom.js";
import { classOf, inUnits } from "./data.js";

export const oneHot = (size, k) => {
  const found = new Float32Array(size);
  found[k] = 1;
  return found;
};

export const largest = (values) => values.indexOf(Math.max(...values));

// {values, words, unknown} for some rows of a map: their classes and given variables, what to say
// about these, and the names of the given variables that the page does not hold.
export function conditions(map, rows) {
  const values = {}, words = [], unknown = [];
  for (const [name, one] of Object.entries(map.classes)) {
    const [best, share] = commonest(one, rows);
    if (best < 0) continue;
    values[name] = oneHot(one.size, best);
    words.push(`${name} = ${best}${among(share)}`);
  }
  for (const [name, one] of Object.entries(map.given)) {
    const found = one.categorical ? commonest(one, rows) : [mean(one, rows), 1];
    if (found[0] === null || found[0] === -1) {
      values[name] = Float32Array.from(one.usual);
      unknown.push(name);
      words.push(usualWords(name, one));
    } else if (one.categorical) {
      values[name] = oneHot(one.size, found[0]);
      words.push(`${name} = ${found[0]}${among(found[1])}`);
    } else {
      values[name] = found[0];
      words.push(`${rows.length > 1 ? "mean " : ""}${name} = ${texts(one, found[0])}`);
    }
  }
  return { values, words, unknown };
}

const among = (share) => (share < 1 ? ` (the most frequent, ${number(100 * share, 2)} %)` : "");

export const texts = (one, value) =>
  Array.from(inUnits(one.units, value).slice(0, 4), (v) => number(v, 4)).join(", ") + (value.length > 4 ? ", …" : "");

// What is said of a given variable that has its usual value.
export const usualWords = (name, one) => (one.categorical
  ? `${name} = ${largest(one.usual)} (the most frequent of all rows)`
  : `${name} = ${texts(one, one.usual)} (the mean of all rows)`);

// The most frequent known class of some rows and its share among these; −1 if none is known.
function commonest(one, rows) {
  const counts = new Float64Array(one.size);
  let known = 0;
  for (const row of rows) {
    const k = classOf(one, row);
    if (k < 0) continue;
    counts[k]++;
    known++;
  }
  const best = known ? largest(counts) : -1;
  return [best, known ? counts[best] / known : 0];
}

// The mean of the known values of some rows; null if none is known.
function mean({ size, values }, rows) {
  if (!values) return null;
  const sum = new Float64Array(size);
  let known = 0;
  for (const row of rows) {
    const value = values.array.subarray(row * size, (row + 1) * size);
    if (!value.every(Number.isFinite)) continue;
    for (let k = 0; k < size; k++) sum[k] += value[k];
    known++;
  }
  return known ? Float32Array.from(sum, (v) => v / known) : null;
}

// Mean codes of some rows, by latent; latents without codes are left out.
export function meanCodes(map, rows) {
  const found = {};
  for (const space of map.spaces) {
    if (!space.latent || space.step || !space.codes) continue;
    const value = mean({ size: space.size, values: space.codes }, rows);
    if (value) found[space.latent] = space.whole ? value.map(Math.round) : value;
  }
  return found;
}
