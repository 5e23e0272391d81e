// The page's state in one object, mirrored in the URL's fragment, which browsers never send to a server.

import { debounced } from "./dom.js";

const START = {
  text: "",
  ids: null, // token ids of the text if it was generated: encoding it again may give others
  forced: {}, // forced depths by slot
  a: null, // a rule, as in rules.js
  b: null, // a second rule to compare with
  difference: false, // colour text B by how its depths differ from A's
  selected: null, // slot of the token in the inspector
  temperature: 0.7,
  seed: 1,
  most: 64, // tokens to generate
};

export const state = { ...START };
const listeners = [];

/** Calls `listener(names)` after each change, with the set of fields that changed. */
export function watch(listener) {
  listeners.push(listener);
}

/** Sets fields, then calls each listener once if any of them changed. */
export function set(changes) {
  const changed = new Set();
  for (const [name, value] of Object.entries(changes)) {
    if (JSON.stringify(state[name]) === JSON.stringify(value)) continue;
    state[name] = value;
    changed.add(name);
  }
  if (changed.size) for (const listener of listeners) listener(changed);
}

const numbers = (text) => text.split(".").filter((part) => /^\d+$/.test(part)).map(Number);

/** Returns the state as a fragment, without `#`. */
function toFragment() {
  const fields = new URLSearchParams();
  fields.set("text", state.text);
  if (state.ids) fields.set("ids", state.ids.join("."));
  if (state.a) fields.set("a", state.a);
  if (state.b) fields.set("b", state.b);
  if (state.difference) fields.set("show", "difference");
  const forced = Object.entries(state.forced);
  if (forced.length) fields.set("forced", forced.map(([slot, depth]) => `${slot}-${depth}`).join("."));
  if (state.selected !== null) fields.set("token", state.selected);
  for (const name of ["temperature", "seed", "most"]) {
    if (state[name] !== START[name]) fields.set(name, state[name]);
  }
  return fields.toString();
}

/** Returns the state of a fragment, with defaults for missing fields; `null` if it holds no text. */
export function fromFragment(fragment) {
  const fields = new URLSearchParams(fragment.replace(/^#/, ""));
  if (!fields.has("text")) return null;
  const fragmentState = { ...START, forced: {}, text: fields.get("text").replace(/\r\n?/g, "\n") };
  const ids = numbers(fields.get("ids") ?? "");
  if (ids.length) fragmentState.ids = ids;
  fragmentState.a = fields.get("a");
  fragmentState.b = fields.get("b");
  fragmentState.difference = fields.get("show") === "difference";
  for (const pair of (fields.get("forced") ?? "").split(".")) {
    const parts = /^(\d+)-(\d+)$/.exec(pair);
    if (parts) fragmentState.forced[parts[1]] = Number(parts[2]);
  }
  if (/^\d+$/.test(fields.get("token") ?? "")) fragmentState.selected = Number(fields.get("token"));
  for (const name of ["temperature", "seed", "most"]) {
    const value = Number(fields.get(name) ?? NaN);
    if (fields.has(name) && Number.isFinite(value) && value >= 0) fragmentState[name] = value;
  }
  return fragmentState;
}

let lastWritten = "";

const writeFragment = debounced(() => {
  lastWritten = `#${toFragment()}`;
  history.replaceState(null, "", lastWritten);
}, 250);

/** Writes each state into the address bar; calls `onNavigate(state)` when the visitor follows another link to this page. */
export function syncAddress(onNavigate) {
  watch(writeFragment);
  addEventListener("hashchange", (event) => {
    // Not location.hash: the debounced write may have replaced it by now.
    const { hash } = new URL(event.newURL);
    if (hash === lastWritten) return;
    const navigated = fromFragment(hash);
    if (navigated) onNavigate(navigated);
  });
}

/** Returns a link to the current state. */
export function address() {
  return `${location.href.split("#")[0]}#${toFragment()}`;
}
