"""Checks the inputs of a forward and computes the slots, positions and documents of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_exporting

from adaponder.errors import CacheError, InputError
from adaponder.execution.ledger import Ledger
from adaponder.ops.masks import spans_of


@dataclass(frozen=True)
class Tokens:
    """The tokens of one forward as a grid ``[batch, time]``.

    Attributes:
        real: false for padding.
        position: position id for the backbone.
        slot: index of the token in its sequence, padding and cached tokens included; causal masks compare slots.
        order: index among the real tokens of its sequence; sliding windows compare it.
        document: document ids; attention stays within a document. ``None``: each sequence is one document.
        unpadded: true if it is known that no token is padding; false if some are, or if that was not checked.
        past: number of slots in the cache.
        per_token: number of slots of a token (more than one for pause).
    """

    real: Tensor
    position: Tensor
    slot: Tensor
    order: Tensor
    document: Tensor | None = None
    unpadded: bool = False
    past: int = 0
    per_token: int = 1

    @property
    def plain(self) -> bool:
        """Whether there is no padding, no packed document and no cached token: an ordinary causal pass."""
        return self.unpadded and self.document is None and not self.past

    @cached_property
    def spans(self) -> Tensor | None:
        """The documents of the slots (:func:`adaponder.ops.masks.spans_of`), or ``None`` if there are none."""
        return None if self.document is None else spans_of(self.document)

    @property
    def last_slot(self) -> int:
        """The index of the last slot: no position exceeds it unless ``position_ids`` were given. Never synchronises."""
        return self.past + self.slot.shape[1] - 1

    def repeat(self, times: int) -> Tokens:
        """Returns the tokens, each followed by ``times - 1`` pause tokens at the same position."""

        def spread(index: Tensor) -> Tensor:
            offset = torch.arange(times, device=index.device)
            return (index[..., None] * times + offset).flatten(1)

        return Tokens(
            real=self.real.repeat_interleave(times, 1),
            position=self.position.repeat_interleave(times, 1),
            slot=spread(self.slot),
            order=spread(self.order),
            document=None if self.document is None else self.document.repeat_interleave(times, 1),
            unpadded=self.unpadded,
            past=self.past * times,
            per_token=self.per_token * times,
        )


def require_tensors(**values: Any) -> None:
    """Raises unless each of these arguments is a tensor or ``None``."""
    for name, value in values.items():
        if value is not None and not isinstance(value, Tensor):
            raise InputError(f"{name} is a {type(value).__name__}, it must be a tensor")


def check_inputs(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, *, vocabulary: int, hidden_size: int
) -> Tensor:
    """Checks the ids or embeddings of a forward; returns the ids, or a placeholder ``[batch, time]`` for embeddings.

    The values of ids are checked only on the CPU, because on a GPU that would synchronise in every forward.
    """
    if input_ids is not None and inputs_embeds is not None:
        raise InputError("input_ids and inputs_embeds: give only one of them")
    if inputs_embeds is not None:
        if inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != hidden_size or not inputs_embeds.is_floating_point():
            raise InputError(
                f"inputs_embeds is {inputs_embeds.dtype} of shape {tuple(inputs_embeds.shape)}, it must be floating "
                f"[batch, time, {hidden_size}]"
            )
        grid, name = inputs_embeds.detach()[..., 0], "inputs_embeds"
    else:
        if input_ids is None or input_ids.ndim != 2:
            raise InputError("input_ids must be a [batch, time] tensor of token ids")
        check_ids("input_ids", input_ids, vocabulary)
        grid, name = input_ids, "input_ids"
    if 0 in grid.shape:
        raise InputError(f"{name} is empty: give at least one sequence of at least one token")
    return grid


def check_ids(name: str, ids: Tensor, vocabulary: int, *, wait: bool = False) -> None:
    """Raises unless ``ids`` are token ids below ``vocabulary``; -100 is allowed unless ``name`` is ``input_ids``.

    On a GPU, values are checked only if ``wait`` is set, because that synchronises the device.
    """
    require_whole(name, ids)
    if not (_is_readable(ids) or (wait and not torch.compiler.is_compiling())) or not ids.numel():
        return
    counted = ids if name == "input_ids" else ids.masked_fill(ids == -100, 0)
    lowest, highest = (int(value) for value in counted.aminmax())
    if lowest < 0 or highest >= vocabulary:
        wrong = lowest if lowest < 0 else highest
        cure = "" if name == "input_ids" else "; -100 marks tokens that do not count"
        raise InputError(f"{name} contains {wrong}, the vocabulary has {vocabulary} tokens{cure}")


def require_whole(name: str, values: Tensor) -> None:
    if values.dtype not in (torch.int64, torch.int32):
        raise InputError(f"{name} is {values.dtype}, it must hold whole numbers (torch.long)")


def _is_readable(values: Tensor) -> bool:
    """Returns whether reading values needs neither a device synchronisation nor a graph break."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling()


