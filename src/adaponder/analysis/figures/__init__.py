"""Every figure of the analysis, in the order in which the report shows them; each is a pure function of a trace."""

from __future__ import annotations

from collections.abc import Sequence

from adaponder.analysis.figures import active, depth, difficulty, excerpts, forgone, gains, gates, grid, halting
from adaponder.analysis.figures.plate import Plate
from adaponder.analysis.trace import Kind
from adaponder.errors import InputError

PLATES: tuple[Plate, ...] = (
    halting.PLATE,
    difficulty.PLATE,
    forgone.PLATE,
    active.PLATE,
    gates.PLATE,
    depth.PLATE,
    gains.PLATE,
    grid.PLATE,
)
NAMES: tuple[str, ...] = (*(plate.name for plate in PLATES), excerpts.NAME)


def choose(kind: Kind, only: Sequence[str] = ()) -> tuple[list[Plate], dict[str, str]]:
    """The plates to draw, and the reasons why others cannot be; raises if one named in ``only`` cannot."""
    if wrong := [name for name in only if name not in NAMES]:
        raise InputError(f"--only {wrong[0]}: name some of {', '.join(NAMES)}")
    wanted = [plate for plate in PLATES if not only or plate.name in only]
    reasons = {plate.name: reason for plate in wanted if (reason := plate.missing(kind)) is not None}
    if only and reasons:
        name, reason = next(iter(reasons.items()))
        raise InputError(f"--only {name}: {reason}; it can be drawn from a checkpoint that has what it shows")
    return [plate for plate in wanted if plate.name not in reasons], reasons
