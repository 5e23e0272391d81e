"""Shared by tests of policies: the rules that decide row by row, rows for them, and models."""

import math

import torch
from torch import Tensor

import support
from adaponder import Policy, PolicyInput, policies

K = 4
SEQUENCES, SLOTS, WIDTH, WORDS = 4, 6, 8, 13
# Other methods give policies one of these signals; the laws try them.
DECIDED = ("adaponder", "mor", "ouro")
EXECUTIONS = ("dense", "compact")


def padded(batch: int = 3, time: int = 12) -> tuple[Tensor, Tensor]:
    """Returns token ids and a mask with left padding, right padding and none."""
    mask = torch.ones(batch, time, dtype=torch.long)
    mask[0, :4] = 0
    mask[1, -3:] = 0
    return support.ids(batch, time), mask


def asked(gate: Tensor, *, iteration: int = 0, seed: int | Tensor = 0, **given) -> PolicyInput:
    """Builds the input of a policy for one sequence, without a model."""
    slot = torch.arange(gate.shape[0])
    given = {"position": slot, "sequence": torch.zeros_like(slot), "slot": slot} | given
    return PolicyInput(
        iteration=torch.full_like(slot, iteration),
        gate=gate,
        hidden=gate[:, None],
        seed=torch.zeros_like(slot) + seed,
        active=torch.ones_like(slot, dtype=torch.bool),
        head=lambda hidden: hidden,
        **given,
    )


DEPTHS = torch.arange(SEQUENCES * SLOTS).view(SEQUENCES, SLOTS) % K + 1
# Every built-in rule that decides row by row and has numbers only; some with one number and with one per gate.
ROW_POLICIES: list[Policy] = [
    *map(policies.LearnedGate, (0.4, 0.6, (0.2, 0.7, 0.4), math.inf)),
    policies.RouterThreshold(),
    *map(policies.ExitThreshold, (0.6, 0.3)),
    *map(policies.FixedDepth, (2, K)),
    policies.ForcedDepths(DEPTHS),
    *map(policies.Random, (0.5, 0.9)),
    *map(policies.RandomRates, (1.0, 2.0)),
    *map(policies.Entropy, (1.2, (1.0, 1.4, 1.2))),
    *map(policies.Divergence, (0.3, (0.2, 0.7, 0.4))),
    *map(policies.Change, (1.2, (math.inf, 1.4, 1.2))),
    *map(policies.Confidence, (0.2, (0.1, 0.4, 0.2))),
    *map(policies.Similarity, (0.1, (-1.0, 0.2, -0.1))),
    policies.SampledExit(),
    policies.Uniform((0.2, 0.7, 0.4), keep=0.5),
    policies.Geometric((0.7, 0.2, 0.4), rate=0.5),
    policies.Shares((0.3, 0.3, 0.6), shares=(0.9, 0.5, 0.1)),
]


def mixed_rows(
    count: int, *, seed: int, iterations: int = K - 1, sequences: int = SEQUENCES, dtype: torch.dtype = torch.float64
) -> PolicyInput:
    """Draws rows of all iterations and many seeds, a few not active; states before iteration 0 are NaN."""
    generator = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    def real(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    iteration, table = whole(0, iterations), real(WORDS, WIDTH)
    return PolicyInput(
        iteration=iteration,
        gate=torch.rand(count, generator=generator),
        hidden=real(count, WIDTH),
        position=whole(0, 1 << 20),
        seed=whole(-(2**63), 2**63 - 1),
        sequence=whole(0, sequences),
        slot=whole(0, SLOTS),
        active=whole(0, 5) > 0,
        head=lambda hidden: torch.nn.functional.linear(hidden, table),
        previous=real(count, WIDTH).masked_fill(iteration[:, None] == 0, math.nan),
    )


def tensors_of(rows: PolicyInput) -> dict[str, Tensor]:
    return {name: value for name, value in vars(rows).items() if isinstance(value, Tensor)}


def alone(rows: PolicyInput, row: int, **changes: Tensor) -> PolicyInput:
    """Returns one row as a batch of 1."""
    tensors = {name: value[row : row + 1] for name, value in tensors_of(rows).items()} | changes
    if not int(rows.iteration[row]):
        tensors["previous"] = None
    return PolicyInput(**tensors, head=rows.head)
