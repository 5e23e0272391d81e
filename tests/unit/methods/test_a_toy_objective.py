"""A training loss of one's own is one file: it is handed to the model, and nothing of the package changes."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import pytest
import torch

from adaponder.execution.base import Execution
from adaponder.methods.adaponder import AdaPonder
from adaponder.methods.objectives import CrossEntropy, Losses, Scorer, Trajectory
from support import ids, tiny


@dataclass
class Remember:
    """Equals cross-entropy plus ``weight`` times the mean squared step of the hidden state from pass to pass."""

    needs_states: ClassVar[bool] = True

    weight: float

    def __call__(self, trajectory: Trajectory, score: Scorer, execution: Execution) -> Losses:
        losses = CrossEntropy()(trajectory, score, execution)
        moved = sum(score.mean((after - before).square().mean(-1)) for before, after in pairwise(trajectory.states))
        return Losses(losses.total + self.weight * moved, losses.terms | {"moved": moved})


@pytest.mark.parametrize("method", ["adaponder", "ponder", "ouro"])
@pytest.mark.parametrize("execution", ["dense", "compact"])
def test_its_term_is_in_the_loss_and_is_what_it_says(method, execution):
    model = tiny(method).train()
    options = {"labels": ids(), "execution": execution, "output_hidden_states": True}
    output = model(ids(), objective=Remember(0.5), **options)
    plain = model.eval()(ids(), labels=ids(), policy=None)
    assert set(output.terms) == {"cross_entropy", "moved"}
    states = torch.stack(output.hidden_states)
    # The last token predicts nothing, so its steps do not count.
    expected = (states[1:] - states[:-1]).square().mean(-1)[..., :-1].mean((1, 2)).sum()
    torch.testing.assert_close(output.terms["moved"], expected)
    torch.testing.assert_close(output.loss, output.terms["cross_entropy"] + 0.5 * expected)
    assert plain.terms.keys() == {"cross_entropy"}


def test_every_pass_is_shown_where_a_method_does_not_decide(monkeypatch):
    monkeypatch.setattr(AdaPonder, "advance", lambda self, rows, state: state)
    output = tiny("adaponder", iterations=4)(ids(), output_hidden_states=True, execution="dense")
    assert len(output.hidden_states) == 4
