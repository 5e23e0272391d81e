"""Which tokens one forward reads, and where each stands: padding, packing and cached past made explicit once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adaponder.errors import CacheError, InputError
from adaponder.execution.ledger import Ledger


@dataclass(frozen=True)
class Tokens:
    """The tokens of one forward as a grid ``[batch, time]``.

    Attributes:
        real: false for padding.
        position: position id handed to the backbone.
        slot: index of the token in its sequence, padding and cached tokens counted: the order of causality.
        order: index among the real tokens of its sequence: what a sliding window counts.
        document: documents packed into one sequence do not see each other; ``None`` if each sequence is one document.
        plain: whether there is no padding, no packed document and no past: an ordinary causal pass.
        past: slots that a cache holds already.
        per_token: slots that a token takes.
    """

    real: Tensor
    position: Tensor
    slot: Tensor
    order: Tensor
    document: Tensor | None = None
    plain: bool = False
    past: int = 0
    per_token: int = 1

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
            per_token=self.per_token * times,
        )


def check_inputs(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, *, vocabulary: int, hidden_size: int
) -> Tensor:
    """A ``[batch, time]`` tensor of what a forward reads, ids or (their values do not matter) embeddings.

    Values of ids are looked at on the CPU alone: on a GPU the host would wait for them in every forward, so there
    ``generate`` looks once, and otherwise the embedding's own check stops the process.
    """
    if input_ids is not None and inputs_embeds is not None:
        raise InputError("input_ids and inputs_embeds: give one")
    if inputs_embeds is not None:
        if inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != hidden_size or not inputs_embeds.is_floating_point():
            raise InputError(
                f"inputs_embeds is {inputs_embeds.dtype} of shape {tuple(inputs_embeds.shape)}: floating "
                f"[batch, time, {hidden_size}] is needed"
            )
        grid, name = inputs_embeds.detach()[..., 0], "inputs_embeds"
    else:
        if input_ids is None or input_ids.ndim != 2:
            raise InputError("input_ids: a [batch, time] tensor of token ids is needed")
        check_ids("input_ids", input_ids, vocabulary)
        grid, name = input_ids, "input_ids"
    if grid.shape[0] == 0:
        raise InputError(f"{name}: the batch is empty; give at least one sequence")
    if grid.shape[1] == 0:
        raise InputError(f"{name}: there is no token to read")
    return grid


def check_ids(name: str, ids: Tensor, vocabulary: int, *, wait: bool = False) -> None:
    """Raises unless these are token ids of a vocabulary of that size; -100 is one where ``name`` is not input_ids.

    On a GPU their values are looked at only if the host may ``wait`` for them.
    """
    require_whole(name, ids)
    if not (_here(ids) or (wait and not torch.compiler.is_compiling())) or not ids.numel():
        return
    counted = ids if name == "input_ids" else ids.masked_fill(ids == -100, 0)
    lowest, highest = (int(value) for value in counted.aminmax())
    if lowest < 0 or highest >= vocabulary:
        wrong = lowest if lowest < 0 else highest
        cure = "" if name == "input_ids" else "; -100 marks what does not count"
        raise InputError(f"{name} holds {wrong}, which is no id of a vocabulary of {vocabulary}{cure}")


def require_whole(name: str, values: Tensor) -> None:
    if values.dtype not in (torch.int64, torch.int32):
        raise InputError(f"{name} is {values.dtype}: whole numbers are needed (torch.long)")


def _here(values: Tensor) -> bool:
    """Whether values can be looked at without making anybody wait or breaking a compiler's graph."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling()


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
                "send one document per sequence, or all without a cache"
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
    if _here(mask) and not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError("attention_mask: 1 for tokens and 0 for padding are needed (packed documents: document_ids)")
    mask = mask.to(ids.device).bool()
    if past and not torch.equal(mask[:, :past], cached):
        raise CacheError("attention_mask hides or shows other cached tokens than the cache was filled with")
    return mask[:, past:], cached.sum(1)


def _as_grid(value: Tensor, ids: Tensor, name: str) -> Tensor:
    require_whole(name, value)
    if value.ndim != 2 or value.shape[1] != ids.shape[1] or value.shape[0] not in (1, ids.shape[0]):
        raise InputError(f"{name} has shape {tuple(value.shape)}, input_ids {tuple(ids.shape)}: they must agree")
    return value.to(ids.device).expand(ids.shape)


def _restarts(position: Tensor) -> Tensor | None:
    """Document numbers of sequences whose positions restart; ``None`` if none does."""
    breaks = position.diff(dim=1, prepend=position[:, :1] - 1) != 1
    return breaks.cumsum(1) if bool(breaks.any()) else None


def _first_of_document(order: Tensor, real: Tensor, document: Tensor) -> Tensor:
    """The order of the first real token of each token's document."""
    new = torch.ones_like(document, dtype=torch.bool)
    new[:, 1:] = document[:, 1:] != document[:, :-1]
    # Padding has the order of the real token before it, so the next real one's is one more.
    return torch.where(new, order + ~real, 0).cummax(dim=1).values
