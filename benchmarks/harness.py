"""Times repetitions after a warm-up, checks the kernels first, and writes the record of one benchmark."""

from __future__ import annotations

import gc
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from typer import Option

from adaponder.devices import as_device
from adaponder.errors import EvaluationError, InputError
from adaponder.recipes import Recipe
from adaponder.terminal import STDOUT, console, line, table, write_json
from benchmarks.record import ROOT, commit_of, provenance

Item = TypeVar("Item")
Number = TypeVar("Number", int, float)
SEVERAL = "; may be repeated."
Row = dict[str, Any]
_NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
# Words of a recipe's or a device's name that file names leave out.
_COMMON = {"paper", "cpu", "adaponder", "nvidia", "geforce", "amd", "instinct"}


# --- timing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Seconds of each repetition, and the peak of allocated memory (``None`` where it is not counted)."""

    seconds: list[float]
    peak_bytes: int | None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Returns (maximum - minimum) / median: smaller differences between variants mean nothing."""
        return (max(self.seconds) - min(self.seconds)) / self.median


def measure(step: Callable[[], object], device: torch.device, *, warmup: int, repeats: int) -> Timing:
    """Times each of ``repeats`` steps after ``warmup`` steps, without synchronising with a GPU in between."""
    for _ in range(warmup):
        step()
    if device.type != "cuda":
        clock = [time.perf_counter()]
        for _ in range(repeats):
            step()
            clock.append(time.perf_counter())
        return Timing([after - before for before, after in pairwise(clock)], None)
    # The last warm-up may still be running, but memory is counted when it is allocated.
    torch.cuda.reset_peak_memory_stats(device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for mark in marks[:-1]:
        mark.record()
        step()
    marks[-1].record()
    torch.cuda.synchronize(device)
    seconds = [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
    return Timing(seconds, torch.cuda.max_memory_allocated(device))


def if_it_fits(measure_one: Callable[[], Item]) -> Item | None:
    """Returns what ``measure_one`` returns, or ``None`` if memory does not suffice."""
    try:
        return measure_one()
    except Exception as error:
        # Libraries below torch report a lack of memory only in their message.
        lacks_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not lacks_memory and not any(sign in str(error) for sign in _NO_MEMORY):
            raise
    return None


def forget(device: torch.device, *, graphs: bool = True) -> None:
    """Frees the memory of earlier measurements, so that every measurement starts alike.

    Compiled graphs are dropped too, unless the next model is known to fit them: the compiler counts those of all models
    together, and past its limit it would run the next model uncompiled, or compile it for shapes that vary.
    """
    if graphs:
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def matmul_rate(device: torch.device) -> float:
    """Returns FLOP/s of a large product of random matrices, in the precision that training uses there."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / measure(lambda: torch.mm(left, right, out=out), device, warmup=3, repeats=10).median


def copy_rate(device: torch.device) -> float:
    """Returns the bytes per second that a large copy reads and writes."""
    source = torch.empty(1 << (30 if device.type == "cuda" else 26), dtype=torch.uint8, device=device).random_(0, 256)
    target = torch.empty_like(source)
    return 2 * source.numel() / measure(lambda: target.copy_(source), device, warmup=3, repeats=10).median


def ratio(above: float | None, below: float | None) -> float | None:
    """Returns ``above / below``, or ``None`` where either is missing."""
    return None if above is None or not below else above / below


# --- the check of the kernels --------------------------------------------------------------------------------------


def check_kernels(device: torch.device) -> None:
    """Runs one test of each kernel on this device; raises with the tail of pytest's output if one fails."""
    # A process either compiles kernels or interprets them.
    environment = {} if device.type == "cuda" else {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    code, output = run_tests(environment)
    if code != 0:
        tail = "\n".join(output.rstrip().splitlines()[-30:])
        raise EvaluationError(f"{tail}\nthe kernels' tests fail (see above): nothing is measured")


def run_tests(environment: dict[str, str]) -> tuple[int, str]:
    """Runs the tests marked ``kernel_check`` with the checkout's sources; returns their exit code and output."""
    arguments = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "kernel_check", "tests/unit/ops"]
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    variables = os.environ | {"PYTHONPATH": paths} | environment
    how: dict[str, Any] = {"cwd": ROOT, "env": variables, "timeout": 300, "check": False, "text": True}
    done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how)
    return done.returncode, done.stdout


