"""The next token of each row, drawn or the likeliest, after truncation."""

from torch import Tensor

from adaponder.ops.fused import has_kernels
from adaponder.ops.next_token import torch as plain
from adaponder.ops.next_token.torch import Picked, stream_key

__all__ = ["Picked", "least_kept", "pick", "stream_key"]


def pick(
    logits: Tensor,
    lanes: Tensor,
    position: Tensor,
    temperature: Tensor,
    key: Tensor,
    *,
    sampled: bool = True,
    least: Tensor | None = None,
) -> Picked:
    """Equals :func:`adaponder.ops.next_token.torch.pick`, by kernels where there are some."""
    if has_kernels(logits):
        from adaponder.ops.next_token import triton

        return triton.pick(logits, lanes, position, temperature, key, sampled=sampled, least=least)
    return plain.pick(logits, lanes, position, temperature, key, sampled=sampled, least=least)


def least_kept(logits: Tensor, lanes: Tensor, numbers: Tensor, top_k: Tensor) -> Tensor:
    """Equals :func:`adaponder.ops.next_token.torch.least_kept`, by kernels where there are some."""
    if has_kernels(logits):
        from adaponder.ops.next_token import triton

        return triton.least_kept(logits, lanes, numbers, top_k)
    return plain.least_kept(logits, lanes, numbers, top_k)
