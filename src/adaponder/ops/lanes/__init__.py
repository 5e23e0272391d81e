"""Advances the lanes of a decoding engine by one tick.

``begin_rows`` allocates the next KV row of each lane and enters it into the index, a table of the rows that each
iteration reads (law 3); ``end_rows`` moves each lane to its token's next iteration, or to the first iteration of the
sampled token. ``begin_windows`` and ``end_windows`` do the same for draft windows
(:mod:`adaponder.inference.drafting`), whose consecutive tokens may be at different iterations: token ``p`` of a
sequence has the window entry ``p % window``, and its KV rows have fixed offsets in the lane's pages. Padding rows of a
batch use the last lane, whose content has no meaning.
"""

from torch import Tensor

from adaponder.ops.dispatch import dispatch, has_kernels, runs_fused
from adaponder.ops.lanes import torch as plain
from adaponder.ops.lanes.torch import GOES_ON, NOT_A_NUMBER, Begun, Books, DraftWindows, WindowRows, book_rows

__all__ = ["GOES_ON", "NOT_A_NUMBER", "Begun", "Books", "DraftWindows", "WindowRows", "begin_rows", "begin_windows"]
__all__ += ["book_rows", "end_rows", "end_windows", "force_rows", "ponder_rows", "resume_rows"]


def _has_rows(lane: Tensor) -> bool:
    return has_kernels(lane) and len(lane) > 0


begin_rows = dispatch(plain.begin_rows, when=lambda books, lane, *, width, vanishes: width == 1 and _has_rows(lane))
end_rows = dispatch(plain.end_rows, when=lambda books, lane, *rest, **options: _has_rows(lane))
resume_rows = dispatch(plain.resume_rows, when=lambda initial, stored, lane, iteration: _has_rows(lane))
force_rows = dispatch(plain.force_rows, when=lambda keep, forced, lane, *rest: _has_rows(lane))
ponder_rows = dispatch(plain.ponder_rows, when=lambda x, *rest: runs_fused(x) and len(x) > 0 and x.shape[1] == 1)
begin_windows = dispatch(plain.begin_windows, when=lambda books, windows, lane, **options: _has_rows(lane))
end_windows = dispatch(plain.end_windows, when=lambda books, windows, lane, *rest: _has_rows(lane))
