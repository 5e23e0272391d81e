"""Logs a run: metrics.jsonl, TensorBoard, optionally Weights & Biases, and a live view. NaN is shown as NaN.

A disk error ends the run with one line that names the file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from adaponder.errors import InputError, TrainingError
from adaponder.files import write_whole
from adaponder.terminal import console, depth_style, line

# No space, no quota, a file at its limit.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_EVENT_FILE = re.compile(r"events\.out\.tfevents\.(\d+)\.")


@contextmanager
def room_to_write(what: str | Path | None = None) -> Iterator[None]:
    """Turns a disk error in the block into one that says that ``what`` could not be written.

    Without ``what`` only a full disk is turned, and names the file itself.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in _FULL
        if what is None and not full:
            raise
        what = what or error.filename or "a file of the run"
        raise TrainingError(
            f"{what} could not be written: {error.strerror or error}; the run stops, its checkpoints are intact: "
            f"{'free some space' if full else 'fix that'}, then continue with --resume auto"
        ) from error


class Appended:
    """Appends whole records to a file, unbuffered: closing it cannot fail, and a kill loses nothing."""

    def __init__(self, path: Path):
        self.path = path
        with room_to_write(path):
            self.file = path.open("ab", buffering=0)

    def write(self, record: bytes) -> None:
        with room_to_write(self.path):
            while record:
                record = record[self.file.write(record) :]

    def close(self) -> None:
        self.file.close()


