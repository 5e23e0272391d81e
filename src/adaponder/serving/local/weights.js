// Reads the tensors of a .safetensors file as float32.

/** Converts the bits of a float16 to a number. */
const fromHalf = (bits) => {
  const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
  const magnitude = exponent === 31 ? (fraction ? NaN : Infinity) : exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
  return bits & 0x8000 ? -magnitude : magnitude;
};

/** Widens bfloat16, which is the upper half of a float32. */
function fromBfloat16(buffer) {
  const halves = new Uint16Array(buffer);
  const bits = new Uint32Array(halves.length);
  for (let index = 0; index < halves.length; index += 1) bits[index] = halves[index] << 16;
  return new Float32Array(bits.buffer);
}

const DECODERS = {
  F32: (buffer) => new Float32Array(buffer),
  BF16: fromBfloat16,
  F16: (buffer) => Float32Array.from(new Uint16Array(buffer), fromHalf),
};

/** Returns a function from a tensor's name to `{data, shape}`, or to `null` if there is no such tensor. */
export function tensors(file) {
  const length = Number(new DataView(file).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(file, 8, length)));
  return (name) => {
    const entry = header[name];
    if (!entry) return null;
    const [start, end] = entry.data_offsets.map((offset) => 8 + length + offset);
    return { data: DECODERS[entry.dtype](file.slice(start, end)), shape: entry.shape };
  };
}
