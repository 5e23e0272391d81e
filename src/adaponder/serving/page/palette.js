// Colours of depths 1 … K: lightness changes in one direction with depth, and the page's ink is readable on each.

// OKLCH anchors (lightness, chroma, hue): on white paper from cream to coral, on dark paper from slate to crimson.
const LIGHT = [[0.962, 0.028, 95], [0.925, 0.08, 92], [0.865, 0.11, 76], [0.79, 0.128, 52], [0.715, 0.138, 32]];
const DARK = [[0.285, 0.02, 270], [0.335, 0.07, 288], [0.395, 0.108, 318], [0.455, 0.125, 355], [0.52, 0.128, 28]];

function toLab([lightness, chroma, hue]) {
  const angle = (hue * Math.PI) / 180;
  return [lightness, chroma * Math.cos(angle), chroma * Math.sin(angle)];
}

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

function ramp(anchors, steps) {
  const labs = anchors.map(toLab);
  return Array.from({ length: steps }, (_, step) => {
    const place = steps === 1 ? 0 : (step * (labs.length - 1)) / (steps - 1);
    const low = Math.min(Math.floor(place), labs.length - 2);
    return toHex(labs[low].map((value, axis) => value + (labs[low + 1][axis] - value) * (place - low)));
  });
}

/** Background colours of depths 1 … `deepest`, as hex. */
export function colours(deepest, dark) {
  return ramp(dark ? DARK : LIGHT, deepest);
}

/** Height in pixels of the mark below a token: none at depth 1, so that depth is told without colour too. */
export function mark(depth, deepest) {
  return deepest === 1 ? 0 : Math.round((3 * (depth - 1) * 10) / (deepest - 1)) / 10;
}

/** Whether the page is dark now, by its own switch or the system's. */
export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Gives the document `--depth-N` and `--mark-N` for N = 1 … deepest, and the ramp of one column of the grid. */
export function paint(deepest) {
  const root = document.documentElement.style;
  const light = colours(deepest, false);
  const dark = colours(deepest, true);
  const stops = [];
  light.forEach((colour, index) => {
    const depth = index + 1;
    root.setProperty(`--depth-${depth}`, `light-dark(${colour}, ${dark[index]})`);
    stops.push(`var(--depth-${depth}) ${(100 * index) / deepest}% ${(100 * depth) / deepest}%`);
  });
  root.setProperty("--iterations", deepest);
  root.setProperty("--ramp", `linear-gradient(to top, ${stops.join(", ")})`);
}

/** Gives an element the colour and mark of a depth; 0 or `null`: none known yet. */
export function wear(element, depth, deepest) {
  const worn = element.dataset.depth ?? "";
  const wanted = depth ? String(depth) : "";
  if (worn === wanted) return;
  if (!wanted) {
    delete element.dataset.depth;
    element.style.removeProperty("--own");
    element.style.removeProperty("--mark");
    return;
  }
  element.dataset.depth = wanted;
  element.style.setProperty("--own", `var(--depth-${depth})`);
  element.style.setProperty("--mark", `${mark(depth, deepest)}px`);
}
