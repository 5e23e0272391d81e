"""Rows of one call may stand at different iterations: each is answered as if it were alone, and nobody waits for it."""

import dataclasses
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import support
from adaponder import policies
from adaponder.policies import Policy, PolicyInput, Random, Ranked, Shares, as_int64, base, sequence_seeds
from adaponder.policies.values import at, unit_hash
from policy_support import ROW_POLICIES, WIDTH, WORDS, alone, mixed_rows, tensors_of

EVERY_SEED = st.integers(-(2**63), 2**63 - 1)
NAMES = [f"{number}-{type(policy).__name__}" for number, policy in enumerate(ROW_POLICIES)]
every_policy = pytest.mark.parametrize("policy", ROW_POLICIES, ids=NAMES)


def measured(policy: Policy, row: PolicyInput) -> float:
    """Computes in Python what a rule measures: entropy or KL in nats, top-two gap, cosine, relative change."""
    log_p = torch.log_softmax(row.logits[0], 0).tolist()
    if isinstance(policy, policies.Entropy):
        return -sum(math.exp(p) * p for p in log_p)
    if isinstance(policy, policies.Confidence):
        first, second = sorted((math.exp(p) for p in log_p), reverse=True)[:2]
        return first - second
    if row.previous is None:
        return -math.inf if isinstance(policy, policies.Similarity) else math.inf
    if isinstance(policy, policies.Divergence):
        log_q = torch.log_softmax(row.head(row.previous)[0], 0).tolist()
        return sum(math.exp(p) * (p - q) for p, q in zip(log_p, log_q, strict=True))
    hidden, before = row.hidden[0].tolist(), row.previous[0].tolist()
    if isinstance(policy, policies.Similarity):
        dot = sum(mine * other for mine, other in zip(hidden, before, strict=True))
        return dot / (math.hypot(*hidden) * math.hypot(*before))
    return math.dist(hidden, before) / math.hypot(*before)


def hash_by_hand(position: int, seed: int, iteration: int) -> float:
    """Computes the hash with Python's unbounded integers."""
    mask = (1 << 64) - 1
    x = position + (seed * 0x9E3779B9 + iteration * 0x85EBCA6B) % (1 << 62)
    for factor in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
        x = ((x ^ (x >> 30)) * factor) & mask
    return ((x ^ (x >> 31)) & ((1 << 24) - 1)) / (1 << 24)


def by_hand(policy: Policy, row: PolicyInput) -> bool:
    """Returns the rule's decision for one row, computed in Python."""
    iteration, gate = int(row.iteration), float(row.gate.float())

    def number(value: float | tuple[float, ...]) -> float:
        return value[iteration] if isinstance(value, tuple) else value

    match policy:
        case policies.LearnedGate(tau=tau):
            return gate >= number(tau)
        case policies.Uniform() | policies.Geometric() | policies.Shares():
            return gate >= policy.thresholds[iteration]
        case policies.RouterThreshold():
            return gate > 0.5
        case policies.ExitThreshold(q=q):
            return 1.0 - gate < q
        case policies.FixedDepth(depth=depth):
            return iteration + 1 < depth
        case policies.ForcedDepths(depths=depths):
            return iteration + 1 < depths[int(row.sequence)][int(row.slot)]
        case policies.Random(keep=keep):
            return hash_by_hand(int(row.position), int(row.seed), iteration) < keep
        case policies.RandomRates(prior=prior):
            position, seed = int(row.position), int(row.seed)
            own = hash_by_hand(position, seed, -2) < 0.5
            rate = hash_by_hand(position if own else -1, seed, -1) ** (1.0 / prior)
            return hash_by_hand(position, seed, iteration) < rate
        case policies.Entropy() | policies.Divergence() | policies.Change():
            return measured(policy, row) >= number(policy.threshold)
        case policies.Confidence() | policies.Similarity():
            return measured(policy, row) <= number(policy.threshold)
        case policies.SampledExit():
            return gate > hash_by_hand(int(row.position), int(row.seed), -3)
    raise AssertionError(f"no rule by hand for {policy}")


def test_the_list_of_row_policies_is_complete():
    listed = {type(policy) for policy in ROW_POLICIES}
    built_in = {kind for kind in base.registered_policies() if kind.__module__.startswith("adaponder.")}
    assert {kind for kind in built_in if kind.row_by_row} | {policies.ForcedDepths} == listed
    assert {kind for kind in built_in if not kind.row_by_row} == {Ranked}


@every_policy
@given(seed=st.integers(0, 10_000))
def test_rows_at_different_iterations_and_seeds_are_each_answered_as_if_alone(policy, seed):
    rows = mixed_rows(24, seed=seed)
    keep = policy(rows)
    assert keep.dtype == torch.bool
    singles = [alone(rows, row) for row in range(24)]
    assert keep.tolist() == [policy(single).item() for single in singles]
    assert keep.tolist() == [by_hand(policy, single) for single in singles]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5), data=st.data())
