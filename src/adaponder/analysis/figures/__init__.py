"""Lists every figure of the report, in its order; each is a pure function of a trace."""

from __future__ import annotations

from collections.abc import Sequence

from adaponder.analysis.figures.depths import ActiveTokens, DepthByDifficulty, DepthByPlace, GateValues
from adaponder.analysis.figures.losses import ForgoneGain, GainByIteration, LossByDepth
from adaponder.analysis.figures.plate import Plate
from adaponder.analysis.figures.tokens import EXCERPTS, TokenGrid
from adaponder.analysis.trace import Kind
from adaponder.errors import InputError

PLATES: tuple[type[Plate], ...] = (
    LossByDepth,
    DepthByDifficulty,
    ForgoneGain,
    ActiveTokens,
    GateValues,
    DepthByPlace,
    GainByIteration,
    TokenGrid,
)
NAMES: tuple[str, ...] = (*(plate.name for plate in PLATES), EXCERPTS)


def choose(kind: Kind, only: Sequence[str] = ()) -> tuple[list[type[Plate]], dict[str, str]]:
    """Returns the figures to draw and, for each figure that this kind of trace cannot show, its name and the reason.

    ``only`` names the figures that are wanted, all by default; raises if one of these is unknown or cannot be drawn.
    """
    if unknown := [name for name in only if name not in NAMES]:
        raise InputError(f"--only {unknown[0]}: unknown figure; choose from {', '.join(NAMES)}")
    plates = [plate for plate in PLATES if not only or plate.name in only]
    reasons = {plate.name: reason for plate in plates if (reason := plate.missing(kind)) is not None}
    if only and reasons:
        name, reason = next(iter(reasons.items()))
        raise InputError(f"--only {name}: {reason}; use a checkpoint that has it")
    return [plate for plate in plates if plate.name not in reasons], reasons
