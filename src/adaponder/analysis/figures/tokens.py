"""Shows tokens in context: a grid of computed and reused rows (the paper's Figure 1), and excerpts with depths."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from rich.text import Text

from adaponder.analysis.figures.plate import HATCH, Plate, percent, traced_method
from adaponder.analysis.figures.words import for_figure, for_html, on_one_line, visible
from adaponder.analysis.style import PAGE, Theme, depth_colours, new_figure
from adaponder.analysis.trace import Trace
from adaponder.terminal import by_depth

TOKENS = 32
# Entries in a line of the legend, at the width of the page, and the height of such a line in inches.
_ENTRIES, _LINE = 5, 0.2
EXCERPTS = "excerpts"
BEFORE, AFTER = 28, 10
PASSAGE = 320


class TokenGrid(Plate):
    """Shows which iterations of consecutive tokens were computed; ``after`` is the label of skipped ones."""

    name = "grid"
    title = "Computed or reused, token by token"
    alt = (
        "A grid: tokens of a real stretch of text from left to right, iterations upwards; filled cells were computed, "
        "hatched ones were not."
    )
    needs = ("halting",)

    def __init__(self, trace: Trace):
        self.first, length = busiest(trace["depth"], trace["document"], TOKENS)
        tokens = trace.frame.iloc[self.first : self.first + length]
        self.words = [for_figure(str(word)) for word in tokens["token"]]
        self.depths = tokens["depth"].to_numpy(np.int64)
        self.deepest, self.after = trace.about.deepest, traced_method(trace.about).after_halting

    def draw(self, theme: Theme) -> Figure:
        count, deepest = len(self.words), self.deepest
        used = np.unique(self.depths).tolist()
        more_lines = len(used) // _ENTRIES  # of the legend, which has one entry more than there are depths
        figure = new_figure(width=PAGE, height=1.35 + 0.24 * deepest + _LINE * more_lines)
        axes = figure.subplots()
        colours = depth_colours(deepest)
        skipped: dict[str, Any] = {"edgecolor": theme.muted, "facecolor": theme.paper, "hatch": HATCH}
        for column, depth in enumerate(self.depths):
            computed = {"edgecolor": theme.ink, "facecolor": colours[depth - 1]}
            for row in range(deepest):
                look = computed if row < depth else skipped
                axes.add_patch(Rectangle((column + 0.06, row + 0.06), 0.88, 0.88, linewidth=0.6, **look))
        axes.set(xlim=(0, max(count, 12)), ylim=(0, deepest), ylabel="iteration", xlabel="token")
        axes.set_yticks(np.arange(deepest) + 0.5, [str(i) for i in range(1, deepest + 1)])
        for tick in axes.set_xticks(np.arange(count) + 0.5, self.words, rotation=60, ha="right"):
            tick.label1.set_parse_math(False)
            tick.label1.set_rotation_mode("anchor")
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        handles = [Patch(facecolor=colours[depth - 1], label=f"computed, depth {depth}") for depth in used]
        handles.append(Patch(**skipped, label=self.after))
        columns = min(len(handles), _ENTRIES)
        figure.legend(handles=handles, loc="outside upper center", ncols=columns, columnspacing=1.2, handlelength=1.4)
        return figure

    def caption(self) -> str:
        count, spent = len(self.depths), int(self.depths.sum())
        rows, halted = count * self.deepest, int((self.depths < self.deepest).sum())
        typical = "" if len(np.unique(self.depths)) == 1 else "; selected because depths differ most, not typical"
        return (
            f"Tokens {self.first:,} to {self.first + count - 1:,} of the text: {spent} of {rows} rows are computed "
            f"({percent(spent / rows)}), {halted} of {count} tokens halt early{typical}."
        )

    def table(self) -> pd.DataFrame:
        return pd.DataFrame({"token": self.words, "depth": self.depths})


def busiest(depth: np.ndarray, document: np.ndarray, length: int) -> tuple[int, int]:
    """Returns (first token, length) of the stretch within one document whose depths have the highest entropy.

    If every document is shorter than ``length``, the stretch is the beginning of the text.
    """
    length = min(length, len(depth))
    levels = np.arange(1, int(depth.max()) + 1)
    counts = np.cumsum(np.vstack([np.zeros(len(levels)), depth[:, None] == levels]), axis=0)
    shares = (counts[length:] - counts[:-length]) / length
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nansum(shares * np.log(shares), axis=1)
    starts = np.arange(len(entropy))
    inside = document[starts] == document[starts + length - 1]
    if not inside.any():
        return 0, length
    # Rounded, so that equal mixtures of depths compare equal.
    return int(np.argmax(np.where(inside, np.round(entropy, 9), -1.0))), length


class Excerpt(NamedTuple):
    """Words with their depths (0: not computed) and the losses of the next words (NaN: no next word).

    ``target`` is the index of the word that ``remark`` is about; ``None`` for a passage.
    """

    words: list[str]
    depths: list[int]
    losses: list[float]
    target: int | None
    remark: str


def extremes(trace: Trace, *, hardest: bool, count: int = 6) -> list[Excerpt]:
    """Returns up to ``count`` excerpts around the highest or lowest losses at depth 1.

    Their targets are distinct tokens in different stretches of the text.
    """
    loss, ids = trace["full_nll_1"], trace["target_id"]
    learned, rows = np.flatnonzero(trace["learned"]), list[int]()
    # Many of the extreme predictions are of one word: far more than ``count`` are considered.
    order = np.argsort(-loss[learned] if hardest else loss[learned], kind="stable")[: 500 * count]
    for row in learned[order].tolist():
        if not any(ids[row] == ids[other] or abs(row - other) < BEFORE + 2 + AFTER for other in rows):
            rows.append(row)
        if len(rows) == count:
            break
    return [_around(trace, row) for row in rows]


def passage(trace: Trace, length: int = PASSAGE) -> Excerpt:
    """Returns the excerpt of ``length`` consecutive tokens whose depths have the highest entropy."""
    first, length = busiest(trace["depth"], trace["document"], length)
    tokens = trace.frame.iloc[first : first + length]
    means = f"mean depth {tokens['depth'].mean():.2f} ({trace['depth'].mean():.2f} overall)"
    return _excerpt(tokens, f"{length:,} tokens from token {first:,} on, {means}.")


def _excerpt(tokens: pd.DataFrame, remark: str, target: int | None = None) -> Excerpt:
    words = [str(word) for word in tokens["token"]]
    return Excerpt(words, tokens["depth"].tolist(), tokens["nll"].tolist(), target, remark)


def _around(trace: Trace, row: int) -> Excerpt:
    """Returns the excerpt around prediction ``row``, within the prediction's document."""
    prediction, deepest = trace.frame.iloc[row], trace.about.deepest
    rows = np.arange(max(0, row - BEFORE), min(len(trace), row + 2 + AFTER))
    rows = rows[trace["document"][rows] == prediction["document"]]
    # Rounding may leave a loss just below 0: z writes no -0.000.
    losses = f"NLL {prediction['full_nll_1']:z.3f} after one iteration, {prediction['nll']:z.3f} at its depth"
    if deepest > 1:
        losses += f", {prediction[f'full_nll_{deepest}']:z.3f} with every token at depth {deepest}"
    word = str(prediction["target"])
    remark = f"“{on_one_line(word)}” after a token of depth {prediction['depth']}: {losses}."
    excerpt = _excerpt(trace.frame.iloc[rows], remark, target=int(np.searchsorted(rows, row)) + 1)
    if excerpt.target == len(rows):
        # The document's last word is predicted, but predicts nothing in this document.
        excerpt.words.append(word)
        excerpt.depths.append(0)
        excerpt.losses.append(float("nan"))
    return excerpt


def as_html(excerpt: Excerpt) -> str:
    """Returns the words, HTML-escaped, in spans with a CSS class for the depth (``d1``, ``d2``, …) and a tooltip."""
    spans = []
    for index, (word, depth, loss) in enumerate(zip(excerpt.words, excerpt.depths, excerpt.losses, strict=True)):
        kind = f"d{depth}" + (" target" if index == excerpt.target else "")
        tooltip = "not computed" if depth == 0 else f"depth {depth}; loss of the next token {loss:z.2f} nats"
        # Line ends lie between spans, so that a token of several lines has a closed box on each line.
        lines = for_html(word).split("\n")
        marked = (f'<span class="{kind}" title="{tooltip}">{line}</span>' if line else "" for line in lines)
        spans.append("\n".join(marked))
    return "".join(spans)


def as_text(excerpt: Excerpt, deepest: int) -> Text:
    """Returns the excerpt for a terminal, the target underlined."""
    text = by_depth([visible(word) for word in excerpt.words], excerpt.depths, deepest)
    if excerpt.target is not None:
        start = sum(len(visible(word)) for word in excerpt.words[: excerpt.target])
        text.stylize("bold underline", start, start + len(visible(excerpt.words[excerpt.target])))
    return text
