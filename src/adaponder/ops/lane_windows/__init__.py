"""The windows of decoding lanes; see README.md."""

from __future__ import annotations

from torch import Tensor

from adaponder.ops.fused import has_kernels
from adaponder.ops.lane_books import Books
from adaponder.ops.lane_windows import torch as plain
from adaponder.ops.lane_windows.torch import DraftWindows, WindowRows

__all__ = ["DraftWindows", "WindowRows", "begin_windows", "end_windows"]


def begin_windows(books: Books, windows: DraftWindows, lane: Tensor, *, passes: int, vanishes: bool) -> WindowRows:
    """Rows of live places alone on a CPU; elsewhere, where the host must not wait, of every place."""
    if _by_kernels(lane):
        from adaponder.ops.lane_windows import triton as kernels

        return kernels.begin_windows(books, windows, lane, passes=passes, vanishes=vanishes)
    every = lane.device.type != "cpu"
    return plain.begin_windows(books, windows, lane, passes=passes, vanishes=vanishes, every=every)


def end_windows(books: Books, windows: DraftWindows, lane: Tensor, *said: Tensor) -> None:
    """See :func:`adaponder.ops.lane_windows.torch.end_windows`."""
    if _by_kernels(lane):
        from adaponder.ops.lane_windows import triton as kernels

        kernels.end_windows(books, windows, lane, *said)
        return
    plain.end_windows(books, windows, lane, *said)


def _by_kernels(lane: Tensor) -> bool:
    """Where kernels may run and there is a row at all."""
    return has_kernels(lane) and len(lane) > 0
