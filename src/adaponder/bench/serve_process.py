"""A server in a process of its own, for as long as it is measured."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from adaponder.errors import EvaluationError

_ADDRESS = re.compile(r"https?://(?:\[[0-9a-fA-F:]+\]|[\w.-]+):\d+")
# The last lines of what a server says are kept for errors.
_KEPT = 40


@dataclass
class Running:
    """A server that listens: its address, its process, and the last it said."""

    url: str
    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    def rss(self) -> int | None:
        """Bytes of memory that its process holds; ``None`` where the system does not say."""
        try:
            with open(f"/proc/{self.process.pid}/status") as status:
                return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))
        except (OSError, StopIteration):
            return None

    def cpu_seconds(self) -> float | None:
        """Seconds of processor time that its process has used; ``None`` where the system does not say."""
        try:
            with open(f"/proc/{self.process.pid}/stat") as stat:
                fields = stat.read().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            return None


@contextmanager
def started(
    arguments: Sequence[str],
    *,
    patience: float = 120.0,
    environment: Mapping[str, str] | None = None,
    ending: float = 30.0,
) -> Iterator[Running]:
    """Runs ``python ARGUMENTS`` until the body is done; it must print its address within ``patience`` seconds.

    It is asked to end (SIGTERM) and killed if it has not after ``ending`` seconds.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **(environment or {})},
    )
    said, lines = [], queue.Queue[str | None]()
    threading.Thread(target=_read, args=(process, said, lines), daemon=True).start()
    try:
        yield Running(_address(lines, said, time.monotonic() + patience), process, said)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(ending)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _read(process: subprocess.Popen[str], said: list[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line.rstrip())
        del said[:-_KEPT]
        lines.put(line)
    lines.put(None)


def _address(lines: queue.Queue[str | None], said: list[str], until: float) -> str:
    while True:
        try:
            line = lines.get(timeout=max(0.01, until - time.monotonic()))
        except queue.Empty:
            raise EvaluationError("the server did not say its address in time: " + " / ".join(said[-5:])) from None
        if line is None:
            raise EvaluationError("the server ended before it listened: " + " / ".join(said[-5:]))
        if match := _ADDRESS.search(line):
            return match.group()
