"""What a forward returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.utils import ModelOutput

from adaponder.execution.ledger import Ledger


@dataclass
class AdaPonderOutput(ModelOutput):
    """What a forward returns; absent parts are ``None``.

    Attributes:
        loss: cross-entropy, plus the method's own terms in training or where an ``objective`` was given.
        logits: ``[batch, kept, vocabulary]``, after each token's last iteration.
        past_key_values: the ledger, where one was asked for.
        hidden_states: on request, final-normed hidden states ``[batch, time, hidden]`` after each pass, the last of
            which the head reads (Hugging Face's own models give one per layer).
        depth: ``[batch, time]``, how often each token was read; 0 for padding.
        gates: ``[batch, time, gates]`` probabilities: adaponder's ``s``, mor's router, ouro's exit ``lambda``.
        iteration_logits: ``[passes, batch, kept, vocabulary]``, on request (pause makes one pass).
        terms: the parts of the loss by name, before their weights, e.g. ``cross_entropy`` and ``ponder``.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Ledger | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    depth: Tensor | None = None
    gates: Tensor | None = None
    iteration_logits: Tensor | None = None
    terms: dict[str, Tensor] | None = None

    @property
    def last_hidden_state(self) -> Tensor:
        """Not here: TRL's trainers look for it, to compute a loss that would have no ponder term."""
        raise AttributeError(
            "last_hidden_state: AutoModel gives it; to train with TRL use adaponder.integrations.PonderSFTTrainer"
        )


@dataclass
class AdaPonderModelOutput(ModelOutput):
    """What ``AutoModel``'s forward returns; ``last_hidden_state`` is each token's last, as the head reads it."""

    last_hidden_state: Tensor | None = None
    past_key_values: Ledger | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    depth: Tensor | None = None
    gates: Tensor | None = None
