"""Computes logits and expected embeddings of the rows of a tick, reading head and embedding table at most once.

Logits of one or two rows are computed by the matrix-vector kernel of ``row_linear``. For up to 16 rows, the expectation
is split over slices of the vocabulary; for more, it is the softmax kernel of ``vocab_expectation`` and one matrix
product. Only the torch version supports ``top_k``.
"""

from adaponder.ops.dispatch import dispatch, runs_fused
from adaponder.ops.row_vocabulary import torch as plain

__all__ = ["row_expectation", "row_logits"]

row_logits = dispatch(plain.row_logits, when=runs_fused)
row_expectation = dispatch(
    plain.row_expectation, when=lambda logits, table, *rest, top_k=None, **options: top_k is None and runs_fused(table)
)
