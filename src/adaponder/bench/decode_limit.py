"""Bytes that must move between memory and the device for a token: what bounds decoding when nothing else does.

A tick reads every weight of the body once, however many rows it holds. The head is read in each tick whose rows mix the
vocabulary, or end a token; the embedding table in each tick with a row that reads on, if the method mixes its rows; the
gate of each iteration that a row stands at. Each row reads the keys and values of the tokens before it, and writes its
own. Activations, the index and the tokens themselves are left out: thousandths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from adaponder.backbones.shape import Shape
from adaponder.bench.decode_depths import mean_depth
from adaponder.config import AdaPonderConfig
from adaponder.methods import method_class


class TickBytes(NamedTuple):
    """Bytes of an average tick, by what they are of."""

    body: float
    head: float
    table: float
    gates: float
    rows: float

    @property
    def total(self) -> float:
        return sum(self)


def tick_bytes(
    config: AdaPonderConfig,
    shape: Shape,
    shares: Sequence[float],
    *,
    lanes: float,
    context: float,
    dtype: torch.dtype,
) -> TickBytes:
    """Bytes of a tick over one row of each of ``lanes`` sequences that have ``context`` tokens each.

    ``shares[d - 1]`` is the share of tokens of depth d.
    """
    method, width = method_class(config.method), dtype.itemsize
    slots = method.slots_per_token(config.iterations)
    reach = [sum(shares[i:]) for i in range(len(shares))]  # the share of tokens that iteration i reads
    depth = sum(reach)
    table = shape.vocabulary * shape.hidden * width
    goes_on = _any((depth - 1) / depth, lanes)
    asked = method.gates_asked(config.iterations)
    gates = sum(_any(share / depth, lanes) for share in reach[:asked])
    tied = bool(getattr(config.backbone_config, "tie_word_embeddings", False))
    # A window hides what is further away.
    seen = sum(min(context, window or context) for window in shape.windows) / shape.layers
    return TickBytes(
        body=shape.body * width,
        head=table * (1.0 if method.mixes_vocabulary else _any(1 / depth, lanes)),
        table=table * goes_on if method.mixes_vocabulary and not tied else 0.0,
        gates=gates * method.gate_flops(config) / 2 * width,
        rows=lanes * slots * (seen + 1) * shape.kv * width,
    )


def limit(
    config: AdaPonderConfig,
    shape: Shape,
    shares: Sequence[float],
    *,
    lanes: float,
    context: float,
    dtype: torch.dtype,
    copy_rate: float,
) -> float:
    """Tokens per second if bytes moved at the rate of a large copy and nothing else took time."""
    depth = 1.0 if method_class(config.method).slots_per_token(config.iterations) > 1 else mean_depth(shares)
    moved = tick_bytes(config, shape, shares, lanes=lanes, context=context, dtype=dtype).total
    return copy_rate * lanes / depth / moved


def _any(share: float, lanes: float) -> float:
    """Probability that one of ``lanes`` rows is among a share of them."""
    return 1 - (1 - min(1.0, share)) ** lanes
