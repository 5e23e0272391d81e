"""Runs a benchmark: checks the kernels, times variants after a warm-up, prints tables and writes the record."""

from __future__ import annotations

import datetime
import gc
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch

from adaponder.commands.shared import Json, opt
from adaponder.devices import as_device
from adaponder.errors import EvaluationError, InputError
from adaponder.files import read_json
from adaponder.terminal import STDOUT, console, line, table, write_json
from adaponder.version import __version__
from benchmarks import ROOT, child_environment

Item = TypeVar("Item")
SEVERAL = "; may be repeated."
Precision = Literal["bfloat16", "float16", "float32"]
Row = dict[str, Any]
Cell = Callable[[Row], str]
Columns = Mapping[str, Cell]
_NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
# Changes to these paths since the commit mark it ``-dirty``.
MEASURED = ("src", "benchmarks/plain.py")
# Left out of file names.
_COMMON = {"paper", "cpu", "adaponder", "nvidia", "geforce", "amd", "instinct"}


@dataclass(frozen=True)
class Timing:
    """Seconds of each repetition, and the peak of allocated memory (``None`` on a CPU)."""

    seconds: list[float]
    peak_bytes: int | None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def spread(values: Sequence[float]) -> float:
    """Returns (maximum - minimum) / median; smaller differences between variants are noise."""
    return (max(values) - min(values)) / statistics.median(values)


def measure(step: Callable[[], object], device: torch.device, *, warmup: int, repeats: int) -> Timing:
    """Times each of ``repeats`` steps after ``warmup`` steps, without synchronising with a GPU in between."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(warmup):
        step()
    # As in training: the garbage collector need not visit what the warm-up has compiled.
    gc.collect()
    gc.freeze()
    try:
        seconds = time_steps(step, device, repeats)
    finally:
        gc.unfreeze()
    if device.type != "cuda":
        return Timing(seconds, None)
    # The memory of a CUDA graph counts as allocated only while it is captured, but nothing else can use it.
    torch.cuda.empty_cache()
    return Timing(seconds, max(torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)))


def time_steps(step: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Returns the seconds of each of ``repeats`` steps; frees no memory, which a next step would allocate again."""
    if device.type != "cuda":
        clock = [time.perf_counter()]
        for _ in range(repeats):
            step()
            clock.append(time.perf_counter())
        return [after - before for before, after in pairwise(clock)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for mark in marks[:-1]:
        mark.record()
        step()
    marks[-1].record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]


def if_it_fits(compute: Callable[[], Item]) -> Item | None:
    """Returns the result of ``compute``, or ``None`` if memory does not suffice."""
    try:
        return compute()
    except (torch.OutOfMemoryError, MemoryError):
        return None
    except Exception as error:
        # Libraries below torch report a lack of memory only in their message.
        if any(sign in str(error) for sign in _NO_MEMORY):
            return None
        raise


