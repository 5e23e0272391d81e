"""Rows of one call may stand at different iterations: each is answered as if it were alone, and nobody waits for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import support
from adaponder.policies import (
    Change,
    Confidence,
    Divergence,
    Entropy,
    ExitThreshold,
    FixedDepth,
    ForcedDepths,
    Geometric,
    LearnedGate,
    Policy,
    PolicyInput,
    Random,
    RandomRates,
    Ranked,
    RouterThreshold,
    SampledExit,
    Shares,
    Similarity,
    Uniform,
    as_int64,
    base,
    sequence_seeds,
)
from adaponder.policies.values import at, unit_hash

GATES, WIDTH, WORDS, SEQUENCES, SLOTS = 3, 8, 13, 4, 6
PolicyLike = Callable[[PolicyInput], Tensor]
EVERY_SEED = st.integers(-(2**63), 2**63 - 1)


def row_policies(device: str = "cpu") -> dict[str, Policy]:
    """Every built-in rule that decides row by row; those that take one number or one per gate, in both ways."""
    depths = torch.arange(SEQUENCES * SLOTS, device=device).view(SEQUENCES, SLOTS) % (GATES + 1) + 1
    several = {"small": (0.2, 0.7, 0.4), "entropy": (1.0, 1.4, 1.2)}
    policies = [
        LearnedGate(0.4),
        LearnedGate(several["small"]),
        RouterThreshold(),
        ExitThreshold(0.6),
        FixedDepth(2),
        ForcedDepths(depths),
        Random(0.5),
        RandomRates(2.0),
        Entropy(1.2),
        Entropy(several["entropy"]),
        Divergence(0.3),
        Divergence(several["small"]),
        Change(1.2),
        Change((math.inf, 1.4, 1.2)),
        Uniform(several["small"], keep=0.5),
        Geometric(several["small"], rate=0.5),
        Shares(several["small"], shares=(0.9, 0.5, 0.1)),
        Confidence(0.2),
        Confidence((0.1, 0.4, 0.2)),
        Similarity(0.1),
        Similarity((-1.0, 0.2, -0.1)),
        SampledExit(),
    ]
    return {f"{i}-{type(policy).__name__}": policy for i, policy in enumerate(policies)}


NAMES = list(row_policies())


def mixed_rows(count: int, *, seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> PolicyInput:
    """Rows at all iterations and of many seeds; what stood before iteration 0 is NaN, which nobody may look at."""
    generator = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=generator).to(device)

    def real(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype).to(device)

    iteration, table = whole(0, GATES), real(WORDS, WIDTH)
    return PolicyInput(
        iteration=iteration,
        gate=torch.rand(count, generator=generator).to(device),
        hidden=real(count, WIDTH),
        position=whole(0, 1 << 20),
        seed=whole(-(2**63), 2**63 - 1),
        sequence=whole(0, SEQUENCES),
        slot=whole(0, SLOTS),
        active=whole(0, 2).bool(),
        head=lambda hidden: torch.nn.functional.linear(hidden, table),
        previous=real(count, WIDTH).masked_fill(iteration[:, None] == 0, math.nan),
    )


def alone(rows: PolicyInput, row: int) -> PolicyInput:
    """One row as it would be asked about in a batch of its own."""
    tensors = {name: value[row : row + 1] for name, value in vars(rows).items() if isinstance(value, Tensor)}
    if not int(rows.iteration[row]):
        tensors["previous"] = None
    return PolicyInput(**tensors, head=rows.head)


def measured(policy: Policy, row: PolicyInput) -> float:
    """Entropy in nats, top-two gap, KL in nats, cosine or relative change of one row, in Python."""
    log_p = torch.log_softmax(row.logits[0], 0).tolist()
    if isinstance(policy, Entropy):
        return -sum(math.exp(p) * p for p in log_p)
    if isinstance(policy, Confidence):
        first, second = sorted((math.exp(p) for p in log_p), reverse=True)[:2]
        return first - second
    if row.previous is None:
        return -math.inf if isinstance(policy, Similarity) else math.inf
    if isinstance(policy, Divergence):
        log_q = torch.log_softmax(row.head(row.previous)[0], 0).tolist()
        return sum(math.exp(p) * (p - q) for p, q in zip(log_p, log_q, strict=True))
    hidden, before = row.hidden[0].tolist(), row.previous[0].tolist()
    if isinstance(policy, Similarity):
        dot = sum(mine * other for mine, other in zip(hidden, before, strict=True))
        return dot / (math.hypot(*hidden) * math.hypot(*before))
    return math.dist(hidden, before) / math.hypot(*before)


def hash_by_hand(position: int, seed: int, iteration: int) -> float:
    """The hash with Python's own whole numbers, which have no largest one."""
    mask = (1 << 64) - 1
    x = position + (seed * 0x9E3779B9 + iteration * 0x85EBCA6B) % (1 << 62)
    for factor in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
        x = ((x ^ (x >> 30)) * factor) & mask
    return ((x ^ (x >> 31)) & ((1 << 24) - 1)) / (1 << 24)


