"""Logs a run: metrics.jsonl, TensorBoard, optionally Weights & Biases, and a live view.

NaN is shown as NaN.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
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
from adaponder.training.board import Board
from adaponder.training.files import Appended


class Telemetry:
    """Logs one flat dict of metrics per step; made in the leading process alone."""

    def __init__(self, folder: Path, *, steps: int, start: int, quiet: bool = False, wandb: str | None = None):
        self.remote = None if wandb is None else _join_wandb(wandb, folder)
        self._forget_from(folder / "metrics.jsonl", start)
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
    def _forget_from(path: Path, start: int) -> None:
        """Removes lines of steps from ``start`` on, which will be taken again."""
        if not path.is_file():
            return
        kept = [line for line in path.read_text().splitlines() if _step(line) < start]
        write_whole(path, "".join(line + "\n" for line in kept).encode(), TrainingError)

    def advance(self, step: int) -> None:
        self.progress.update(self.task, completed=step + 1)

    def log(self, metrics: dict[str, Any]) -> None:
        step, now = metrics["step"], round(time.time(), 3)
        self.file.write(f"{json.dumps({'time': now} | metrics)}\n".encode())
        scalars = {}
        for name, value in metrics.items():
            if name != "step":
                for index, part in enumerate(value if isinstance(value, list) else [value]):
                    scalars[f"{name}/{index}" if isinstance(value, list) else name] = part
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
            # The view vanishes with the bar; its last numbers stay.
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
        raise InputError("--wandb: Weights & Biases is not installed; pip install wandb, or leave it out") from None
    name = folder.resolve().name
    identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    return wandb.init(project=project, name=name, id=identity, resume="allow", dir=str(folder), config=recipe)


def _step(line: str) -> float:
    """The step of a line of metrics; infinity for a line that was cut off."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf


def line_of(metrics: dict[str, Any]) -> str:
    """Metrics as one line of text: loss, speed, depth, shares halted, means of gates."""
    parts = []
    if "validation_loss" in metrics:
        parts.append(f"validation {metrics['validation_loss']:.4f}")
    if "loss" in metrics:
        parts.append(f"loss {metrics.get('cross_entropy', metrics['loss']):.4f}")
    if "tokens_per_second" in metrics:
        parts.append(f"{metrics['tokens_per_second']:,.0f} tok/s")
    if "mfu" in metrics:
        parts.append(f"mfu {metrics['mfu']:.0%}")
    if "mean_depth" in metrics:
        parts.append(f"depth {metrics['mean_depth']:.2f}")
    if metrics.get("halted"):
        parts.append("halted " + "/".join(f"{share:.0%}" for share in metrics["halted"]))
    if metrics.get("gate_means"):
        parts.append("gates " + "/".join(f"{mean:.2f}" for mean in metrics["gate_means"]))
    return "  ".join(parts)


def view_of(metrics: dict[str, Any]) -> RenderableType:
    """The live view under the progress bar: losses, speed, and per iteration the share of tokens that are active."""
    facts = []
    for name, label, form in (
        ("cross_entropy", "loss", ".4f"),
        ("ponder", "ponder", ".4f"),
        ("validation_loss", "validation", ".4f"),
        ("lr", "lr", ".2e"),
        ("grad_norm", "gradient", ".2f"),
        ("tokens_per_second", "tokens/s", ",.0f"),
        ("mfu", "mfu", ".1%"),
        ("mean_depth", "mean depth", ".3f"),
    ):
        if name in metrics:
            facts.append(line((label, "dim"), f" {metrics[name]:{form}}"))
    parts: list[RenderableType] = [Text("   ").join(facts)]
    if halted := metrics.get("halted"):
        parts.append(_by_iteration(halted, metrics.get("gate_means") or []))
    return Group(*parts)


def _by_iteration(halted: list[float], gates: list[float]) -> Table:
    """A table with the share of tokens active in each iteration, as a bar, and the mean of the gate after it."""
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
