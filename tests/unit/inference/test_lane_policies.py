"""Tests policies of many requests in one pass: each lane's decisions are those of its policy alone."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_policy import UntilLikely
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from adaponder.errors import InputError
from adaponder.inference.policies import LanePolicies, prefix_key, runs_on_host
from adaponder.policies.base import Custom, Policy, PolicyInput
from adaponder.policies.depth import FixedDepth, ForcedDepths, GateOrChance, Random, RandomRates, SampledExit
from adaponder.policies.gate import ExitThreshold, LearnedGate
from adaponder.policies.values import as_int64
from cuda_graphs import captured
from policy_support import DEPTHS, ROW_POLICIES, SLOTS, WORDS, K, alone, tensors_of
from policy_support import mixed_rows as policy_rows

LANES = 12
# The host does not wait for the row policies: their numbers become tensors.
EVERY: list[Policy] = [
    *ROW_POLICIES,
    GateOrChance(0.5, 0.5, 1.0),
    UntilLikely(0.3),
    Custom(lambda rows: rows.gate > 0.1 * rows.iteration),
]


@dataclass(frozen=True)
class Holds(Policy):
    """A user's policy class with a field that is no number."""

    function: Callable[[PolicyInput], Tensor]

    def __call__(self, rows: PolicyInput) -> Tensor:
        return self.function(rows)


def mixed_rows(count: int, *, seed: int, lanes: int = LANES, dtype: torch.dtype = torch.float64) -> PolicyInput:
    """Returns rows of all lanes at all iterations, including the last, after which no row continues."""
    return policy_rows(count, seed=seed, iterations=K, sequences=lanes, dtype=dtype)


def assign(policies, lane, policy, seed=0, depths=None, last=K - 1):
    policies.set(lane, policy, seed, depths or {}, last)


def decide_alone(rows: PolicyInput, row: int, policy: Policy, seed: int) -> bool:
    """Returns the policy's decision for one row in a batch of its own."""
    changes = {"seed": torch.tensor([as_int64(seed)]), "sequence": torch.zeros(1, dtype=torch.long)}
    return bool(policy(alone(rows, row, **changes)))


def test_which_policies_run_on_the_host():
    assert [policy for policy in EVERY if runs_on_host(policy)] == EVERY[len(ROW_POLICIES) :]


