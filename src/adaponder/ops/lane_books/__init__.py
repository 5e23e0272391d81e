"""The books of decoding lanes; see README.md."""

from __future__ import annotations

from torch import Tensor

from adaponder.ops.lane_books import torch as plain
from adaponder.ops.lane_books.torch import Begun, Books, book_rows

__all__ = ["Begun", "Books", "begin_rows", "book_rows", "end_rows"]


def begin_rows(books: Books, lane: Tensor, *, width: int, vanishes: bool) -> Begun:
    if lane.is_cuda and width == 1:
        from adaponder.ops.lane_books import triton as kernels

        return kernels.begin_rows(books, lane, width=width, vanishes=vanishes)
    return plain.begin_rows(books, lane, width=width, vanishes=vanishes)


def end_rows(books: Books, lane: Tensor, begun: Begun, goes_on: Tensor, chosen: Tensor, *, places: int) -> None:
    if lane.is_cuda:
        from adaponder.ops.lane_books import triton as kernels

        kernels.end_rows(books, lane, begun, goes_on, chosen, places=places)
        return
    plain.end_rows(books, lane, begun, goes_on, chosen, places=places)
