// Series of numbers: decimation for drawing, limits of axes, ticks, bins and CSV. No DOM.

/** Index of the first number of an ascending array that is not below `value`. */
export function lowerBound(x, value) {
  let low = 0;
  let high = x.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Index of the number of an ascending array that is nearest to `value`; −1 if it is empty. */
export function nearest(x, value) {
  if (!x.length) return -1;
  const after = Math.min(x.length - 1, lowerBound(x, value));
  const before = Math.max(0, after - 1);
  return value - x[before] <= x[after] - value ? before : after;
}

/** Linear interpolation of (xs, ys) at `at`, constant beyond the ends. `xs` ascend. */
export function interpolate(xs, ys, at) {
  const after = lowerBound(xs, at);
  if (after === 0) return ys[0];
  if (after === xs.length) return ys[xs.length - 1];
  const span = xs[after] - xs[after - 1];
  const share = span > 0 ? (at - xs[after - 1]) / span : 1;
  return ys[after - 1] + share * (ys[after] - ys[after - 1]);
}

/** The same at ascending places `at`, in one pass over both. */
export function along(xs, ys, at) {
  const found = new Float64Array(at.length);
  let after = 0;
  for (let i = 0; i < at.length; i += 1) {
    while (after < xs.length && xs[after] < at[i]) after += 1;
    if (after === 0) found[i] = ys[0];
    else if (after === xs.length) found[i] = ys[after - 1];
    else {
      const span = xs[after] - xs[after - 1];
      const share = span > 0 ? (at[i] - xs[after - 1]) / span : 1;
      found[i] = ys[after - 1] + share * (ys[after] - ys[after - 1]);
    }
  }
  return found;
}

/**
 * The points of a line from `low` to `high` that matter on `buckets` pixels: of each pixel the first,
 * lowest, highest and last point. One point beyond each end is kept, so that the line leaves the
 * picture. Values that are not finite are left out. `x` ascends.
 */
export function decimated(x, y, low, high, buckets) {
  const from = Math.max(0, lowerBound(x, low) - 1);
  let to = lowerBound(x, high);
  while (to < x.length && x[to] <= high) to += 1;
  to = Math.min(x.length, to + 1);
  const xs = [];
  const ys = [];
  const keep = (i) => {
    xs.push(x[i]);
    ys.push(y[i]);
  };
  if (to - from <= 4 * buckets) {
    for (let i = from; i < to; i += 1) if (Number.isFinite(y[i])) keep(i);
    return [xs, ys];
  }
  const width = high > low ? (high - low) / buckets : 1;
  let bucket = null;
  let chosen = null; // first, lowest, highest and last point of the bucket
  const flush = () => {
    if (chosen === null) return;
    [...new Set(chosen)].sort((a, b) => a - b).forEach(keep);
  };
  for (let i = from; i < to; i += 1) {
    if (!Number.isFinite(y[i])) continue;
    const at = Math.floor((x[i] - low) / width);
    if (at !== bucket) {
      flush();
      bucket = at;
      chosen = [i, i, i, i];
    } else {
      if (y[i] < y[chosen[1]]) chosen[1] = i;
      if (y[i] > y[chosen[2]]) chosen[2] = i;
      chosen[3] = i;
    }
  }
  flush();
  return [xs, ys];
}

function quantile(sorted, share) {
  const at = share * (sorted.length - 1);
  const below = Math.floor(at);
  const above = Math.min(sorted.length - 1, below + 1);
  return sorted[below] + (at - below) * (sorted[above] - sorted[below]);
}

const SAMPLED = 4096; // values of a curve that say where its outliers begin

/**
 * Limits of the y axis for several curves: without the first tenth of each and without outliers.
 * `skipped` is the share of each curve to leave out at its start; `outliers` keeps the outliers.
 */
export function limits(curves, { skipped = 0.1, outliers = false } = {}) {
  const starts = curves.map((curve) => Math.floor(curve.length * skipped));
  let [least, most] = [-Infinity, Infinity];
  if (!outliers) {
    const some = curves.flatMap((curve, k) => {
      const step = Math.max(1, (curve.length - starts[k]) / SAMPLED);
      const found = [];
      for (let i = starts[k]; i < curve.length; i += step) found.push(curve[Math.floor(i)]);
      return found.filter(Number.isFinite);
    });
    if (some.length) {
      const sorted = Float64Array.from(some).sort();
      const [low, high] = [quantile(sorted, 0.02), quantile(sorted, 0.98)];
      const reach = 1.5 * (high - low);
      [least, most] = [low - reach, high + reach];
    }
  }
  let [low, high] = [Infinity, -Infinity];
  curves.forEach((curve, k) => {
    for (let i = starts[k]; i < curve.length; i += 1) {
      const value = curve[i];
      if (value >= least && value <= most && value > -Infinity && value < Infinity) {
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
  });
  if (low > high) return [0, 1];
  const margin = 0.06 * (high - low) + 1e-3 * Math.max(1, Math.abs(low) / 100);
  return [low - margin, high + margin];
}

/** Round numbers from `low` to `high`, about `count` of them. */
export function ticks(low, high, count = 4) {
  if (!(high > low) || !Number.isFinite(high - low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i += 1) {
    found.push(i === 0 ? 0 : Number((i * step).toPrecision(12)));
  }
  return found;
}

/** A number for an axis: "12k", "−0.05". */
export function compact(value) {
  if (!Number.isFinite(value)) return "";
  const size = Math.abs(value);
  let text;
  if (size >= 1e15) text = value.toExponential(0);
  else if (size >= 1e6) text = `${Number((value / 1e6).toPrecision(4))}M`;
  else if (size >= 1e4) text = `${Number((value / 1e3).toPrecision(4))}k`;
  else if (size > 0 && size < 1e-4) text = value.toExponential(0);
  else text = String(Number(value.toPrecision(5)));
  return text.replace("-", "−");
}

/** Counts of the finite values in equal bins, and the ends of the bins. */
export function binned(values, bins, low = null, high = null) {
  const finite = Array.from(values).filter(Number.isFinite);
  const least = low ?? finite.reduce((a, b) => Math.min(a, b), Infinity);
  const most = high ?? finite.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!(most >= least)) return null;
  const wide = most > least;
  const [start, end] = wide ? [least, most] : [least - 0.5, most + 0.5];
  const counts = new Array(bins).fill(0);
  for (const value of finite) {
    if (value < start || value > end) continue;
    counts[Math.min(bins - 1, Math.floor(((value - start) / (end - start)) * bins))] += 1;
  }
  return { low: start, high: end, counts };
}

/**
 * Limits between which a count of `n` uniform values in one of `bins` bins lies with a chance of
 * 99 %, from the binomial distribution.
 */
export function uniformBand(n, bins) {
  const p = 1 / bins;
  let chance = (1 - p) ** n; // underflows to 0 for a mean count above about 700
  if (chance === 0) {
    const spread = 2.576 * Math.sqrt(n * p * (1 - p));
    return [Math.max(0, n * p - spread), n * p + spread];
  }
  let total = 0;
  let low = null;
  for (let k = 0; k <= n; k += 1) {
    total += chance;
    if (low === null && total > 0.005) low = k;
    if (total >= 0.995) return [low, k];
    chance *= ((n - k) / (k + 1)) * (p / (1 - p));
  }
  return [low ?? 0, n];
}

/** First, last, lowest and highest finite value of a curve; null if there is none. */
export function course(y) {
  let [first, last, low, high] = [null, null, Infinity, -Infinity];
  for (const value of y) {
    if (!Number.isFinite(value)) continue;
    first ??= value;
    last = value;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return first === null ? null : { first, last, low, high };
}

/** Columns of several lines over the same x, as lines of a table: one per x that any line has. */
export function joined(lines) {
  const found = new Map();
  lines.forEach(({ x, y }, j) => {
    for (let i = 0; i < x.length; i += 1) {
      let row = found.get(x[i]);
      if (row === undefined) found.set(x[i], (row = new Array(lines.length).fill(null)));
      row[j] = Number.isFinite(y[i]) ? y[i] : null;
    }
  });
  return [...found.keys()].sort((a, b) => a - b).map((x) => [x, ...found.get(x)]);
}

