"""Computes the loss of each token, or their weighted sum, without the logits of all tokens.

``loss[t] = logsumexp(z[t]) - z[t, target[t]]`` with ``z = h W^T + b``, a chunk of tokens at a time: at a vocabulary
of 50,304 the logits of 65,536 tokens would be 6.6 GB in bf16, and their float32 copy and its gradient 13 GB each.

The per-token loss recomputes a chunk's logits in backward, where ``g[t] = dL / d loss[t]`` is known. For the weighted
sum ``S = sum_t a[t] loss[t]`` every gradient is proportional to the scalar ``dL / dS``, so forward computes gradients
from each chunk's logits and backward multiplies them by it: three products instead of four. A factor common to all
tokens, such as ``1 / N``, belongs after the sum, not in ``a``, because ``(p - 1) / N`` would vanish in fp16. Sums over
chunks are in float32.

H200, bf16, forward and backward of 65,536 tokens of d = 512: the sum takes 21.3 ms in 2.4 GiB, plain 55.8 ms in 37
GiB (``benchmarks/records/ops-h200.json``).
"""

from adaponder.ops.dispatch import dispatch, runs_fused
from adaponder.ops.linear_cross_entropy import torch as plain
from adaponder.ops.linear_cross_entropy.torch import plain_linear_cross_entropy

__all__ = ["linear_cross_entropy", "linear_cross_entropy_sum", "plain_linear_cross_entropy"]

_KERNELS = "adaponder.ops.linear_cross_entropy.triton"
linear_cross_entropy = dispatch(plain.linear_cross_entropy, _KERNELS, when=runs_fused)
linear_cross_entropy_sum = dispatch(plain.linear_cross_entropy_sum, _KERNELS, when=runs_fused)
