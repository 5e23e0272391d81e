"""Computes logits and expected embeddings of the rows of a tick, reading head and embedding table at most once.

``row_logits``: ``z = h W^T + b``, for both sampling and expectation. ``row_expectation``: ``softmax(z) E * scale`` for
rows that continue, zeros for the others.

Logits of one or two rows use the matrix-vector kernel of ``row_linear``. The expectation of up to 16 rows is split
over slices of the vocabulary; ``goes_on`` is read on the device. More rows use the softmax kernel of
``vocab_expectation`` and one matrix product. Only torch supports ``top_k``.

H200, bf16, one row, V = 50,304, d = 1,024 (103 MB, 24 us at the copy rate): logits 26 us, expectation 34 us.
"""

from adaponder.ops.dispatch import dispatch, runs_fused
from adaponder.ops.row_vocabulary import torch as plain

__all__ = ["row_expectation", "row_logits"]

_KERNELS = "adaponder.ops.row_vocabulary.triton"

row_logits = dispatch(plain.row_logits, _KERNELS, when=runs_fused)
row_expectation = dispatch(
    plain.row_expectation,
    _KERNELS,
    when=lambda logits, table, *rest, top_k=None, **options: top_k is None and runs_fused(table),
)
