"""Times decoding of our engine and of others, by number of lanes, context length and depth."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import torch

from adaponder.commands.shared import listed, opt
from adaponder.errors import AdaPonderError, InputError, in_one_line
from adaponder.terminal import console
from benchmarks import harness
from benchmarks.harness import Common, Precision, Row, Run, number, ratio
from benchmarks.models import ITERATIONS, SHAPES, SHARES, shares_of

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
        side: the implementation that decodes: one of ``ENGINE``, ``DRAFTING``, ``VANILLA`` and ``OUTSIDE``.
        shape: a name in :data:`SHAPES`, or a checkpoint.
        depth: forced mean depth; ``None``: the model decides.
        kind: ``steady``: every lane decodes. ``memory``: many requests share a KV cache with rows for ``lanes``
            sequences of full depth. ``end to end``: prompts are included.
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


def run(
    *,
    shape: Annotated[list[str] | None, opt(f"{', '.join(SHAPES)}; random weights{harness.SEVERAL}", "NAME")] = None,
    checkpoint: Annotated[str | None, opt("A model whose gates decide depth; needs --data.", "CKPT")] = None,
    data: Annotated[str | None, opt("The text that the prompts are cut from.", "SRC")] = None,
    lanes: Annotated[str | None, opt("Sequences decoded at the same time.", "1,64")] = None,
    contexts: Annotated[str | None, opt("Tokens of a prompt.", "128,…")] = None,
    depths: Annotated[str | None, opt("Forced mean depths, 1 to 4.", "4,2")] = None,
    tokens: Annotated[int, opt("New tokens of each lane per repetition.", "N", min=1)] = 16,
    subset: Annotated[bool, opt("Only the cases that the project has targets for.", flag="--subset")] = False,
    scenario: Annotated[Literal["ouro"] | None, opt("ouro: Ouro-1.4B, 1,024 in, 128 out, by depth.", "NAME")] = None,
    dtype: Annotated[Precision | None, opt("bfloat16 (GPU), float16 or float32 (CPU).", "NAME")] = None,
    options: Common,
) -> dict[str, Any]:
    """Time decoding in the engine, beside generate and Hugging Face: by lanes, context length and depth.

    [dim]python -m benchmarks decode --device cuda --subset[/]

    [dim]python -m benchmarks decode --device cuda --scenario ouro[/]
    """
    from benchmarks.decode_sides import Sides, open_checkpoint

    device = options.target
    precision = harness.precision(dtype, device)
    if unknown := set(shape or ()) - set(SHAPES):
        raise InputError(f"--shape {unknown.pop()} must be one of {', '.join(SHAPES)}")
    counts = listed("--lanes", lanes, int, "[1, 4096]")
    lengths = listed("--contexts", contexts, int, "[1, 1048576]")
    means = listed("--depths", depths, float, f"[1, {ITERATIONS}]")
    if scenario is not None and (subset or checkpoint or shape or means):
        raise InputError(f"--scenario {scenario} has its own shape and depths: leave the other options out")
    if (checkpoint is None) != (data is None):
        raise InputError("--checkpoint and --data belong together: prompts are cut from the text")
    if subset and (counts or lengths or means):
        raise InputError("--subset has its own lanes, contexts and depths: leave it out to choose them")
    defaults = ON_GPU if device.type == "cuda" else ON_CPU
    sizes: dict[str, Any] = defaults | {"lanes": counts or defaults["lanes"]}
    sizes |= {"contexts": lengths or defaults["contexts"]}
    if scenario is not None:
        size: dict[str, Any] = {}
        if device.type != "cuda":
            size = {"shape": "ouro-tiny", "lanes": (1, 2), "context": 16, "new": 8}
        if counts:
            size["lanes"] = counts
        if lengths:
            size["context"] = lengths[0]
        name, candidates = f"decode-{scenario}", served(**size)
    elif checkpoint is not None:
        name = "decode-checkpoint"
        arguments = itertools.product((ENGINE, DRAFTING), (checkpoint,), sizes["lanes"], sizes["contexts"], (None,))
        candidates = list(itertools.starmap(DecodeCase, arguments))
    else:
        shapes = shape or (["70m", "410m"] if device.type == "cuda" else ["tiny"])
        name = "-".join(["decode", *shapes, *(["subset"] if subset else [])])
        candidates = subset_cases(shapes) if subset else cases(shapes, means or tuple(SHARES), **sizes)
    selected = harness.select(candidates, options.only)
    opened = None if checkpoint is None or data is None else open_checkpoint(checkpoint, data, precision, device)
    settings = {"dtype": precision, "tokens": tokens, "subset": subset, "scenario": scenario, "checkpoint": checkpoint}
    forced = {case.depth for case in selected if case.depth is not None}
    settings |= {"shares": {f"{depth:g}": shares_of(depth) for depth in sorted(forced)}}
    bench = Run(options, name, settings)
    rate, steps = bench.hardware["copy_bytes"], options.how_often | {"part": tokens}
    sides = Sides(device, getattr(torch, precision), options.seed or 0, rate, steps, opened)
    about: dict[str, Any] = {"title": lambda row: f"\n{row['shape']}: decoding", "columns": COLUMNS}
    rows = bench.measure_all(selected, lambda case: row_of(case, sides.measure), compare=compare, **about)
    for row in rows:
        if not row["works"]:
            console.print(f"{row['name']}: {row['problem']}", style="yellow")
    return bench.finish()


def cases(
    shapes: Sequence[str], depths: Sequence[float], *, lanes: Sequence[int], contexts: Sequence[int], new: int
) -> list[DecodeCase]:
    """Returns all cases of each shape; neighbours use the same model.

    The engine runs with every number of lanes and every context at full depth, and with every depth at the middle
    context. Other sides run with the fewest lanes and with the number of lanes that is nearest to 64.
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
    """Returns end-to-end cases for each number of concurrent requests and mean depth, then those of equal memory."""
    depths = (4.0, 3.0, 2.5, 2.0)
    middle = sorted(lanes)[len(lanes) // 2]
    cases = [DecodeCase(ENGINE, shape, count, context, depth, WHOLE, new) for count in lanes for depth in depths]
    return cases + [DecodeCase(ENGINE, shape, middle, context, depth, MEMORY, new) for depth in depths]


def row_of(case: DecodeCase, measure: Callable[[DecodeCase], Row]) -> Row:
    """Returns the record's row of a case; if ``measure`` fails, the row has the error message as ``problem``."""
    row: Row = {"name": case.name, **asdict(case)}
    try:
        return row | {"works": True, "problem": None} | measure(case)
    except (AdaPonderError, RuntimeError, MemoryError, TypeError, ValueError, NotImplementedError) as error:
        # Too little memory, or an option that an engine lacks: the other rows are measured all the same.
        return row | {"works": False, "problem": in_one_line(error)}


def compare(rows: Sequence[Row]) -> None:
    """Sets ``times_engine``: tokens/s relative to the engine at full depth, without drafting, with as many lanes."""
    speeds = {row["name"]: row.get("tokens_per_second") for row in rows}
    for row in rows:
        case = DecodeCase(**{name: row[name] for name in DecodeCase.__dataclass_fields__})
        base = replace(case, side=ENGINE, depth=None if case.depth is None else float(ITERATIONS))
        speed = row.get("tokens_per_second") if case.side in (ENGINE, DRAFTING) else None
        row["times_engine"] = ratio(speed, speeds.get(base.name))


def _case_name(row: Row) -> str:
    kind = "" if row["kind"] == STEADY else f" {row['kind']}"
    depth = row.get("mean_depth") or row["depth"]
    name = f"{row['side']}{kind}, {row['lanes']}, {row['context']}, {'own' if depth is None else f'{depth:.2f}'}"
    return name if row.get("accepted_share") is None else f"{name}, {row['accepted_share']:.0%} kept"


def _speed(row: Row) -> str:
    if row["works"]:
        return format(row["tokens_per_second"], ",.0f")
    return "out of memory" if "out of memory" in row["problem"].lower() else "failed"


COLUMNS = {
    "who, lanes, context, depth": _case_name,
    "tokens/s": _speed,
    "spread": harness.SPREAD,
    "x engine": number("times_engine", ".2f"),
    "of limit": number("limit_share", ".1%"),
    "first ms": number("first_token_seconds.p50", ",.2f", 1e3),
    "between ms": number("between_tokens_seconds.p50", ",.2f", 1e3),
    "p99": number("between_tokens_seconds.p99", ",.2f", 1e3),
    "resident": number("resident_lanes", ".1f"),
    "waiting": number("waiting_requests", ",.0f"),
    "peak GiB": harness.PEAK,
    "idle": number("idle_share", ".1%"),
}
