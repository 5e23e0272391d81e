"""The books of decoding lanes; see README.md."""

from __future__ import annotations

from torch import Tensor

from adaponder.ops.fused import has_kernels, runs_fused
from adaponder.ops.lane_books import torch as plain
from adaponder.ops.lane_books.torch import GOES_ON, NOT_A_NUMBER, Begun, Books, book_rows

__all__ = [
    "GOES_ON",
    "NOT_A_NUMBER",
    "Begun",
    "Books",
    "begin_rows",
    "book_rows",
    "end_rows",
    "force_rows",
    "ponder_rows",
    "resume_rows",
]


def begin_rows(books: Books, lane: Tensor, *, width: int, vanishes: bool) -> Begun:
    """See :func:`adaponder.ops.lane_books.torch.begin_rows`."""
    if _by_kernels(lane) and width == 1:
        from adaponder.ops.lane_books import triton as kernels

        return kernels.begin_rows(books, lane, width=width, vanishes=vanishes)
    return plain.begin_rows(books, lane, width=width, vanishes=vanishes)


def end_rows(books: Books, lane: Tensor, *arguments: Tensor | Begun, places: int) -> None:
    """See :func:`adaponder.ops.lane_books.torch.end_rows`."""
    if _by_kernels(lane):
        from adaponder.ops.lane_books import triton as kernels

        kernels.end_rows(books, lane, *arguments, places=places)  # type: ignore[arg-type]
        return
    plain.end_rows(books, lane, *arguments, places=places)  # type: ignore[arg-type]


def resume_rows(first: Tensor, kept: Tensor, lane: Tensor, iteration: Tensor) -> Tensor:
    """See :func:`adaponder.ops.lane_books.torch.resume_rows`."""
    if _by_kernels(lane):
        from adaponder.ops.lane_books import triton as kernels

        return kernels.resume_rows(first, kept, lane, iteration)
    return plain.resume_rows(first, kept, lane, iteration)


def ponder_rows(embedding: Tensor, expected: Tensor, active: Tensor, probability: Tensor) -> Tensor:
    """See :func:`adaponder.ops.lane_books.torch.ponder_rows`."""
    if runs_fused(embedding) and len(embedding) and embedding.shape[1] == 1:
        from adaponder.ops.lane_books import triton as kernels

        return kernels.ponder_rows(embedding, expected, active, probability)
    return plain.ponder_rows(embedding, expected, active, probability)


def force_rows(keep: Tensor, forced: Tensor, lane: Tensor, place: Tensor, iteration: Tensor, last: Tensor) -> Tensor:
    """See :func:`adaponder.ops.lane_books.torch.force_rows`."""
    if _by_kernels(lane):
        from adaponder.ops.lane_books import triton as kernels

        return kernels.force_rows(keep, forced, lane, place, iteration, last)
    return plain.force_rows(keep, forced, lane, place, iteration, last)


def _by_kernels(lane: Tensor) -> bool:
    """Where kernels may run and there is a row at all."""
    return has_kernels(lane) and len(lane) > 0
