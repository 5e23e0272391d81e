"""Attention over the vocabulary: which embedding does the model expect next?"""

from torch import Tensor

from adaponder.ops.fused import runs_fused
from adaponder.ops.vocab_expectation import torch as reference
from adaponder.ops.vocab_expectation.torch import plain_vocab_expectation

__all__ = ["plain_vocab_expectation", "vocab_expectation"]


def vocab_expectation(
    hidden: Tensor,
    weight: Tensor,
    table: Tensor,
    *,
    bias: Tensor | None = None,
    top_k: int | None = None,
    chunk: int | None = None,
    keep_logits: bool = False,
) -> Tensor:
    """The torch version, or its Triton kernels where they run."""
    if top_k is None and runs_fused(hidden):
        from adaponder.ops.vocab_expectation.triton import vocab_expectation as fused

        return fused(hidden, weight, table, bias=bias, chunk=chunk, keep_logits=keep_logits)
    return reference.vocab_expectation(
        hidden, weight, table, bias=bias, top_k=top_k, chunk=chunk, keep_logits=keep_logits
    )