def test_a_number_per_gate_is_rounded_as_one_number_for_all_gates_is(dtype, values, data):
    """A signal that equals the threshold as rounded to its precision is not below it."""
    i = data.draw(st.integers(0, len(values) - 1))
    signal, iteration = torch.tensor([values[i]], dtype=dtype), torch.tensor([i])
    for neighbour in (signal, signal.nextafter(torch.tensor(-math.inf)), signal.nextafter(torch.tensor(math.inf))):
        one, several = (at(value, iteration, dtype) for value in (values[i], values))
        assert torch.equal(neighbour >= one, neighbour >= several)


def test_an_iteration_without_a_number_keeps_nothing():
    number = at((0.1, 0.2), torch.tensor([0, 1, 2, -1]), torch.float64)
    assert (torch.tensor(math.inf) >= number).tolist() == [True, True, False, False]


@given(position=st.integers(0, 2**31), seed=EVERY_SEED, iteration=st.integers(0, 100))
@example(position=0, seed=-(2**63), iteration=0)
@example(position=2**31, seed=2**63 - 1, iteration=100)
@example(position=5, seed=-1, iteration=3)
def test_the_hash_of_wrapping_numbers_is_that_of_whole_numbers(position, seed, iteration):
    result = unit_hash(torch.tensor([position]), torch.tensor([seed]), torch.tensor([iteration]))
    assert result.item() == hash_by_hand(position, seed, iteration)


@given(seed=st.integers(-(2**70), 2**70), numbers=st.lists(EVERY_SEED, min_size=2, max_size=9, unique=True))
@example(seed=0, numbers=[0, 1, 2, 3])
def test_every_sequence_has_a_seed_of_its_own(seed, numbers):
    seeds = sequence_seeds(seed, torch.tensor(numbers))
    assert len(set(seeds.tolist())) == len(numbers)
    assert torch.equal(sequence_seeds(seed, torch.tensor(numbers[:1])), seeds[:1])
    assert not torch.equal(sequence_seeds(seed + 1, torch.tensor(numbers)), seeds)


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 + 3, -(2**70)])
def test_a_model_takes_any_whole_number_as_a_seed(seed):
    ids, model = support.ids(2, 9), support.tiny(iterations=3).train()
    model.training_policy, model.training_seed = Random(0.5), 5
    depth = model(ids, seed=seed).depth
    by_hand = [[hash_by_hand(position, seed, i) < 0.5 for i in range(2)] for position in range(9)]
    expected = [1 + first + (first and second) for first, second in by_hand]
    assert depth.tolist() == [expected, expected]


class OnDevice(TorchDispatchMode):
    """Fails where an operation reads or makes a tensor that is not on the device: it would be copied there."""

    def __init__(self, device: str):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in (*args, result) if isinstance(value, Tensor)]
        assert all(tensor.device.type == self.device for tensor in tensors), f"{func} touches the host"
        return result


@pytest.mark.parametrize("previous", [True, False], ids=["later", "first"])
@every_policy
def test_no_rule_looks_at_a_value_or_copies_one_from_the_host(policy, previous):
    """Fake rows have shapes and types alone, on a GPU that need not exist."""
    # Indexing a fake tensor of a GPU needs a torch that was built for one.
    device = "cpu" if isinstance(policy, policies.ForcedDepths) else "cuda"
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = tensors_of(mixed_rows(2000, seed=0, dtype=torch.float32))
        fakes = {name: torch.empty(value.shape, dtype=value.dtype, device=device) for name, value in tensors.items()}
        table = torch.empty(WORDS, WIDTH, device=device)
        rows = PolicyInput(**fakes, head=lambda hidden: torch.nn.functional.linear(hidden, table))
        with OnDevice(device):
            keep = policy(rows if previous else dataclasses.replace(rows, previous=None))
    assert (keep.shape, keep.dtype, keep.device.type) == ((2000,), torch.bool, device)


def test_ranking_chooses_the_highest_gates_of_active_tokens_and_the_first_of_equals():
    gate = torch.tensor([[0.9, 0.3, 0.3, 0.3, 0.8, 0.1], [0.5, 0.6, 0.7, 0.9, 0.9, 0.9]])
    active = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()
    keep = Ranked(Shares(shares=(0.5, 1.0))).choose(gate, active, torch.tensor([6, 3]), 0)
    assert keep.long().tolist() == [[0, 1, 1, 0, 1, 0], [0, 0, 1, 0, 0, 0]]
    assert torch.equal(Ranked(Shares(shares=(0.5, 1.0))).choose(gate, active, torch.tensor([6, 3]), 1), active)


@pytest.mark.gpu
def test_seeds_that_vary_are_compiled():
    """A seed becomes a variable of the graph at its second value."""
    position = torch.arange(100, device="cuda")

    def draw(seed: int) -> Tensor:
        return unit_hash(position, torch.full_like(position, as_int64(seed)), position % 3)

    compiled = torch.compile(draw, fullgraph=True)
    for seed in (3, 4, -7, 2**62, -(2**63)):
        assert torch.equal(compiled(seed), draw(seed))
