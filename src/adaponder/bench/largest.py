"""The largest batch whose training step fits into memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adaponder.bench import training
from adaponder.bench.timing import capacity
from adaponder.bench.training import Result, Variant
from adaponder.recipes import Recipe


def search(
    recipe: Recipe, variant: Variant, *, start: int, device: torch.device, tried: Callable[[int, bool], object]
) -> Result | None:
    """The step of the largest multiple of ``start`` that fits into memory; ``None`` if not even ``start`` does.

    Memory grows linearly with the batch, so two trials predict where it is full, and the rest search around that.
    Where memory is not counted the batch doubles until it no longer fits. The answer and the next multiple have
    both been tried. ``tried(batch, fits)`` is called after each trial.
    """
    peaks: dict[int, int] = {}
    fitting: dict[int, Result] = {}

    def fits(multiple: int) -> bool:
        done = _second_step(recipe, variant, multiple * start, device)
        tried(multiple * start, done.timing is not None)
        if done.timing is None:
            return False
        fitting[multiple] = done
        if done.timing.peak_bytes is not None:
            peaks[multiple] = done.timing.peak_bytes
        return True

    below, above, probe, stride = 0, 0, 1, 1  # nothing has failed yet: above is 0
    while above - below != 1:
        if fits(probe):
            below = probe
        else:
            above = probe
        if not above and (full := full_at(peaks, capacity(device))) > below:
            probe, stride = full, 1
            continue
        probe = above - stride if above else below + stride
        if above and probe <= below:
            probe = (below + above) // 2
        stride *= 2
    return fitting.get(below)


def around(
    recipe: Recipe,
    variant: Variant,
    *,
    guess: int,
    start: int,
    device: torch.device,
    tried: Callable[[int, bool], object],
) -> Result | None:
    """The step of the largest batch that fits, searched up or down from a good guess, because each trial compiles.

    The second trial compiles for a variable batch size, so that later ones need not.
    """
    best, batch, direction = None, guess, 0
    while batch > 0:
        done = _second_step(recipe, variant, batch, device, keep_graphs=direction != 0)
        fits = done.timing is not None
        tried(batch, fits)
        direction = direction or (1 if fits else -1)
        best = done if fits else best
        if fits != (direction == 1):
            break
        batch += direction * start
    return best


def full_at(peaks: dict[int, int], room: int | None) -> int:
    """The largest multiple that should fit, extrapolated from the two largest peaks; 0 if unknown."""
    if room is None or len(peaks) < 2:
        return 0
    less, more = sorted(peaks)[-2:]
    slope = (peaks[more] - peaks[less]) / (more - less)
    return int(more + (room - peaks[more]) / slope) if slope > 0 else 0


def _second_step(
    recipe: Recipe, variant: Variant, batch: int, device: torch.device, *, keep_graphs: bool = False
) -> Result:
    """Times the second step: the first that has the optimizer's moments from its beginning."""
    settings = {"device": device, "warmup": 1, "repeats": 1, "keep_graphs": keep_graphs}
    return training.measure_if_it_fits(recipe, variant, batch=batch, **settings)


def as_row(variant: Variant, best: Result | None) -> dict[str, Any]:
    """A line of a record's ``largest_batch``."""
    if best is None or best.timing is None:
        return {"variant": variant.name, "batch": 0, "tokens_per_second": None, "peak_bytes": None}
    speed, peak = best.tokens_per_second, best.timing.peak_bytes
    return {"variant": variant.name, "batch": best.batch, "tokens_per_second": speed, "peak_bytes": peak}