@settings(max_examples=40)
@given(
    chosen=st.lists(st.integers(0, len(EVERY) - 1), min_size=LANES, max_size=LANES),
    lasts=st.lists(st.integers(0, K - 1), min_size=LANES, max_size=LANES),
    forced=st.lists(st.dictionaries(st.integers(0, SLOTS - 1), st.integers(0, K)), min_size=LANES, max_size=LANES),
    limits=st.booleans(),
    forces=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_each_row_is_decided_as_by_its_lanes_policy_alone(chosen, lasts, forced, limits, forces, dtype, seed):
    policies = LanePolicies(LANES, SLOTS, K)
    for lane, number in enumerate(chosen):
        assign(policies, lane, FixedDepth(K), 1, {0: 2} if forces else {})  # an earlier request leaves nothing
        last = lasts[lane] if limits else K - 1
        assign(policies, lane, EVERY[number], seed + (lane << 62), forced[lane] if forces else {}, last)
    rows = mixed_rows(60, seed=seed, dtype=dtype)
    keep = policies(rows)
    assert not policies.errors
    for row in range(60):
        lane, iteration, slot = (int(index[row]) for index in (rows.sequence, rows.iteration, rows.slot))
        expected = iteration < (lasts[lane] if limits else K - 1)
        depth = forced[lane].get(slot, 0) if forces else 0
        if depth:
            expected &= iteration + 1 < depth
        else:
            expected &= decide_alone(rows, row, EVERY[chosen[lane]], seed + (lane << 62))
        assert bool(keep[row]) == expected or not rows.active[row]


def test_thresholds_are_compared_in_the_same_precision():
    # 0.1 and 0.7 in float32 lie above and below the same numbers in float64.
    for number in (0.1, 0.7, 0.6):
        rows = mixed_rows(1, seed=0, lanes=1, dtype=torch.float32)
        near = torch.tensor(number, dtype=torch.float32)
        for gate in (near, near.nextafter(torch.tensor(2.0)), near.nextafter(torch.tensor(-2.0))):
            for policy in (LearnedGate(number), ExitThreshold(1 - number), ExitThreshold(number)):
                policies = LanePolicies(1, SLOTS, K)
                assign(policies, 0, policy)
                row = replace(rows, gate=gate[None], iteration=torch.zeros(1, dtype=torch.long))
                assert bool(policies(row)) == bool(policy(row))


@pytest.mark.parametrize("wrong", [None, 1, torch.ones(1), torch.ones(99, dtype=torch.bool), ZeroDivisionError("mine")])
def test_an_error_of_a_policy_is_recorded_for_its_lane_alone(wrong):
    def function(rows: PolicyInput) -> Tensor:
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    for failing in (Custom(function), Holds(function)):
        policies = LanePolicies(3, SLOTS, K)
        assign(policies, 0, FixedDepth(K))
        assign(policies, 1, FixedDepth(K))
        assign(policies, 1, failing)
        assign(policies, 2, Custom(lambda rows: torch.ones_like(rows.active)))
        rows = mixed_rows(80, seed=1, lanes=3)
        keep = policies(rows)
        assert list(policies.errors) == [1]
        assert isinstance(policies.errors[1], type(wrong) if isinstance(wrong, Exception) else InputError)
        expected = (rows.sequence != 1) & (rows.iteration < K - 1)
        assert torch.equal(keep[rows.active], expected[rows.active])
        assign(policies, 1, FixedDepth(1))
        assert not policies.errors


def test_a_callable_gets_the_active_rows_of_its_lane():
    seen: list[PolicyInput] = []

    def function(rows: PolicyInput) -> Tensor:
        seen.append(rows)
        return rows.active

    policies = LanePolicies(3, SLOTS, K)
    assign(policies, 1, Custom(function), seed=77)
    assign(policies, 0, FixedDepth(2))
    assert policies.callables() == (1,)
    rows = mixed_rows(50, seed=1, lanes=3)
    policies(rows)
    mine = (rows.sequence == 1) & rows.active
    (given_rows,) = seen
    assert torch.equal(given_rows.hidden, rows.hidden[mine])
    assert torch.equal(given_rows.iteration, rows.iteration[mine])
    assert given_rows.active.all()
    assert (given_rows.seed == 77).all()
    assert not given_rows.sequence.any()
    assert given_rows.logits.shape == (int(mine.sum()), WORDS)
    policies(replace(rows, active=torch.zeros_like(rows.active)))
    assert len(seen) == 1


def test_the_key_changes_with_what_a_graph_depends_on():
    policies = LanePolicies(3, SLOTS, K)
    empty = policies.key()
    assign(policies, 0, LearnedGate(0.1))
    one = policies.key()
    assign(policies, 1, LearnedGate((0.1, 0.2, 0.3)), 5, {}, 1)
    assert policies.key() == one != empty
    assert policies.classes() == (LearnedGate,)
    for other in (Random(0.5), ForcedDepths(DEPTHS), Custom(lambda rows: rows.active)):
        assign(policies, 2, other)
        assert policies.key() != one
        policies.clear(2)
        assert policies.key() == one
    assign(policies, 2, LearnedGate(0.1), 0, {1: 2})
    assert policies.key() != one


def test_numeric_policies_never_make_the_host_wait():
    def decided(policies: LanePolicies) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            rows = mixed_rows(20, seed=0)
            tensors = {name: fake.from_tensor(value) for name, value in tensors_of(rows).items()}
            policies(PolicyInput(**tensors, head=lambda hidden: hidden))

    for limit in (K - 1, 1):
        policies = LanePolicies(len(ROW_POLICIES), SLOTS, K)
        for lane, policy in enumerate(ROW_POLICIES):
            assign(policies, lane, policy, lane, {1: 2}, limit)
        decided(policies)
    assign(policies, 0, EVERY[-1])
    with pytest.raises(DataDependentOutputException):
        decided(policies)


@pytest.mark.gpu
def test_a_captured_policy_equals_the_cpu():
    lanes = len(ROW_POLICIES)
    policies = {device: LanePolicies(lanes, SLOTS, K, device) for device in ("cpu", "cuda")}

    def settle(shift: int) -> None:
        for lane_policies in policies.values():
            for lane in range(lanes):
                policy, last = ROW_POLICIES[(lane + shift) % lanes], K - 1 - (lane + shift) % 2
                assign(lane_policies, lane, policy, lane + shift, {shift % SLOTS: 2}, last)

    settle(0)
    held = {name: value.cuda() for name, value in tensors_of(mixed_rows(300, seed=0, lanes=lanes)).items()}
    replay, keep = captured(lambda: policies["cuda"](PolicyInput(**held, head=lambda hidden: hidden)))
    for turn in range(5):
        settle(turn)
        rows = replace(mixed_rows(300, seed=turn, lanes=lanes), head=lambda hidden: hidden)
        for name, value in tensors_of(rows).items():
            held[name].copy_(value)
        replay()
        assert torch.equal(keep.cpu(), policies["cpu"](rows))


class Plain(Policy):
    def __call__(self, rows: PolicyInput) -> Tensor:
        return rows.active


@dataclass(frozen=True)
class Seedless(UntilLikely):
    reads_seed: ClassVar[bool] = False


@dataclass(frozen=True)
class OwnGate(LearnedGate):
    def __call__(self, rows: PolicyInput) -> Tensor:
        return rows.seed % 2 == 0


def test_equal_decisions_have_equal_keys():
    for policy in ROW_POLICIES:
        assert prefix_key(policy, 3) == prefix_key(policy, 3)
        assert hash(prefix_key(policy, 3)) is not None
        draws = isinstance(policy, (Random, RandomRates, SampledExit))
        assert (prefix_key(policy, 3) != prefix_key(policy, 4)) == draws
    assert len({prefix_key(policy, 0) for policy in ROW_POLICIES}) == len(ROW_POLICIES)
    assert prefix_key(LearnedGate(0.5), 1) == prefix_key(LearnedGate(0.5), 2)
    assert prefix_key(Random(0.5), 1) == prefix_key(Random(0.5), 1 + (1 << 64))
    assert prefix_key(UntilLikely(0.5), 1) == prefix_key(UntilLikely(0.5), 1)
    assert prefix_key(UntilLikely(0.5), 1) != prefix_key(UntilLikely(0.5), 2)
    assert prefix_key(Seedless(0.5), 1) == prefix_key(Seedless(0.5), 2) != prefix_key(UntilLikely(0.5), 2)
    assert prefix_key(OwnGate(0.5), 1) not in (prefix_key(OwnGate(0.5), 2), prefix_key(LearnedGate(0.5), 1))
    for own in (Custom(lambda rows: rows.active), Plain(), Holds(lambda rows: rows.active)):
        assert prefix_key(own, 0) is None, "a user's function is never shared"
