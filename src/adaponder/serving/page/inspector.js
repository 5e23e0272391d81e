// Shows one token in detail: predictions, gates and losses after each iteration, and what full depth would change.

import { gateChart, lossChart } from "./charts.js";
import { h, setChildren } from "./dom.js";
import { showDepth } from "./palette.js";
import { thresholds } from "./rules.js";
import { figure, percent, spoken, visible } from "./spelling.js";

// How many predictions are shown.
const AFTER_LAST_READ = 5;
const AFTER_EARLIER_READS = 3;

function heading(token, slot, count, maxDepth, close) {
  const chip = h("span", { class: "chip" }, visible(token.text, 40));
  showDepth(chip, token.depth, maxDepth);
  const depth = token.depth ? `depth ${token.depth} of ${maxDepth}` : "not read yet";
  return h(
    "header",
    {},
    h("button", { type: "button", class: "close", "aria-label": "Close", onclick: close }, "×"),
    h("h2", {}, chip),
    h("p", { class: "facts" }, `token ${slot + 1} of ${count} · id ${token.id} · `, h("strong", {}, depth)),
  );
}

/** Returns a note with the probability that the model gave the token; `null` without a loss and for a puzzle's random part. */
function probabilityNote(token, puzzle) {
  if (token.nll === null || token.nll === undefined || (puzzle && !token.verdict)) return null;
  return h("p", { class: "quiet" }, `The model gave it ${finePercent(Math.exp(-token.nll))} (${figure(token.nll)} nats).`);
}

/** Returns a note with the model's answer to a puzzle's question, and whether it is right; `null` for other tokens. */
function answerNote({ question }) {
  if (!question) return null;
  const { hops, answer, predicted } = question;
  const verdict = predicted === answer ? "right" : `wrong: it is ${answer}`;
  return h("p", { class: "quiet" }, `This question takes ${hops} ${hops === 1 ? "hop" : "hops"}. The model answers ${predicted}, `, h("strong", {}, verdict), ".");
}

/** Returns a note about the same token under rule B of a comparison; `null` without a comparison. */
function comparisonNote(other, slot, maxDepth) {
  const token = other?.tokens[slot];
  if (!token) return null;
  const next = other.answers ? null : other.tokens[slot + 1];
  let result = next ? ` and the loss of the next token ${figure(next.nll)} nats` : "";
  if (token.question) result = ` and the answer ${token.question.predicted}, ${token.question.predicted === token.question.answer ? "right" : "wrong"}`;
  return h("p", { class: "quiet" }, `Under rule B its depth is ${token.depth} of ${maxDepth}${result}.`);
}

/** Formats a probability, with one decimal below 10 %. */
function finePercent(share) {
  if (share >= 0.1) return percent(share);
  return share >= 0.001 ? `${figure(100 * share, 1)} %` : "less than 0.1 %";
}

function gatesSection(token, rule, maxDepth) {
  if (!token.gates?.length || maxDepth < 2) return null;
  const taus = thresholds(rule, maxDepth - 1);
  let note = "This rule does not use the gates.";
  if (taus.length) note = "The token is read again while its gate is at or above the threshold τ, the dashed line.";
  else if (rule?.startsWith("budget")) note = "The calibrated thresholds of this budget decide.";
  return h(
    "section",
    {},
    h("h3", {}, "Gate after each read"),
    gateChart(token.gates, taus, maxDepth),
    h("p", { class: "quiet" }, note),
  );
}

