"""Warnings of gates that no longer distinguish tokens."""

from dataclasses import replace

import pytest

from adaponder.recipes import load_recipe
from adaponder.training.watch import collapse


@pytest.mark.parametrize(
    ("step", "halted", "gates", "pressed", "kind"),
    [
        (10, [0.995, 0.995], [0.5, 0.5], True, "all"),
        (10, [0.0, 0.995], [0.5, 0.5], True, "one"),
        (150, [0.967, 0.998], [0.1, 0.0], True, "all"),  # as a run ended that kept 3 % of its tokens
        (150, [0.9, 0.998], [0.1, 0.0], True, None),  # as puzzles should: most of their tokens need one
        (200, [0.0, 0.0], [0.5, 0.5], True, "none"),
        (199, [0.0, 0.1], [0.5, 0.5], True, None),
        (10, [0.3, 0.6], [0.5, 0.5], True, "early"),
        (10, [0.0, 0.0], [0.9, 0.001], True, "early"),  # no token may halt yet, but the gate is shut
        (10, [0.0, 0.0], [0.9, 0.02], True, None),
        (150, [0.0, 0.2], [0.9, 0.001], True, None),
        (10, [], [], True, None),
        (200, [1.0, 1.0], [], False, "all"),
        (200, [0.0, 1.0], [], False, "one"),
        (200, [0.0, 0.0], [], False, None),
    ],
)
def test_gates_that_no_longer_distinguish_tokens_are_warned_of(step, halted, gates, pressed, kind):
    plan = load_recipe("cpu/demo", ["train.steps=200", "train.ponder_start=100", "train.ponder_full=120"]).train
    warning = collapse({"step": step, "halted": halted, "gate_means": gates}, plan, pressed=pressed)
    assert (warning and warning[0]) == kind
    unpressed = collapse({"step": 200, "halted": [0.0, 0.0], "gate_means": gates}, replace(plan, ponder_weight=0.0))
    assert unpressed is None, "without a ponder loss gates may stay open"
