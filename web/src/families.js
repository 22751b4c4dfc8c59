// The families of distributions: means, standard deviations and draws, from raw network outputs.
//
// A family has four functions. `parameters(raw, settings, size)` turns raw numbers (name →
// Float32Array: the heads of the network and the learned vectors) into parameters, and `mean`,
// `sd` and `draw` make Float32Arrays of `size` numbers from these. A finite or heavy-tailed family
// also has `central`: the value that stands for the distribution where a draw is not wanted.

/** log(1 + eˣ), as torch computes it. */
export function softplus(x) {
  return x > 20 ? x : Math.log1p(Math.exp(x));
}

export function sigmoid(x) {
  if (x >= 0) return 1 / (1 + Math.exp(-x));
  const e = Math.exp(x);
  return e / (1 + e);
}

function softmax(logits) {
  let top = -Infinity;
  for (const value of logits) top = Math.max(top, value);
  const found = Float64Array.from(logits, (value) => Math.exp(value - top));
  let total = 0;
  for (const value of found) total += value;
  for (let i = 0; i < found.length; i++) found[i] /= total;
  return found;
}

/** The Float32Array f(0), …, f(size − 1). */
function fill(size, f) {
  const found = new Float32Array(size);
  for (let i = 0; i < size; i++) found[i] = f(i);
  return found;
}

/** Softplus of raw numbers, or a fixed number in every entry if there are none. */
function positive(raw, fixed, size) {
  return raw
    ? Float64Array.from(raw, softplus)
    : new Float64Array(size).fill(fixed);
}

/** A location–scale family; `unit` is its standard deviation and `noise` a draw for scale 1. */
function locationScale(unit, noise) {
  return {
    parameters: ({ loc, scale }, settings, size) => ({
      loc,
      scale: positive(scale, settings.scale, size),
      settings,
    }),
    mean: ({ loc }) => Float32Array.from(loc),
    sd: ({ scale, settings }) => {
      const each = unit(settings);
      return fill(scale.length, (i) => scale[i] * each);
    },
    draw: ({ loc, scale, settings }, random) =>
      fill(loc.length, (i) => loc[i] + scale[i] * noise(random, settings)),
  };
}

const degreesOfFreedom = (settings) => settings.df ?? Infinity; // null stands for infinity

function studentDeviation(settings) {
  const df = degreesOfFreedom(settings);
  if (df === Infinity) return 1;
  return df > 2 ? Math.sqrt(df / (df - 2)) : df > 1 ? Infinity : NaN;
}

const student = locationScale(studentDeviation, (random, settings) =>
  random.student(degreesOfFreedom(settings)),
);

/** A Cholesky factor [size × size] from its free entries; softplus makes the diagonal positive. */
function cholesky(entries, size) {
  const factor = new Float64Array(size * size);
  for (let row = 0, at = 0; row < size; row++) {
    for (let column = 0; column <= row; column++, at++) {
      factor[row * size + column] = column === row ? softplus(entries[at]) : entries[at];
    }
  }
  return factor;
}

// The formulas of the continuous Bernoulli distribution cancel near 0; there, series replace them.
const NEAR = 0.5;
const CLAMPED_LOGIT = Math.log(1 - 2 ** -23) - Math.log(2 ** -23);

function continuousBernoulliMean(logit) {
  if (Math.abs(logit) < NEAR) {
    const s = logit * logit;
    return 0.5 + logit * (1 / 12 + s * (-1 / 720 + s * (1 / 30240 - s / 1209600)));
  }
  const a = Math.abs(logit);
  const upper = -1 / Math.expm1(-a) - 1 / a;
  return logit < 0 ? 1 - upper : upper;
}

function continuousBernoulliVariance(logit) {
  if (Math.abs(logit) < NEAR) {
    const s = logit * logit;
    return 1 / 12 + s * (-1 / 240 + s * (1 / 6048 - s / 172800));
  }
  const a = Math.abs(logit);
  return 1 / (a * a) - Math.exp(-a) / Math.expm1(-a) ** 2;
}

/** The quantile function of the continuous Bernoulli distribution. */
function continuousBernoulliQuantile(logit, u) {
  const a = Math.abs(logit);
  if (a < 1e-6) return u + 0.5 * logit * u * (1 - u);
  const upper = logit < 0 ? 1 - u : u;
  // log(upper + (1 − upper) e^−a) / a + 1, in a form that does not cancel for a small a
  const x = 1 + Math.log1p((1 - upper) * Math.expm1(-a)) / a;
  const clipped = Math.min(1, Math.max(0, x));
  return logit < 0 ? 1 - clipped : clipped;
}

/** The one-hot row of the largest number. */
function oneHot(size, index) {
  const found = new Float32Array(size);
  found[index] = 1;
  return found;
}

function largest(values) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] > values[best]) best = i;
  return best;
}

