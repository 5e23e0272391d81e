"""What changes with the step, the depth controller, and warnings of gates that no longer distinguish tokens."""

import math
from dataclasses import replace

import pytest
import torch

from adaponder import FixedDepth, Objective
from adaponder.recipes import TrainRecipe, load_recipe
from adaponder.training import schedule
from adaponder.training.controller import DepthController
from adaponder.training.schedule import learning_rate_factor, named_groups, objective_at, policy_at
from adaponder.training.watch import collapse
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
