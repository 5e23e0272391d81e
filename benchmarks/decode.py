"""Times decoding: one stream and many lanes, short and long contexts, tokens of every depth, ours beside others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from typer import Option

from adaponder.errors import AdaPonderError, InputError, in_one_line
from adaponder.terminal import console, line, table
from benchmarks import harness
from benchmarks.harness import Common, Row, Run, number
from benchmarks.models import ITERATIONS, SHAPES, SHARES, shares_of
from benchmarks.record import ROOT

# Sides in the engine: our method, the same with drafted tokens, and the plain decoder.
ENGINE, DRAFTING, VANILLA = "engine", "drafting", "vanilla"
# Sides outside of it: our ``generate``, Hugging Face's on the plain decoder, and its continuous batching.
PORTABLE, HF, HF_BATCH = "portable", "hf generate", "hf continuous"
IN_ENGINE = (ENGINE, DRAFTING, VANILLA)
PLAIN_SIDES = (VANILLA, HF, HF_BATCH)
STEADY, MEMORY, WHOLE = "steady", "memory", "end to end"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Lanes, contexts and lengths of the whole table, and what is enough on a CPU.
ON_GPU: dict[str, Any] = {"lanes": (1, 4, 16, 64, 256), "contexts": (128, 512, 2048), "new": 128}
ON_CPU: dict[str, Any] = {"lanes": (1, 4), "contexts": (8, 16), "new": 8}


@dataclass(frozen=True)
class DecodeCase:
    """One row of the table.

    Attributes:
        side: who decodes.
        shape: the model's shape, or the name of a checkpoint.
        lanes: sequences at a time.
        context: tokens of each prompt.
        depth: forced mean depth; ``None``: the model decides.
        kind: ``steady``, all lanes decoding; ``memory``, many requests through a KV cache with rows for ``lanes``
            sequences of full depth; ``end to end``, prompts included.
        new: new tokens of each request that runs to its end.
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
        """Returns the name on the screen and in the record."""
        depth = "" if self.side in PLAIN_SIDES else ", own depth" if self.depth is None else f", depth {self.depth:g}"
        kind = "" if self.kind == STEADY else f", {self.kind}"
        lanes = "one stream" if self.lanes == 1 else f"{self.lanes} lanes"
        return f"{self.shape}, {self.side}, {lanes}, context {self.context}{depth}{kind}"

    @property
    def shares(self) -> tuple[float, ...] | None:
        """Returns the shares of depths that the case forces; ``None`` where it forces none."""
        return None if self.depth is None or self.side in PLAIN_SIDES else shares_of(self.depth)


