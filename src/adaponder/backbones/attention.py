"""Defines our attention function for decoders: equals ``sdpa``, and also takes packed rows (:class:`Lane`).

Hugging Face looks it up by name (``attn_implementation="adaponder"``). While compiling, a plain causal pass has no mask
either, with which attention would do twice the work, and queries are laid out token by token, so that the next matrix
product needs no copy of the result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from adaponder.errors import InputError
from adaponder.ops.compact_attention import PackedRows, compact_attention
from adaponder.ops.ledger_attention import LedgerRows, ledger_attention

NAME = "adaponder"


class Lane(NamedTuple):
    """Rows packed into one lane, and the window of each layer; passed to the decoder as the keyword ``lane``.

    ``windows`` has one entry per layer (after :meth:`of_layer`, only that layer's). Each layer that receives the lane
    appends to ``arrived``: a decoder that drops the keyword would attend to wrong tokens, so the pass counts them.
    """

    rows: PackedRows
    windows: list[int | None]
    arrived: list[bool]

    def of_layer(self, layer: int) -> Lane:
        """Returns the lane for one layer, without its number, so that one graph fits all layers (see compiling.py)."""
        return Lane(self.rows, [self.windows[layer]], [])

    def take(self, layer: int, lane: Lane) -> None:
        """Adds the layer that has arrived in its own lane."""
        self.arrived.extend(lane.arrived)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, **options: Any) -> Tensor:
        return compact_attention(query, key, value, self.rows, window=window, **options)


class LedgerLane(NamedTuple):
    """A :class:`Lane` whose rows read keys and values through a ledger's index: that of the engine."""

    rows: LedgerRows
    windows: list[int | None]
    arrived: list[bool]

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, *, scale: float | None, dropout: float
    ) -> Tensor:
        return ledger_attention(query, key, value, self.rows, window=window, scale=scale)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    lane: Lane | LedgerLane | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes attention for a decoder's module: the ``lane``'s where the pass has one, else ``sdpa``."""
    if lane is not None:
        lane.arrived.append(True)
        mixed = lane.mix(
            query[0].transpose(0, 1).to(value.dtype),
            key,
            value,
            lane.windows[module.layer_idx if len(lane.windows) > 1 else 0],
            scale=kwargs.get("scaling"),
            dropout=kwargs.get("dropout", 0.0),
        )
        return mixed[None], None
    if torch.compiler.is_compiling():
        # Under autocast rotary angles have widened the queries; attention narrows them anyway.
        query = query.to(value.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def mask(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor | None:
    """Returns no mask where the pass is plain and causal, else ``sdpa``'s."""
    window = kwargs.get("local_size")
    whole = q_length == kv_length and (window is None or kv_length < window)
    if kwargs.get("attention_mask") is None and kwargs.get("allow_is_causal_skip", True) and whole:
        return None
    return sdpa_mask(batch_size, q_length, kv_length, **kwargs)


def refuse_attention(implementation: Any) -> None:
    """Raises on an attention that cannot be exact here: a pass over reused rows needs an arbitrary mask."""
    names = implementation.values() if isinstance(implementation, dict) else [implementation]
    for name in names:
        if name not in (None, "eager", "sdpa", NAME):
            raise InputError(
                f"attn_implementation={name!r} takes no mask of scattered rows, which halting needs; use 'sdpa', "
                "which runs flash kernels wherever no mask is needed"
            )


def use(stock: PreTrainedModel) -> bool:
    """Sets this attention on a decoder that uses ``sdpa``; returns whether it has this attention now."""
    if stock.config._attn_implementation == "sdpa" and stock._can_set_attn_implementation():
        stock.set_attn_implementation(NAME)
    return stock.config._attn_implementation == NAME


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask)
