"""Defines an attention function for decoders that equals ``sdpa`` and also takes packed rows (:class:`Lane`).

Hugging Face looks the function up by name (``attn_implementation="adaponder"``). A plain causal pass gets no mask even
while compiling, because a mask would double the work of attention. When compiling, queries are copied to a token-major
layout, so that the next matrix product need not copy attention's output.
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
    """Describes packed rows of several sequences to :func:`attend`, which receives this object as keyword ``lane``.

    Attributes:
        rows: the rows; either they are one batch entry, or all tokens of a batch ``[sequences, slots]`` in order.
        windows: the sliding window of each layer, ``None`` for no limit; of one layer after :meth:`of_layer`.
        arrived: one entry for each layer that has received the lane. A pass raises if some layer has not, because a
            decoder that does not pass keywords on to its attention would compute wrong results.
    """

    rows: PackedRows
    windows: list[int | None]
    arrived: list[bool]

    def of_layer(self, layer: int) -> Lane:
        """Returns a copy with only this layer's window, without its index, so that layers share a compiled graph."""
        return Lane(self.rows, [self.windows[layer]], [])

    def take(self, layer: int, lane: Lane) -> None:
        """Adds the ``arrived`` entries of ``lane``, a copy that :meth:`of_layer` made for one layer."""
        self.arrived.extend(lane.arrived)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, **options: Any) -> Tensor:
        return compact_attention(query, key, value, self.rows, window=window, **options)


class LedgerLane(NamedTuple):
    """The engine's counterpart of :class:`Lane`: each row attends to the KV-pool rows listed in ``rows.index``."""

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
    """Computes attention for a decoder's attention module: over the rows of ``lane`` if given, else by ``sdpa``."""
    if lane is not None:
        lane.arrived.append(True)
        mixed = lane.mix(
            query.transpose(1, 2).flatten(0, 1).to(value.dtype),
            key,
            value,
            lane.windows[module.layer_idx if len(lane.windows) > 1 else 0],
            scale=kwargs.get("scaling"),
            dropout=kwargs.get("dropout", 0.0),
        )
        return mixed.unflatten(0, (query.shape[0], -1)), None
    if torch.compiler.is_compiling():
        # Under autocast, rotary embedding widens queries to float32; attention would narrow them anyway.
        query = query.to(value.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def mask(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor | None:
    """Returns ``None`` for a plain causal pass without padding or cache, else the mask of ``sdpa``."""
    window = kwargs.get("local_size")
    plain = q_length == kv_length and (window is None or kv_length < window)
    if kwargs.get("attention_mask") is None and kwargs.get("allow_is_causal_skip", True) and plain:
        return None
    return sdpa_mask(batch_size, q_length, kv_length, **kwargs)


def refuse_attention(implementation: Any) -> None:
    """Raises unless the attention implementation takes arbitrary masks, which passes over reused rows need."""
    names = implementation.values() if isinstance(implementation, dict) else [implementation]
    for name in names:
        if name not in (None, "eager", "sdpa", NAME):
            raise InputError(
                f"attn_implementation={name!r} takes no mask of scattered rows, which halting needs; use 'sdpa', "
                "which runs flash kernels wherever no mask is needed"
            )


def use(stock: PreTrainedModel) -> bool:
    """Switches a decoder from ``sdpa`` to this attention if possible; returns whether the decoder now uses it."""
    if stock.config._attn_implementation == "sdpa" and stock._can_set_attn_implementation():
        stock.set_attn_implementation(NAME)
    return stock.config._attn_implementation == NAME


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask)
