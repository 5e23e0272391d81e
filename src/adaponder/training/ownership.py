"""A run folder has one owner at a time, and an interrupted run stops between two steps."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adaponder.errors import InputError
from adaponder.files import lock
from adaponder.training.distributed import World
from adaponder.training.files import room_to_write


@contextmanager
def owned(out: Path, world: World, resume: str | None) -> Iterator[None]:
    """Inside, the run folder is locked; it must be writable, empty unless resuming, and not in use by another run.

    A run that goes on from a checkpoint of another folder must not find checkpoints here.
    """
    if not world.leads:
        world.wait()
        yield
        return
    if not out.parent.is_dir():
        wrong = "is a file, not a folder" if out.parent.exists() else "does not exist"
        raise InputError(f"--out {out}: {out.parent} {wrong}")
    try:
        out.mkdir(exist_ok=True)
        holder = (out / ".lock").open("a+")
    except OSError as error:
        raise InputError(f"--out {out} cannot be written to: {error}") from error
    with holder:
        if not lock(holder.fileno()):
            holder.seek(0)
            raise InputError(f"--out {out} is in use by {holder.read().strip() or 'another run'}")
        if resume is None and any(path.name != ".lock" for path in out.iterdir()):
            raise InputError(f"--out {out} is not empty: name a new folder, or --resume auto to go on")
        if resume not in (None, "auto"):
            _require_own_checkpoint(out, Path(resume))
        with room_to_write(out / ".lock"):
            holder.truncate(0)
            holder.write(f"process {os.getpid()} on {socket.gethostname()}")
            holder.flush()
        world.wait()
        yield


def _require_own_checkpoint(out: Path, resumed: Path) -> None:
    """Raises where a run that goes on from elsewhere would replace the checkpoints or the final model in ``out``."""
    kept = [*(out / "checkpoints").glob("step-*"), *out.glob("final")]
    if kept and resumed.resolve().parent != (out / "checkpoints").resolve():
        raise InputError(
            f"--out {out} holds {kept[0].name} of a run, which would be lost, and --resume {resumed} is no checkpoint "
            "of that run: name a new folder, or --resume auto to go on with what is there"
        )


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether SIGINT or SIGTERM came; a second signal ends the process at once."""
    signals: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if signals:
            os._exit(130)
        signals.append(number)
        print("\nstopping after this step; once more to stop at once", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(signals)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
