"""Loss and depths on the validation split: the same windows each time, shared by all processes, each counted once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from adaponder.data import Shards
from adaponder.devices import autocast
from adaponder.evaluation.scoring import score_sum
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.training.distributed import World


def whole_windows(shards: Shards, tokens: int, *, length: int) -> int:
    """How many whole windows of ``length`` predictions the split's first ``tokens`` tokens hold, one at least.

    One takes a token more than it predicts: the split has as many, ``tokens`` may be just ``length``.
    """
    step = _step(shards, length)
    return max(1, min(tokens, shards.tokens - (length + 1 - step)) // step)


def _step(shards: Shards, length: int) -> int:
    """From one window's first token to the next's: each token is a target once, but of a puzzle the first word."""
    return length + 1 if shards.manifest.puzzles else length


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
    """``validation_loss``, ``validation_depth`` (mean) and ``validation_halted`` on the first ``tokens`` tokens.

    ``validation_halted`` are the shares of tokens halted after iterations 1 … K-1, of those that predict what counts:
    of a conversation, what the assistant says. ``together`` windows of ``length`` tokens are read at once; without
    ``across``, documents do not see each other; ``options`` are further arguments of the model's forward.
    """
    windows = whole_windows(shards, tokens, length=length)
    model.eval()
    with autocast(dtype, world.device):
        sums = validation_sums(
            model, shards, windows=windows, length=length, together=together, world=world, across=across, **options
        )
    model.train()
    loss, predictions, depths = float(sums[0]), float(sums[1]) or math.nan, sums[2:].cpu()
    return {
        "validation_loss": loss / predictions,
        "validation_depth": float((depths * torch.arange(1, len(depths) + 1)).sum()) / predictions,
        "validation_halted": (depths.cumsum(0)[:-1] / predictions).tolist(),
    }


@torch.no_grad()
def validation_sums(
    model: AdaPonderForCausalLM,
    shards: Shards,
    *,
    windows: int,
    length: int,
    together: int,
    world: World,
    across: bool = True,
    **options: Any,
) -> Tensor:
    """(summed loss, predictions, tokens of depth 1 … K) of the first ``windows``, over all processes, in double.

    ``together`` windows are read at once; see :func:`validate` for the rest.
    """
    levels = torch.arange(1, model.config.iterations + 1, device=world.device)
    sums = torch.zeros(2 + len(levels), dtype=torch.double, device=world.device)
    # Every process makes as many forwards, as FSDP needs. Past the end the last window is read again and not counted.
    for index in range(-(-windows // (world.size * together))):
        first = (index * world.size + world.rank) * together
        chosen = torch.arange(first, first + together)
        ids, targets, documents = (
            part.to(world.device) for part in _windows(shards, chosen, windows=windows, length=length)
        )
        if not across:
            # The first token of the next document cannot be predicted from this one: it is no target.
            targets = targets.masked_fill(documents[:, 1:] != documents[:, :-1], -100)
            options["document_ids"] = documents[:, :-1]
        scored = score_sum(model, ids, targets, execution="dense", **options)
        depths = ((scored.depth[..., None] == levels) & (targets != -100)[..., None]).sum((0, 1))
        sums += torch.cat([torch.stack([scored.nll, scored.predictions.double()]), depths.double()])
    return world.sum(sums)


def _windows(shards: Shards, chosen: Tensor, *, windows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, targets, documents) of the chosen windows, the last with one more; nothing is a target past the end."""
    starts = chosen.clamp_max(windows - 1).numpy() * _step(shards, length)
    block = torch.from_numpy(shards.read_blocks(starts, length + 1))
    documents = torch.from_numpy(shards.number_blocks(starts, length + 1))
    targets = block[:, 1:].masked_fill((chosen >= windows)[:, None], -100)
    learned = shards.learned_blocks(starts, length + 1)
    if learned is not None:
        targets = targets.masked_fill(~torch.from_numpy(learned)[:, 1:], -100)
    return block[:, :-1], targets, documents
