// The page: state on one side, parts on the other, and what leads from one to the other.

import * as api from "./api.js";
import { Comparison } from "./compare.js";
import { Dial } from "./dial.js";
import { byId, h, put } from "./dom.js";
import { examplesOf } from "./examples.js";
import { json, offer, png, svgText } from "./export.js";
import { Grid } from "./grid.js";
import { inspect } from "./inspector.js";
import { paint } from "./palette.js";
import { marked } from "./puzzle.js";
import { always, question, Reader } from "./reader.js";
import { offered, runs, usual } from "./rules.js";
import { scaled, written } from "./spelling.js";
import { address, fromFragment, keepAddress, set, state, watch } from "./state.js";
import { sentence, summarise } from "./summary.js";
import { Editor } from "./text.js";
import { startTheme } from "./theme.js";
import { startTips } from "./tips.js";
import { Desk } from "./desk.js";

let model = null;
let reading = null; // of rule A
let hovered = null;
let fresh = false; // nothing was shown yet, and no address said what to show

const editor = new Editor(byId("text"), byId("mirror"), {
  edited: (text) => set({ text, ids: null, forced: kept(text) }),
  hovered: hover,
  selected: (slot) => set({ selected: slot }),
});
const grid = new Grid(byId("grid-a"), { name: "a", hovered: hover, selected: choose });
const dial = new Dial(byId("dial-a"), { name: "A", turnedTo: (rule) => set({ a: rule }) });
const reader = new Reader({ shown, failed: notice });
const comparison = new Comparison({ hovered: hover, selected: choose, notice, first: () => reading, drawn: drawInspector });
const desk = new Desk({ notice, grown: showWriting, ended: endWriting, tokens: freshTokens });

/** Forced depths of tokens that an edit leaves in place: those before it. */
function kept(text) {
  const old = editor.before;
  let same = 0;
  while (same < Math.min(old.length, text.length) && old[same] === text[same]) same += 1;
  let [place, slot] = [0, 0];
  const tokens = reading?.tokens ?? [];
  while (slot < tokens.length && place + tokens[slot].text.length <= same) place += tokens[slot++].text.length;
  return Object.fromEntries(Object.entries(state.forced).filter(([forced]) => Number(forced) < slot));
}

function notice(failure, wait) {
  const line = byId("notice");
  line.hidden = !failure;
  const then = wait ? ` Trying again in ${Math.ceil(wait)} s.` : "";
  line.textContent = failure ? failure.message.replace(/[.!?]?$/, (end) => end || ".") + then : "";
  line.classList.toggle("waits", Boolean(wait));
  // The numbers below are those of the text before.
  byId("work").classList.toggle("stale", Boolean(failure?.tokens));
  if (failure?.tokens) count(failure.tokens);
}

/** Shows how many tokens the text has, of as many as the model has positions for. */
function count(tokens) {
  byId("count").textContent = model.positions ? `${tokens} / ${model.positions} tokens` : `${tokens} tokens`;
  byId("count").classList.toggle("over", tokens > model.positions);
}

function hover(slot) {
  if (slot === hovered) return;
  hovered = slot;
  for (const part of [editor.spans, grid, comparison]) part.light(slot, "hover");
  drawInspector();
}

function choose(slot) {
  set({ selected: slot });
  editor.reveal(slot);
  grid.reveal();
  comparison.reveal();
}

function drawInspector() {
  if (!model) return;
  const slot = hovered ?? state.selected;
  const rule = reading?.policy ?? state.a;
  const other = comparison.shown()?.reading ?? null;
  const hands = { force, goOn, replace, close: () => set({ selected: null }) };
  inspect(byId("inspector"), { reading, other, slot, deepest: model.iterations, halts: model.halts, rule, forced: state.forced, hands });
}

const extra = (slot) => ({ forced: state.forced[slot], written: reading.tokens[slot].written });

function draw() {
  const deepest = model.iterations;
  if (reading) editor.show(reading.tokens, deepest, extra);
  grid.show(reading?.tokens ?? [], deepest);
  grid.light(state.selected, "selected");
  editor.spans.light(state.selected, "selected");
  count(reading?.tokens.length ?? 0);
  byId("work").classList.toggle("bare", !reading);
  drawInspector();
}

/** An answer about the text on the page. */
function shown(answer, detailed) {
  // What the detailed answer adds to the same tokens stays until its successor is there.
  if (!detailed && reading?.full_loss !== undefined && answer.loss === reading.loss) answer.full_loss = reading.full_loss;
  reading = marked(answer, model);
  // Exact tokens say what the text is: writing may have completed a character that it had left unfinished before.
  if (state.ids) set({ text: reading.tokens.map((token) => token.text).join("") });
  draw();
  summarise(byId("summary-a"), reading, model.iterations);
  comparison.draw();
  byId("spoken").textContent = sentence(reading, model.iterations);
  if (fresh) firstLook();
  fresh = false;
  document.documentElement.dataset.shown = detailed ? "detailed" : "read";
}

function showWriting(writing) {
  const sheet = byId("text").closest(".sheet");
  // The end stays in view, unless somebody has scrolled up to read.
  const follows = writing.made <= 1 || sheet.scrollHeight - sheet.scrollTop - sheet.clientHeight < 60;
  reading = { ...reading, tokens: writing.tokens };
  editor.write(writing.text);
  draw();
  if (follows) sheet.scrollTop = sheet.scrollHeight;
}

/** The text with all that was written becomes the text; its exact tokens are kept and read again. */
function endWriting(writing) {
  const tokens = writing.kept;
  reading = { ...reading, tokens };
  editor.write(writing.text);
  set({ text: writing.text, ids: tokens.map((token) => token.id), selected: state.selected });
  ask();
}