function predictionsSection(token, next, replace) {
  if (!token.iteration_top?.length) return null;
  const last = token.iteration_top.length - 1;
  const shown = token.iteration_top.map((top, index) => top.slice(0, index === last ? AFTER_LAST_READ : AFTER_EARLIER_READS));
  const isFramed = next && shown.flat().some((guess) => guess.id === next.id);
  const rows = shown.map((top, index) =>
    h(
      "li",
      {},
      h("span", { class: "read" }, `${index + 1}×`),
      h(
        "span",
        { class: "guesses" },
        top.map((guess) => {
          const share = Math.exp(guess.logprob);
          const isNext = next && guess.id === next.id;
          return h(
            "button",
            {
              type: "button",
              class: isNext ? "guess true" : "guess",
              "--share": share,
              "data-id": guess.id,
              "aria-label": `${spoken(guess.text)}, ${finePercent(share)}${isNext ? ", this comes next" : ""}`,
              onclick: () => replace(guess),
            },
            h("span", { class: "word" }, visible(guess.text, 14)),
            h("span", { class: "odds" }, percent(share)),
          );
        }),
      ),
    ),
  );
  return h(
    "section",
    {},
    h("h3", {}, "Next-token predictions after each read"),
    h("ol", { class: "tops" }, rows),
    h("p", { class: "quiet" }, `${isFramed ? "The framed token comes next in the text. " : ""}Choose a token to continue from here with it.`),
  );
}

function lossSection(next, maxDepth) {
  const losses = next?.nll_by_iteration;
  if (!losses?.length) return null;
  const full = next.full_nll ?? null;
  let verdict = null;
  if (full !== null) {
    const difference = next.nll - full;
    const effect = `${difference >= 0 ? "lower" : "raise"} this loss by ${figure(Math.abs(difference))} nats`;
    verdict = `Full depth (all tokens read ${maxDepth}×) would ${Math.abs(difference) < 0.005 ? "not change this loss" : effect}.`;
  }
  return h(
    "section",
    {},
    h("h3", {}, "Loss of the next token after each read"),
    lossChart(losses, full, maxDepth),
    verdict && h("p", { class: "verdict" }, verdict),
  );
}

function buttons(slot, maxDepth, halts, forced, { force, continueFrom }) {
  const depths = Array.from({ length: maxDepth }, (_, index) => index + 1);
  const button = (depth, label) =>
    h(
      "button",
      { type: "button", "aria-pressed": String((forced ?? 0) === depth), "data-force": depth, onclick: () => force(slot, depth) },
      label,
    );
  return h(
    "section",
    { class: "actions" },
    halts && h("div", { class: "segments", role: "group", "aria-label": "Depth of this token" }, button(0, "By rule"), ...depths.map((depth) => button(depth, `${depth}×`))),
    h("button", { type: "button", class: "plain", id: "continue-here", onclick: () => continueFrom(slot) }, "Continue from here"),
  );
}

/** Draws the inspector of one slot; `actions` are the functions `force`, `continueFrom`, `replace` and `close`. */
export function inspect(element, { scores, other, slot, maxDepth, halts, rule, forced, actions }) {
  const token = scores?.tokens[slot];
  element.classList.toggle("idle", !token);
  if (!token) {
    setChildren(
      element,
      h("div", { class: "empty" }, h("h2", {}, "Inspect a token"), h("p", {}, "Point at a token or place the caret in it to see its predictions, gates and losses.")),
    );
    return;
  }
  const next = scores.tokens[slot + 1];
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset.force : undefined;
  setChildren(
    element,
    heading(token, slot, scores.tokens.length, maxDepth, actions.close),
    token.unknown && h("p", { class: "quiet" }, "The tokenizer does not know this word: the model sees the same token for all unknown words."),
    probabilityNote(token, scores.answers),
    answerNote(token),
    comparisonNote(other?.tokens.length === scores.tokens.length ? other : null, slot, maxDepth),
    buttons(slot, maxDepth, halts, forced[slot], actions),
    predictionsSection(token, next, (guess) => actions.replace(slot, guess)),
    gatesSection(token, rule, maxDepth),
    scores.answers && !token.question ? null : lossSection(next, maxDepth),
    token.iteration_top ? null : h("p", { class: "quiet later" }, "Predictions and the loss at full depth appear when you stop typing."),
  );
  if (focused !== undefined) element.querySelector(`[data-force="${focused}"]`)?.focus();
}
