"""Which tokens one forward reads, and where each stands: padding, packing and cached past made explicit once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adaponder.errors import CacheError, InputError
from adaponder.ledger import Ledger


@dataclass(frozen=True)
class Tokens:
    """The tokens of one forward as a grid ``[batch, time]``.

    Attributes:
        real: false for padding.
        position: position id handed to the backbone.
        slot: index of the token in its sequence, padding and cached tokens counted: the order of causality.
        order: index among the real tokens of its sequence: what a sliding window counts.
        document: documents packed into one sequence do not see each other; ``None`` if each row is one document.
        plain: known without looking at the device to be unpadded, undivided and without a past.
        past: slots that a cache holds already.
    """

    real: Tensor
    position: Tensor
    slot: Tensor
    order: Tensor
    document: Tensor | None = None
    plain: bool = False
    past: int = 0

    @property
    def last_slot(self) -> int:
        """A bound on every position, known without asking the device."""
        return self.past + self.slot.shape[1] - 1

    @property
    def lengths(self) -> Tensor:
        return self.real.sum(1)

    def repeat(self, times: int) -> Tokens:
        """Each token followed by ``times - 1`` companions at its position (pause tokens)."""

        def spread(index: Tensor) -> Tensor:
            companion = torch.arange(times, device=index.device)
            return (index[..., None] * times + companion).flatten(1)

        return Tokens(
            real=self.real.repeat_interleave(times, 1),
            position=self.position.repeat_interleave(times, 1),
            slot=spread(self.slot),
            order=spread(self.order),
            document=None if self.document is None else self.document.repeat_interleave(times, 1),
            plain=self.plain,
            past=self.past * times,
        )


def arrange_tokens(
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    ledger: Ledger | None = None,
) -> Tokens:
    """The grid of a forward, from what Hugging Face callers pass.

    Positions are derived from the mask when absent, so left padding changes nothing. Packed documents come as
    ``document_ids``, or as ``position_ids`` that restart (no mask, no cache), as in Hugging Face; a cache would
    silently switch the latter off there, so here both become an explicit mask.
    """
    batch, time = input_ids.shape
    past = 0 if ledger is None else ledger.get_seq_length()
    real, before = _real(input_ids, attention_mask, ledger, past)
    order = real.cumsum(1) - 1 + before[:, None]
    slot = (past + torch.arange(time, device=input_ids.device)).expand(batch, -1)
    if document_ids is None and position_ids is not None and attention_mask is None and not past:
        document_ids = _restarts(_as_grid(position_ids, input_ids, "position_ids"))
    if document_ids is not None:
        if ledger is not None:
            raise InputError(
                "document_ids (or position_ids that restart): a cache does not keep packed documents apart; "
                "send them one per row, or without a cache"
            )
        document_ids = _as_grid(document_ids, input_ids, "document_ids")
    if position_ids is not None:
        position = _as_grid(position_ids, input_ids, "position_ids")
    elif document_ids is not None:
        position = order - _first_of_document(order, document_ids)
    else:
        position = order
    return Tokens(
        real=real,
        position=position.clamp_min(0),
        slot=slot,
        order=order,
        document=document_ids,
        past=past,
        plain=not past and document_ids is None and (attention_mask is None or bool(real.all())),
    )


def _real(ids: Tensor, mask: Tensor | None, ledger: Ledger | None, past: int) -> tuple[Tensor, Tensor]:
    """(which tokens are not padding, how many real tokens of each sequence the cache holds)."""
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
            f"attention_mask has shape {tuple(mask.shape)}: "
            f"[batch, cached + new tokens] = {(batch, past + time)} is needed"
        )
    mask = mask.to(ids.device).bool()
    if past and not torch.equal(mask[:, :past], cached):
        raise CacheError("attention_mask hides or shows other cached tokens than the cache was filled with")
    return mask[:, past:], cached.sum(1)


def _as_grid(value: Tensor, ids: Tensor, name: str) -> Tensor:
    if value.ndim != 2 or value.shape[1] != ids.shape[1] or value.shape[0] not in (1, ids.shape[0]):
        raise InputError(f"{name} has shape {tuple(value.shape)}, input_ids {tuple(ids.shape)}: they must agree")
    return value.to(ids.device).expand(ids.shape)


def _restarts(position: Tensor) -> Tensor | None:
    """Document numbers of rows whose positions restart; ``None`` if none does."""
    breaks = position.diff(dim=1, prepend=position[:, :1] - 1) != 1
    return breaks.cumsum(1) if bool(breaks.any()) else None


def _first_of_document(order: Tensor, document: Tensor) -> Tensor:
    new = torch.ones_like(document, dtype=torch.bool)
    new[:, 1:] = document[:, 1:] != document[:, :-1]
    return torch.where(new, order, 0).cummax(dim=1).values
