// Starts the page and connects its state to its parts.

import * as api from "./api.js";
import { Comparison } from "./compare.js";
import { Controls } from "./controls.js";
import { Dial } from "./dial.js";
import { byId, h, setChildren } from "./dom.js";
import { examplesOf } from "./examples.js";
import { download, json, png, svgText } from "./export.js";
import { Grid } from "./grid.js";
import { inspect } from "./inspector.js";
import { setPalette } from "./palette.js";
import { annotate } from "./puzzle.js";
import { defaultRule, isRunnable, offeredRules } from "./rules.js";
import { scoreDefaults, Scorer, scoreRequest } from "./scorer.js";
import { scaled, textOf } from "./spelling.js";
import { address, fromFragment, set, state, syncAddress, watch } from "./state.js";
import { sentence, summarise } from "./summary.js";
import { Editor } from "./text.js";
import { startTheme } from "./theme.js";
import { startTips } from "./tips.js";

let model = null;
let scores = null; // the /score answer for rule A
let hovered = null; // slot under the pointer
let firstVisit = false; // true until the first scores if the address held no text

const editor = new Editor(byId("text"), byId("mirror"), {
  onEdit: (text) => set({ text, ids: null, forced: forcedBeforeEdit(text) }),
  onHover: hover,
  onSelect: (slot) => set({ selected: slot }),
});
const grid = new Grid(byId("grid-a"), { name: "a", onHover: hover, onSelect: select });
const dial = new Dial(byId("dial-a"), { name: "A", onChange: (rule) => set({ a: rule }) });
const scorer = new Scorer({ onScores: show, onFailure: notice });
const comparison = new Comparison({ onHover: hover, onSelect: select, notice, first: () => scores, onDraw: drawInspector });
const controls = new Controls({ notice, onProgress: showProgress, onEnd: endGeneration, tokens: currentTokens });

/** Returns the forced depths of the tokens before an edit; later slots may now hold other tokens. */
function forcedBeforeEdit(text) {
  const old = editor.textBeforeEdit;
  let same = 0;
  while (same < Math.min(old.length, text.length) && old[same] === text[same]) same += 1;
  let [end, slot] = [0, 0];
  const tokens = scores?.tokens ?? [];
  while (slot < tokens.length && end + tokens[slot].text.length <= same) end += tokens[slot++].text.length;
  return Object.fromEntries(Object.entries(state.forced).filter(([forced]) => Number(forced) < slot));
}

/** Shows an error and, if the page retries, in how many seconds; `null` hides the last error. */
function notice(failure, wait) {
  const line = byId("notice");
  line.hidden = !failure;
  const retry = wait ? ` Trying again in ${Math.ceil(wait)} s.` : "";
  line.textContent = failure ? failure.message.replace(/[.!?]?$/, (end) => end || ".") + retry : "";
  // A text that is too long is not scored: the numbers are those of the previous text.
  byId("work").classList.toggle("stale", Boolean(failure?.tokens));
  if (failure?.tokens) showCount(failure.tokens);
}

/** Shows how many of the model's positions the text takes. */
function showCount(tokens) {
  byId("count").textContent = model.positions ? `${tokens} / ${model.positions} tokens` : `${tokens} tokens`;
  byId("count").classList.toggle("over", tokens > model.positions);
}

function hover(slot) {
  if (slot === hovered) return;
  hovered = slot;
  for (const view of [editor.spans, grid, comparison]) view.highlight(slot, "hover");
  drawInspector();
}

function select(slot) {
  set({ selected: slot });
  editor.reveal(slot);
  grid.reveal();
  comparison.reveal();
}

function drawInspector() {
  if (!model) return;
  const slot = hovered ?? state.selected;
  const rule = scores?.policy ?? state.a;
  const other = comparison.shown()?.scores ?? null;
  const actions = { force, continueFrom, replace, close: () => set({ selected: null }) };
  inspect(byId("inspector"), { scores, other, slot, maxDepth: model.iterations, halts: model.halts, rule, forced: state.forced, actions });
}

