"""Picks the next token of each row by sampling or argmax, after truncation (top-k, top-p, min-p)."""

from adaponder.ops.dispatch import dispatch, has_kernels
from adaponder.ops.next_token import torch as plain
from adaponder.ops.next_token.torch import Picked, stream_key

__all__ = ["Picked", "least_kept", "pick", "stream_key"]

pick = dispatch(plain.pick, when=has_kernels)
least_kept = dispatch(plain.least_kept, when=has_kernels)