def arrange_tokens(
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    ledger: Ledger | None = None,
) -> Tokens:
    """Builds the :class:`Tokens` of a forward from its arguments.

    Without ``position_ids``, positions count the real tokens of each document, so left padding changes nothing. Packed
    documents are given as ``document_ids`` or, as in Hugging Face, as ``position_ids`` that restart (if there is no
    mask and no cached token). Raises for packed documents with a cache, which in Hugging Face silently attend to each
    other.
    """
    batch, time = input_ids.shape
    past = 0 if ledger is None else ledger.get_seq_length()
    real, num_cached = _real(input_ids, attention_mask, ledger, past)
    order = real.cumsum(1) - 1 + num_cached[:, None]
    slot = (past + torch.arange(time, device=input_ids.device)).expand(batch, -1)
    if document_ids is None and position_ids is not None and attention_mask is None and not past:
        document_ids = _restarts(_as_grid(position_ids, input_ids, "position_ids"))
    if document_ids is not None:
        if ledger is not None:
            raise InputError(
                "document_ids (or position_ids that restart): a cache does not separate packed documents; "
                "give one document per sequence, or all without a cache"
            )
        document_ids = _as_grid(document_ids, input_ids, "document_ids")
    if position_ids is not None:
        position = _as_grid(position_ids, input_ids, "position_ids")
    elif document_ids is not None:
        position = order - _first_of_document(order, real, document_ids)
    else:
        position = order
    return Tokens(
        real=real,
        position=position.clamp_min(0),
        slot=slot,
        order=order,
        document=document_ids,
        past=past,
        # An exported graph must not depend on the values of the mask.
        unpadded=attention_mask is None or (not past and not is_exporting() and bool(real.all())),
    )


def _real(ids: Tensor, mask: Tensor | None, ledger: Ledger | None, past: int) -> tuple[Tensor, Tensor]:
    """Returns (mask of the real new tokens ``[batch, time]``, number of real cached tokens ``[batch]``)."""
    batch, time = ids.shape
    cached = torch.zeros(batch, 0, dtype=torch.bool, device=ids.device)
    if ledger is not None and past:
        if ledger.batch_size != batch:
            raise CacheError(f"the cache holds {ledger.batch_size} sequences, input_ids has {batch}: they must agree")
        cached = ledger.depth > 0
    if mask is None:
        return torch.ones_like(ids, dtype=torch.bool), cached.sum(1)
    if mask.ndim != 2 or mask.shape != (batch, past + time):
        raise InputError(
            f"attention_mask has shape {tuple(mask.shape)}, "
            f"it must be [batch, cached + new tokens] = {(batch, past + time)}"
        )
    if _is_readable(mask) and not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError("attention_mask must be 1 for tokens and 0 for padding (packed documents: document_ids)")
    mask = mask.to(ids.device).bool()
    if past and not torch.equal(mask[:, :past], cached):
        raise CacheError("attention_mask must mask the same cached tokens as when the cache was filled")
    return mask[:, past:], cached.sum(1)


def _as_grid(value: Tensor, ids: Tensor, name: str) -> Tensor:
    require_whole(name, value)
    if value.ndim != 2 or value.shape[1] != ids.shape[1] or value.shape[0] not in (1, ids.shape[0]):
        raise InputError(f"{name} has shape {tuple(value.shape)}, input_ids {tuple(ids.shape)}: they must agree")
    return value.to(ids.device).expand(ids.shape)


def _restarts(position: Tensor) -> Tensor | None:
    """Returns document ids ``[batch, time]``: a new id where positions do not grow by 1; ``None`` if they always do."""
    breaks = position.diff(dim=1, prepend=position[:, :1] - 1) != 1
    return breaks.cumsum(1) if is_exporting() or bool(breaks.any()) else None


def _first_of_document(order: Tensor, real: Tensor, document: Tensor) -> Tensor:
    """Returns, for each token, the ``order`` of the first real token of its document."""
    new = torch.ones_like(document, dtype=torch.bool)
    new[:, 1:] = document[:, 1:] != document[:, :-1]
    # Padding has the order of the real token before it, so the order of the next real token is one more.
    return torch.where(new, order + ~real, 0).cummax(dim=1).values
