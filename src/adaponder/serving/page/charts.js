// Two small charts for the inspector: a token's gates with their thresholds, and its losses, after each iteration.

import { s } from "./dom.js";
import { figure, short } from "./spelling.js";

const WIDTH = 300;
const LEFT = 40;
const RIGHT = 12;

function frame(height, label, ...children) {
  return s("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label }, ...children);
}

/** Returns the x coordinate of an iteration. */
const across = (index, count) => LEFT + 14 + (count === 1 ? 0 : (index * (WIDTH - LEFT - RIGHT - 28)) / (count - 1));

/** Returns how many iterations apart labels of this width must be, so that they do not overlap. */
const stride = (count, width) => Math.max(1, Math.ceil((width * (count - 1)) / (WIDTH - LEFT - RIGHT - 28)));

/** Labels iterations below a chart, as many as fit. */
function iterationLabels(count, height) {
  const step = stride(count, 26);
  const all = Array.from({ length: count }, (_, index) => index);
  return all.filter((index) => index % step === 0).map((index) => s("text", { class: "tick", x: across(index, count), y: height - 6 }, `${index + 1}×`));
}

function ticks(values, y, text) {
  return values.flatMap((value) => [
    s("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
    s("text", { class: "tick end", x: LEFT - 6, y: y(value) + 3.5 }, text(value)),
  ]);
}

/** Draws the gates on a logarithmic axis; a filled dot is at or above its threshold, so the token is read again. */
export function gateChart(gates, thresholds, maxDepth) {
  const height = 118;
  const positive = [...gates, ...thresholds].filter((value) => value > 0 && value <= 1);
  const lowest = Math.min(-2, Math.floor(Math.log10(Math.min(1, ...positive)) + 1e-9));
  const floor = Math.max(-6, lowest);
  const y = (value) => 12 + ((height - 38) * Math.max(floor, Math.min(0, Math.log10(Math.max(value, 1e-12))))) / floor;
  const count = Math.max(1, maxDepth - 1);
  const decades = Array.from({ length: -floor + 1 }, (_, step) => 10 ** (floor + step));
  const labelled = decades.filter((_, index) => -floor <= 3 || (decades.length - 1 - index) % 2 === 0);
  const label = (gate, index) => {
    const left = count > 1 && index === count - 1;
    return s("text", { class: left ? "value before" : "value", x: across(index, count) + (left ? -9 : 9), y: y(gate) - 6 }, short(gate));
  };
  const spoken = gates.map((gate, index) => `after read ${index + 1}: ${short(gate)}`).join(", ");
  return frame(
    height,
    `Gates, ${spoken || "none was computed"}${thresholds.length ? `; threshold ${thresholds.map(short).join(", ")}` : ""}`,
    ...ticks(labelled, y, (value) => (value >= 0.01 ? String(value) : `1e−${Math.round(-Math.log10(value))}`)),
    ...thresholds.map((value, index) =>
      s("line", { class: "tau", x1: Math.max(LEFT, across(index, count) - 22), x2: across(index, count) + 22, y1: y(value), y2: y(value) }),
    ),
    ...iterationLabels(count, height),
    ...gates.flatMap((gate, index) => {
      const open = thresholds.length ? gate >= thresholds[index] : true;
      return [
        s("line", { class: "stem", x1: across(index, count), x2: across(index, count), y1: y(10 ** floor), y2: y(gate) }),
        s("circle", { class: open ? "dot" : "dot closed", cx: across(index, count), cy: y(gate), r: 5 }),
        // The last gate is always labelled, earlier ones if there is room; at the right edge the label is left of its dot.
        ...((gates.length - 1 - index) % stride(count, 108) ? [] : [label(gate, index)]),
      ];
    }),
  );
}

/** Draws the loss of the next token after each iteration; a ring marks the loss with all tokens read K times. */
export function lossChart(losses, full, maxDepth) {
  const height = 110;
  const all = full === null ? losses : [...losses, full];
  const highest = Math.max(...all);
  const lowest = Math.min(...all);
  const range = Math.max(0.05, highest - lowest);
  const y = (value) => 18 + ((height - 44) * (highest - value)) / range;
  const points = losses.map((loss, index) => [across(index, maxDepth), y(loss)]);
  const spoken = losses.map((loss, index) => `after read ${index + 1}: ${figure(loss)}`).join(", ");
  const last = points.at(-1);
  const end = [across(maxDepth - 1, maxDepth), full === null ? 0 : y(full)];
  return frame(
    height,
    `Loss of the next token in nats, ${spoken}${full === null ? "" : `; at full depth ${figure(full)}`}`,
    ...ticks(range > 0.05 ? [lowest, highest] : [lowest], y, figure),
    ...iterationLabels(maxDepth, height),
    ...(full !== null ? [s("line", { class: "ahead", x1: last[0], y1: last[1], x2: end[0], y2: end[1] })] : []),
    s("polyline", { class: "line", points: points.map((point) => point.join(",")).join(" ") }),
    ...points.map(([cx, cy]) => s("circle", { class: "dot", cx, cy, r: 4 })),
    ...(full !== null ? [s("circle", { class: "ring", cx: end[0], cy: end[1], r: 6.5 })] : []),
  );
}
