// Memory for floats, and the matrix product, which takes nearly all of the model's time. The product is WebAssembly with SIMD,
// assembled here from the instructions below, so there is no binary to trust; browsers without SIMD run plain JavaScript,
// about ten times slower.

const [I32, V128] = [0x7f, 0x7b];

/** Encodes an integer as LEB128: seven bits per byte, the lowest first. */
function leb(value, signed = false) {
  const bytes = [];
  for (;;) {
    const low = value & 0x7f;
    value = signed ? value >> 7 : value >>> 7;
    const last = signed ? (value === 0 && !(low & 0x40)) || (value === -1 && low & 0x40) : value === 0;
    bytes.push(last ? low : low | 0x80);
    if (last) return bytes;
  }
}

const list = (items) => [...leb(items.length), ...items.flat()];
const section = (number, bytes) => [number, ...leb(bytes.length), ...bytes];

// Instructions as bytes. Operands are bytes of instructions that leave one value on the stack.
const get = (local) => [0x20, ...leb(local)];
const set = (local, value) => [...value, 0x21, ...leb(local)];
const constant = (value) => [0x41, ...leb(value, true)];
const add = (a, b) => [...a, ...b, 0x6a];
const load = (address, offset) => [...address, 0xfd, 0x00, 2, ...leb(offset)];
const loadSplat = (address) => [...address, 0xfd, 0x09, 2, 0];
const store = (address, offset, value) => [...address, ...value, 0xfd, 0x0b, 2, ...leb(offset)];
const addFloats = (a, b) => [...a, ...b, 0xfd, ...leb(228)];
const multiplyFloats = (a, b) => [...a, ...b, 0xfd, ...leb(230)];
const zeros = [0xfd, 0x0c, ...new Array(16).fill(0)];
const when = (condition, body) => [...condition, 0x04, 0x40, ...body, 0x0b];
/** Runs `body` once, and repeats it while `condition` is true. */
const loop = (body, condition) => [0x03, 0x40, ...body, ...condition, 0x0d, 0, 0x0b];
const atLeast = (a, value) => [...a, ...constant(value), 0x4e];

/**
 * Assembles a module with the function `product(out, outRow, a, aRow, b, bRow, bPanel, n, k, m)`. It computes `out = a @ b` for
 * `a [n, k]` and `b [k, m]`, which is stored in panels of 16 columns. Addresses are in bytes, and so are the strides: of rows of
 * `out`, `a` and `b`, and of panels of `b`. `out` must have room for whole panels.
 */
