"""The loss of each token without the logits of all."""

from adaponder.ops.linear_cross_entropy.torch import linear_cross_entropy, plain_linear_cross_entropy

__all__ = ["linear_cross_entropy", "plain_linear_cross_entropy"]
