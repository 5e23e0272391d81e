// Colours of depths 1 … K: lightness is monotone in depth, and text is readable on every colour.

// OKLCH anchors (lightness, chroma, hue): from cream to coral on the light page, from slate to crimson on the dark one.
const LIGHT = [[0.962, 0.028, 95], [0.925, 0.08, 92], [0.865, 0.11, 76], [0.79, 0.128, 52], [0.715, 0.138, 32]];
const DARK = [[0.285, 0.02, 270], [0.335, 0.07, 288], [0.395, 0.108, 318], [0.455, 0.125, 355], [0.52, 0.128, 28]];

/** Converts OKLCH to OKLab. */
function toLab([lightness, chroma, hue]) {
  const angle = (hue * Math.PI) / 180;
  return [lightness, chroma * Math.cos(angle), chroma * Math.sin(angle)];
}

/** Converts OKLab to sRGB as `#rrggbb`; channels outside the gamut are clipped. */
function toHex([lightness, a, b]) {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  const byte = (x) => {
    const clipped = Math.min(1, Math.max(0, x));
    const gamma = clipped <= 0.0031308 ? 12.92 * clipped : 1.055 * clipped ** (1 / 2.4) - 0.055;
    return Math.round(255 * gamma).toString(16).padStart(2, "0");
  };
  return `#${linear.map(byte).join("")}`;
}

/** Returns `steps` colours, interpolated between the anchors in OKLab. */
function ramp(anchors, steps) {
  const labs = anchors.map(toLab);
  return Array.from({ length: steps }, (_, step) => {
    const position = steps === 1 ? 0 : (step * (labs.length - 1)) / (steps - 1);
    const low = Math.min(Math.floor(position), labs.length - 2);
    return toHex(labs[low].map((value, axis) => value + (labs[low + 1][axis] - value) * (position - low)));
  });
}

/** Returns the background colours of depths 1 … `maxDepth`, in hex. */
export function colours(maxDepth, dark) {
  return ramp(dark ? DARK : LIGHT, maxDepth);
}

/** Returns the height in pixels of the mark below a token, which shows depth without colour; 0 at depth 1. */
export function mark(depth, maxDepth) {
  return maxDepth === 1 ? 0 : Math.round((3 * (depth - 1) * 10) / (maxDepth - 1)) / 10;
}

/** Returns whether the page is dark now, by its own switch or the system's. */
export function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Sets the document's `--depth-N` for N = 1 … maxDepth, and `--ramp`, the gradient of a column of the grid. */
export function setPalette(maxDepth) {
  const root = document.documentElement.style;
  const light = colours(maxDepth, false);
  const dark = colours(maxDepth, true);
  const stops = [];
  light.forEach((colour, index) => {
    const depth = index + 1;
    root.setProperty(`--depth-${depth}`, `light-dark(${colour}, ${dark[index]})`);
    stops.push(`var(--depth-${depth}) ${(100 * index) / maxDepth}% ${(100 * depth) / maxDepth}%`);
  });
  root.setProperty("--iterations", maxDepth);
  root.setProperty("--ramp", `linear-gradient(to top, ${stops.join(", ")})`);
}

/** Gives an element the colour and mark of a depth; removes both if the depth is not known yet (0 or `null`). */
export function showDepth(element, depth, maxDepth) {
  const value = depth ? String(depth) : "";
  if ((element.dataset.depth ?? "") === value) return;
  if (!value) {
    delete element.dataset.depth;
    element.style.removeProperty("--depth-colour");
    element.style.removeProperty("--mark");
    return;
  }
  element.dataset.depth = value;
  element.style.setProperty("--depth-colour", `var(--depth-${depth})`);
  element.style.setProperty("--mark", `${mark(depth, maxDepth)}px`);
}
