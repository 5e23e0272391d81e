"""The loss of the validation split: the same windows each time, shared by all processes, each window counted once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adaponder.data import Shards
from adaponder.evaluation.scoring import score_sum
from adaponder.modeling.model import AdaPonderForCausalLM
from adaponder.training.distributed import World


def count_windows(shards: Shards, tokens: int, *, length: int) -> int:
    """How many whole windows of ``length`` predictions the split's first ``tokens`` tokens hold."""
    return min(tokens, shards.tokens - 1) // length


@torch.no_grad()
def validation_sums(
    model: AdaPonderForCausalLM, shards: Shards, *, windows: int, length: int, rows: int, world: World, **asked: Any
) -> Tensor:
    """(summed loss, predictions, tokens of depth 1 … K) of the first ``windows``, over all processes, in double.

    ``rows`` windows are read at once; ``asked`` are further arguments of the model.
    """
    levels = torch.arange(1, model.config.iterations + 1, device=world.device)
    sums = torch.zeros(2 + len(levels), dtype=torch.double, device=world.device)
    # Every process does equally many forwards: under FSDP each is a joint act. Past the end the last window fills up.
    for index in range(-(-windows // (world.size * rows))):
        first = (index * world.size + world.rank) * rows
        chosen = torch.arange(first, first + rows)
        blocks = [shards.read(i * length, length + 1) for i in chosen.clamp_max(windows - 1).tolist()]
        block = torch.stack([torch.from_numpy(one) for one in blocks]).to(world.device)
        real = (chosen < windows).to(world.device)[:, None]
        scored = score_sum(model, block[:, :-1], block[:, 1:].masked_fill(~real, -100), execution="dense", **asked)
        depths = ((scored.depth[..., None] == levels) & real[..., None]).sum((0, 1))
        sums += torch.cat([torch.stack([scored.nll, scored.predictions.double()]), depths.double()])
    return world.sum(sums)