def by_hand(policy: Policy, row: PolicyInput) -> bool:
    """What the rule says about one row, with Python's numbers and its lists."""
    iteration, gate = int(row.iteration), float(row.gate.float())

    def number(value: float | tuple[float, ...]) -> float:
        return value[iteration] if isinstance(value, tuple) else value

    match policy:
        case LearnedGate(tau=tau):
            return gate >= number(tau)
        case Uniform() | Geometric() | Shares():
            return gate >= policy.thresholds[iteration]
        case RouterThreshold():
            return gate > 0.5
        case ExitThreshold(q=q):
            return 1.0 - gate < q
        case FixedDepth(depth=depth):
            return iteration + 1 < depth
        case ForcedDepths(depths=depths):
            return iteration + 1 < depths[int(row.sequence)][int(row.slot)]
        case Random(keep=keep):
            return hash_by_hand(int(row.position), int(row.seed), iteration) < keep
        case RandomRates(prior=prior):
            position, seed = int(row.position), int(row.seed)
            own = hash_by_hand(position, seed, -2) < 0.5
            rate = hash_by_hand(position if own else -1, seed, -1) ** (1.0 / prior)
            return hash_by_hand(position, seed, iteration) < rate
        case Entropy() | Divergence() | Change():
            return measured(policy, row) >= number(policy.threshold)
        case Confidence() | Similarity():
            return measured(policy, row) <= number(policy.threshold)
        case SampledExit():
            return gate > hash_by_hand(int(row.position), int(row.seed), -3)
    raise AssertionError(f"no rule by hand for {policy}")


def test_the_list_of_row_policies_is_complete():
    listed = {type(policy) for policy in row_policies().values()}
    built_in = {kind for kind in base.registered_policies() if kind.__module__.startswith("adaponder.")}
    assert {kind for kind in built_in if kind.row_by_row} | {ForcedDepths} == listed
    assert {kind for kind in built_in if not kind.row_by_row} == {Ranked}


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10_000))
def test_rows_at_different_iterations_and_seeds_are_each_answered_as_if_alone(name, seed):
    policy, rows = row_policies()[name], mixed_rows(24, seed=seed)
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


@given(seed=st.integers(-(2**200), 2**200))
@example(seed=2**63)
@example(seed=-(2**63) - 1)
def test_a_seed_beyond_int64_wraps_around_to_one_of_the_same_hash(seed):
    wrapped = as_int64(seed)
    assert torch.iinfo(torch.int64).min <= wrapped <= torch.iinfo(torch.int64).max
    assert (wrapped - seed) % 2**64 == 0
    assert hash_by_hand(7, wrapped, 2) == hash_by_hand(7, seed, 2)


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


def on_device(rows: PolicyInput, device: str) -> PolicyInput:
    """Fake rows on a device that need not be there: shapes and types alone, so that looking at a value is an error."""
    tensors = {name: value for name, value in vars(rows).items() if isinstance(value, Tensor)}
    fakes = {name: torch.empty(value.shape, dtype=value.dtype, device=device) for name, value in tensors.items()}
    table = torch.empty(WORDS, WIDTH, dtype=rows.hidden.dtype, device=device)
    return PolicyInput(**fakes, head=lambda hidden: torch.nn.functional.linear(hidden, table))


def run_fake(make: Callable[[], PolicyLike], *, previous: bool = True, device: str = "cuda") -> Tensor:
    """The policy's answer about fake rows; fails where it looks at a value or touches the host's memory."""
    rows = mixed_rows(2000, seed=0, dtype=torch.float32)
    with FakeTensorMode():
        policy, rows = make(), on_device(rows, device)
        if not previous:
            rows = dataclasses.replace(rows, previous=None)
        with OnDevice(device):
            return policy(rows)


@pytest.mark.parametrize("previous", [True, False], ids=["later", "first"])
@pytest.mark.parametrize("name", NAMES)
def test_no_rule_looks_at_a_value_or_copies_one_from_the_host(name, previous):
    # Indexing a fake tensor of a GPU needs a torch that was built for one.
    device = "cpu" if "ForcedDepths" in name else "cuda"
    keep = run_fake(lambda: row_policies(device)[name], previous=previous, device=device)
    assert (keep.shape, keep.dtype, keep.device.type) == ((2000,), torch.bool, device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_every_rule_is_captured_in_a_cuda_graph_and_answers_about_other_rows(name):
    policy = row_policies("cuda")[name]
    rows, other = (mixed_rows(200, seed=seed, device="cuda") for seed in (0, 1))
    expected = policy(dataclasses.replace(other, head=rows.head))
    assert not torch.equal(policy(rows), expected)
    # Libraries set themselves up when first used, which a graph cannot hold.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        policy(rows)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keep = policy(rows)
    for field, value in vars(rows).items():
        if isinstance(value, Tensor):
            value.copy_(getattr(other, field))
    graph.replay()
    assert torch.equal(keep, expected)


def test_ranking_chooses_the_highest_gates_of_active_tokens_and_the_first_of_equals():
    gate = torch.tensor([[0.9, 0.3, 0.3, 0.3, 0.8, 0.1], [0.5, 0.6, 0.7, 0.9, 0.9, 0.9]])
    active = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()
    keep = Ranked(Shares(shares=(0.5, 1.0))).choose(gate, active, torch.tensor([6, 3]), 0)
    assert keep.long().tolist() == [[0, 1, 1, 0, 1, 0], [0, 0, 1, 0, 0, 0]]
    assert torch.equal(Ranked(Shares(shares=(0.5, 1.0))).choose(gate, active, torch.tensor([6, 3]), 1), active)


@pytest.mark.gpu
def test_seeds_that_vary_are_compiled():
    """From its second value on a seed is a variable of the graph."""
    position = torch.arange(100, device="cuda")

    def draw(seed: int) -> Tensor:
        return unit_hash(position, torch.full_like(position, as_int64(seed)), position % 3)

    compiled = torch.compile(draw, fullgraph=True)
    for seed in (3, 4, -7, 2**62, -(2**63)):
        assert torch.equal(compiled(seed), draw(seed))
