"""Computes statistics of a trace for several figures: means with counts and intervals, correlations, bins."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from adaponder.analysis.trace import Trace
from adaponder.evaluation.summary import FEW, Interval, bootstrap

# For the interval of a group's mean: there are many groups, and two digits suffice.
RESAMPLES = 500


class Numbers(NamedTuple):
    """Overall numbers of a trace; see :class:`adaponder.evaluation.meter.Spent` for ``halted`` and ``gates_closed``.

    Attributes:
        tokens: number of predictions in the trace.
        scored: number of predictions that count in the loss (of a chat, only those in the assistant's turns).
        bits_per_byte: ``None`` if some predictions do not count in the loss, or if the text has unknown tokens.
        flops, kv_bytes: total cost divided by ``tokens``; context that sliding windows compute again is included.
        flops_ratio: FLOPs divided by those of the stock decoder on the same tokens.
    """

    tokens: int
    scored: int
    documents: int
    loss: float
    interval: Interval | None
    perplexity: float
    bits_per_byte: float | None
    iterations: float
    halted: float
    gates_closed: float | None
    flops: float
    flops_ratio: float
    kv_bytes: float


def numbers(trace: Trace) -> Numbers:
    about, depth, scored = trace.about, trace["depth"].astype(np.int64), trace.scored
    sums, counts = _per_document(scored["document"], scored["nll"], np.zeros(len(scored), np.int64), 1)
    size = about.utf8_bytes if len(scored) == len(trace) else 0
    decisions = about.deepest - 1 if about.halts else 0
    loss = trace.loss
    return Numbers(
        tokens=len(trace),
        scored=len(scored),
        documents=int(trace["document"].max()) + 1,
        loss=loss,
        interval=bootstrap(sums[:, 0], counts[:, 0], seed=about.seed),
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        bits_per_byte=float(scored["nll"].sum() / math.log(2) / size) if size else None,
        iterations=float(depth.mean()),
        halted=float((depth < about.deepest).mean()),
        gates_closed=float((about.deepest - depth).mean() / decisions) if decisions else None,
        flops=about.spent["flops_per_token"],
        flops_ratio=about.spent["flops_ratio"],
        kv_bytes=about.spent["kv_bytes_per_token"],
    )


class Means(NamedTuple):
    """Mean values of groups of tokens: arrays with an entry per group.

    Attributes:
        tokens: number of tokens in the group.
        share: the group's share of all tokens.
        mean: mean value of the group; NaN if the group has no tokens.
        low, high: bootstrap interval of the mean, over the documents that have tokens of the group; NaN for fewer than
            :data:`FEW` documents.
    """

    tokens: np.ndarray
    share: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def pick(self, rows: Any) -> Means:
        """Returns the groups at ``rows``: a slice, a mask or indices."""
        return Means(*(values[rows] for values in self))

    @property
    def bars(self) -> np.ndarray:
        """Returns ``[2, groups]``: distances from the mean to the interval's ends; NaN without an interval."""
        return np.maximum(np.stack([self.mean - self.low, self.high - self.mean]), 0.0)

    @property
    def range(self) -> tuple[float, float]:
        """Returns the minimum and the maximum over all means and interval bounds."""
        return float(np.nanmin([self.mean, self.low])), float(np.nanmax([self.mean, self.high]))

    def frame(self, name: str, **columns: Any) -> pd.DataFrame:
        """Returns a table with a row per group: first ``columns``, then these arrays, with ``mean`` called ``name``."""
        values = {"tokens": self.tokens, "share": self.share, name: self.mean}
        return pd.DataFrame(columns | values | {"95% low": self.low, "95% high": self.high})


def means(trace: Trace, values: np.ndarray, labels: np.ndarray, groups: int) -> Means:
    """Returns the mean of ``values`` over the tokens of each group; ``labels`` are the tokens' group indices."""
    sums, counts = _per_document(trace["document"], values, labels, groups)
    tokens = counts.sum(axis=0)
    low, high = np.full((2, groups), np.nan)
    for group in range(groups):
        if interval := bootstrap(sums[:, group], counts[:, group], seed=trace.about.seed, resamples=RESAMPLES):
            low[group], high[group] = interval
    mean = sums.sum(axis=0) / np.where(tokens > 0, tokens, np.nan)
    return Means(tokens.astype(np.int64), tokens / len(trace), mean, low, high)


def _per_document(
    document: np.ndarray, values: np.ndarray, labels: np.ndarray, groups: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sums and counts of ``values`` by document and label, each ``[documents, groups]``."""
    documents = int(document.max()) + 1
    index = document.astype(np.int64) * groups + labels
    sums = np.bincount(index, weights=values, minlength=documents * groups).reshape(documents, groups)
    counts = np.bincount(index, minlength=documents * groups).reshape(documents, groups)
    return sums, counts.astype(np.float64)


class Correlation(NamedTuple):
    """Spearman's rho (``None`` if a variable is constant) and its interval over resampled documents."""

    rho: float | None
    interval: Interval | None

    def __str__(self) -> str:
        if self.rho is None:
            return "undefined"
        spread = "" if self.interval is None else f" [{self.interval.low:+.3f}, {self.interval.high:+.3f}]"
        return f"{self.rho:+.3f}{spread}"


def spearman(x: np.ndarray, y: np.ndarray, weights: np.ndarray | None = None) -> float | None:
    """Returns Spearman's correlation of two arrays of non-negative integers; ``None`` if one is constant.

    ``weights`` say how often each pair counts, once by default.
    """
    weights = np.ones(len(x)) if weights is None else weights.astype(np.float64)
    ranks = []
    for values in (x, y):
        tied = np.bincount(values, weights=weights)
        # Tied values share the middle rank; the mean of all ranks is half of the total.
        ranks.append((np.cumsum(tied) - tied / 2 - weights.sum() / 2)[values])
    first, second = ranks
    spread = float(np.sqrt((weights * first**2).sum() * (weights * second**2).sum()))
    return float((weights * first * second).sum()) / spread if spread > 0 else None


def rank_correlation(trace: Trace, x: np.ndarray, y: np.ndarray) -> Correlation:
    """Returns Spearman's rho of two values per prediction, and its percentile interval over resampled documents."""
    # Indices among the distinct values have the same ranks, and computing the ranks of a resample needs no sorting.
    x, y = (np.unique(values, return_inverse=True)[1] for values in (x, y))
    rho, document = spearman(x, y), trace["document"]
    documents = int(document.max()) + 1
    if rho is None or documents < FEW:
        return Correlation(rho, None)
    # A resample takes time proportional to the tokens, so large texts get fewer resamples.
    resamples = int(np.clip(2e8 / len(trace), 200, 1000))
    generator = np.random.default_rng(trace.about.seed)
    resampled = []
    for _ in range(resamples):
        times = np.bincount(generator.integers(documents, size=documents), minlength=documents)
        if (rho_of_resample := spearman(x, y, times[document])) is not None:
            resampled.append(rho_of_resample)
    if not resampled:
        return Correlation(rho, None)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Correlation(rho, Interval(float(low), float(high)))


def quantile_bins(values: np.ndarray, bins: int) -> np.ndarray:
    """Returns the bin index of each value, below ``bins``.

    Bins have equal counts as far as ties allow, and none is empty.
    """
    edges = np.unique(np.quantile(values, np.linspace(0, 1, bins + 1)[1:-1], method="lower"))
    return np.unique(np.searchsorted(edges, values, side="left"), return_inverse=True)[1]


def geometric_bins(values: np.ndarray) -> np.ndarray:
    """Equals ``floor(log2(value))`` of positive whole numbers: bin b holds ``2**b … 2**(b+1) - 1``."""
    return np.frexp(values)[1] - 1