function draw() {
  const maxDepth = model.iterations;
  if (scores) editor.show(scores.tokens, maxDepth, (slot) => ({ forced: state.forced[slot] }));
  grid.show(scores?.tokens ?? [], maxDepth);
  grid.highlight(state.selected, "selected");
  editor.spans.highlight(state.selected, "selected");
  showCount(scores?.tokens.length ?? 0);
  drawInspector();
}

/** Shows a `/score` answer for the text on the page. */
function show(answer, detailed) {
  // Keeps the loss at full depth until the next detailed answer, so that it does not flicker.
  if (!detailed && scores?.full_loss !== undefined && answer.loss === scores.loss) answer.full_loss = scores.full_loss;
  scores = annotate(answer, model);
  // Generated token ids define the text: the last tokens may complete a character that was unfinished until now.
  if (state.ids) set({ text: scores.tokens.map((token) => token.text).join("") });
  draw();
  summarise(byId("summary-a"), scores, model.iterations);
  comparison.draw();
  byId("spoken").textContent = sentence(scores, model.iterations);
  if (firstVisit) selectDeepest();
  firstVisit = false;
  document.documentElement.dataset.shown = detailed ? "detailed" : "read";
}

function showProgress(generation) {
  const sheet = byId("text").closest(".sheet");
  // Keeps the end in view unless the visitor has scrolled up.
  const follows = generation.count <= 1 || sheet.scrollHeight - sheet.scrollTop - sheet.clientHeight < 60;
  scores = { ...scores, tokens: generation.tokens };
  editor.setText(generation.text);
  draw();
  if (follows) sheet.scrollTop = sheet.scrollHeight;
}

/** Makes prompt and generated tokens the new text and scores exactly these tokens. */
function endGeneration(generation) {
  const tokens = generation.textTokens;
  scores = { ...scores, tokens };
  editor.setText(generation.text);
  set({ text: generation.text, ids: tokens.map((token) => token.id), selected: state.selected });
  requestScores();
}

/** Returns the tokens of the current text, scored first if necessary. */
async function currentTokens() {
  const body = scoreRequest(state, state.a);
  if (scorer.answered === JSON.stringify(body) && scores) return scores.tokens;
  scores = await api.score(body);
  return scores.tokens;
}

function force(slot, depth) {
  const forced = { ...state.forced };
  if (depth) forced[slot] = depth;
  else delete forced[slot];
  set({ forced, selected: slot });
}

const continueFrom = (slot) => controls.generate({ keep: slot + 1 });
const replace = (slot, { id, text }) => controls.generate({ keep: slot + 1, add: { id, text: textOf(text) } });

function requestScores() {
  if (!model || controls.busy) return;
  if (state.text === "") {
    scores = null;
    scorer.request(null);
    notice(null);
    draw();
    summarise(byId("summary-a"), null, model.iterations);
    delete document.documentElement.dataset.shown;
  } else {
    delete document.documentElement.dataset.shown;
    scorer.request(scoreRequest(state, state.a));
  }
  comparison.requestScores();
}

function changed(names) {
  if (!model) return;
  if (names.has("text") || names.has("ids")) editor.setText(state.text);
  if (names.has("a")) dial.show(state.a);
  comparison.changed(names);
  controls.changed(names);
  if (["text", "ids", "forced", "a", "seed"].some((name) => names.has(name))) requestScores();
  else if (names.has("b")) comparison.requestScores();
  if (names.has("selected")) {
    hover(null);
    editor.spans.highlight(state.selected, "selected");
    grid.highlight(state.selected, "selected");
    comparison.highlight(state.selected, "selected");
    drawInspector();
  }
}