# --- one benchmark and its record ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Common:
    """Options that train, prefill, decode and ops share."""

    device: Annotated[str, Option(metavar="NAME", help="cpu, cuda, cuda:1, …")] = "cpu"
    repeats: Annotated[int, Option(metavar="N", min=1, max=100_000, help="Timed repetitions; the median counts.")] = 10
    warmup: Annotated[int, Option(metavar="N", min=0, max=100_000, help="Untimed repetitions before them.")] = 3
    only: Annotated[
        list[str] | None,
        Option(metavar="WORD", help=f"Only plain and variants with WORD in their name, without a record{SEVERAL}"),
    ] = None
    trust: Annotated[bool, Option("--trust", help="Do not check the kernels first; the record says so.")] = False
    commit: Annotated[str | None, Option(metavar="NAME", help="The measured commit; default: from git.")] = None
    record: Annotated[bool, Option("--record/--no-record", help="Write a record to benchmarks/records/.")] = True
    json: Annotated[Path | None, Option(metavar="PATH", help="Write JSON after each row; - for stdout.")] = None
    seed: Annotated[int | None, Option(metavar="N", min=0, help="Default: the recipe's, or 0.")] = None

    @property
    def target(self) -> torch.device:
        return as_device(self.device)

    @property
    def how_often(self) -> dict[str, Any]:
        return {"warmup": self.warmup, "repeats": self.repeats}


