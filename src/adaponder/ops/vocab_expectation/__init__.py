"""Computes the expected next embedding ``y = softmax(h W^T + b) E``, which is attention over the vocabulary.

Computes a chunk of tokens at a time, so that the logits of all tokens never exist at once. With ``z = h W^T + b``,
``p = softmax(z)`` and ``g = dL/dy``: ``dE = p^T g``, ``dp = g E^T``, ``dz = p (dp - <p, dp>)``, ``dh = dz W``, ``dW =
dz^T h``. Replacing ``<p, dp>`` by the equal ``<y, g>`` would save a reduction, but ``y`` is rounded, so that
``dp - <y, g>`` would not cancel for a nearly certain token.

Backward recomputes the logits. ``keep_logits`` stores them instead, in ``2 n V`` bytes in bf16: six matrix products
rather than seven, equal results. With ``top_k``, ``p`` is the softmax of the k largest logits (torch version only).
Times and memory: ``benchmarks/records/ops-h200.json``.
"""

from adaponder.ops.dispatch import dispatch, runs_fused
from adaponder.ops.vocab_expectation import torch as plain
from adaponder.ops.vocab_expectation.torch import plain_vocab_expectation

__all__ = ["plain_vocab_expectation", "vocab_expectation"]

vocab_expectation = dispatch(
    plain.vocab_expectation, when=lambda hidden, *rest, top_k=None, **options: top_k is None and runs_fused(hidden)
)