/** On a wide screen, selects the deepest token; of several, the one whose next token had the highest loss. */
function selectDeepest() {
  if (!matchMedia("(min-width: 1081px)").matches || state.selected !== null || !scores) return;
  const rank = (slot) => 1000 * scores.tokens[slot].depth + (scores.tokens[slot + 1]?.nll ?? 0);
  const slots = scores.tokens.map((_, slot) => slot).slice(0, -1);
  if (slots.length) select(slots.reduce((best, slot) => (rank(slot) > rank(best) ? slot : best)));
}

/** Shows the state of a link, without rules that this model cannot run; forced depths are dropped if the model never halts. */
function openLink(link) {
  controls.stop();
  const a = isRunnable(link.a, model) ? link.a : defaultRule(offeredRules(model)[0], model);
  const b = isRunnable(link.b, model) ? link.b : null;
  set({ ...link, forced: model.halts ? link.forced : {}, a, b });
}

function connectExport() {
  const current = () => ({ scores, model, rule: state.a, text: state.text, compared: comparison.shown() });
  const onClick = (id, action) => {
    byId(id).addEventListener("click", async () => {
      byId("export").open = false;
      if (scores) await action();
    });
  };
  onClick("export-svg", () => download("adaponder.svg", svgText(current()), "image/svg+xml"));
  onClick("export-png", async () => download("adaponder.png", await png(current()), "image/png"));
  onClick("export-json", () => download("adaponder.json", json(current()), "application/json"));
  onClick("copy-link", async () => {
    try {
      await navigator.clipboard.writeText(address());
      byId("spoken").textContent = "Link copied.";
    } catch {
      notice(new api.Failure("The browser did not allow copying; copy the link from the address bar."));
    }
  });
  addEventListener("click", (event) => {
    if (!byId("export").contains(event.target)) byId("export").open = false;
  });
}

/** Creates a button for each example; each click shows its next text. */
function showExamples() {
  const buttons = examplesOf(model).map(({ name, texts }) => {
    const showNext = () => {
      controls.stop();
      const text = texts[(texts.indexOf(state.text) + 1) % texts.length];
      set({ text, ids: null, forced: {}, selected: null });
    };
    return h("button", { type: "button", class: "example", onclick: showNext }, name);
  });
  setChildren(byId("examples"), buttons);
}

function showModel() {
  document.title = `${model.name} – AdaPonder`;
  byId("about").textContent = model.examples?.about ?? "";
  byId("about").hidden = !model.examples?.about;
  if (!model.halts) byId("lede").textContent = `This model reads every token ${model.iterations === 1 ? "once" : `${model.iterations} times`}. Type and look at its predictions.`;
  const reads = model.iterations === 1 ? "1 read" : `up to ${model.iterations} reads`;
  setChildren(byId("model"), h("strong", {}, model.name), ` ${scaled(model.parameters, " parameters")} · ${reads} per token`);
  for (const axis of [byId("axis"), byId("axis-b")]) {
    setChildren(axis, Array.from({ length: model.iterations }, (_, index) => h("span", {}, `${index + 1}×`)));
  }
}

async function start() {
  for (let tries = 0; ; tries += 1) {
    try {
      model = await api.model();
      break;
    } catch (failure) {
      const wait = failure.retryAfter === null ? null : Math.min(15, (failure.retryAfter ?? 2) * 1.5 ** tries);
      notice(failure, wait);
      if (wait === null) return;
      await new Promise((resolve) => setTimeout(resolve, 1000 * wait));
    }
  }
  notice(null);
  setPalette(model.iterations);
  showModel();
  showExamples();
  scoreDefaults.predictions = Boolean(model.examples?.answers);
  dial.open(model);
  comparison.open(model);
  controls.open(model);
  watch(changed);
  syncAddress(openLink);
  const link = fromFragment(location.hash);
  firstVisit = link === null;
  openLink(link ?? { ...state, text: examplesOf(model)[0].texts[0] });
  draw();
  document.documentElement.dataset.ready = "yes";
}

byId("privacy").textContent = api.PRIVACY;
startTheme(byId("theme"));
startTips();
connectExport();
start();
