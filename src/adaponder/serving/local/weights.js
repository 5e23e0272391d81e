// Reads tensors of a .safetensors file as float32.

const half = (bits) => {
  const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
  const size = exponent === 31 ? (fraction ? NaN : Infinity) : exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
  return bits & 0x8000 ? -size : size;
};

function fromBrain(buffer) {
  const from = new Uint16Array(buffer);
  const to = new Uint32Array(from.length);
  for (let at = 0; at < from.length; at += 1) to[at] = from[at] << 16;
  return new Float32Array(to.buffer);
}

const DECODED = {
  F32: (buffer) => new Float32Array(buffer),
  BF16: fromBrain,
  F16: (buffer) => Float32Array.from(new Uint16Array(buffer), half),
};

/** A function that gives `{data, shape}` of a tensor by its name, `null` where there is none. */
export function tensors(file) {
  const length = Number(new DataView(file).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(file, 8, length)));
  return (name) => {
    const entry = header[name];
    if (!entry) return null;
    const [start, end] = entry.data_offsets.map((offset) => 8 + length + offset);
    return { data: DECODED[entry.dtype](file.slice(start, end)), shape: entry.shape };
  };
}
