"""Errors of the disk end a run in one line that names the file; files that grow are written record by record."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adaponder.errors import TrainingError

# No space, no quota, a file at its limit.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def room_to_write(what: str | Path) -> Iterator[None]:
    """Inside, an error of the disk ends the run with one line that says that ``what`` could not be written."""
    try:
        yield
    except OSError as error:
        raise _stopped(what, error) from error


@contextmanager
def room_on_disk() -> Iterator[None]:
    """Inside, a full disk ends the run with one line, whichever file it hit; any other error stays as it is."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise _stopped(error.filename or "what the run writes", error) from error


def _stopped(what: str | Path, error: OSError) -> TrainingError:
    cure = "make room" if error.errno in _FULL else "mend that"
    return TrainingError(
        f"{what} could not be written: {error.strerror or error}; the run stops and its checkpoints are untouched: "
        f"{cure}, then go on with --resume auto"
    )


class Appended:
    """A file that grows by whole records, unbuffered: closing it cannot fail, and a kill loses nothing."""

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
