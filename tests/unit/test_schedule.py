"""What changes with the step, at the very steps where it changes."""

import math

import pytest

from adaponder import FixedDepth
from adaponder.recipe import TrainRecipe
from adaponder.training.schedule import learning_rate_factor, objective_at, policy_at
from support import tiny


def test_the_learning_rate_is_a_line_up_and_a_cosine_down_that_ends_exactly_at_its_floor():
    train = TrainRecipe(steps=8, global_batch=1, warmup=3, min_lr_ratio=0.1)
    down = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done / 4)) for done in range(5)]
    found = [learning_rate_factor(train, step) for step in range(8)]
    assert found == pytest.approx([1 / 3, 2 / 3, 1.0, *down], rel=1e-12)
    assert found[3] == 1.0
    assert found[7] == pytest.approx(0.1, rel=1e-12)


def test_the_ponder_term_begins_at_its_step_and_grows_to_its_full_share():
    train = TrainRecipe(steps=10, global_batch=1, ponder_start=3, ponder_full=7, ponder_weight=0.5, k_max=0.4)
    found = [objective_at(train, step) for step in range(10)]
    assert [each.ponder_weight for each in found] == [0.0] * 3 + [0.5] * 7
    assert [each.ponder_fraction for each in found] == pytest.approx([0.0] * 4 + [0.1, 0.2, 0.3] + [0.4] * 3)


@pytest.mark.parametrize("method", ["adaponder", "ouro"])
def test_nobody_halts_before_the_ponder_term_unless_so_wished(method):
    model = tiny(method, iterations=3)
    for wished in (False, True):
        train = TrainRecipe(steps=10, global_batch=1, ponder_start=3, ponder_full=7, halt_before_ponder=wished)
        first = None if wished else FixedDepth(3)
        assert [policy_at(train, model.method, step) for step in range(5)] == [first] * 3 + [None] * 2
    assert policy_at(train, tiny("ponder").method, 0) is None, "nothing to decide"