export const FAMILIES = {
  Normal: locationScale(
    () => 1,
    (random) => random.normal(),
  ),

  Laplace: locationScale(
    () => Math.SQRT2,
    (random) => random.laplace(),
  ),

  StudentT: {
    ...student,
    mean: ({ loc, settings }) =>
      degreesOfFreedom(settings) > 1 ? Float32Array.from(loc) : fill(loc.length, () => NaN),
    central: ({ loc }) => Float32Array.from(loc),
  },

  MultivariateNormal: {
    parameters: ({ loc, tril }, settings, size) => ({ loc, factor: cholesky(tril, size) }),
    mean: ({ loc }) => Float32Array.from(loc),
    sd: ({ loc, factor }) =>
      fill(loc.length, (i) => {
        let total = 0;
        for (let j = 0; j <= i; j++) total += factor[i * loc.length + j] ** 2;
        return Math.sqrt(total);
      }),
    draw: ({ loc, factor }, random) => {
      const noise = Float64Array.from(loc, () => random.normal());
      return fill(loc.length, (i) => {
        let total = loc[i];
        for (let j = 0; j <= i; j++) total += factor[i * loc.length + j] * noise[j];
        return total;
      });
    },
  },

  // The locations and scales of component k are entries k * size … (k + 1) * size − 1.
  Mixture: {
    parameters: ({ weight, loc, scale }, settings, size) => ({
      size,
      weights: softmax(weight),
      loc,
      scale: positive(scale),
    }),
    mean: ({ size, weights, loc }) => fill(size, (i) => mixtureMean(size, weights, loc, i)),
    sd: ({ size, weights, loc, scale }) =>
      fill(size, (i) => {
        const mean = mixtureMean(size, weights, loc, i);
        let variance = 0;
        for (let k = 0, at = i; k < weights.length; k++, at += size) {
          variance += weights[k] * (scale[at] ** 2 + (loc[at] - mean) ** 2);
        }
        return Math.sqrt(variance);
      }),
    draw: ({ size, weights, loc, scale }, random) => {
      const start = random.categorical(weights) * size;
      return fill(size, (i) => loc[start + i] + scale[start + i] * random.normal());
    },
  },

  Bernoulli: {
    parameters: ({ logits }) => ({ probs: Float64Array.from(logits, sigmoid) }),
    mean: ({ probs }) => Float32Array.from(probs),
    sd: ({ probs }) => fill(probs.length, (i) => Math.sqrt(probs[i] * (1 - probs[i]))),
    draw: ({ probs }, random) => fill(probs.length, (i) => (random.uniform() < probs[i] ? 1 : 0)),
    central: ({ probs }) => fill(probs.length, (i) => (probs[i] > 0.5 ? 1 : 0)),
    probs: true,
  },

  ContinuousBernoulli: {
    parameters: ({ logits }, { clamped }) => ({
      logits: clamped
        ? Float64Array.from(logits, (x) => Math.min(CLAMPED_LOGIT, Math.max(-CLAMPED_LOGIT, x)))
        : logits,
    }),
    mean: ({ logits }) => Float32Array.from(logits, continuousBernoulliMean),
    sd: ({ logits }) => Float32Array.from(logits, (x) => Math.sqrt(continuousBernoulliVariance(x))),
    draw: ({ logits }, random) =>
      Float32Array.from(logits, (x) => continuousBernoulliQuantile(x, random.uniform())),
  },

  OneHot: {
    parameters: ({ logits }) => ({ probs: softmax(logits) }),
    mean: ({ probs }) => Float32Array.from(probs),
    sd: ({ probs }) => fill(probs.length, (i) => Math.sqrt(probs[i] * (1 - probs[i]))),
    draw: ({ probs }, random) => oneHot(probs.length, random.categorical(probs)),
    central: ({ probs }) => oneHot(probs.length, largest(probs)),
    categorical: true,
    probs: true,
  },

  Beta: {
    parameters: ({ concentration1, concentration0 }) => ({
      a: positive(concentration1),
      b: positive(concentration0),
    }),
    mean: ({ a, b }) => fill(a.length, (i) => a[i] / (a[i] + b[i])),
    sd: ({ a, b }) =>
      fill(a.length, (i) => {
        const total = a[i] + b[i];
        return Math.sqrt((a[i] * b[i]) / (total + 1)) / total;
      }),
    draw: ({ a, b }, random) => fill(a.length, (i) => random.beta(a[i], b[i])),
  },

  Poisson: {
    parameters: ({ log_rate: logRate }) => ({ rate: Float64Array.from(logRate, Math.exp) }),
    mean: ({ rate }) => Float32Array.from(rate),
    sd: ({ rate }) => Float32Array.from(rate, Math.sqrt),
    draw: ({ rate }, random) => Float32Array.from(rate, random.poisson),
  },

  // A Poisson distribution whose rate has a Gamma distribution: variance mean + mean²/r.
  NegativeBinomial: {
    parameters: ({ log_mean: logMean, dispersion }, settings, size) => ({
      mean: Float64Array.from(logMean, Math.exp),
      r: positive(dispersion, settings.dispersion, size),
    }),
    mean: ({ mean }) => Float32Array.from(mean),
    sd: ({ mean, r }) => fill(mean.length, (i) => Math.sqrt(mean[i] + (mean[i] * mean[i]) / r[i])),
    draw: ({ mean, r }, random) =>
      fill(mean.length, (i) => random.poisson((mean[i] / r[i]) * random.gamma(r[i]))),
  },
};

function mixtureMean(size, weights, loc, i) {
  let total = 0;
  for (let k = 0, at = i; k < weights.length; k++, at += size) total += weights[k] * loc[at];
  return total;
}
