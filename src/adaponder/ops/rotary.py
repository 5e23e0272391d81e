"""Computes rotary position embeddings in compiled passes as two products over whole heads.

Hugging Face rotates a head by slicing, negating and concatenating its halves, and Inductor makes each slice a branch
that every element evaluates, several times in backward (``benchmarks/records/tuning-h200.json``, runs 5 and 6).
``x * cos + partner(x) * sin``, where ``partner`` swaps the halves, gives the same numbers; elements that are not
rotated get cosine 1 and sine 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import pad
from transformers import PreTrainedModel

NAME = "apply_rotary_pos_emb"
Rotary = Callable[..., tuple[Tensor, Tensor]]


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys ``[batch, heads, time, size]``, bit for bit as Hugging Face does.

    ``cos`` and ``sin`` are ``[batch, time, width]``: the first ``width`` elements (a divisor of ``size``) are rotated.
    """
    size, width = query.shape[-1], cos.shape[-1]
    half = width // 2
    cos, sin = cos[:, None], sin[:, None]
    sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
    if size > width:
        cos, sin = pad(cos, (0, size - width), value=1.0), pad(sin, (0, size - width))

    def rotated(x: Tensor) -> Tensor:
        partner = x.unflatten(-1, (size // width, 2, half)).flip(-2).flatten(-3)
        return x * cos + partner * sin

    return rotated(query), rotated(key)


def use(stock: PreTrainedModel) -> None:
    """Makes a decoder's rotary function call :func:`rotary` while compiling, if both agree bit for bit."""
    family: Any = sys.modules[type(stock.base_model).__module__]
    original = getattr(family, NAME, None)
    if original is None or hasattr(original, "parts"):
        return
    # The ratios size / width for which both functions give equal results.
    parts = {count for count in (1, 2, 4) if _same(original, count)}

    @wraps(original)
    def either(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any):
        sizes = {cos.shape[-1] * count for count in parts}
        known = not (args or kwargs) and cos.ndim == 3 and query.shape[-1] in sizes
        return (rotary if is_compiling() and known else original)(query, key, cos, sin, *args, **kwargs)

    if parts:
        either.parts = parts  # type: ignore[attr-defined]
        setattr(family, NAME, either)


def _same(original: Rotary, parts: int) -> bool:
    """Returns whether ``original`` equals :func:`rotary` on random heads of size ``parts`` times the rotary width."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    inputs = (draw(2, 3, 5, 4 * parts), draw(2, 3, 5, 4 * parts), draw(2, 5, 4), draw(2, 5, 4))
    try:
        return all(map(torch.equal, original(*inputs), rotary(*inputs)))
    except (RuntimeError, TypeError, ValueError):
        return False  # another signature, or it rotates whole heads only
