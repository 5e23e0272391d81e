"""The hardest and the easiest tokens in context; the background colour of a word is its depth."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from rich.text import Text

from adaponder.analysis.figures.grid import busiest
from adaponder.analysis.figures.plate import times
from adaponder.analysis.figures.words import for_html, on_one_line, visible
from adaponder.analysis.trace import Trace
from adaponder.terminal import by_depth

NAME = "excerpts"
BEFORE, AFTER = 28, 10
PASSAGE = 320


class Excerpt(NamedTuple):
    """Words with their depths (0: not computed) and the loss of what each predicts (NaN: nothing).

    ``target`` is the index of the word that ``remark`` is about; ``None`` for a passage.
    """

    words: list[str]
    depths: list[int]
    losses: list[float]
    target: int | None
    remark: str


def hardest(trace: Trace, count: int = 6) -> list[Excerpt]:
    """Excerpts around the highest losses after one iteration: different words, from different parts of the text."""
    return [_around(trace, row) for row in _apart(trace, -trace["full_nll_1"], count)]


def easiest(trace: Trace, count: int = 6) -> list[Excerpt]:
    """Excerpts around the lowest losses after one iteration: different words, from different parts of the text."""
    return [_around(trace, row) for row in _apart(trace, trace["full_nll_1"], count)]


def passage(trace: Trace, length: int = PASSAGE) -> Excerpt:
    """The ``length`` tokens whose depths differ most."""
    first, length = busiest(trace["depth"], trace["document"], length)
    rows = np.arange(first, first + length)
    mean = float(trace["depth"][rows].mean())
    remark = f"{length:,} tokens from token {first:,} on, read {mean:.2f} times on average ({_mean(trace):.2f} in all)."
    return Excerpt(*_words(trace, rows), target=None, remark=remark)


def _mean(trace: Trace) -> float:
    return float(trace["depth"].mean())


def _apart(trace: Trace, order: np.ndarray, count: int) -> list[int]:
    """The first ``count`` predictions by ``order`` with different learned targets, whose excerpts do not overlap."""
    ids, chosen = trace["target_id"], list[int]()
    learned = np.flatnonzero(trace["learned"])
    # Many of the extreme predictions are of one word: far more than ``count`` are considered.
    for row in learned[np.argsort(order[learned], kind="stable")[: 500 * count]].tolist():
        known = any(ids[row] == ids[other] or abs(row - other) <= BEFORE + AFTER for other in chosen)
        if not known:
            chosen.append(row)
        if len(chosen) == count:
            break
    return chosen


def _around(trace: Trace, row: int) -> Excerpt:
    """Excerpt of the document around prediction ``row``."""
    document = trace["document"]
    rows = np.arange(max(0, row - BEFORE), min(len(trace), row + 2 + AFTER))
    rows = rows[document[rows] == document[row]]
    words, depths, losses = _words(trace, rows)
    target = int(np.searchsorted(rows, row)) + 1
    if target == len(words):
        # The document's last word is predicted, but predicts nothing in this document.
        words, depths, losses = [*words, str(trace.frame["target"].iloc[row])], [*depths, 0], [*losses, float("nan")]
    return Excerpt(words, depths, losses, target, _remark(trace, row))


def _words(trace: Trace, rows: np.ndarray) -> tuple[list[str], list[int], list[float]]:
    part = trace.frame.iloc[rows]
    return [str(word) for word in part["token"]], part["depth"].tolist(), part["nll"].tolist()


def _remark(trace: Trace, row: int) -> str:
    deepest, one = trace.about.deepest, trace.frame.iloc[row]
    # Rounding may leave a loss just below 0: z writes no -0.000.
    losses = f"NLL {one['full_nll_1']:z.3f} after one iteration, {one['nll']:z.3f} as read"
    if deepest > 1:
        losses += f", {one[f'full_nll_{deepest}']:z.3f} had every token been read {times(deepest)}"
    return f"“{on_one_line(str(one['target']))}” after a token that was read {times(int(one['depth']))}: {losses}."


def as_html(excerpt: Excerpt) -> str:
    """HTML of the excerpt: coloured spans, with everything from data escaped."""
    spans = []
    for index, (word, depth, loss) in enumerate(zip(excerpt.words, excerpt.depths, excerpt.losses, strict=True)):
        kind = f"d{depth}" + (" target" if index == excerpt.target else "")
        about = "never read" if depth == 0 else f"read {times(depth)}; predicts the next token at {loss:z.2f} nats"
        # A line's end lies between two spans, so that the box of a token of several lines is closed on each of them.
        lines = for_html(word).split("\n")
        spans.append("\n".join(f'<span class="{kind}" title="{about}">{line}</span>' if line else "" for line in lines))
    return f'<p class="remark">{for_html(excerpt.remark)}</p>\n<pre class="words">{"".join(spans)}</pre>'


def as_text(excerpt: Excerpt, deepest: int) -> Text:
    """The excerpt for a terminal, the target underlined."""
    text = by_depth([visible(word) for word in excerpt.words], excerpt.depths, deepest)
    if excerpt.target is not None:
        start = sum(len(visible(word)) for word in excerpt.words[: excerpt.target])
        text.stylize("bold underline", start, start + len(visible(excerpt.words[excerpt.target])))
    return text