def run(
    options: Common,
    *,
    shape: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="70m, 410m, ouro-1.4b or tiny, with random weights; default: 70m and 410m on a GPU, tiny on a CPU"
            + harness.SEVERAL,
        ),
    ] = None,
    checkpoint: Annotated[str | None, Option(metavar="CKPT", help="Its gates decide depth; needs --data.")] = None,
    data: Annotated[str | None, Option(metavar="SRC", help="The text that the prompts are cut from.")] = None,
    lanes: Annotated[str | None, Option(metavar="1,64", help="Sequences at a time.")] = None,
    contexts: Annotated[str | None, Option(metavar="128,…", help="Tokens of a prompt.")] = None,
    depths: Annotated[str | None, Option(metavar="4,2", help="Forced mean depths, 1 to 4.")] = None,
    tokens: Annotated[int, Option(metavar="N", min=1, help="New tokens of each lane per repetition.")] = 16,
    subset: Annotated[bool, Option("--subset", help="Only the rows that aims are stated for.")] = False,
    scenario: Annotated[
        str | None, Option(metavar="NAME", help="ouro: Ouro-1.4B's shape, 1,024 tokens in, 128 out, end to end.")
    ] = None,
    dtype: Annotated[str | None, Option(metavar="NAME", help="bfloat16 (GPU), float16 or float32 (CPU).")] = None,
) -> dict[str, Any]:
    """Time decoding in the engine: one stream and many lanes, contexts, depths; beside generate and Hugging Face's.

    [dim]python -m benchmarks decode --device cuda --subset[/]

    [dim]python -m benchmarks decode --device cuda --scenario ouro[/]
    """
    from benchmarks.decode_sides import Sides, open_checkpoint

    device = options.target
    precision = dtype or ("bfloat16" if device.type == "cuda" else "float32")
    harness.one_of("--dtype", precision, DTYPES)
    harness.one_of("--scenario", scenario or "ouro", ["ouro"])
    for name in shape or ():
        harness.one_of("--shape", name, SHAPES)
    counts = harness.numbers("--lanes", lanes, int, 1, 4096)
    lengths = harness.numbers("--contexts", contexts, int, 1, 2**20)
    means = harness.numbers("--depths", depths, float, 1, ITERATIONS)
    if scenario is not None and (subset or checkpoint or shape or means):
        raise InputError(f"--scenario {scenario} has its own shape and depths: leave the other options out")
    if (checkpoint is None) != (data is None):
        raise InputError("--checkpoint and --data belong together: prompts are cut from the text")
    if subset and (counts or lengths or means):
        raise InputError("--subset has its own lanes, contexts and depths: leave it out to choose them")
    usual = ON_GPU if device.type == "cuda" else ON_CPU
    sizes: dict[str, Any] = usual | {"lanes": counts or usual["lanes"], "contexts": lengths or usual["contexts"]}
    if scenario is not None:
        name, every = f"decode-{scenario}", served("ouro-1.4b", counts or (1, 32, 128), lengths[0] if lengths else 1024)
    elif checkpoint is not None:
        name = "decode-checkpoint"
        where = list(itertools.product(sizes["lanes"], sizes["contexts"]))
        every = [DecodeCase(side, checkpoint, *at, None) for side in (ENGINE, DRAFTING) for at in where]
    else:
        shapes = shape or (["70m", "410m"] if device.type == "cuda" else ["tiny"])
        name = "-".join(["decode", *shapes, *(["subset"] if subset else [])])
        every = subset_cases(shapes) if subset else cases(shapes, means or tuple(SHARES), **sizes)
    selected = harness.select(every, options.only)
    opened = None if checkpoint is None or data is None else open_checkpoint(checkpoint, data, precision, device)
    settings = {"dtype": precision, "tokens": tokens, "subset": subset, "scenario": scenario, "checkpoint": checkpoint}
    forced = {case.depth for case in selected if case.depth is not None}
    settings |= {"shares": {f"{depth:g}": shares_of(depth) for depth in sorted(forced)}}
    bench = Run(options, name, settings)
    rate, steps = bench.hardware["copy_bytes"], options.how_often | {"part": tokens}
    sides = Sides(device, DTYPES[precision], options.seed or 0, rate, opened, **steps)
    rows = bench.measure_all(selected, lambda case: row_of(case, sides.measure), compare=lambda result: None, show=show)
    bench.keep(ratios=(ratios := ratios_of(rows)))
    if ratios:
        cells = [
            (pair["name"], pair["what"], f"{pair['times']:.2f}", number("lanes_times", ".2f")(pair)) for pair in ratios
        ]
        console.print(table("\nHow many times as fast", ("case", "", "tokens/s", "lanes"), cells))
    record = bench.finish()
    if bench.path is not None and any(row["works"] for row in rows):
        for path in draw(rows, ROOT / "benchmarks" / bench.path.stem, bench.hardware["device"]):
            console.print(line("the plot is ", (path.relative_to(ROOT), "bold")))
    return record


# --- cases ---------------------------------------------------------------------------------------------------------


