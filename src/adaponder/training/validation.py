"""Measures loss and depths on the same windows of the validation split each time, divided among all processes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from adaponder.data import Shards, read_windows
from adaponder.devices import autocast
from adaponder.evaluation.scoring import score_sum
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.training.data import model_inputs
from adaponder.training.distributed import World
from adaponder.training.watch import count_depths, depth_shares


def whole_windows(shards: Shards, tokens: int, *, length: int) -> int:
    """Returns the number of windows of ``length`` predictions in the split's first ``tokens`` tokens, at least 1.

    A window has ``length + 1`` tokens; the last token of the last window may lie beyond the first ``tokens``.
    """
    stride = _stride(shards, length)
    return max(1, min(tokens, shards.tokens - (length + 1 - stride)) // stride)


def _stride(shards: Shards, length: int) -> int:
    """Returns the distance between window starts. Windows overlap by one token, except those of puzzles."""
    return length + 1 if shards.manifest.puzzles else length


@torch.no_grad()
def validate(
    model: AdaPonderForCausalLM,
    shards: Shards,
    *,
    tokens: int,
    length: int,
    together: int,
    world: World,
    dtype: str,
    across: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Returns ``validation_loss``, mean ``validation_depth`` and ``validation_halted`` of the first ``tokens`` tokens.

    ``validation_halted`` are the shares of tokens with depth at most 1 … K-1. Only tokens with targets are counted (in
    conversations, the assistant's turns).

    Args:
        length: predictions per window.
        together: windows per batch.
        across: whether tokens attend to the documents before their own in the window.
        options: further arguments of the model's forward.
    """
    windows, stride = whole_windows(shards, tokens, length=length), _stride(shards, length)
    # Summed loss, predictions, tokens of depth 1 … K.
    sums = torch.zeros(2 + model.config.iterations, dtype=torch.double, device=world.device)
    model.eval()
    # FSDP needs the same number of forwards in every process: beyond the end, the last window is repeated, not counted.
    for index in range(-(-windows // (world.size * together))):
        numbers = (index * world.size + world.rank) * together + np.arange(together)
        batch = read_windows(shards, np.minimum(numbers, windows - 1), sequence=length, stride=stride)
        inputs = model_inputs(batch, across=across)
        inputs["targets"][torch.from_numpy(numbers >= windows)] = -100
        inputs = {name: value.to(world.device) for name, value in inputs.items()}
        ids, targets = inputs.pop("input_ids"), inputs.pop("targets")
        with autocast(dtype, world.device):
            scored = score_sum(model, ids, targets, execution="dense", **inputs, **options)
        depths = count_depths(scored.depth * (targets != -100), model.config.iterations)
        sums += torch.cat([torch.stack([scored.nll, scored.predictions.double()]), depths.double()])
    model.train()
    sums = world.sum(sums)
    depth, halted = depth_shares(sums[2:].cpu())
    loss = float(sums[0]) / (float(sums[1]) or math.nan)
    return {"validation_loss": loss, "validation_depth": depth, "validation_halted": halted}
