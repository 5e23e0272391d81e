"""adaponder bench decode: tokens per second of the engine and of others; prints a table, writes a record and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from adaponder.bench import decode as bench
from adaponder.bench.decode import Case, Result
from adaponder.bench.decode_depths import shares_of
from adaponder.bench.decode_models import ITERATIONS
from adaponder.bench.decode_sides import Sides
from adaponder.bench.record import checkout
from adaponder.bench.tables import DECODE_HEAD, decode_cells, decode_problems
from adaponder.commands.bench import announced, collect
from adaponder.commands.bench_record import Record, begin, checked
from adaponder.commands.options import DecodeBenchOptions
from adaponder.commands.options.shared import CheckpointOptions, WindowOptions
from adaponder.errors import InputError
from adaponder.terminal import console, line, table

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Lanes, contexts and lengths of the whole table, and what is enough on a CPU.
_ON_GPU: dict[str, Any] = {"lanes": (1, 4, 16, 64, 256), "contexts": (128, 512, 2048), "new": 128}
_ON_CPU: dict[str, Any] = {"lanes": (1, 4), "contexts": (8, 16), "new": 8}


def run(options: DecodeBenchOptions) -> dict[str, Any]:
    """Times every case and returns the record; a case that fails is a row that says why."""
    device = checked(options)
    dtype = _DTYPES[options.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    chosen = choose_cases(options, device)
    opened = _opened(options, dtype)
    told = {
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": options.tokens,
        "subset": options.subset,
        "scenario": options.scenario,
        "checkpoint": options.checkpoint,
        "shares": {f"{case.depth:g}": shares_of(case.depth, ITERATIONS) for case in chosen if case.depth is not None},
    }
    record = begin(options, _record_name(options, chosen), device, told)
    sides = Sides(
        device=device,
        dtype=dtype,
        seed=options.seed or 0,
        warmup=options.warmup,
        repeats=options.repeats,
        part=options.tokens,
        all_cases=chosen,
        **opened,
    )

    def rows_of(results: Sequence[Result]) -> list[dict[str, Any]]:
        return as_rows(results, sides, record.hardware["copy_bytes"])

    measuring = bench.compare(announced(chosen), sides.measure)
    rows = rows_of(collect(measuring, lambda results: show(rows_of(results)), rows_of, record))
    record.keep({"ratios": (ratios := bench.ratios(rows))})
    if ratios:
        cells = [(one["name"], one["what"], f"{one['times']:.2f}", _lanes_times(one)) for one in ratios]
        console.print(table("\nHow many times as fast", ("case", "", "tokens/s", "lanes"), cells))
    done = record.finish()
    _plot(record, rows)
    return done


def choose_cases(options: DecodeBenchOptions, device: torch.device) -> list[Case]:
    """The cases that the options ask for; raises where they contradict each other."""
    _refuse_contradictions(options)
    chosen = _every_case(options, on_gpu=device.type == "cuda")
    for word in options.only:
        if not any(word in case.name for case in chosen):
            raise InputError(f"--only {word}: in none of the names: {'; '.join(case.name for case in chosen)}")
    return [case for case in chosen if not options.only or any(word in case.name for word in options.only)]


def _refuse_contradictions(options: DecodeBenchOptions) -> None:
    if options.scenario is not None and (options.subset or options.checkpoint or options.shape or options.depths):
        raise InputError(f"--scenario {options.scenario}: it has its own shape and depths; leave the others out")
    if (options.checkpoint is None) != (options.data is None):
        raise InputError("--checkpoint and --data: give both, or none; prompts are cut from the text")
    if options.subset and (options.lanes or options.contexts or options.depths):
        raise InputError("--subset: it has its own lanes, contexts and depths; leave it out to choose them")


def _every_case(options: DecodeBenchOptions, *, on_gpu: bool) -> list[Case]:
    """All cases of the scenario, the checkpoint, or the shapes."""
    usual = _ON_GPU if on_gpu else _ON_CPU
    lanes, contexts = tuple(options.lanes) or usual["lanes"], tuple(options.contexts) or usual["contexts"]
    if options.scenario is not None:
        return bench.served("ouro-1.4b", **_given(lanes=options.lanes, context=(options.contexts or (None,))[0]))
    if options.checkpoint is not None:
        name = options.checkpoint
        places = [(count, context) for count in lanes for context in contexts]
        return [Case(side, name, *place, None) for side in (bench.ENGINE, bench.DRAFTING) for place in places]
    shapes = tuple(options.shape) or (("70m", "410m") if on_gpu else ("tiny",))
    if options.subset:
        return bench.subset(shapes)
    depths = _given(depths=tuple(options.depths))
    return bench.cases(shapes, lanes=lanes, contexts=contexts, new=usual["new"], **depths)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value}


def _opened(options: DecodeBenchOptions, dtype: torch.dtype) -> dict[str, Any]:
    """The checkpoint and the tokens that its prompts are cut from; nothing without one."""
    if options.checkpoint is None or options.data is None:
        return {}
    from adaponder.commands.shared import open_subject

    name = str(dtype).removeprefix("torch.")
    subject = open_subject(CheckpointOptions(checkpoint=options.checkpoint, device=options.device, dtype=name))
    text = subject.text(options.data, WindowOptions(max_tokens=1_000_000))
    return {"checkpoint": subject.model, "prompts": text.stream.tolist()}


def _record_name(options: DecodeBenchOptions, chosen: Sequence[Case]) -> str:
    """The kind of record, with what is measured in its name."""
    if options.scenario is not None:
        return f"decode-{options.scenario}"
    if options.checkpoint is not None:
        return "decode-checkpoint"
    return "-".join(["decode", *dict.fromkeys(case.shape for case in chosen), *(["subset"] if options.subset else [])])


def as_rows(results: Sequence[Result], sides: Sides, copy_rate: float) -> list[dict[str, Any]]:
    """The record's rows."""
    return [
        bench.as_row(
            result,
            limit=None if result.measured is None else sides.limit(result.case, result.measured, copy_rate),
        )
        for result in results
    ]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints a table for each shape, and why rows have no figures."""
    for shape in dict.fromkeys(row["shape"] for row in rows):
        own = [decode_cells(row) for row in rows if row["shape"] == shape]
        console.print(table(f"\n{shape}: decoding", DECODE_HEAD, own))
    for problem in decode_problems(rows):
        console.print(problem, style="yellow")


def _lanes_times(ratio: dict[str, Any]) -> str:
    return f"{ratio['lanes_times']:.2f}" if "lanes_times" in ratio else ""


def _plot(record: Record, rows: Sequence[dict[str, Any]]) -> None:
    """Draws the figure beside the record's folder, if there is a record."""
    if record.path is None or not any(row["works"] for row in rows):
        return
    from adaponder.analysis.decode_figure import draw

    for path in draw(rows, checkout() / "benchmarks" / record.path.stem, record.hardware["device"]):
        console.print(line("the plot is ", (path.relative_to(checkout()), "bold")))
