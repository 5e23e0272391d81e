"""Random depths of which given shares halt, and a check that dense and compact execution agree on them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from adaponder.backbones.wrapper import relative_difference, rounding_bound
from adaponder.bench.models import batches, build_ours
from adaponder.bench.timing import forget
from adaponder.devices import autocast, product_dtype
from adaponder.errors import EvaluationError, InputError
from adaponder.methods import Iteration
from adaponder.policies import ForcedDepths
from adaponder.recipes import Recipe

METHOD = "adaponder"


def check_keep(keep: Sequence[float], iterations: int) -> None:
    """Raises unless ``keep`` are possible shares of active tokens, one per iteration."""
    said = "--keep " + ",".join(f"{share:g}" for share in keep)
    if len(keep) != iterations:
        raise InputError(f"{said}: {iterations} shares are needed, one per iteration of the recipe")
    if keep[0] != 1:
        raise InputError(f"{said}: the first share is 1, every token is read once")
    if any(not 0 <= later <= earlier for earlier, later in pairwise(keep)):
        raise InputError(f"{said}: shares of all tokens, each at most the one before: nobody comes back")


def depths_of(keep: Sequence[float], batch: int, sequence: int, *, seed: int) -> Tensor:
    """Depths ``[batch, sequence]``: in each sequence ``keep[i]`` of the tokens, chosen at random, reach iteration i."""
    generator = torch.Generator().manual_seed(seed)
    rank = torch.rand(batch, sequence, generator=generator).argsort(dim=1).argsort(dim=1)
    return sum(((rank < round(share * sequence)).long() for share in keep), torch.zeros_like(rank))


@torch.no_grad()
def disagreement(recipe: Recipe, depths: Tensor, *, device: torch.device) -> float:
    """The largest difference between dense and compact final hidden states, relative to the largest state.

    Raises if it is more than rounding explains.
    """
    forget(device)
    batch = depths.shape[0]
    ids, _ = next(batches(recipe, batch, device))
    model = build_ours(recipe, METHOD, device).eval()
    policy = ForcedDepths(depths.to(device))
    states: dict[str, Tensor] = {}
    for execution in ("dense", "compact"):

        def keep_last(iteration: Iteration, execution: str = execution) -> None:
            states[execution] = iteration.hidden

        with autocast(recipe.train.dtype, device):
            output: Any = model(
                ids, execution=execution, policy=policy, logits_to_keep=1, output_gates=False, on_iteration=keep_last
            )
        if not torch.equal(output.depth.cpu(), depths):
            raise EvaluationError(f"{execution} execution read tokens less or more often than told: nothing is timed")
    error = relative_difference(states["compact"], states["dense"])
    bound = rounding_bound(product_dtype(recipe.train.dtype, device))
    if not error <= bound:
        raise EvaluationError(
            f"dense and compact hidden states differ by {error:.1e} (rounding explains {bound:.1e}): nothing is timed"
        )
    return error
