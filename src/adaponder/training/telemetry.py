"""Logs a run to metrics.jsonl, TensorBoard, optionally Weights & Biases, and a live view in the terminal.

A disk error ends the run with a one-line error that names the file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from adaponder.errors import InputError, TrainingError
from adaponder.files import write_whole
from adaponder.terminal import console, depth_style, line

# Errors of a full disk: no space, no quota, file too large.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Metrics of the live view: name, label, format.
_SHOWN = (
    ("cross_entropy", "loss", ".4f"),
    ("ponder", "ponder", ".4f"),
    ("validation_loss", "validation", ".4f"),
    ("lr", "lr", ".2e"),
    ("grad_norm", "gradient", ".2f"),
    ("tokens_per_second", "tokens/s", ",.0f"),
    ("mfu", "mfu", ".1%"),
    ("mean_depth", "depth", ".3f"),
)
# Metrics that are in the live view, but not in lines of plain text.
_LIVE_ONLY = {"ponder", "lr", "grad_norm"}


@contextmanager
def room_to_write(what: str | Path | None = None) -> Iterator[None]:
    """Context manager that converts an ``OSError`` to a ``TrainingError``, which says that ``what`` was not written.

    If ``what`` is ``None``, only errors of a full disk are converted, and the message names the ``OSError``'s file.
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
            f"{'free some space' if full else 'correct that'}, then continue with --resume auto"
        ) from error


class Telemetry:
    """Logs a flat dict of metrics per step; used in the leading process only."""

    def __init__(self, folder: Path, *, steps: int, start: int, quiet: bool = False, wandb: str | None = None):
        from torch.utils.tensorboard import SummaryWriter

        self.remote = None if wandb is None else _join_wandb(wandb, folder)
        self.path = folder / "metrics.jsonl"
        _drop_from(self.path, start)
        self.board_folder = folder / "tensorboard"
        with room_to_write(self.board_folder):
            self.board = SummaryWriter(self.board_folder, purge_step=start)
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
        self.steps, self.start, self.began = steps, start, time.monotonic()
        self.latest: dict[str, Any] = {}
        self.warned: set[str] = set()

    def advance(self, step: int) -> None:
        self.progress.update(self.task, completed=step + 1)

    def log(self, metrics: dict[str, Any]) -> None:
        step, now = metrics["step"], round(time.time(), 3)
        # Closing the file after each line loses none if the process is killed.
        with room_to_write(self.path), self.path.open("ab") as file:
            file.write(f"{json.dumps({'time': now} | metrics)}\n".encode())
        scalars = {}
        for name, value in metrics.items():
            if isinstance(value, list):
                scalars |= {f"{name}/{index}": element for index, element in enumerate(value)}
            elif name != "step":
                scalars[name] = value
        with room_to_write(self.board_folder):
            for name, value in scalars.items():
                self.board.add_scalar(name, value, step, walltime=now)
            self.board.flush()
        if self.remote is not None:
            self.remote.log(scalars, step=step)
        self.latest |= metrics
        if self.shown:
            self.live.update(Group(self.progress, view_of(self.latest)))
        if self.plain:
            per_step = (time.monotonic() - self.began) / (step + 1 - self.start)
            left = timedelta(seconds=round(per_step * (self.steps - step - 1)))
            console.print(f"step {step} of {self.steps}  {line_of(metrics)}  {left} left", soft_wrap=True)

    def warn(self, kind: str, message: str) -> None:
        """Prints a warning, once per kind."""
        if kind not in self.warned:
            self.warned.add(kind)
            console.print(line(("warning:", "bold yellow"), f" {message}"), soft_wrap=True)

    def close(self) -> None:
        if self.shown:
            self.live.stop()
            # The live view disappears when it stops, so print its last state.
            console.print(view_of(self.latest))
        with suppress(OSError):  # log() has already flushed everything, or raised
            self.board.close()
        if self.remote is not None:
            self.remote.finish()


def _join_wandb(project: str, folder: Path) -> Any:
    """Starts or resumes the Weights & Biases run of this folder in ``project``."""
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError("--wandb needs Weights & Biases: pip install wandb, or drop --wandb") from None
    name = folder.resolve().name
    identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    return wandb.init(project=project, name=name, id=identity, resume="allow", dir=str(folder), config=recipe)


def _drop_from(path: Path, start: int) -> None:
    """Removes from ``metrics.jsonl`` truncated lines and lines from step ``start`` on, which is trained again."""
    if path.is_file():
        earlier = [line for line in path.read_text().splitlines() if _step(line) < start]
        write_whole(path, "".join(line + "\n" for line in earlier).encode(), TrainingError)


def _step(line: str) -> float:
    """Returns the step of a line of metrics; infinity for a truncated line."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf


def line_of(metrics: dict[str, Any]) -> str:
    """Returns metrics as one line of text: losses, speed, depth, shares of halted tokens, mean gates."""
    values = {"cross_entropy": metrics["loss"]} | metrics if "loss" in metrics else metrics
    words = [
        f"{label} {values[name]:{form}}" for name, label, form in _SHOWN if name in values and name not in _LIVE_ONLY
    ]
    if metrics.get("halted"):
        words.append("halted " + "/".join(f"{share:.0%}" for share in metrics["halted"]))
    if metrics.get("gate_means"):
        words.append("gates " + "/".join(f"{mean:.2f}" for mean in metrics["gate_means"]))
    return "  ".join(words)


def view_of(metrics: dict[str, Any]) -> RenderableType:
    """Returns the live view under the progress bar: metrics, and the share of active tokens by iteration."""
    facts = [line((label, "dim"), f" {metrics[name]:{form}}") for name, label, form in _SHOWN if name in metrics]
    halted, gates = metrics.get("halted"), metrics.get("gate_means") or []
    if not halted:
        return Text("   ").join(facts)
    right = (Column("", justify="right"), Column("gate after it", justify="right"))
    by_iteration = Table("iteration", "tokens read", *right, box=None, pad_edge=False, header_style="dim")
    deepest = len(halted) + 1
    for index in range(deepest):
        active = 1.0 - (halted[index - 1] if index else 0.0)
        bar = Text(" " * max(1, round(30 * active)) if active else "", style=depth_style(index + 1, deepest))
        gate = f"{gates[index]:.3f}" if index < len(gates) else ""
        by_iteration.add_row(str(index + 1), bar, f"{active:.1%}", gate)
    return Group(Text("   ").join(facts), by_iteration)
