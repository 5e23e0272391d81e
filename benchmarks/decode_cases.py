"""Lists the cases of ``benchmarks decode``: the side (implementation), shape, lanes, context and depth of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.models import ITERATIONS, shares_of

# Sides in the engine: our method, the same with drafted tokens, and the plain decoder.
ENGINE, DRAFTING, VANILLA = "engine", "drafting", "vanilla"
# Sides outside of it: our ``generate``, and Hugging Face's on the plain decoder; compiled, its cache is static.
PORTABLE, HF, HF_COMPILED = "portable", "hf generate", "hf compiled"
# Sides outside of the engine, and how many new tokens each is timed for; fewer for the slow one.
OUTSIDE = {PORTABLE: 12, HF: 48, HF_COMPILED: 96}
PLAIN_SIDES = (VANILLA, HF, HF_COMPILED)
STEADY, MEMORY, WHOLE = "steady", "memory", "end to end"
# Lanes, contexts and lengths of the whole table, and what is enough on a CPU.
ON_GPU: dict[str, Any] = {"lanes": (1, 4, 16, 64, 256), "contexts": (128, 512, 2048), "new": 128}
ON_CPU: dict[str, Any] = {"lanes": (1, 4), "contexts": (8, 16), "new": 8}


@dataclass(frozen=True)
class DecodeCase:
    """A measurement of decoding, with ``lanes`` sequences at a time and prompts of ``context`` tokens.

    Attributes:
        side: the implementation that decodes: ``ENGINE``, ``DRAFTING``, ``VANILLA`` or a key of ``OUTSIDE``.
        shape: a name in :data:`SHAPES`, or a checkpoint.
        depth: forced mean depth; ``None``: the model decides.
        kind: ``steady``: only decoding is timed, with all lanes busy. ``memory``: many requests share a KV cache with
            rows for ``lanes`` sequences of full depth. ``end to end``: prefill is timed too.
        new: tokens to generate per request, unless the kind is ``steady``.
    """

    side: str
    shape: str
    lanes: int
    context: int
    depth: float | None = float(ITERATIONS)
    kind: str = STEADY
    new: int = 128

    @property
    def name(self) -> str:
        depth = "" if self.side in PLAIN_SIDES else ", own depth" if self.depth is None else f", depth {self.depth:g}"
        kind = "" if self.kind == STEADY else f", {self.kind}"
        lanes = "one stream" if self.lanes == 1 else f"{self.lanes} lanes"
        return f"{self.shape}, {self.side}, {lanes}, context {self.context}{depth}{kind}"

    @property
    def shares(self) -> tuple[float, ...] | None:
        """Returns the share of tokens that is forced to each depth; ``None`` if no depth is forced."""
        return None if self.depth is None or self.side in PLAIN_SIDES else shares_of(self.depth)


def cases(
    shapes: Sequence[str], depths: Sequence[float], *, lanes: Sequence[int], contexts: Sequence[int], new: int
) -> list[DecodeCase]:
    """Returns the cases of all shapes; consecutive cases use the same model.

    The engine runs at full depth with every pair of lanes and context, at every depth with the middle context, and with
    limited memory. Drafting runs with the fewest lanes; other sides, with the fewest and with those nearest to 64.
    """
    many = min(lanes, key=lambda count: abs(count - 64))
    short, middle = min(contexts), sorted(contexts)[len(contexts) // 2]
    full, low = max(depths), 2.0 if 2.0 in depths else min(depths)
    result: list[DecodeCase] = []
    for shape in shapes:
        result += [DecodeCase(ENGINE, shape, count, context, full) for count in lanes for context in contexts]
        result += [DecodeCase(ENGINE, shape, many, middle, depth) for depth in depths]
        result += [DecodeCase(ENGINE, shape, max(2, many // 2), middle, depth, MEMORY, new) for depth in (full, low)]
        result.append(DecodeCase(DRAFTING, shape, min(lanes), short, full))
        result += _other_sides(shape, (min(lanes), many), short, full)
    return list(dict.fromkeys(result))


def _other_sides(shape: str, lanes: tuple[int, int], context: int, full: float) -> list[DecodeCase]:
    """Returns cases of the plain decoder, of ``generate`` at depth ``full``, and of Hugging Face's ``generate``."""
    depths = {VANILLA: 1.0, PORTABLE: full, HF: 1.0, HF_COMPILED: 1.0}
    return [DecodeCase(side, shape, count, context, depth) for side, depth in depths.items() for count in lanes]


def subset_cases(shapes: Sequence[str]) -> list[DecodeCase]:
    """Returns the cases that the project has targets for; they take a few minutes."""
    last = shapes[-1]
    return [
        *(DecodeCase(side, shape, 1, 128) for shape in shapes for side in (ENGINE, DRAFTING)),
        *(DecodeCase(ENGINE, last, 64, 512, depth) for depth in (4.0, 3.7, 2.0)),
        *(DecodeCase(ENGINE, last, 32, 512, depth, MEMORY) for depth in (4.0, 2.0)),
        *_other_sides(last, (1, 64), 128, float(ITERATIONS)),
    ]


def served(
    shape: str = "ouro-1.4b", lanes: Sequence[int] = (1, 32, 128), context: int = 1024, new: int = 128
) -> list[DecodeCase]:
    """Returns end-to-end cases for each number of concurrent requests and mean depth, then a memory case per depth."""
    depths = (4.0, 3.0, 2.5, 2.0)
    middle = sorted(lanes)[len(lanes) // 2]
    result = [DecodeCase(ENGINE, shape, count, context, depth, WHOLE, new) for count in lanes for depth in depths]
    return result + [DecodeCase(ENGINE, shape, middle, context, depth, MEMORY, new) for depth in depths]
