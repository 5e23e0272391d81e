"""Computes rotary positions in compiled passes as two products over whole heads.

Hugging Face turns halves of a head by slicing, negating and concatenating, and a compiler makes of each piece a
branch that every element walks through, backward several times over. The same numbers are ``x * cos + partner(x) *
sin`` where ``partner`` exchanges neighbouring halves: with cosines of 1 and sines of 0 where a head does not turn,
nothing is cut. A 410M step with two layers takes 97.2 instead of 99.5 ms of GPU time
(``benchmarks/records/tuning-h200.json``, runs 5 and 6).
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
    """Equals Hugging Face's function: ``[batch, heads, time, size]`` turned by ``[batch, time, width]``, bit for bit.

    The width is all of a head or an even part of it.
    """
    size, width = query.shape[-1], cos.shape[-1]
    half = width // 2
    cos, sin = cos[:, None], sin[:, None]
    sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
    if size > width:
        cos, sin = pad(cos, (0, size - width), value=1.0), pad(sin, (0, size - width))

    def turned(x: Tensor) -> Tensor:
        partner = x.unflatten(-1, (size // width, 2, half)).flip(-2).flatten(-3)
        return x * cos + partner * sin

    return turned(query), turned(key)


def use(stock: PreTrainedModel) -> None:
    """Lets this family's decoders turn so while they are compiled, if their own function is found to be the same."""
    family: Any = sys.modules[type(stock.base_model).__module__]
    own = getattr(family, NAME, None)
    if own is None or hasattr(own, "parts"):
        return
    # Numbers of equal parts that a head may be split into, of which rotary embedding turns the first.
    parts = {count for count in (1, 2, 4) if _same(own, count)}

    @wraps(own)
    def either(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *others: Any, **more: Any):
        known = not (others or more) and cos.ndim == 3 and query.shape[-1] in {cos.shape[-1] * count for count in parts}
        return (rotary if is_compiling() and known else own)(query, key, cos, sin, *others, **more)

    if parts:
        either.parts = parts  # type: ignore[attr-defined]
        setattr(family, NAME, either)


def _same(own: Rotary, parts: int) -> bool:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    given = (draw(2, 3, 5, 4 * parts), draw(2, 3, 5, 4 * parts), draw(2, 5, 4), draw(2, 5, 4))
    try:
        return all(map(torch.equal, own(*given), rotary(*given)))
    except (RuntimeError, TypeError, ValueError):
        return False  # another signature, or it turns whole heads only
