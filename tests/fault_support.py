"""Children that die, disks that are full, and what a folder holds afterwards."""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


def in_child(act: Callable[[], Any]) -> int:
    """Runs ``act`` in a fork of this warm process; returns its wait status. A child that hangs dies of SIGALRM."""
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(120)
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)
    return os.waitpid(child, 0)[1]


def killed(act: Callable[[], Any]) -> bool:
    """Returns whether a child that runs ``act`` was killed rather than finished; it must not fail."""
    status = in_child(act)
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


def full_disk(*arguments: Any, **named: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def flip(path: Path, place: float, bit: int = 0) -> None:
    """Flips a bit of the byte at ``place``, an index (also from the end) or a share of the file's length."""
    data = bytearray(path.read_bytes())
    data[int(place * len(data)) if 0 < place < 1 else int(place)] ^= 1 << bit
    path.write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    """Returns every file of a folder, by its name in it; the lock of a run tells nothing."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