def forget(device: torch.device, *, graphs: bool = True) -> None:
    """Frees the memory of earlier measurements and, with ``graphs``, drops compiled graphs.

    The compiler counts the graphs of all models: past its limit it would run the next model uncompiled.
    """
    if graphs:
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def matmul_rate(device: torch.device) -> float:
    """Returns the FLOP/s of a large matrix product, in bfloat16 on a GPU and float32 on a CPU."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / measure(lambda: torch.mm(left, right, out=out), device, warmup=3, repeats=10).median


def copy_rate(device: torch.device) -> float:
    """Returns the bytes read and written per second by a large copy."""
    source = torch.empty(1 << (30 if device.type == "cuda" else 26), dtype=torch.uint8, device=device).random_(0, 256)
    target = torch.empty_like(source)
    return 2 * source.numel() / measure(lambda: target.copy_(source), device, warmup=3, repeats=10).median


def ratio(above: float | None, below: float | None) -> float | None:
    """Returns ``above / below``, or ``None`` if either is missing."""
    return None if above is None or not below else above / below


def add_ratios(rows: Sequence[Row], base: str, **fields: str) -> None:
    """Sets ``row[name] = row[field] / base_row[field]`` for each ``name=field``; ``base_row`` has variant ``base``."""
    base_row = next((row for row in rows if row["variant"] == base), {})
    for row in rows:
        row |= {name: ratio(row[field], base_row.get(field)) for name, field in fields.items()}


def check_kernels(device: torch.device) -> None:
    """Runs a test of each kernel on this device; raises with the end of pytest's output if one fails."""
    arguments = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "kernel_check", "tests/unit/ops"]
    # A process either compiles kernels or interprets them.
    variables = {} if device.type == "cuda" else {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        arguments,
        cwd=ROOT,
        env=child_environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        tail = "\n".join(result.stdout.rstrip().splitlines()[-30:])
        raise EvaluationError(f"{tail}\nthe kernels' tests fail (see above): nothing is measured")


@dataclass(frozen=True)
class Recorded:
    """Options of every benchmark."""

    device: Annotated[str, opt("cpu, cuda, cuda:1, …", "NAME")] = "cpu"
    commit: Annotated[str | None, opt("The measured commit; default: from git.", "NAME")] = None
    record: Annotated[bool, opt("Write a record to benchmarks/records/.", flag="--record/--no-record")] = True
    json: Json = None
    seed: Annotated[int | None, opt("Default: the recipe's, or 0.", "N", min=0)] = None

    @property
    def target(self) -> torch.device:
        return as_device(self.device)


@dataclass(frozen=True)
class Common(Recorded):
    """Options of the benchmarks that time kernels: train, prefill, decode and ops."""

    repeats: Annotated[int, opt("Timed repetitions; the median counts.", "N", min=1, max=100_000)] = 10
    warmup: Annotated[int, opt("Untimed repetitions before them.", "N", min=0, max=100_000)] = 3
    only: Annotated[list[str] | None, opt(f"Only plain and names with WORD; no record{SEVERAL}", "WORD")] = None
    resume: Annotated[Path | None, opt("Keep the rows of an earlier --json file.", "PATH")] = None
    trust: Annotated[bool, opt("Skip the check of the kernels; the record says so.", flag="--trust")] = False

    @property
    def how_often(self) -> dict[str, int]:
        return {"warmup": self.warmup, "repeats": self.repeats}


def precision(dtype: str | None, device: torch.device) -> str:
    """Returns ``--dtype``; the default is bfloat16 on a GPU and float32 on a CPU."""
    return dtype or ("bfloat16" if device.type == "cuda" else "float32")


class Run:
    """A running benchmark and its record so far."""

    def __init__(self, options: Recorded, name: str, settings: dict[str, Any], **facts: Any):
        """Checks the kernels if they are timed, measures the device's rates and begins the record ``name``."""
        self.options, device = options, options.target
        self.path = record_path(name, device) if options.record else None
        commit = commit_of(options.commit, required=options.record)
        if isinstance(options, Common):
            settings |= options.how_often | ({"only": options.only} if options.only else {})
            facts = {"recipe": None, "tested": not options.trust} | facts
            if options.only and self.path is not None:
                # A record stands for the whole comparison: --only must not replace it.
                console.print("--only measures a part, so no record is written; --json PATH keeps the rows")
                self.path = None
            if options.trust:
                console.print("--trust: the kernels are not checked", style="yellow")
            else:
                console.print("checking the kernels …")
                check_kernels(device)
        console.print("measuring the device's own rates …")
        self.metrics: dict[str, Any] = {}
        self.record = {"command": f"bench {name.partition('-')[0]}", **provenance(device, commit=commit)}
        self.hardware: dict[str, Any] = {"device": self.record["hardware"]}
        self.hardware |= {"matmul_flops": matmul_rate(device), "copy_bytes": copy_rate(device)}
        self.record |= {"hardware": self.hardware, "seed": options.seed or 0, "settings": settings, **facts}
        self.record |= {"complete": False, "metrics": self.metrics}

    def keep(self, **metrics: Any) -> None:
        """Adds metrics to the record and writes the record to ``--json``."""
        self.metrics.update(metrics)
        write_json(self.options.json, self.record)

    def finish(self) -> dict[str, Any]:
        """Writes the complete record to its path and to ``--json``, and returns it."""
        matmul, copied = self.hardware["matmul_flops"] / 1e12, self.hardware["copy_bytes"] / 1e9
        rates = f"{self.hardware['device']}: {matmul:.3g} TFLOP/s of matmul, {copied:.4g} GB/s of copy"
        console.print(f"\n{rates}; medians of {getattr(self.options, 'repeats', 1)}", style="dim")
        self.record["complete"] = True
        if self.path is not None:
            write_json(self.path, self.record)
            console.print(line("the record is ", (self.path.relative_to(ROOT), "bold")))
        self.keep()
        return self.record

    def measure_all(
        self,
        variants: Iterable[Any],
        measure_one: Callable[[Any], Row],
        *,
        compare: Callable[[list[Row]], object],
        title: Cell,
        columns: Columns,
    ) -> list[Row]:
        """Returns a row per variant, measured or from ``--resume``; ``compare`` fills in ratios between rows.

        At the end or when interrupted, prints one table with ``columns`` for consecutive rows with equal ``title``.
        """
        rows: list[Row] = []
        earlier = self._earlier_rows()
        try:
            for variant in variants:
                if variant.name not in earlier:
                    console.print(f"measuring {variant.name} …")
                rows.append(earlier.get(variant.name) or measure_one(variant))
                compare(rows)
                self.keep(rows=rows)
        except KeyboardInterrupt:
            name = "standard output" if self.options.json == STDOUT else self.options.json
            saved = f"; {name} has the rows so far" if rows and name else ""
            console.print(f"interrupted: no record is written{saved}")
            raise
        finally:
            for heading, group in groupby(rows, title):
                print_table(heading, columns, group)
        return rows

    def _earlier_rows(self) -> dict[str, Row]:
        """Returns the rows of ``--resume`` by name; raises if they were measured under other conditions."""
        if (path := getattr(self.options, "resume", None)) is None:
            return {}
        earlier = read_json(path)
        same = ("command", "commit", "versions", "seed", "tested", "recipe")
        facts = [(name, earlier[name], self.record[name]) for name in same]
        facts.append(("device", earlier["hardware"]["device"], self.hardware["device"]))
        old, new = earlier["settings"], self.record["settings"]
        names = sorted({*old, *new}.difference(("only", "subset", "shares", "sizes")))  # these choose rows
        facts += [(name, old.get(name), new.get(name)) for name in names]
        for name, before, now in facts:
            if before != now:
                raise InputError(f"--resume {path}: {name} was {before}, and is {now} now")
        rows = [row for row in earlier["metrics"]["rows"] if row.get("works", True)]
        return {row.get("name") or row["variant"]: row for row in rows}

    def time_all(
        self,
        variants: Sequence[Any],
        prepare: Callable[[Any], Callable[[], object]],
        report: Callable[[Any, float | None], Row],
        **after: Any,
    ) -> list[Row]:
        """Times the step that ``prepare`` builds for each variant; ``after`` is passed to :meth:`measure_all`.

        ``report`` returns further fields of the row from the median seconds, which are ``None`` if memory did not
        suffice. Consecutive variants with equal ``graphs`` share compiled graphs.
        """
        device, counts = self.options.target, self.options.how_often
        graphs = {variant: getattr(variant, "graphs", variant) for variant in variants}
        shares_graphs = {after: graphs[before] == graphs[after] for before, after in pairwise(variants)}

        def measure_one(variant: Any) -> Row:
            forget(device, graphs=not shares_graphs.get(variant))
            timing = if_it_fits(lambda: measure(prepare(variant), device, **counts))
            fields: Row = {"fits": timing is not None, "spread": None, "seconds": [], "peak_bytes": None}
            fields |= {} if timing is None else {"spread": spread(timing.seconds), **vars(timing)}
            return report(variant, timing and timing.median) | fields

        return self.measure_all(variants, measure_one, **after)


def provenance(device: torch.device | str, *, commit: str) -> dict[str, Any]:
    """Returns the first fields of every benchmark, training and soak record: date, commit, hardware and versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "hardware": device_name(torch.device(device)),
        "versions": versions(),
    }


def versions(*packages: str) -> dict[str, str | None]:
    """Returns the versions of adaponder, Python, torch, transformers, triton and ``packages``, or ``None``."""
    installed: dict[str, str | None] = {"adaponder": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "triton", *packages):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = None
    return installed


def device_name(device: torch.device) -> str:
    """Returns the GPU's name, or the CPU's architecture and thread count."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def commit_of(commit: str | None, *, required: bool, paths: Sequence[str] = MEASURED) -> str:
    """Returns ``commit``, else git's (``-dirty`` if ``paths`` changed), else ``unknown``, or raises if ``required``."""
    if commit is not None:
        return commit
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        if required:
            raise InputError("there is no git checkout: name the commit with --commit, or use --no-record") from None
        return "unknown"
    return head + ("-dirty" if _git("diff", "--name-only", "HEAD", "--", *paths) else "")


def _git(*arguments: str) -> str:
    """Returns what a git command prints; raises if it fails."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def record_path(name: str, device: torch.device) -> Path:
    """Returns the path of a record, such as ``benchmarks/records/train-70m-h200.json``."""
    words = words_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else [device.type]
    return ROOT / "benchmarks" / "records" / ("-".join([name, *words]) + ".json")


def words_of(name: str) -> list[str]:
    """Splits a recipe's or device's name into lower-case words for a file name, without ones such as ``nvidia``."""
    return [word for word in re.split(r"[^a-z0-9.]+", name.lower()) if word and word not in _COMMON]


def select(items: Sequence[Any], only: Sequence[str] | None, always: str | None = None) -> list[Any]:
    """Returns the items whose name contains a word of ``only`` or has the part ``always``; without ``only``, all items.

    Commas and colons separate the parts of a name. Raises if no name contains a word of ``only``.
    """
    names = {item: item.name for item in items}
    for word in only or ():
        if not any(word in name for name in names.values()):
            raise InputError(f"--only {word} matches none of the names: {'; '.join(names.values())}")
    selected = {name for name in names.values() for word in only or [""] if word in name}
    return [item for item, name in names.items() if name in selected or always in re.split("[:,] ", name)]


def print_table(title: str, columns: Columns, rows: Iterable[Row]) -> None:
    """Prints rows under a title; ``columns`` maps each heading to the function that formats its cell."""
    console.print(table(title, list(columns), [[cell(row) for cell in columns.values()] for row in rows]))


def number(path: str, form: str, scale: float = 1.0) -> Cell:
    """Returns a function that formats a row's field times ``scale``, or a dash if the value is missing.

    ``path`` is the field's name; ``first_token.p50`` is the field ``p50`` of the dictionary ``first_token``.
    """

    def cell(row: Row) -> str:
        value: Any = row
        for name in path.split("."):
            value = (value or {}).get(name)
        return "–" if value is None else format(value * scale, form)

    return cell


SPREAD, PEAK = number("spread", ".1%"), number("peak_bytes", ".1f", 2**-30)


def speed(name: str, form: str, scale: float = 1.0) -> Cell:
    """Returns a formatter like :func:`number` that shows "out of memory" for a variant that did not fit."""
    cell = number(name, form, scale)
    return lambda row: cell(row) if row["fits"] else "out of memory"
