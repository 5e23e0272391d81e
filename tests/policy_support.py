"""What tests of policies share: models of moderate gates, padded batches, and depths by hand."""

from __future__ import annotations

import torch
from torch import Tensor

import support
from adaponder import PolicyInput

K = 4
# Other methods give policies one of these signals; the laws try them.
DECIDED = ("adaponder", "mor", "ouro")
EXECUTIONS = ("dense", "compact")


def padded(batch: int = 3, time: int = 12) -> tuple[Tensor, Tensor]:
    """Token ids and a mask with left padding, right padding and none."""
    mask = torch.ones(batch, time, dtype=torch.long)
    mask[0, :4] = 0
    mask[1, -3:] = 0
    return support.ids(batch, time), mask


def depth_by_hand(keep: Tensor, real: Tensor) -> Tensor:
    """Depth from what each gate said ``[batch, time, gates]``: one reading, and one more for each yes in a row."""
    return torch.where(real.bool(), 1 + keep.long().cumprod(-1).sum(-1), 0)


def asked(gate: Tensor, *, iteration: int = 0, seed: int | Tensor = 0, **given) -> PolicyInput:
    """What a policy is shown of one sequence without a model behind it."""
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