def cases(
    shapes: Sequence[str], depths: Sequence[float], *, lanes: Sequence[int], contexts: Sequence[int], new: int
) -> list[DecodeCase]:
    """Returns the whole table of each shape, cases of one engine together.

    One stream and ``lanes`` at full depth over all contexts; every depth at the middle context; the other sides there,
    at full depth and at mean depth 2. ``new`` is the length of requests that run to their ends.
    """
    result: list[DecodeCase] = []
    # Sides and depths are compared at 64 lanes, or the nearest number there is.
    many = min(lanes, key=lambda count: abs(count - 64))
    middle, full = sorted(contexts)[len(contexts) // 2], max(depths)
    low = 2.0 if 2.0 in depths else min(depths)
    for shape in shapes:
        for count in lanes:
            result += [DecodeCase(ENGINE, shape, count, context, full) for context in contexts]
            result += [DecodeCase(ENGINE, shape, count, middle, depth) for depth in depths if count == many]
        result += [DecodeCase(ENGINE, shape, max(2, many // 2), middle, depth, MEMORY, new) for depth in (full, low)]
        result.append(DecodeCase(DRAFTING, shape, min(lanes), min(contexts), full))
        result += _other_sides(shape, (min(lanes), many), min(contexts), full)
        result.append(DecodeCase(HF_BATCH, shape, many, min(contexts), 1.0, WHOLE, new))
    return list(dict.fromkeys(result))


def _other_sides(shape: str, lanes: Sequence[int], context: int, full: float) -> list[DecodeCase]:
    depths = {VANILLA: 1.0, PORTABLE: full, HF: 1.0}
    return [DecodeCase(side, shape, count, context, depth) for side, depth in depths.items() for count in lanes]


def subset_cases(shapes: Sequence[str]) -> list[DecodeCase]:
    """Returns the rows that the aims are stated for, which take a few minutes."""
    result = [DecodeCase(side, shape, 1, 128) for shape in shapes for side in (ENGINE, DRAFTING)]
    last = shapes[-1]
    result += [DecodeCase(ENGINE, last, 64, 512, depth) for depth in (4.0, 3.7, 2.0)]
    result += [DecodeCase(ENGINE, last, 32, 512, depth, MEMORY) for depth in (4.0, 2.0)]
    result += _other_sides(last, (1, 64), 128, float(ITERATIONS))
    return [*result, DecodeCase(HF_BATCH, last, 64, 128, 1.0, WHOLE)]


def served(shape: str, lanes: Sequence[int] = (1, 32, 128), context: int = 1024, new: int = 128) -> list[DecodeCase]:
    """Returns requests from prompt to last token, at full depth, ``lanes`` at a time."""
    return [DecodeCase(ENGINE, shape, count, context, float(ITERATIONS), WHOLE, new) for count in lanes]


# --- rows ----------------------------------------------------------------------------------------------------------


def row_of(case: DecodeCase, measure: Callable[[DecodeCase], Row]) -> Row:
    """Returns a record's row; a case that fails becomes a row with its ``problem``."""
    row: Row = {"name": case.name, **asdict(case)}
    try:
        return row | {"works": True, "problem": None} | measure(case)
    except (AdaPonderError, RuntimeError, MemoryError, TypeError, ValueError, NotImplementedError) as error:
        # Too little memory, or an option that an engine lacks: the other rows are measured all the same.
        return row | {"works": False, "problem": in_one_line(error)}


def ratios_of(rows: Sequence[Row]) -> list[Row]:
    """Returns how much faster ours is where two rows differ in one thing only: the depth or the side."""
    names = DecodeCase.__dataclass_fields__
    by_case = {DecodeCase(**{name: row[name] for name in names}): row for row in rows if row.get("tokens_per_second")}
    result = []
    for case, row in by_case.items():
        others = {}
        if case.side == DRAFTING:
            others = {"over engine": replace(case, side=ENGINE)}
        elif case.side == ENGINE:
            others = {"over portable": replace(case, side=PORTABLE)}
            others[f"over depth {ITERATIONS}"] = replace(case, depth=float(ITERATIONS))
        for what, other in others.items():
            if other == case or other not in by_case:
                continue
            base = by_case[other]
            ratio = {"name": row["name"], "what": what, "times": row["tokens_per_second"] / base["tokens_per_second"]}
            if row.get("resident_lanes") and base.get("resident_lanes"):
                ratio["lanes_times"] = row["resident_lanes"] / base["resident_lanes"]
            result.append(ratio)
    return result


# --- tables and figure ---------------------------------------------------------------------------------------------


def _case_name(row: Row) -> str:
    kind = "" if row["kind"] == STEADY else f" {row['kind']}"
    depth = row.get("mean_depth") or row["depth"]
    name = f"{row['side']}{kind}, {row['lanes']}, {row['context']}, {'own' if depth is None else f'{depth:.2f}'}"
    return name if row.get("accepted_share") is None else f"{name}, {row['accepted_share']:.0%} kept"


def _speed(row: Row) -> str:
    if row["works"]:
        return format(row["tokens_per_second"], ",.0f")
    return "out of memory" if "out of memory" in row["problem"].lower() else "failed"


def _milliseconds(name: str, quantile: str) -> Callable[[Row], str]:
    return lambda row: number(quantile, ",.2f", 1e3)(row.get(name) or {})


COLUMNS = {
    "who, lanes, context, depth": _case_name,
    "tokens/s": _speed,
    "spread": harness.SPREAD,
    "of limit": number("limit_share", ".1%"),
    "first ms": _milliseconds("first_token_seconds", "p50"),
    "between ms": _milliseconds("between_tokens_seconds", "p50"),
    "p99": _milliseconds("between_tokens_seconds", "p99"),
    "resident": number("resident_lanes", ".1f"),
    "waiting": number("waiting_requests", ",.0f"),
    "peak GiB": harness.PEAK,
    "idle": number("idle_share", ".1%"),
}


def show(rows: Sequence[Row]) -> None:
    """Prints a table for each shape, and why rows have no figures."""
    for shape in dict.fromkeys(row["shape"] for row in rows):
        harness.print_table(f"\n{shape}: decoding", COLUMNS, [row for row in rows if row["shape"] == shape])
    for row in rows:
        if not row["works"]:
            console.print(f"{row['name']}: {row['problem']}", style="yellow")


def draw(rows: Sequence[Row], path: Path, device: str) -> tuple[Path, Path]:
    """Writes ``path``.png and ``path``.svg: tokens per second by lanes and by mean depth; failed rows are left out."""
    from adaponder.analysis.style import PAGE, house, new_figure, save, series

    works = [row for row in rows if row["works"]]
    deepest = max((row["depth"] or 0 for row in works), default=0)
    by_lanes: dict[str, list[tuple[float, float]]] = {}
    by_depth: dict[str, list[tuple[float, float]]] = {}
    for row in works:
        ours, name = row["side"] == ENGINE, f"{row['shape']}, {row['side']}"
        if row["kind"] != MEMORY and not (ours and (row["depth"] or deepest) != deepest):
            label = f"{name}, context {row['context']}" if ours else name
            by_lanes.setdefault(label, []).append((row["lanes"], row["tokens_per_second"]))
        if row["kind"] == STEADY and ours and row["mean_depth"]:
            label = f"{name}, {row['lanes']} lanes, context {row['context']}"
            by_depth.setdefault(label, []).append((row["mean_depth"], row["tokens_per_second"]))
    by_depth = {label: points for label, points in by_depth.items() if len(points) > 1}
    with house():
        figure = new_figure(width=PAGE, height=4.2)
        left, right = figure.subplots(1, 2)
        for axes, some in ((left, by_lanes), (right, by_depth)):
            for index, (label, points) in enumerate(some.items()):
                axes.plot(*zip(*sorted(points), strict=True), **series(index, len(some)), label=label)
            if some:
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize="small")
        left.set(xscale="log", yscale="log", xlabel="lanes", ylabel="tokens/s", title=f"by lanes, {device}")
        lanes = sorted({row["lanes"] for row in works})
        left.set_xticks(lanes, [str(count) for count in lanes], minor=False)
        left.minorticks_off()
        right.set(xlabel="mean depth", ylabel="tokens/s", title="by mean depth")
        right.set_ylim(bottom=0)
        return save(figure, path)
