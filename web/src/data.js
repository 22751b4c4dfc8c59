// Reading the document: packed arrays become typed arrays.

const TYPES = {
  u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i4: Int32Array,
  f2: Uint16Array, f4: Float32Array, f8: Float64Array,
};

export async function revive(value) {
  const waiting = [];
  const found = walk(value, waiting);
  await Promise.all(waiting);
  return found;
}

function walk(value, waiting) {
  if (value === null || typeof value !== "object") return value;
  if (Array.isArray(value)) {
    for (let i = 0; i < value.length; i++) value[i] = walk(value[i], waiting);
    return value;
  }
  if (typeof value.$ === "string" && TYPES[value.$]) {
    const packed = { array: null, shape: value.shape };
    waiting.push(unpack(value).then((array) => { packed.array = array; }));
    return packed;
  }
  for (const key of Object.keys(value)) value[key] = walk(value[key], waiting);
  return value;
}

async function unpack(packed) {
  let bytes = fromBase64(packed.b);
  if (packed.z) {
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  }
  const type = TYPES[packed.$];
  if (bytes.byteOffset % type.BYTES_PER_ELEMENT) bytes = bytes.slice();
  const array = new type(bytes.buffer, bytes.byteOffset, bytes.length / type.BYTES_PER_ELEMENT);
  return packed.$ === "f2" ? fromHalf(array) : array;
}

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

function fromHalf(halves) {
  const table = halfTable();
  const found = new Float32Array(halves.length);
  for (let i = 0; i < halves.length; i++) found[i] = table[halves[i]];
  return found;
}

let halves = null;
function halfTable() {
  if (halves) return halves;
  halves = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
    halves[bits] = exponent === 31 ? (fraction ? NaN : sign * Infinity)
      : exponent === 0 ? sign * fraction * 2 ** -24
        : sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  }
  return halves;
}

// Numbers that were quantised to 16 bits (65535: none), or stored as they are.
export function valueAt(numbers, i) {
  const raw = numbers.values.array[i];
  if (numbers.low === undefined) return raw;
  const wide = numbers.values.array instanceof Uint8Array ? 255 : 65534;
  if (wide === 65534 && raw === 65535) return NaN;
  return numbers.low + ((numbers.high - numbers.low) * raw) / wide;
}

export function valuesOf(numbers, start, count) {
  const found = new Float64Array(count);
  for (let i = 0; i < count; i++) found[i] = valueAt(numbers, start + i);
  return found;
}

// The number of a row's class, among those of a latent or a given variable; −1 if it is unknown.
export const classOf = ({ values }, row) => (values.array[row] === 65535 ? -1 : values.array[row]);

export const inUnits = (units, values) =>
  units ? Float64Array.from(values, (v, j) => units[j].location + units[j].scale * v) : values;
