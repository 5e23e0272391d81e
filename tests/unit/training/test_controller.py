"""The depth controller reaches its target and acts at its steps."""

import pytest
import torch

from adaponder import Objective
from adaponder.training.controller import DepthController


@pytest.mark.parametrize("target", [1.5, 2.5, 3.5])
@pytest.mark.parametrize("effect", [0.4, 1.0, 2.5])
def test_a_controller_brings_slow_gates_to_the_target(target, effect):
    """The simulated gates close ``effect`` times what k asks; their means follow within a few turns, depth later."""
    controller = DepthController(target=target, iterations=4, start=0, gain=0.5, every=1)
    depth = promised = 4.0
    for step in range(600):
        steered = controller.steer(Objective(ponder_weight=0.1, ponder_fraction=0.1), step)
        wanted = 4.0 - min(1.0, effect * 3 * steered.ponder_fraction) * 3
        promised += 0.2 * (wanted - promised)
        depth += 0.05 * (promised - depth)
        controller.update(torch.tensor([1.0, depth, promised], dtype=torch.double))
    assert depth == pytest.approx(target, abs=0.05)


@pytest.mark.parametrize(("target", "share"), [(2.0, 2 / 9), (3.5, 0.5 / 9), (4.0, 0.0)])
def test_a_controller_begins_with_the_share_of_gates_whose_closing_gives_the_target(target, share):
    """One closed first gate saves a token K - 1 iterations, and is one of its K - 1 gates."""
    controller = DepthController(target=target, iterations=4, start=3, gain=0.5, every=1)
    objective = Objective(ponder_weight=0.1, ponder_fraction=0.7)
    assert controller.steer(objective, 2) == objective
    steered = controller.steer(objective, 3)
    assert (steered.ponder_weight, steered.ponder_fraction) == (0.1, pytest.approx(share))


@pytest.mark.parametrize(("start", "every", "due"), [(0, 1, [0, 1, 2, 3]), (0, 3, [2, 5, 8]), (5, 3, [7, 10, 13])])
def test_a_controller_turns_after_whole_spans_of_steps_from_its_start_on(start, every, due):
    controller = DepthController(target=2.0, iterations=4, start=start, gain=0.5, every=every)
    assert [step for step in range(due[-1] + 1) if controller.due(step)] == due
