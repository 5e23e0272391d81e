"""Computes the loss of each token, or their weighted sum, without the logits of all tokens.

``loss[t] = logsumexp(z[t]) - z[t, target[t]]`` with ``z = h W^T + b``, a chunk of tokens at a time.

The per-token loss recomputes a chunk's logits in backward, where ``g[t] = dL / d loss[t]`` is known. For the weighted
sum ``S = sum_t a[t] loss[t]`` every gradient is proportional to the scalar ``dL / dS``, so forward computes gradients
from each chunk's logits and backward multiplies them by it: three products instead of four. A factor common to all
tokens, such as ``1 / N``, belongs after the sum, not in ``a``, because ``(p - 1) / N`` would vanish in fp16. Sums over
chunks are in float32. Times and memory: ``benchmarks/records/ops-h200.json``.
"""

from adaponder.ops.dispatch import dispatch, runs_fused
from adaponder.ops.linear_cross_entropy import torch as plain
from adaponder.ops.linear_cross_entropy.torch import plain_linear_cross_entropy

__all__ = ["linear_cross_entropy", "linear_cross_entropy_sum", "plain_linear_cross_entropy"]

linear_cross_entropy = dispatch(plain.linear_cross_entropy, when=runs_fused)
linear_cross_entropy_sum = dispatch(plain.linear_cross_entropy_sum, when=runs_fused)
