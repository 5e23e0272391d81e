"""Times decoding in our engine and in other implementations, by number of lanes, context length and depth."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

import torch

from adaponder.commands.shared import listed, opt
from adaponder.errors import AdaPonderError, InputError, in_one_line
from adaponder.terminal import console
from benchmarks import harness
from benchmarks.decode_cases import DRAFTING, ENGINE, ON_CPU, ON_GPU, STEADY, DecodeCase, cases, served, subset_cases
from benchmarks.decode_sides import Sides, open_checkpoint
from benchmarks.harness import Common, Precision, Row, Run, number, ratio
from benchmarks.models import ITERATIONS, SHAPES, SHARES, shares_of


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
    """Time decoding in our engine, with generate() and with Hugging Face, by lanes, context length and depth.

    [dim]python -m benchmarks decode --device cuda --subset[/]

    [dim]python -m benchmarks decode --device cuda --scenario ouro[/]
    """
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


def row_of(case: DecodeCase, measure: Callable[[DecodeCase], Row]) -> Row:
    """Returns the record's row of a case; if ``measure`` fails, the row has the error message as ``problem``."""
    row: Row = {"name": case.name, **asdict(case)}
    try:
        return row | {"works": True, "problem": None} | measure(case)
    except (AdaPonderError, RuntimeError, MemoryError, TypeError, ValueError, NotImplementedError) as error:
        # Too little memory, or an option that an engine lacks: the other rows are measured all the same.
        return row | {"works": False, "problem": in_one_line(error)}


def compare(rows: Sequence[Row]) -> None:
    """Sets ``times_engine``: tokens/s of the engine relative to the same case without drafting and at full depth.

    If the model decides depth in a case, it also does so in the case for comparison. Other sides get ``None``.
    """
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
    "side, lanes, context, depth": _case_name,
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
