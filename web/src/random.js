// Seeded random numbers of the distributions that a model can have.

/** The generator sfc32, seeded by one number through splitmix32. */
function sfc32(seed) {
  let mixed = seed >>> 0;
  const next = () => {
    mixed = (mixed + 0x9e3779b9) | 0;
    let t = mixed ^ (mixed >>> 16);
    t = Math.imul(t, 0x21f0aaad);
    t ^= t >>> 15;
    t = Math.imul(t, 0x735a2d97);
    return t ^ (t >>> 15);
  };
  let a = next();
  let b = next();
  let c = next();
  let counter = 1;
  const generate = () => {
    const sum = (((a + b) | 0) + counter) | 0;
    counter = (counter + 1) | 0;
    a = b ^ (b >>> 9);
    b = (c + (c << 3)) | 0;
    c = (c << 21) | (c >>> 11);
    c = (c + sum) | 0;
    return sum >>> 0;
  };
  for (let i = 0; i < 12; i++) generate();
  return generate;
}

/** log k! by Stirling's series; the recurrence moves a small k up to where the series is exact. */
export function logFactorial(k) {
  let x = k + 1;
  let product = 1;
  while (x < 12) product *= x++;
  const square = 1 / (x * x);
  const series = (1 / 12 - square * (1 / 360 - square / 1260)) / x;
  return (x - 0.5) * Math.log(x) - x + 0.5 * Math.log(2 * Math.PI) + series - Math.log(product);
}

/** Create a source of random numbers. Equal seeds give equal numbers. */
export function createRandom(seed) {
  const bits = sfc32(seed);
  let spare = NaN;

  /** A uniform number in (0, 1) with 52 bits, never exactly 0 or 1. */
  function uniform() {
    return ((bits() >>> 6) * 67108864 + (bits() >>> 6) + 0.5) / 4503599627370496;
  }

  /** A standard normal number, by Marsaglia's polar method. */
  function normal() {
    if (spare === spare) {
      const value = spare;
      spare = NaN;
      return value;
    }
    for (;;) {
      const u = 2 * uniform() - 1;
      const v = 2 * uniform() - 1;
      const s = u * u + v * v;
      if (s > 0 && s < 1) {
        const factor = Math.sqrt((-2 * Math.log(s)) / s);
        spare = v * factor;
        return u * factor;
      }
    }
  }

  /** A standard Laplace number. */
  function laplace() {
    const u = uniform();
    return u < 0.5 ? Math.log(2 * u) : -Math.log(2 - 2 * u);
  }

  /** The logarithm of a Gamma(shape, 1) number, which does not underflow for a small shape. */
  function logGamma(shape) {
    if (!(shape > 0 && shape < Infinity)) return shape === 0 ? -Infinity : Math.log(shape);
    if (shape < 1) return logGamma(shape + 1) + Math.log(uniform()) / shape;
    // Marsaglia and Tsang (2000)
    const d = shape - 1 / 3;
    const c = 1 / Math.sqrt(9 * d);
    for (;;) {
      const x = normal();
      const root = 1 + c * x;
      if (root <= 0) continue;
      const v = root * root * root;
      const u = uniform();
      if (Math.log(u) < 0.5 * x * x + d * (1 - v + Math.log(v))) return Math.log(d * v);
    }
  }

  function gamma(shape) {
    return Math.exp(logGamma(shape));
  }

  function beta(a, b) {
    return 1 / (1 + Math.exp(logGamma(b) - logGamma(a)));
  }

  /** A Student t number. With infinitely many degrees of freedom it is normal. */
  function student(df) {
    const z = normal();
    return df < Infinity ? z / Math.sqrt(gamma(df / 2) / (df / 2)) : z;
  }

  function poisson(rate) {
    if (!(rate >= 0)) return NaN;
    if (rate === Infinity) return Infinity;
    if (rate < 10) {
      // The number of uniform factors whose product stays above e^−rate.
      const end = Math.exp(-rate);
      let count = 0;
      for (let product = uniform(); product > end; product *= uniform()) count++;
      return count;
    }
    // Beyond, the skewness is below 1e-5, and the exact test would lose its digits.
    if (rate > 1e10) return Math.max(0, Math.round(rate + Math.sqrt(rate) * normal()));
    // PTRS: the transformed rejection of Hörmann (1993)
    const logRate = Math.log(rate);
    const b = 0.931 + 2.53 * Math.sqrt(rate);
    const a = -0.059 + 0.02483 * b;
    const inverseAlpha = 1.1239 + 1.1328 / (b - 3.4);
    const accepted = 0.9277 - 3.6224 / (b - 2);
    for (;;) {
      const u = uniform() - 0.5;
      const v = uniform();
      const distance = 0.5 - Math.abs(u);
      const k = Math.floor(((2 * a) / distance + b) * u + rate + 0.43);
      if (distance >= 0.07 && v <= accepted) return k;
      if (k < 0 || (distance < 0.013 && v > distance)) continue;
      const left = Math.log((v * inverseAlpha) / (a / (distance * distance) + b));
      if (left <= k * logRate - rate - logFactorial(k)) return k;
    }
  }

  /** An index, drawn with these probabilities, which sum to 1. */
  function categorical(probabilities) {
    let left = uniform();
    let last = 0;
    for (let i = 0; i < probabilities.length; i++) {
      if (probabilities[i] > 0) {
        last = i;
        left -= probabilities[i];
        if (left < 0) return i;
      }
    }
    return last; // the rounded probabilities sum to less than 1
  }

  return { uniform, normal, laplace, gamma, logGamma, beta, student, poisson, categorical };
}