/** The tokens of the text as it stands. */
async function freshTokens() {
  const body = question(state, state.a);
  if (reader.answered === JSON.stringify(body) && reading) return reading.tokens;
  reading = await api.score(body);
  return reading.tokens;
}

function force(slot, depth) {
  const forced = { ...state.forced };
  if (depth) forced[slot] = depth;
  else delete forced[slot];
  set({ forced, selected: slot });
}

const goOn = (slot) => desk.write({ keep: slot + 1 });
const replace = (slot, guess) => desk.write({ keep: slot + 1, add: { id: guess.id, text: written(guess.text), written: true } });

function ask() {
  if (!model || desk.busy) return;
  if (state.text === "") {
    reading = null;
    reader.want(null);
    notice(null);
    draw();
    summarise(byId("summary-a"), null, model.iterations);
    delete document.documentElement.dataset.shown;
  } else {
    delete document.documentElement.dataset.shown;
    reader.want(question(state, state.a));
  }
  comparison.ask();
}

function changed(names) {
  if (!model) return;
  if (names.has("text") || names.has("ids")) editor.write(state.text);
  if (names.has("a")) dial.show(state.a);
  comparison.changed(names);
  desk.changed(names);
  if (["text", "ids", "forced", "a", "seed"].some((name) => names.has(name))) ask();
  else if (names.has("b")) comparison.ask();
  if (names.has("selected")) {
    hover(null);
    editor.spans.light(state.selected, "selected");
    grid.light(state.selected, "selected");
    comparison.light(state.selected, "selected");
    drawInspector();
  }
}

/** On a wide screen the page opens with a token to look at: the deepest, and of those the one that was hardest to follow. */
function firstLook() {
  if (!matchMedia("(min-width: 1081px)").matches || state.selected !== null || !reading) return;
  const rank = (slot) => 1000 * reading.tokens[slot].depth + (reading.tokens[slot + 1]?.nll ?? 0);
  const slots = reading.tokens.map((_, slot) => slot).slice(0, -1);
  if (slots.length) choose(slots.reduce((best, slot) => (rank(slot) > rank(best) ? slot : best)));
}

/** Goes to what an address says; rules that this model cannot run are replaced by its own, depths are left out. */
function arrive(found) {
  desk.stop();
  const own = usual(offered(model)[0], model);
  const forced = model.halts ? found.forced : {};
  set({ ...found, forced, a: runs(found.a, model) ? found.a : own, b: runs(found.b, model) ? found.b : null });
}

function wireTools() {
  const subject = () => ({ reading, model, rule: state.a, text: state.text, compared: comparison.shown() });
  const keep = (id, make) => {
    byId(id).addEventListener("click", async () => {
      byId("keep").open = false;
      if (reading) await make();
    });
  };
  keep("export-svg", () => offer("adaponder.svg", svgText(subject()), "image/svg+xml"));
  keep("export-png", async () => offer("adaponder.png", await png(subject()), "image/png"));
  keep("export-json", () => offer("adaponder.json", json(subject()), "application/json"));
  keep("copy-link", async () => {
    try {
      await navigator.clipboard.writeText(address());
      byId("spoken").textContent = "The link is copied.";
    } catch {
      notice(new api.Failure("The browser did not allow copying; the link is in the address bar."));
    }
  });
  addEventListener("click", (event) => {
    if (!byId("keep").contains(event.target)) byId("keep").open = false;
  });
}

/** A button for each example; one of several texts shows the next of them. */
function offerExamples() {
  const buttons = examplesOf(model).map(({ name, texts }) => {
    const show = () => {
      desk.stop();
      const text = texts[(texts.indexOf(state.text) + 1) % texts.length];
      set({ text, ids: null, forced: {}, selected: null });
    };
    return h("button", { type: "button", class: "example", onclick: show }, name);
  });
  put(byId("examples"), buttons);
}

function introduce() {
  document.title = `${model.name} – AdaPonder`;
  byId("about").textContent = model.examples?.about ?? "";
  byId("about").hidden = !model.examples?.about;
  if (!model.halts) byId("lede").textContent = `This one reads every token ${model.iterations === 1 ? "once" : `${model.iterations} times`}. Type, and look at its predictions.`;
  const reads = model.iterations === 1 ? "1 read" : `up to ${model.iterations} reads`;
  put(byId("model"), h("strong", {}, model.name), ` ${scaled(model.parameters, " parameters")} · ${reads} per token`);
  for (const axis of [byId("axis"), byId("axis-b")]) {
    put(axis, Array.from({ length: model.iterations }, (_, index) => h("span", {}, `${index + 1}×`)));
  }
}

async function start() {
  for (let tries = 0; ; tries += 1) {
    try {
      model = await api.model();
      break;
    } catch (failure) {
      const wait = failure.again === null ? null : Math.min(15, (failure.again ?? 2) * 1.5 ** tries);
      notice(failure, wait);
      if (wait === null) return;
      await new Promise((resolve) => setTimeout(resolve, 1000 * wait));
    }
  }
  notice(null);
  paint(model.iterations);
  introduce();
  offerExamples();
  always.predictions = Boolean(model.examples?.answers);
  dial.open(model);
  comparison.open(model);
  desk.open(model);
  watch(changed);
  keepAddress(arrive);
  const own = usual(offered(model)[0], model);
  fresh = fromFragment(location.hash) === null;
  arrive(fromFragment(location.hash) ?? { ...state, text: examplesOf(model)[0].texts[0], a: own });
  draw();
  document.documentElement.dataset.ready = "yes";
}

byId("privacy").textContent = api.PRIVACY;
startTheme(byId("theme"));
startTips();
wireTools();
start();
