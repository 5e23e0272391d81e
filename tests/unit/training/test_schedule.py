"""What changes with the step, at the very steps where it changes."""

import math

import pytest

from adaponder import FixedDepth
from adaponder.recipes import TrainRecipe
from adaponder.training import schedule
from adaponder.training.schedule import learning_rate_factor, named_groups, objective_at, policy_at
from support import METHODS, tiny


def test_the_learning_rate_is_a_line_up_and_a_cosine_down_that_ends_exactly_at_its_floor():
    train = TrainRecipe(steps=8, global_batch=1, warmup=3, min_lr_ratio=0.1)
    down = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done / 4)) for done in range(5)]
    actual = [learning_rate_factor(train, step) for step in range(8)]
    assert actual == pytest.approx([1 / 3, 2 / 3, 1.0, *down], rel=1e-12)
    assert actual[3] == 1.0
    assert actual[7] == pytest.approx(0.1, rel=1e-12)


@pytest.mark.parametrize(("warmup", "first"), [(0.5, 1 / 4), (1, 1.0), (2, 1 / 2)])
def test_a_warmup_below_1_is_a_share_of_the_steps_and_from_1_on_their_number(warmup, first):
    assert learning_rate_factor(TrainRecipe(steps=8, global_batch=1, warmup=warmup), 0) == first


def test_the_ponder_term_begins_at_its_step_and_grows_to_its_full_share():
    train = TrainRecipe(steps=10, global_batch=1, ponder_start=3, ponder_full=7, ponder_weight=0.5, k_max=0.4)
    actual = [objective_at(train, step) for step in range(10)]
    assert [objective.ponder_weight for objective in actual] == [0.0] * 3 + [0.5] * 7
    assert [objective.ponder_fraction for objective in actual] == pytest.approx([0.0] * 4 + [0.1, 0.2, 0.3] + [0.4] * 3)


@pytest.mark.parametrize("method", ["adaponder", "ouro"])
def test_no_token_halts_before_the_ponder_term_unless_set(method):
    model = tiny(method, iterations=3)
    for wished in (False, True):
        train = TrainRecipe(steps=10, global_batch=1, ponder_start=3, ponder_full=7, halt_before_ponder=wished)
        first = None if wished else FixedDepth(3)
        assert [policy_at(train, model.method, step) for step in range(5)] == [first] * 3 + [None] * 2
    assert policy_at(train, tiny("ponder").method, 0) is None, "nothing to decide"


def test_matrices_decay_and_vectors_do_not_and_gates_have_a_rate_and_a_start_of_their_own():
    model = tiny()
    train = TrainRecipe(steps=10, global_batch=1, lr=1e-3, gate_lr=1e-2, gate_start=4, weight_decay=0.3, warmup=0)
    shapes, actual = {name: value.ndim for name, value in model.named_parameters()}, {}
    for group in named_groups(model, train):
        actual |= dict.fromkeys(group["names"], (group["peak"], group["weight_decay"], group["start"]))
    expected = {
        name: (1e-2 if name.startswith("method.") else 1e-3, 0.3 if ndim > 1 else 0.0, 4 * name.startswith("method."))
        for name, ndim in shapes.items()
    }
    assert actual == expected
    optimizer = schedule.build_optimizer(model, train)
    for step, gates in ((3, 0.0), (4, 1e-2 * learning_rate_factor(train, 4))):
        assert schedule.set_learning_rate(optimizer, train, step) == 1e-3 * learning_rate_factor(train, step)
        rates = {group["peak"]: group["lr"] for group in optimizer.param_groups}
        assert rates == {1e-3: 1e-3 * learning_rate_factor(train, step), 1e-2: gates}


@pytest.mark.parametrize("method", METHODS)
def test_only_gates_that_a_ponder_term_presses_on_wait_for_a_third_of_stage_1(method):
    model, train = tiny(method), TrainRecipe(steps=10, global_batch=1, ponder_start=6, ponder_full=6)
    starts = {group["start"] for group in named_groups(model, train) if group["names"][0].startswith("method.")}
    assert starts <= {2 if model.method.has_ponder_term else 0}
    assert bool(starts) == any(True for _ in model.method.parameters())


def test_joint_training_warms_up_again_and_ouros_beta_follows_a_line():
    train = TrainRecipe(steps=12, global_batch=1, warmup=0, freeze_backbone_steps=4, joint_warmup=4)
    alone = TrainRecipe(steps=12, global_batch=1, warmup=0)
    factors = [learning_rate_factor(train, step) / learning_rate_factor(alone, step) for step in range(12)]
    assert factors == pytest.approx([1.0] * 4 + [0.25, 0.5, 0.75] + [1.0] * 5)
    train = TrainRecipe(steps=12, global_batch=1, exit_entropy=(0.1, 0.05), exit_entropy_steps=(2, 6))
    betas = [objective_at(train, step).exit_entropy_weight for step in range(9)]
    assert betas == pytest.approx([0.1] * 3 + [0.0875, 0.075, 0.0625] + [0.05] * 3)
