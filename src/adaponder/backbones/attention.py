"""Our attention function for decoders: equals ``sdpa``, and also takes packed rows.

Hugging Face looks it up by name (``attn_implementation="adaponder"``). Three things are different. A pass over
scattered rows, packed into one lane, attends to the keys of every sequence (:class:`Lane`). A plain causal pass is
given no mask while compiling either: with one, attention does twice the work. And compiled queries are laid out token
by token, so that the result is too, and need not be copied to be multiplied on.
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
    """Rows packed into one lane, and the window of each layer; handed to the decoder as the keyword ``lane``.

    ``windows`` has one entry per layer (after :meth:`of_layer`, that layer's alone). Each layer that receives the lane
    appends to ``arrived``: a decoder that does not pass it on would attend to other tokens, so the pass counts them.
    """

    rows: PackedRows
    windows: list[int | None]
    arrived: list[bool]

    def of_layer(self, layer: int) -> Lane:
        """The lane as one layer is handed it, in which nothing says which layer that is (see compiling.py)."""
        return Lane(self.rows, [self.windows[layer]], [])

    def mix(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, **options: Any) -> Tensor:
        return compact_attention(query, key, value, self.rows, window=window, **options)


class LedgerLane(NamedTuple):
    """Like :class:`Lane`, for rows that read keys and values through a ledger's index: those of an inference engine."""

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
    """What a decoder's attention module calls: the ``lane``'s attention where its pass has one, else ``sdpa``."""
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
        # Under autocast rotary angles have widened the queries; attention would narrow them anyway.
        query = query.to(value.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """No mask where the pass is plain and causal, ``sdpa``'s elsewhere."""
    whole = q_length == kv_length and (local_size is None or kv_length < local_size)
    if attention_mask is None and allow_is_causal_skip and whole:
        return None
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        **kwargs,
    )


def refuse_attention(implementation: Any) -> None:
    """Raises on an attention that cannot be exact here: a pass over reused rows needs a mask that any row may have."""
    names = implementation.values() if isinstance(implementation, dict) else [implementation]
    for name in names:
        if name not in (None, "eager", "sdpa", NAME):
            raise InputError(
                f"attn_implementation={name!r}: it takes no mask of scattered rows, which halting needs; use 'sdpa', "
                "which runs flash kernels wherever no mask is needed"
            )


def use(stock: PreTrainedModel) -> bool:
    """Gives a decoder that attends by ``sdpa`` this attention; any other keeps its own. True if it has this one now."""
    if stock.config._attn_implementation == "sdpa" and stock._can_set_attn_implementation():
        stock.set_attn_implementation(NAME)
    return stock.config._attn_implementation == NAME


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask)