class Board:
    """Writes one TensorBoard event file in ``folder``; steps from ``start`` on in earlier files become void.

    ``SummaryWriter`` does not fit: it writes in a thread, where a disk error prints a traceback, and it names files by
    the clock. TensorBoard reads files in order of their names, so after a clock was set back it would drop new steps.
    """

    def __init__(self, folder: Path, *, start: int):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        with room_to_write(folder):
            folder.mkdir(exist_ok=True)
            name = f"events.out.tfevents.{_next_number(folder):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self.file = Appended(folder / name)
        self.records = RecordWriter(self.file)
        for event in (
            Event(wall_time=time.time(), file_version="brain.Event:2"),
            Event(wall_time=time.time(), step=start, session_log=SessionLog(status=SessionLog.START)),
        ):
            self.records.write(event.SerializeToString())

    def add(self, scalars: Mapping[str, float], step: int, *, wall_time: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        event = Event(wall_time=wall_time, step=step, summary=Summary(value=values))
        self.records.write(event.SerializeToString())

    def close(self) -> None:
        self.file.close()


def _next_number(folder: Path) -> int:
    """Returns the time in seconds, or one more than the largest number in an existing name."""
    there = (_EVENT_FILE.match(path.name) for path in folder.iterdir())
    return max([int(time.time()), *(int(match[1]) + 1 for match in there if match)])


class Telemetry:
    """Logs one flat dict of metrics per step, in the leading process."""

    def __init__(self, folder: Path, *, steps: int, start: int, quiet: bool = False, wandb: str | None = None):
        self.remote = None if wandb is None else _join_wandb(wandb, folder)
        self._drop_from(folder / "metrics.jsonl", start)
        self.file = Appended(folder / "metrics.jsonl")
        self.board = Board(folder / "tensorboard", start=start)
        self.progress = Progress(
            TextColumn("step", style="bold"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:.0f} %  elapsed"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self.task = self.progress.add_task("", total=steps, completed=start)
        self.live = Live(self.progress, console=console, transient=True, refresh_per_second=4)
        self.shown = console.is_terminal and not quiet
        self.plain = not console.is_terminal and not quiet
        if self.shown:
            self.live.start()
        self.latest: dict[str, Any] = {}
        self.warned: set[str] = set()

    @staticmethod
    def _drop_from(path: Path, start: int) -> None:
        """Removes the lines of steps from ``start`` on, which will be trained again."""
        if path.is_file():
            earlier = [line for line in path.read_text().splitlines() if _step(line) < start]
            write_whole(path, "".join(line + "\n" for line in earlier).encode(), TrainingError)

    def advance(self, step: int) -> None:
        self.progress.update(self.task, completed=step + 1)

    def log(self, metrics: dict[str, Any]) -> None:
        step, now = metrics["step"], round(time.time(), 3)
        self.file.write(f"{json.dumps({'time': now} | metrics)}\n".encode())
        scalars = {}
        for name, value in metrics.items():
            if isinstance(value, list):
                scalars |= {f"{name}/{index}": element for index, element in enumerate(value)}
            elif name != "step":
                scalars[name] = value
        self.board.add(scalars, step, wall_time=now)
        if self.remote is not None:
            self.remote.log(scalars, step=step)
        self.latest |= metrics
        if self.shown:
            self.live.update(Group(self.progress, view_of(self.latest)))
        if self.plain:
            console.print(f"step {step}  {line_of(metrics)}", soft_wrap=True)

    def warn(self, kind: str, message: str) -> None:
        """Prints a warning, once per kind."""
        if kind not in self.warned:
            self.warned.add(kind)
            console.print(line(("warning:", "bold yellow"), f" {message}"), soft_wrap=True)

    def close(self) -> None:
        if self.shown:
            self.live.stop()
            # The live view disappears; its last numbers stay on the screen.
            console.print(view_of(self.latest))
        self.file.close()
        self.board.close()
        if self.remote is not None:
            self.remote.finish()


def _join_wandb(project: str, folder: Path) -> Any:
    """Starts, or resumes, the Weights & Biases run of this folder in ``project``."""
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError("--wandb needs Weights & Biases: pip install wandb, or drop --wandb") from None
    name = folder.resolve().name
    identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    return wandb.init(project=project, name=name, id=identity, resume="allow", dir=str(folder), config=recipe)


def _step(line: str) -> float:
    """Returns the step of a line of metrics; infinity for a truncated line."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf


def line_of(metrics: dict[str, Any]) -> str:
    """Returns metrics as one line of text: loss, speed, depth, shares halted, means of gates."""
    shown = {"loss": metrics.get("cross_entropy", metrics["loss"])} if "loss" in metrics else {}
    values = metrics | shown
    words = [
        text.format(values[name])
        for name, text in (
            ("validation_loss", "validation {:.4f}"),
            ("loss", "loss {:.4f}"),
            ("tokens_per_second", "{:,.0f} tok/s"),
            ("mfu", "mfu {:.0%}"),
            ("mean_depth", "depth {:.2f}"),
        )
        if name in values
    ]
    if metrics.get("halted"):
        words.append("halted " + "/".join(f"{share:.0%}" for share in metrics["halted"]))
    if metrics.get("gate_means"):
        words.append("gates " + "/".join(f"{mean:.2f}" for mean in metrics["gate_means"]))
    return "  ".join(words)


def view_of(metrics: dict[str, Any]) -> RenderableType:
    """Returns the live view under the progress bar: losses, speed, and the share of tokens active per iteration."""
    facts = [
        line((label, "dim"), f" {metrics[name]:{form}}")
        for name, label, form in (
            ("cross_entropy", "loss", ".4f"),
            ("ponder", "ponder", ".4f"),
            ("validation_loss", "validation", ".4f"),
            ("lr", "lr", ".2e"),
            ("grad_norm", "gradient", ".2f"),
            ("tokens_per_second", "tokens/s", ",.0f"),
            ("mfu", "mfu", ".1%"),
            ("mean_depth", "mean depth", ".3f"),
        )
        if name in metrics
    ]
    halted = metrics.get("halted")
    tables = [_by_iteration(halted, metrics.get("gate_means") or [])] if halted else []
    return Group(Text("   ").join(facts), *tables)


def _by_iteration(halted: list[float], gates: list[float]) -> Table:
    """Returns a table of the share of tokens active in each iteration, as a bar, and the mean of the gate after it."""
    by_iteration = Table(box=None, pad_edge=False, header_style="dim")
    by_iteration.add_column("iteration")
    by_iteration.add_column("tokens read")
    by_iteration.add_column("", justify="right")
    by_iteration.add_column("gate after it", justify="right")
    deepest = len(halted) + 1
    for index in range(deepest):
        active = 1.0 - (halted[index - 1] if index else 0.0)
        bar = Text(" " * max(1, round(30 * active)) if active else "", style=depth_style(index + 1, deepest))
        gate = f"{gates[index]:.3f}" if index < len(gates) else ""
        by_iteration.add_row(str(index + 1), bar, f"{active:.1%}", gate)
    return by_iteration
