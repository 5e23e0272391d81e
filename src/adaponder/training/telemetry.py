"""What a run shows while it runs: metrics.jsonl, TensorBoard, and one live line; NaN is shown as NaN."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from adaponder.terminal import console


class Telemetry:
    """Takes one flat dict per logged step. Only the leading process has one."""

    def __init__(self, folder: Path, *, steps: int, start: int, quiet: bool = False):
        from torch.utils.tensorboard import SummaryWriter

        self._forget_from(folder / "metrics.jsonl", start)
        self.file = (folder / "metrics.jsonl").open("a")
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=start)
        self.progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=16),
            TimeRemainingColumn(),
            TextColumn("{task.fields[shown]}"),
            console=console,
            transient=True,
            disable=quiet,
        )
        self.task = self.progress.add_task("", total=steps, completed=start, shown="")
        self.progress.start()
        self.plain = not console.is_terminal and not quiet
        self.warned: set[str] = set()

    @staticmethod
    def _forget_from(path: Path, start: int) -> None:
        """Drops lines of steps that will be done again: one line per step, whatever was interrupted."""
        if not path.is_file():
            return
        kept = [line for line in path.read_text().splitlines() if _step(line) < start]
        # Written beside and renamed: a kill here loses no line.
        fresh = path.with_suffix(".new")
        fresh.write_text("".join(line + "\n" for line in kept))
        os.replace(fresh, path)

    def advance(self, step: int) -> None:
        self.progress.update(self.task, completed=step + 1)

    def log(self, metrics: dict[str, Any]) -> None:
        self.file.write(json.dumps({"time": round(time.time(), 3)} | metrics) + "\n")
        self.file.flush()
        step = metrics["step"]
        for name, value in metrics.items():
            if name != "step":
                for index, part in enumerate(value if isinstance(value, list) else [value]):
                    label = f"{name}/{index}" if isinstance(value, list) else name
                    self.board.add_scalar(label, part, step)
        shown = line_of(metrics)
        self.progress.update(self.task, shown=shown)
        if self.plain:
            console.print(f"step {step}  {shown}", soft_wrap=True)

    def warn(self, kind: str, message: str) -> None:
        """Loud, once per kind."""
        if kind not in self.warned:
            self.warned.add(kind)
            console.print(f"[bold yellow]warning:[/] {message}", soft_wrap=True)

    def close(self) -> None:
        self.progress.stop()
        self.file.close()
        self.board.close()


def _step(line: str) -> float:
    """The step of a line of metrics; a line torn by a kill belongs to no step and goes."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf


def line_of(metrics: dict[str, Any]) -> str:
    """The live line: loss, speed, depth, who halted where."""
    parts = []
    if "validation_loss" in metrics:
        parts.append(f"validation {metrics['validation_loss']:.4f}")
    if "loss" in metrics:
        parts.append(f"loss {metrics['cross_entropy']:.4f}")
    if "tokens_per_second" in metrics:
        parts.append(f"{metrics['tokens_per_second']:,.0f} tok/s")
    if "mfu" in metrics:
        parts.append(f"mfu {metrics['mfu']:.0%}")
    if "mean_depth" in metrics:
        parts.append(f"depth {metrics['mean_depth']:.2f}")
    if metrics.get("halted"):
        parts.append("halted " + "/".join(f"{share:.0%}" for share in metrics["halted"]))
    return "  ".join(parts)
