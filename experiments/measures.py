"""Measures trained models; the runs of the queue name their measurements under ``measure``.

A run's record holds each result as plain data; if a measurement fails, the record holds its error under ``missing``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adaponder.analysis.demand import measure_demand
from adaponder.analysis.trace import make_trace
from adaponder.conversion.open import load
from adaponder.devices import autocast
from adaponder.errors import InputError, in_one_line
from adaponder.evaluation.lab.halves import halve
from adaponder.evaluation.lab.lab import LEARNED, Lab, budgets_between
from adaponder.evaluation.lab.lab import frontier as frontier_rows
from adaponder.evaluation.scoring import ScoringOptions, default_length, score
from adaponder.evaluation.text import Text, Windows, open_text, open_vocabulary
from adaponder.inference import Engine, Request
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.terminal import console
from experiments.runner import Measure
from experiments.statistics import at_depth

# Validation tokens of a measurement; a policy is tuned on one half of them and measured on the other.
_TOKENS = 262_144
_BATCH = 32
# Mean depths, relative to that of the learned gate, between which losses are interpolated.
_AROUND = (-0.15, 0.0, 0.15)
# Upper limits: sequences that decode in parallel; tokens of a prompt, and of its completion.
_LANES, _NEW = 64, 128
# Measurements of time, which need a device that no other run shares.
TIMED = ("speed",)


class Subject(NamedTuple):
    """A trained model, its folder, and the folder of the prepared data that it is measured on."""

    model: AdaPonderForCausalLM
    folder: Path
    data: Path

    def text(self) -> Text:
        """Opens the first ``_TOKENS`` validation tokens."""
        folder = str(self.folder)
        return open_text(str(self.data), open_vocabulary(folder), whose=folder, max_tokens=_TOKENS)

    def windows(self) -> Windows:
        return Windows(default_length(self.model))


def measuring(names: Sequence[str], *, device: str, dtype: str = "float32") -> Measure | None:
    """Returns a generator function that loads a final model and yields (name, result); ``None`` without names.

    ``dtype`` is the run's ``train.dtype``, so that measurements have the precision of the run's validation losses.
    """
    if unknown := set(names) - set(MEASURES):
        raise InputError(f"measure {sorted(unknown)[0]}: no such measurement; there are {', '.join(MEASURES)}")
    if not names:
        return None

    def measure(final: Path, data: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        subject = Subject(*load(str(final), device=device), data)
        for name in sorted(names, key=list(MEASURES).index):
            console.print(f"measuring {name} …")
            began = time.perf_counter()
            try:
                with autocast(dtype, subject.model.device):
                    result = MEASURES[name](subject)
            except Exception as error:  # of any kind: the other measurements follow
                result = {"missing": in_one_line(error)}
            yield name, result | {"seconds": round(time.perf_counter() - began, 1)}

    return measure


def steps(subject: Subject) -> dict[str, Any]:
    """Measures the mean loss of the tokens that halt at each iteration, and their losses at depth 1 and at full depth.

    A token's depth changes its loss, so only losses at equal depth show which tokens are harder.
    """
    checkpoint = str(subject.folder)
    trace = make_trace(
        subject.model, subject.text(), subject.windows(), checkpoint=checkpoint, data="", batch_size=_BATCH
    ).scored
    depth, deepest = trace["depth"].astype(int), trace.about.deepest
    full = trace.by_iteration("full_nll")
    groups = [depth == step for step in range(1, deepest + 1)]

    def means(values: np.ndarray) -> list[float | None]:
        return [float(values[group].mean()) if group.any() else None for group in groups]

    return {
        "tokens": [int(group.sum()) for group in groups],
        "nll": means(trace["nll"]),
        "nll_at_depth_1": means(full[:, 0]),
        "nll_at_full_depth": means(full[:, -1]),
        "loss_by_forced_depth": full.mean(axis=0).tolist(),
        "cost": trace.about.spent,
    }


def policies(subject: Subject) -> dict[str, Any]:
    """Measures the loss of each halting policy at the mean depth of the learned gate.

    A policy is tuned on half of the text to several depths around that mean, and measured on the other half; its loss
    is then interpolated to the learned gate's depth on that other half.
    """
    lab = _lab(subject)
    own_depth = lab.own_depth()
    lab.budgets((), own_depth)  # raises if all policies are the same at this depth
    budgets = [budget for step in _AROUND if 1.0 < (budget := own_depth + step) < lab.iterations]
    rows = list(lab.compare(budgets))
    learned = next(row for row in rows if row.policy == LEARNED and row.budget == own_depth)
    compared = {}
    for name in dict.fromkeys(row.policy for row in rows):
        points = [(row.depth, row.loss) for row in rows if row.policy == name]
        reached = [(depth, loss) for depth, loss in points if depth is not None and loss is not None]
        compared[name] = {
            "loss": at_depth(reached, learned.depth or own_depth),
            "points": reached,
            "causal": next(row.causal for row in rows if row.policy == name),
        }
    return {"depth": learned.depth, "compared": compared}


def dial(subject: Subject) -> dict[str, Any]:
    """Measures the loss of a checkpoint with thresholds tuned to mean depths 1 … K, and with the trained threshold."""
    lab = _lab(subject)
    rows = [row for row in frontier_rows(lab, budgets_between(lab.iterations, 0.25)) if row.loss is not None]
    fields = ("policy", "budget", "setting", "depth", "loss", "mflops", "flops_ratio", "active")
    *tuned, trained = ({name: getattr(row, name) for name in fields} for row in [*rows, lab.trained(lab.own_depth())])
    return {"rows": tuned, "own": trained}


def _lab(subject: Subject) -> Lab:
    return Lab(subject.model, halve(subject.text(), subject.windows()), batch_size=_BATCH)


def reuse(subject: Subject) -> dict[str, Any]:
    """Measures the loss with each value of ``config.reuse``, which says what a halted token keeps.

    Only ``state`` skips work, so inference uses it however the model was trained. ``gap`` is the loss with ``state``
    minus the loss with the value that the model was trained with.
    """
    config, how, scored = subject.model.config, ScoringOptions(execution="dense"), {}
    trained = config.reuse
    try:
        for rule in ("state", "kv", "none"):
            config.reuse = rule
            scores = score(subject.model, subject.text(), subject.windows(), how=how, batch_size=_BATCH)
            scored[rule] = {"loss": scores.loss, "depth": float(scores.depth.mean())}
    finally:
        config.reuse = trained
    return {"trained": trained, "as": scored, "gap": scored["state"]["loss"] - scored[trained]["loss"]}


def demand(subject: Subject) -> dict[str, Any]:
    """Measures accuracy and mean depth on puzzles by the number of hops; see :mod:`adaponder.analysis.demand`."""
    by_need = measure_demand(subject.model, subject.text(), batch_size=_BATCH)
    return by_need.as_dict() | {"least_depth": by_need.least_depth()}


def speed(subject: Subject) -> dict[str, Any]:
    """Measures tokens per second of prefill and of decoding in the engine; rounds the weights to bfloat16 on a GPU."""
    text, windows = subject.text(), subject.windows()
    model = subject.model.eval()
    if model.device.type == "cuda":
        model.bfloat16()
    score(model, text.first(_BATCH * windows.length), windows, batch_size=_BATCH)  # to warm up
    prefill = score(model, text, windows, batch_size=_BATCH)
    ids, new = text.stream.tolist(), min(_NEW, windows.length // 2)
    starts = range(0, min(len(ids) - new, _LANES * new), new)
    requests = [Request(prompt=ids[i : i + new], max_new_tokens=new, ignore_eos=True) for i in starts]
    engine = Engine(model, lanes=min(_LANES, len(requests)), drafts=0)
    decoded: dict[str, Any] = {}
    for attempt in ("warm up", "timed"):
        began, tokens, depths = time.perf_counter(), 0, 0
        for (completion,) in engine.generate(requests):
            tokens += len(completion.tokens)
            depths += sum(token.depth for token in completion.tokens)
        seconds = time.perf_counter() - began
        decoded = {"tokens_per_second": tokens / seconds, "depth": depths / max(1, tokens), "attempt": attempt}
    model.float()
    return {
        "prefill": {"tokens_per_second": prefill.spent.tokens_per_second, "depth": float(prefill.depth.mean())},
        "decode": decoded | {"lanes": len(requests), "prompt": new, "new": new},
    }


# In the order of measuring: quick measurements first, and speed, which rounds the weights, last.
MEASURES: Mapping[str, Callable[[Subject], dict[str, Any]]] = {
    function.__name__: function for function in (steps, reuse, demand, dial, policies, speed)
}