def numbers(
    option: str, text: str | None, kind: Callable[[str], Number], low: float, high: float, count: int | None = None
) -> list[Number]:
    """Parses ``1,2,3``; every number must be between ``low`` and ``high``."""
    if text is None:
        return []
    try:
        values = [kind(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or len(values) != (count or len(values)):
        raise InputError(f"{option} {text} must be {count or 'some'} numbers separated by commas")
    if wrong := [value for value in values if not low <= value <= high]:
        raise InputError(f"{option} {text}: {wrong[0]:g} must be between {low:g} and {high:g}")
    return values


def one_of(option: str, value: str, names: Iterable[str]) -> None:
    """Raises unless ``value`` is one of ``names``."""
    if value not in names:
        raise InputError(f"{option} {value} must be one of {', '.join(names)}")


class Run:
    """A benchmark under way: its record so far."""

    def __init__(
        self,
        options: Common,
        name: str,
        settings: dict[str, Any],
        recipe: Recipe | None = None,
        overrides: Sequence[str] | None = None,
    ):
        """Checks the kernels, measures the device's rates and begins the record called ``name``."""
        self.options, device, part = options, options.target, bool(options.only)
        # A record stands for the whole comparison: --only must not replace it.
        self.path = record_path(name, device, recipe) if options.record and not part else None
        commit = commit_of(options.commit, required=options.record)
        if recipe is not None:
            console.print(line((recipe.name, "bold"), f"  {recipe.fingerprint}  {recipe.about}"))
        if options.record and part:
            console.print("--only measures a part, so no record is written; --json PATH keeps the rows")
        if options.trust:
            console.print("--trust: the kernels are not checked", style="yellow")
        else:
            console.print("checking the kernels …")
            check_kernels(device)
        known = {"command": f"bench {name.partition('-')[0]}", "tested": not options.trust}
        known |= conditions(device, commit=commit) | {"recipe": None, "seed": options.seed or 0}
        if recipe is not None:
            known["recipe"] = {"name": recipe.name, "hash": recipe.fingerprint, "set": list(overrides or [])}
            known["seed"] = recipe.train.seed
        known["settings"] = settings | options.how_often | ({"only": list(options.only or ())} if part else {})
        self.hardware: dict[str, Any] = known["hardware"]
        self.metrics: dict[str, Any] = {}
        self.record = known | {"complete": False, "metrics": self.metrics}

    def keep(self, **metrics: Any) -> None:
        """Adds metrics and writes all so far to ``--json``."""
        self.metrics.update(metrics)
        write_json(self.options.json, self.record)

    def finish(self) -> dict[str, Any]:
        """Returns the complete record, written to its path and to ``--json``."""
        rates = f"{self.hardware['matmul_flops'] / 1e12:.3g} TFLOP/s of matmul, "
        rates += f"{self.hardware['copy_bytes'] / 1e9:.4g} GB/s of copy"
        console.print(f"\n{self.hardware['device']}: {rates}; medians of {self.options.repeats}", style="dim")
        self.record["complete"] = True
        save(self.record, self.path, self.options.json)
        return self.record

    def measure_all(
        self,
        items: Iterable[Any],
        measure_one: Callable[[Any], Row],
        *,
        compare: Callable[[list[Row]], object],
        show: Callable[[list[Row]], object],
    ) -> list[Row]:
        """Returns a row per item; ``compare`` fills in the ratios between rows, ``show`` prints them.

        The rows so far are printed if the user interrupts.
        """
        rows: list[Row] = []
        try:
            for item in items:
                console.print(f"measuring {item.name} …")
                rows.append(measure_one(item))
                compare(rows)
                self.keep(rows=rows)
        except KeyboardInterrupt:
            name = "standard output" if self.options.json == STDOUT else self.options.json
            console.print(
                f"interrupted: no record is written{f'; {name} has the rows so far' if rows and name else ''}"
            )
            raise
        finally:
            if rows:
                show(rows)
        return rows


def conditions(device: torch.device, *, commit: str, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Returns hardware with its measured rates, versions, commit and date."""
    console.print("measuring the device's own rates …")
    facts = provenance(device, commit=commit, packages=packages)
    rates = {"matmul_flops": matmul_rate(device), "copy_bytes": copy_rate(device)}
    return facts | {"hardware": {"device": facts["hardware"], **rates}}


def record_path(kind: str, device: torch.device, recipe: Recipe | None = None) -> Path:
    """Returns the path of a record, such as ``benchmarks/records/train-70m-h200.json``."""
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    words = [kind, *_words("" if recipe is None else recipe.name), *(_words(hardware) if hardware else [device.type])]
    return ROOT / "benchmarks" / "records" / ("-".join(words) + ".json")


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9.]+", name.lower()) if word and word not in _COMMON]


def save(record: dict[str, Any], path: Path | None, also: Path | None) -> None:
    """Writes a record to ``path`` and ``also`` where they are given."""
    if path is not None:
        write_json(path, record)
        console.print(line("the record is ", (path.relative_to(ROOT), "bold")))
    write_json(also, record)


# --- names and tables ----------------------------------------------------------------------------------------------


def select(items: Sequence[Item], only: Sequence[str] | None, always: str | None = None) -> list[Item]:
    """Returns the items with a word of ``only`` in their names, and those that are called ``always``."""
    names = {item: str(getattr(item, "name", item)) for item in items}
    for word in only or ():
        if not any(word in name for name in names.values()):
            raise InputError(f"--only {word} matches none of the names: {'; '.join(names.values())}")

    def is_selected(name: str) -> bool:
        return not only or any(word in name for word in only) or always in re.split("[:,] ", name)

    return [item for item, name in names.items() if is_selected(name)]


def print_table(title: str, columns: Mapping[str, Callable[[Row], str]], rows: Sequence[Row]) -> None:
    """Prints rows under a title; ``columns`` maps each heading to the function that formats its cell."""
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    console.print(table(title, [heading.strip() for heading in columns], cells))


def number(name: str, form: str, scale: float = 1.0) -> Callable[[Row], str]:
    """Returns a function that formats a row's ``name``, times ``scale``; a dash where it is missing."""

    def cell(row: Row) -> str:
        value = row.get(name)
        return "–" if value is None else format(value * scale, form)

    return cell


SPREAD, PEAK = number("spread", ".1%"), number("peak_bytes", ".1f", 2**-30)


def speed(name: str, form: str, scale: float = 1.0) -> Callable[[Row], str]:
    """Formats as :func:`number`, and says where memory did not suffice."""
    cell = number(name, form, scale)
    return lambda row: cell(row) if row["fits"] else "out of memory"


def timing_fields(timing: Timing | None) -> Row:
    """Returns the fields of a row that every timing has."""
    if timing is None:
        return {"fits": False, "seconds": [], "spread": None, "peak_bytes": None}
    return {"fits": True, "seconds": timing.seconds, "spread": timing.spread, "peak_bytes": timing.peak_bytes}
