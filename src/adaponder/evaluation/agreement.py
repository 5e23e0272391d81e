"""Compares dense and compact execution of the same text: a depth may differ only where a gate nearly ties.

Rounding differs between the two, so a gate that nearly equals its threshold may fall on either side of it. Such flips
are allowed only where the gate lies within the measured rounding of the threshold, and they are counted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from adaponder.evaluation.scoring import OWN, ScoringOptions, score
from adaponder.evaluation.text import Text, Windows
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import LearnedGate
from adaponder.terminal import counted

# Allowed difference of mean losses by precision; in lower precisions flips decide.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@dataclass(frozen=True)
class Agreement:
    """The differences between dense and compact execution on the same predictions.

    Attributes:
        loss_difference: of the mean losses.
        worst: the largest difference of one prediction's loss whose depth agrees.
        flips: predictions whose depth differs.
        unexplained: flips that are not near ties; ``None`` for policies other than the learned gate.
        gate_noise: the largest difference between the two executions' gates that no flip can have caused.
        tolerance: allowed difference of the mean losses in this precision.
    """

    tokens: int
    loss_difference: float
    worst: float
    flips: int
    unexplained: int | None
    gate_noise: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.loss_difference <= self.tolerance and not self.unexplained

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"holds": self.holds}

    def __str__(self) -> str:
        verdict = "agree" if self.holds else "DISAGREE"
        tokens = counted(self.tokens, "token")
        words = f"dense and skipping {verdict}: loss differs by {self.loss_difference:.1e} on {tokens}"
        if self.flips:
            words += f", {counted(self.flips, 'depth')} flipped"
            words += "" if self.unexplained is None else f" ({self.unexplained} not at a near tie)"
        else:
            words += ", every depth the same"
        return words


def agreement(
    model: AdaPonderForCausalLM, text: Text, windows: Windows, *, how: ScoringOptions = OWN, batch_size: int = 8
) -> Agreement:
    """Scores ``text`` by dense and by compact execution and compares."""
    runs = [
        score(model, text, windows, how=replace(how, execution=execution), batch_size=batch_size, detail=True)
        for execution in ("dense", "compact")
    ]
    dense, compact = runs
    flipped = dense.depth != compact.depth
    same = ~flipped
    noise, unexplained = 0.0, None
    if dense.gates is not None and compact.gates is not None:
        noise = float(np.abs(dense.gates - compact.gates)[_untouched(flipped, windows)].max(initial=0.0))
        taus = _taus(model, how, dense.gates.shape[1])
        if taus is not None:
            # The gate that decided differently is the one after the smaller depth.
            gate = np.minimum(dense.depth, compact.depth)[flipped] - 1
            rows = np.nonzero(flipped)[0]
            margin = np.minimum(*(np.abs(run.gates[rows, gate] - taus[gate]) for run in runs if run.gates is not None))
            unexplained = int((margin > noise + np.finfo(np.float32).eps).sum())
    return Agreement(
        tokens=text.predictions,
        loss_difference=abs(float(dense.nll.mean() - compact.nll.mean())),
        worst=float(np.abs(dense.nll - compact.nll)[same].max(initial=0.0)),
        flips=int(flipped.sum()),
        unexplained=unexplained,
        gate_noise=noise,
        tolerance=_TOLERANCE.get(model.dtype, 1e-2),
    )


def _untouched(flipped: np.ndarray, windows: Windows) -> np.ndarray:
    """Returns ``bool[predictions]``: those without an earlier flip in their window, which could have changed them."""
    index = np.arange(len(flipped))
    latest = np.maximum.accumulate(np.where(flipped, index, -1))
    start = index // windows.length * windows.length if windows.stride is None else index - windows.length + 1
    return latest < start


def _taus(model: AdaPonderForCausalLM, how: ScoringOptions, gates: int) -> np.ndarray | None:
    """Returns the learned gate's threshold at each gate; ``None`` for other policies."""
    policy = how.policy if how.policy is not None else model.method.default_policy(training=False)
    if not isinstance(policy, LearnedGate):
        return None
    tau = np.asarray(policy.tau, np.float64)
    return np.broadcast_to(tau if tau.ndim == 0 else tau[:gates], (gates,))
