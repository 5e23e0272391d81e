// Checks the model's answers to puzzles. A hops puzzle is steps `x y .`, then `|`, then questions `x y`, where y is the end
// of the chain of steps that starts at x.

/** Returns the questions of a hops puzzle, `{slot, hops, answer}`; `slot` is the answer's index, maybe after the last word. */
function questions(words) {
  const bar = words.indexOf("|");
  const result = [];
  const steps = new Map();
  for (let index = 0; index + 2 < bar; index += 3) if (words[index + 2] === ".") steps.set(words[index], words[index + 1]);
  for (let slot = bar + 2; bar > 0 && slot <= words.length; slot += 2) {
    let [word, hops] = [words[slot - 1], 0];
    while (steps.has(word) && hops < steps.size) [word, hops] = [steps.get(word), hops + 1];
    if (hops && !steps.has(word)) result.push({ slot, hops, answer: word });
  }
  return result;
}

/** Adds to a `/score` answer which words are unknown and, for a model of puzzles, which answers are right; returns it. */
export function annotate(scores, model) {
  for (const token of scores.tokens) if (token.id === model.unknown) token.unknown = true;
  if (model.examples?.answers === "hops") gradeAnswers(scores);
  return scores;
}

/**
 * Gives the token of each answer a `verdict`, the token before it a `question`, and `scores` the field `answers`: the number of
 * the model's answers, the number of right ones, and the mean loss of the answers in the text.
 */
function gradeAnswers(scores) {
  const { tokens } = scores;
  const losses = [];
  let [right, count] = [0, 0];
  for (const { slot, hops, answer } of questions(tokens.map((token) => token.text.trim()))) {
    const predicted = tokens[slot - 1].iteration_top?.at(-1)[0].text.trim();
    if (predicted === undefined) continue;
    tokens[slot - 1].question = { hops, answer, predicted };
    count += 1;
    if (predicted === answer) right += 1;
    if (!tokens[slot]) continue;
    tokens[slot].verdict = predicted === answer ? "right" : "wrong";
    losses.push(tokens[slot].nll);
  }
  if (count) scores.answers = { right, count, loss: losses.length ? losses.reduce((a, b) => a + b) / losses.length : null };
}
