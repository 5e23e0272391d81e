// Two small charts of one token: its gates against the threshold, and the loss after each iteration.

import { s } from "./dom.js";
import { figure, short } from "./spelling.js";

const WIDTH = 300;
const LEFT = 40;
const RIGHT = 12;

function frame(height, label, ...children) {
  return s("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label }, ...children);
}

const across = (index, count) => LEFT + 14 + (count === 1 ? 0 : (index * (WIDTH - LEFT - RIGHT - 28)) / (count - 1));

/** Of labels so many pixels wide at each place, every how many-th has room. */
const stride = (count, width) => Math.max(1, Math.ceil((width * (count - 1)) / (WIDTH - LEFT - RIGHT - 28)));

/** Names of the places below a chart, as many as have room. */
function places(count, width, height, name) {
  const step = stride(count, width);
  const all = Array.from({ length: count }, (_, index) => index);
  return all.filter((index) => index % step === 0).map((index) => s("text", { class: "tick", x: across(index, count), y: height - 6 }, name(index + 1)));
}

function ticks(values, y, text) {
  return values.flatMap((value) => [
    s("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
    s("text", { class: "tick end", x: LEFT - 6, y: y(value) + 3.5 }, text(value)),
  ]);
}

/** Gates after each iteration on a logarithmic axis; a token reads on where its gate reaches the threshold. */
export function gateChart(gates, thresholds, deepest) {
  const height = 118;
  const known = [...gates, ...thresholds].filter((value) => value > 0 && value <= 1);
  const lowest = Math.min(-2, Math.floor(Math.log10(Math.min(1, ...known)) + 1e-9));
  const floor = Math.max(-6, lowest);
  const y = (value) => 12 + ((height - 38) * Math.max(floor, Math.min(0, Math.log10(Math.max(value, 1e-12))))) / floor;
  const count = Math.max(1, deepest - 1);
  const decades = Array.from({ length: -floor + 1 }, (_, step) => 10 ** (floor + step));
  const drawn = decades.filter((_, index) => -floor <= 3 || (decades.length - 1 - index) % 2 === 0);
  const value = (gate, index) => {
    const left = count > 1 && index === count - 1;
    return s("text", { class: left ? "value before" : "value", x: across(index, count) + (left ? -9 : 9), y: y(gate) - 6 }, short(gate));
  };
  const said = gates.map((gate, index) => `after read ${index + 1}: ${short(gate)}`).join(", ");
  return frame(
    height,
    `Gates, ${said || "none was computed"}${thresholds.length ? `; threshold ${thresholds.map(short).join(", ")}` : ""}`,
    ...ticks(drawn, y, (value) => (value >= 0.01 ? String(value) : `1e−${Math.round(-Math.log10(value))}`)),
    ...thresholds.map((value, index) =>
      s("line", { class: "tau", x1: Math.max(LEFT, across(index, count) - 22), x2: across(index, count) + 22, y1: y(value), y2: y(value) }),
    ),
    ...places(count, 46, height, (read) => `after ${read}`),
    ...gates.flatMap((gate, index) => {
      const on = thresholds.length ? gate >= thresholds[index] : true;
      return [
        s("line", { class: "stem", x1: across(index, count), x2: across(index, count), y1: y(10 ** floor), y2: y(gate) }),
        s("circle", { class: on ? "dot" : "dot closed", cx: across(index, count), cy: y(gate), r: 5 }),
        // The last gate decided: its value is written, and those before it that have room; one may stand to its left.
        ...((gates.length - 1 - index) % stride(count, 108) ? [] : [value(gate, index)]),
      ];
    }),
  );
}

/** Loss of the next token after each iteration; the ring is full depth, every token read K times. */
export function lossChart(losses, full, deepest) {
  const height = 110;
  const known = full === null ? losses : [...losses, full];
  const most = Math.max(...known);
  const least = Math.min(...known);
  const room = Math.max(0.05, most - least);
  const y = (value) => 18 + ((height - 44) * (most - value)) / room;
  const points = losses.map((loss, index) => [across(index, deepest), y(loss)]);
  const said = losses.map((loss, index) => `after read ${index + 1}: ${figure(loss)}`).join(", ");
  const last = points.at(-1);
  const end = [across(deepest - 1, deepest), full === null ? 0 : y(full)];
  return frame(
    height,
    `Loss of the next token in nats, ${said}${full === null ? "" : `; at full depth ${figure(full)}`}`,
    s("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: y(least), y2: y(least) }),
    ...(room > 0.05 ? [s("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: y(most), y2: y(most) })] : []),
    s("text", { class: "tick end", x: LEFT - 6, y: y(least) + 3.5 }, figure(least)),
    ...(room > 0.05 ? [s("text", { class: "tick end", x: LEFT - 6, y: y(most) + 3.5 }, figure(most))] : []),
    ...places(deepest, 26, height, (read) => `${read}×`),
    ...(full !== null ? [s("line", { class: "ahead", x1: last[0], y1: last[1], x2: end[0], y2: end[1] })] : []),
    s("polyline", { class: "line", points: points.map((point) => point.join(",")).join(" ") }),
    ...points.map(([x, height_]) => s("circle", { class: "dot", cx: x, cy: height_, r: 4 })),
    ...(full !== null ? [s("circle", { class: "ring", cx: end[0], cy: end[1], r: 6.5 })] : []),
  );
}
