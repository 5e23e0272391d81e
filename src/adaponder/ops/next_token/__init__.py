"""The next token of each row, drawn or the likeliest, after truncation."""

import os

from torch import Tensor

from adaponder.ops.fused import HAS_TRITON
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
    if _has_kernels(logits):
        from adaponder.ops.next_token import triton

        return triton.pick(logits, lanes, position, temperature, key, sampled=sampled, least=least)
    return plain.pick(logits, lanes, position, temperature, key, sampled=sampled, least=least)


def least_kept(logits: Tensor, lanes: Tensor, numbers: Tensor, top_k: Tensor) -> Tensor:
    """Equals :func:`adaponder.ops.next_token.torch.least_kept`, by kernels where there are some."""
    if _has_kernels(logits):
        from adaponder.ops.next_token import triton

        return triton.least_kept(logits, lanes, numbers, top_k)
    return plain.least_kept(logits, lanes, numbers, top_k)


def _has_kernels(logits: Tensor) -> bool:
    """Whether tokens are chosen by Triton kernels: on CUDA, unless ``ADAPONDER_KERNELS=0`` says otherwise."""
    return logits.is_cuda and HAS_TRITON and os.environ.get("ADAPONDER_KERNELS") != "0"
