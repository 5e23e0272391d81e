// Exports the page: a drawing (SVG, PNG) of the coloured text with its legend and grid, or all numbers (JSON).

import { h, s } from "./dom.js";
import { colours, isDark, mark } from "./palette.js";
import { describe } from "./rules.js";
import { figure, parts, percent } from "./spelling.js";
import { histogram } from "./summary.js";

const LETTER = 8.4; // width of a 14 px monospace character
const LINE = 24; // px
const COLUMNS = 88; // characters per line
const MARGIN = 28;
const CELL = 12;

/** Breaks tokens into lines; returns the number of `lines` and `result`, boxes `{text, line, column, depth}` within one line. */
function boxes(tokens) {
  const result = [];
  let [line, column] = [0, 0];
  for (const token of tokens) {
    for (const part of parts(token.text)) {
      const letters = [...(part.end ? "↵" : part.name ? `‹${part.name}›` : part.text.replaceAll("\t", "    "))];
      while (letters.length) {
        if (column >= COLUMNS) [line, column] = [line + 1, 0];
        const piece = letters.splice(0, COLUMNS - column).join("").toWellFormed();
        result.push({ text: piece, line, column, depth: token.depth });
        column += [...piece].length;
      }
      if (part.end) [line, column] = [line + 1, 0];
    }
  }
  return { result, lines: line + (column ? 1 : 0) };
}

/** Returns the page's current colours without CSS variables, which an SVG file cannot resolve. */
function themeColours() {
  const style = getComputedStyle(document.documentElement);
  const probe = document.body.appendChild(h("span", { hidden: true }));
  const colour = (name) => {
    probe.style.color = style.getPropertyValue(name);
    return getComputedStyle(probe).color;
  };
  const resolved = { paper: colour("--paper"), ink: colour("--ink"), quiet: colour("--quiet"), line: colour("--line"), deep: colour("--deep") };
  probe.remove();
  return resolved;
}

function legend(tokens, maxDepth, shades, look, y) {
  return histogram(tokens, maxDepth).flatMap((count, index) => [
    s("rect", { x: MARGIN + index * 92, y, width: 26, height: 18, rx: 3, fill: shades[index] }),
    s("text", { x: MARGIN + index * 92 + 13, y: y + 13, fill: look.ink, "text-anchor": "middle", "font-size": 11 }, `${index + 1}×`),
    s("text", { x: MARGIN + index * 92 + 34, y: y + 13, fill: look.quiet, "font-size": 12 }, String(count)),
  ]);
}

function columns(tokens, maxDepth, shades, look, y, width) {
  const perRow = Math.floor((width - 2 * MARGIN) / CELL);
  const tall = (maxDepth + 1.5) * CELL;
  return tokens.flatMap((token, index) => {
    const x = MARGIN + (index % perRow) * CELL;
    const bottom = y + Math.floor(index / perRow) * tall + maxDepth * CELL;
    return Array.from({ length: maxDepth }, (_, read) =>
      s("rect", {
        x: x + 0.5,
        y: bottom - (read + 1) * CELL + 0.5,
        width: CELL - 1,
        height: CELL - 1,
        fill: read < token.depth ? shades[read] : "none",
        stroke: read < token.depth ? "none" : look.line,
      }),
    );
  });
}

/** Draws the scored text as an SVG element. */
export function drawing({ scores, model, rule }) {
  const maxDepth = model.iterations;
  const shades = colours(maxDepth, isDark());
  const look = themeColours();
  const { result: textBoxes, lines } = boxes(scores.tokens);
  const width = Math.ceil(COLUMNS * LETTER + 2 * MARGIN);
  const top = 86;
  const below = top + lines * LINE + 24;
  const rows = Math.ceil(scores.tokens.length / Math.floor((width - 2 * MARGIN) / CELL));
  const height = Math.ceil(below + 44 + rows * (maxDepth + 1.5) * CELL + MARGIN);
  const { name, sentence } = describe(rule);
  const facts = `${model.name} · ${name}: ${sentence} · mean depth ${figure(scores.mean_depth)} of ${maxDepth} · loss ${figure(scores.loss, 3)}`;
  const saving = `${scores.tokens.length} tokens, ${percent(1 - scores.usage.flops / scores.usage.flops_full_depth)} of FLOPs saved`;
  const sans = "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif";
  return s(
    "svg",
    { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`, "font-family": sans },
    s("rect", { width, height, fill: look.paper }),
    s("text", { x: MARGIN, y: 40, fill: look.ink, "font-size": 18, "font-weight": 600 }, "AdaPonder"),
    s("text", { x: MARGIN, y: 62, fill: look.quiet, "font-size": 12 }, facts),
    ...textBoxes.flatMap(({ text, line, column, depth }) => {
      const [x, y, wide] = [MARGIN + column * LETTER, top + line * LINE, [...text].length * LETTER];
      const thick = depth ? mark(depth, maxDepth) : 0;
      return [
        s("rect", { x, y, width: wide, height: LINE - 4, rx: 2, fill: depth ? shades[depth - 1] : "none" }),
        ...(thick ? [s("rect", { x, y: y + LINE - 4 - thick, width: wide, height: thick, fill: look.deep })] : []),
      ];
    }),
    ...textBoxes.map(({ text, line, column }) =>
      s("text", { x: MARGIN + column * LETTER, y: top + line * LINE + 15, fill: look.ink, "font-size": 14, "font-family": "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace", textLength: [...text].length * LETTER, lengthAdjust: "spacingAndGlyphs", "xml:space": "preserve" }, text),
    ),
    ...legend(scores.tokens, maxDepth, shades, look, below),
    s("text", { x: width - MARGIN, y: below + 13, fill: look.quiet, "font-size": 12, "text-anchor": "end" }, saving),
    ...columns(scores.tokens, maxDepth, shades, look, below + 40, width),
  );
}

/** Returns the drawing as an SVG file. */
export const svgText = (current) => `${new XMLSerializer().serializeToString(drawing(current))}\n`;

/** Returns the drawing as a PNG at twice its size. */
export async function png(current) {
  const element = drawing(current);
  const [width, height] = [Number(element.getAttribute("width")), Number(element.getAttribute("height"))];
  const url = URL.createObjectURL(new Blob([svgText(current)], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    image.src = url;
    await image.decode();
    const canvas = h("canvas", { width: 2 * width, height: 2 * height });
    canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
    return await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  } finally {
    URL.revokeObjectURL(url);
  }
}

/** Returns the text, the model's facts and the scores of both rules as a JSON file. */
export function json({ scores, model, rule, compared, text }) {
  const side = ({ rule: line, scores: answer }) => ({ rule: line, ...answer });
  return `${JSON.stringify({ text, model, a: side({ rule, scores }), b: compared && side(compared) }, null, 1)}\n`;
}

/** Downloads content as a file. */
export function download(name, content, type) {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
