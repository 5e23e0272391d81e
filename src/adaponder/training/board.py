"""Writes TensorBoard's event files, named so that they sort in the order they were written, whatever the clock says.

TensorBoard reads the files of a folder by name, which holds a time, and forgets steps of earlier ones that were done
again. A clock that was set back would put the newest file first, and what it shows would be forgotten.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from adaponder.training.files import Appended, room_to_write

_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.")


class Board:
    """One event file of ``folder``, for a run that goes on at step ``start``: later steps of files before it are void.

    Written in the caller's thread, so that an error of the disk is an error there.
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
    """The time in seconds, or one more than the largest number in an existing name."""
    there = (_NAME.match(path.name) for path in folder.iterdir())
    return max([int(time.time()), *(int(match[1]) + 1 for match in there if match)])
