"""A pass on the CPU gets as many threads as its products are worth: one per million multiply-adds of a product.

Every product that several threads share ends with a wait for the slowest of them. A thread reads or multiplies a
million weights in about 100 microseconds, which such a wait is small against; of a small model's products it is the
larger part, and where another program holds a core, each wait may last until the system takes that core back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from adaponder.backbones.shape import Shape

PER_THREAD = 1_000_000
# Of attention (in and out) and of the feed-forward part (up and down); then head and expectation.
_PRODUCTS_OF_A_LAYER, _PRODUCTS_AFTER = 4, 2


def threads_of_pass(shape: Shape, rows: int, *, most: int) -> int:
    """From 1 to ``most``: the multiply-adds of an average product of a pass over ``rows``, over :data:`PER_THREAD`."""
    each = shape.body + _PRODUCTS_AFTER * shape.vocabulary * shape.hidden
    products = _PRODUCTS_OF_A_LAYER * shape.layers + _PRODUCTS_AFTER
    return max(1, min(most, rows * each // products // PER_THREAD))


@contextmanager
def pass_threads(shape: Shape, rows: int) -> Iterator[int]:
    """Within it torch computes with :func:`threads_of_pass`, at most as many threads as it had, which it has after."""
    before = torch.get_num_threads()
    chosen = threads_of_pass(shape, rows, most=before)
    if chosen == before:
        yield before
        return
    torch.set_num_threads(chosen)
    try:
        yield chosen
    finally:
        torch.set_num_threads(before)
