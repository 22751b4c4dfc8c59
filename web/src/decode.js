// Run p in the browser: the program that aevb.page.decoder.export writes.

import { FAMILIES, sigmoid, softplus } from "./families.js";
import { createRandom } from "./random.js";

/** The complementary error function, with a relative error below 1.2e-7 (Numerical Recipes). */
function erfc(x) {
  const t = 1 / (1 + 0.5 * Math.abs(x));
  const coefficients = [
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418,
    0.37409196, 1.00002368, -1.26551223,
  ];
  let sum = 0;
  for (const coefficient of coefficients) sum = sum * t + coefficient;
  const tail = t * Math.exp(-x * x + sum);
  return x >= 0 ? tail : 2 - tail;
}

const ACTIVATIONS = {
  relu: (x) => (x > 0 ? x : 0),
  tanh: Math.tanh,
  sigmoid,
  elu: (x) => (x > 0 ? x : Math.expm1(x)),
  gelu: (x) => 0.5 * x * erfc(-x * Math.SQRT1_2),
  silu: (x) => x * sigmoid(x),
  softplus,
  leaky_relu: (x) => (x > 0 ? x : 0.01 * x),
  identity: null,
};

function activate(values, activation) {
  const f = ACTIVATIONS[activation];
  if (f) for (let i = 0; i < values.length; i++) values[i] = f(values[i]);
}

/** The inner product of n numbers of two arrays. Four sums run side by side. */
function dot(left, i, right, j, n) {
  let a = 0;
  let b = 0;
  let c = 0;
  let d = 0;
  const end = i + n;
  const blocks = end - (n % 4);
  for (; i < blocks; i += 4, j += 4) {
    a += left[i] * right[j];
    b += left[i + 1] * right[j + 1];
    c += left[i + 2] * right[j + 2];
    d += left[i + 3] * right[j + 3];
  }
  for (; i < end; i++, j++) a += left[i] * right[j];
  return a + b + (c + d);
}

/** out = weight · input + bias; the weight is [out][in], row by row. */
function affine(out, weight, bias, input) {
  const n = input.length;
  for (let i = 0; i < out.length; i++) {
    out[i] = (bias ? bias[i] : 0) + dot(weight, i * n, input, 0, n);
  }
}

/** A function from the network's input to the output of dense layers, one activation between two. */
function denseLayers(layers, activation, last) {
  const made = layers.map(({ weight, bias }) => ({
    weight: weight.array,
    bias: bias && bias.array,
    out: new Float32Array(weight.shape[0]),
  }));
  return (input) => {
    made.forEach(({ weight, bias, out }, i) => {
      affine(out, weight, bias, input);
      if (last || i + 1 < made.length) activate(out, activation);
      input = out;
    });
    return input;
  };
}

/**
 * A transposed convolution with kernel 4, stride 2 and padding 1, cropped to `size`.
 *
 * Images are [height][width][channels], so that the innermost loop, over the channels of the
 * input, reads neighbouring numbers. Each output pixel reads two rows and two columns of the
 * input: y = 2 i − 1 + k for the kernel row k.
 */
function transposedConvolution({ weight, bias, size }, height, width) {
  const [ins, outs] = weight.shape;
  const kernel = new Float32Array(16 * outs * ins); // [tap][out][in]
  for (let c = 0; c < ins; c++) {
    for (let o = 0; o < outs; o++) {
      for (let tap = 0; tap < 16; tap++) {
        kernel[(tap * outs + o) * ins + c] = weight.array[(c * outs + o) * 16 + tap];
      }
    }
  }
  const [rows, columns] = size;
  const out = new Float32Array(rows * columns * outs);
  const sums = new Float64Array(outs);
  const run = (image) => {
    for (let y = 0; y < rows; y++) {
      for (let x = 0; x < columns; x++) {
        for (let o = 0; o < outs; o++) sums[o] = bias.array[o];
        for (let ky = (y + 1) % 2; ky < 4; ky += 2) {
          const i = (y + 1 - ky) / 2;
          if (i < 0 || i >= height) continue;
          for (let kx = (x + 1) % 2; kx < 4; kx += 2) {
            const j = (x + 1 - kx) / 2;
            if (j < 0 || j >= width) continue;
            const pixel = (i * width + j) * ins;
            let at = (ky * 4 + kx) * outs * ins;
            for (let o = 0; o < outs; o++) {
              sums[o] += dot(kernel, at, image, pixel, ins);
              at += ins;
            }
          }
        }
        out.set(sums, (y * columns + x) * outs);
      }
    }
    return out;
  };
  return { run, rows, columns, outs };
}

/** The rows of a dense layer that makes an image, from [channel][pixel] to [pixel][channel]. */
function channelsLast({ weight, bias }, channels) {
  const [outs, ins] = weight.shape;
  const pixels = outs / channels;
  const array = new Float32Array(outs * ins);
  const biases = new Float32Array(outs);
  for (let c = 0; c < channels; c++) {
    for (let pixel = 0; pixel < pixels; pixel++) {
      const from = c * pixels + pixel;
      const to = pixel * channels + c;
      array.set(weight.array.subarray(from * ins, (from + 1) * ins), to * ins);
      biases[to] = bias.array[from];
    }
  }
  return { weight: { array, shape: [outs, ins] }, bias: { array: biases } };
}