function assemble() {
  const [out, outRow, a, aRow, b, bRow, bPanel, n, k, m] = Array.from({ length: 10 }, (_, index) => index);
  const [rowsLeft, aTile, outTile, pa, pb, kLeft] = Array.from({ length: 6 }, (_, index) => 10 + index);
  // Vector locals: sums of 2 rows by 4 vectors, 4 vectors of a row of b, and a broadcast element of a.
  const sum = (row, part) => 16 + 4 * row + part;
  const [bVector, aElement] = [24, 28];
  const advance = (local, by) => set(local, add(get(local), by));

  /** Computes a tile of 1 or 2 rows by 16 columns, summing over k in registers. */
  const tile = (rows) => {
    const forEachVector = (make) => Array.from({ length: rows }, (_, row) => [0, 1, 2, 3].map((part) => make(row, part))).flat(2);
    const rowAddress = (base, stride, row) => (row ? add(get(base), get(stride)) : get(base));
    return [
      ...forEachVector((row, part) => set(sum(row, part), zeros)),
      ...set(pa, get(aTile)),
      ...set(pb, get(b)),
      ...set(kLeft, get(k)),
      ...loop(
        [
          ...[0, 1, 2, 3].flatMap((part) => set(bVector + part, load(get(pb), 16 * part))),
          ...Array.from({ length: rows }, (_, row) => [
            ...set(aElement, loadSplat(rowAddress(pa, aRow, row))),
            ...[0, 1, 2, 3].flatMap((part) =>
              set(sum(row, part), addFloats(get(sum(row, part)), multiplyFloats(get(aElement), get(bVector + part)))),
            ),
          ]).flat(),
          ...advance(pa, constant(4)),
          ...advance(pb, get(bRow)),
          ...advance(kLeft, constant(-1)),
        ],
        get(kLeft),
      ),
      ...forEachVector((row, part) => store(rowAddress(outTile, outRow, row), 16 * part, get(sum(row, part)))),
      ...Array.from({ length: rows }, () => [...advance(aTile, get(aRow)), ...advance(outTile, get(outRow)), ...advance(rowsLeft, constant(-1))]).flat(),
    ];
  };
  const code = loop(
    [
      ...set(rowsLeft, get(n)),
      ...set(aTile, get(a)),
      ...set(outTile, get(out)),
      ...when(atLeast(get(rowsLeft), 2), loop(tile(2), atLeast(get(rowsLeft), 2))),
      ...when(get(rowsLeft), tile(1)),
      ...advance(b, get(bPanel)),
      ...advance(out, constant(64)),
      ...advance(m, constant(-16)),
    ],
    atLeast(get(m), 1),
  );
  const body = [...list([[6, I32], [13, V128]]), ...code, 0x0b];
  const name = (text) => list([...new TextEncoder().encode(text)].map((byte) => [byte]));
  return new Uint8Array([
    ...[0x00, 0x61, 0x73, 0x6d, 1, 0, 0, 0],
    ...section(1, list([[0x60, ...list(new Array(10).fill([I32])), 0]])),
    ...section(2, list([[...name("e"), ...name("m"), 0x02, 0x00, ...leb(1)]])),
    ...section(3, list([[0]])),
    ...section(7, list([[...name("product"), 0x00, 0]])),
    ...section(10, list([[...leb(body.length), ...body]])),
  ]);
}

/** Returns `product` in plain JavaScript, with the same arguments, on an array of floats. */
function plainProduct(floats) {
  return (out, outRow, a, aRow, b, bRow, bPanel, n, k, m) => {
    for (let panel = 0; panel * 16 < m; panel += 1) {
      for (let row = 0; row < n; row += 1) {
        for (let column = 0; column < 16; column += 1) {
          let sum = 0;
          let [p, q] = [(a + row * aRow) / 4, (b + panel * bPanel) / 4 + column];
          for (let x = 0; x < k; x += 1, p += 1, q += bRow / 4) sum += floats[p] * floats[q];
          floats[(out + row * outRow) / 4 + panel * 16 + column] = sum;
        }
      }
    }
  };
}

/** One growing memory of floats. Methods take and return indices of floats; `product` calls the function that `assemble` builds. */
export class Memory {
  constructor() {
    this.used = 16;
    this.memory = new WebAssembly.Memory({ initial: 16 });
    this.floats = new Float32Array(this.memory.buffer);
    const code = assemble();
    if (WebAssembly.validate(code)) this.run = new WebAssembly.Instance(new WebAssembly.Module(code), { e: { m: this.memory } }).exports.product;
  }

  /** Reserves zeroed floats; returns the index of the first. */
  reserve(count) {
    const start = this.used;
    this.used += (count + 15) & ~15;
    const missing = 4 * (this.used + 64) - this.memory.buffer.byteLength;
    if (missing > 0) {
      this.memory.grow(Math.ceil(missing / 65536));
      this.floats = new Float32Array(this.memory.buffer);
    }
    return start;
  }

  product(out, outRow, a, aRow, b, bRow, bPanel, n, k, m) {
    const run = this.run ?? plainProduct(this.floats);
    run(4 * out, 4 * outRow, 4 * a, 4 * aRow, 4 * b, 4 * bRow, 4 * bPanel, n, k, m);
  }

  /** Stores a linear layer's weight `[m, k]` in panels of 16 rows; returns its index. */
  pack(matrix, m, k) {
    const start = this.reserve(Math.ceil(m / 16) * 16 * k);
    for (let row = 0; row < m; row += 1) {
      const panel = start + (row >> 4) * 16 * k + (row & 15);
      for (let x = 0; x < k; x += 1) this.floats[panel + 16 * x] = matrix[row * k + x];
    }
    return start;
  }
}