function deconvolution({ layers, activation, seed, upsample }) {
  const dense = denseLayers([layers[0], channelsLast(layers[1], seed[0])], activation, true);
  let [, height, width] = seed;
  const stages = upsample.map((layer) => {
    const stage = transposedConvolution(layer, height, width);
    [height, width] = [stage.rows, stage.columns];
    return stage;
  });
  const { outs } = stages.at(-1);
  const pixels = height * width;
  const raw = new Float32Array(outs * pixels);
  return (input) => {
    let image = dense(input);
    stages.forEach(({ run }, i) => {
      image = run(image);
      if (i + 1 < stages.length) activate(image, activation);
    });
    for (let pixel = 0; pixel < pixels; pixel++) {
      for (let c = 0; c < outs; c++) raw[c * pixels + pixel] = image[pixel * outs + c];
    }
    return raw;
  };
}

/** A function from the values of a node's parents to its raw numbers, valid until the next call. */
function network(net, inputs) {
  if (net.kind === "root") return () => net.raw.array;
  const run = net.kind === "mlp" ? denseLayers(net.layers, net.activation, false) : deconvolution(net);
  const input = new Float32Array(inputs);
  return (parents) => {
    let at = 0;
    for (const parent of parents) {
      input.set(parent, at);
      at += parent.length;
    }
    if (net.log) for (let i = 0; i < input.length; i++) input[i] = Math.asinh(input[i]);
    return run(input);
  };
}

const product = (shape) => shape.reduce((total, size) => total * size, 1);

function describe({ name, role, shape, family }, categorical) {
  return { name, role, shape, size: product(shape), family, categorical };
}

/** A node of the program, with the functions that compute it. */
function createNode(node, sizes) {
  const { name, role, settings, parents } = node;
  const size = product(node.shape);
  const run = network(
    node.net,
    parents.reduce((total, parent) => total + sizes[parent], 0),
  );
  const raw = (values) => run(parents.map((parent) => values[parent]));
  if (role === "deterministic") {
    const value = (values) => {
      const found = Float32Array.from(raw(values));
      activate(found, settings.activation);
      return found;
    };
    return { name, role, value };
  }
  const family = FAMILIES[node.family];
  const vectors = Object.entries(node.vectors).map(([head, vector]) => [head, vector.array]);
  const heads = (values) => {
    const numbers = Float32Array.from(raw(values));
    const found = {};
    let at = 0;
    for (const [head, count] of Object.entries(node.heads)) {
      found[head] = numbers.subarray(at, at + count);
      at += count;
    }
    for (const [head, vector] of vectors) found[head] = vector;
    return found;
  };
  const parameters = (found) => family.parameters(found, settings, size);
  return { name, role, family, heads, parameters };
}

/**
 * Make a decoder of a program whose packed arrays are revived ({array, shape}).
 *
 * Values are objects from a variable's name to its numbers, an array of `size` numbers.
 */
export function createDecoder(program) {
  const sizes = {};
  const descriptors = { latent: [], observed: [], given: [], deterministic: [] };
  for (const node of program.nodes) {
    const categorical =
      node.role === "given"
        ? program.given[node.name].categorical
        : Boolean(FAMILIES[node.family]?.categorical);
    sizes[node.name] = product(node.shape);
    descriptors[node.role].push(describe(node, categorical));
  }
  const nodes = program.nodes
    .filter((node) => node.role !== "given")
    .map((node) => createNode(node, sizes));
  const ownRandom = createRandom(1);

  function withGiven(values) {
    const found = {};
    for (const { name, size } of descriptors.given) found[name] = new Float32Array(size);
    for (const [name, value] of Object.entries(values)) {
      if (name in sizes) found[name] = Float32Array.from(value);
    }
    return found;
  }

  /**
   * Complete values by p: latents, then observed variables.
   *
   * Variables in `fixed` (by default all in `values`) keep their value. Every other latent gets
   * p's mean given its parents, or with `draw` a draw; a finite latent gets its most probable
   * value instead of the mean. A given variable without a value is zero. An observed variable in
   * `fixed` passes its value to its children, and is described like the others.
   */
  function forward(values, { fixed, draw = false, random = ownRandom } = {}) {
    const known = withGiven(values);
    const kept = fixed ?? new Set(Object.keys(values));
    const latents = {};
    const observed = {};
    for (const { name, role, value, family, heads, parameters } of nodes) {
      if (role === "deterministic") {
        known[name] = value(known);
        continue;
      }
      const keep = kept.has(name) && known[name] !== undefined;
      if (role === "latent") {
        if (!keep) known[name] = chosen(family, parameters(heads(known)), draw && random);
        latents[name] = known[name];
        continue;
      }
      const raw = heads(known);
      const found = parameters(raw);
      const mean = family.mean(found);
      const drawn = draw ? family.draw(found, random) : null;
      observed[name] = { mean, sd: family.sd(found), draw: drawn, heads: raw };
      if (family.probs) observed[name].probs = mean;
      if (!keep) known[name] = drawn ?? chosen(family, found, null);
    }
    return { latents, observed };
  }

  function chosen(family, parameters, random) {
    if (random) return family.draw(parameters, random);
    return (family.central ?? family.mean)(parameters);
  }

  /** Values of all latents: p's means (most probable values of finite ones), or draws. */
  function start(random = null, given = {}) {
    const fixed = new Set(Object.keys(given));
    return forward(given, { fixed, draw: Boolean(random), random: random ?? ownRandom }).latents;
  }

  return {
    latents: descriptors.latent,
    observed: descriptors.observed,
    given: descriptors.given,
    start,
    forward,
  };
}
