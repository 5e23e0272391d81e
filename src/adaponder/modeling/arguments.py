"""Defines the run-time settings and the outputs of a forward, and checks its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers.utils import ModelOutput

from adaponder.errors import InputError
from adaponder.execution.base import Iteration
from adaponder.execution.ledger import Ledger
from adaponder.execution.tokens import require_whole
from adaponder.policies import Policy, PolicyInput

PolicyLike = Policy | Callable[[PolicyInput], Tensor]

# Arguments that Hugging Face may pass to any model; only num_items_in_batch is used here.
_ACCEPTED = {"num_items_in_batch", "cache_position", "token_type_ids", "tokenizer"}
# Arguments of kernels for packed sequences; ``position_ids`` that restart carry the same information.
PACKING_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass(frozen=True)
class RunTime:
    """The settings that a caller can change in each forward. A field with its default value counts as unset."""

    policy: PolicyLike | None = None
    max_iterations: int | None = None
    seed: int | Tensor | None = None
    on_iteration: Callable[[Iteration], None] | None = None
    allow_mismatch: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.seed, Tensor):
            require_whole("seed", self.seed)
        elif not isinstance(self.seed, int | None):
            raise InputError(f"seed={self.seed!r} must be a whole number, or a tensor with one per sequence")

    def over(self, below: RunTime | None) -> RunTime:
        """Merges with ``below``, which supplies unset fields."""
        changes = {name: value for name, value in vars(self).items() if value is not None and value is not False}
        return self if below is None else replace(below, **changes)

    def check_batch(self, sequences: int) -> None:
        """Raises if ``seed`` is a tensor without exactly one seed per sequence."""
        if isinstance(self.seed, Tensor) and self.seed.shape != (sequences,):
            raise InputError(f"seed has shape {tuple(self.seed.shape)}, it must be [{sequences}]: one per sequence")


def refuse_unknown(kwargs: dict[str, Any]) -> None:
    """Raises if ``kwargs`` sets arguments that this model's ``forward`` does not take."""
    passed = {key for key, value in kwargs.items() if value is not None and value is not False}
    if "output_attentions" in passed:
        raise InputError("output_attentions: attention weights are not kept; hooks on backbone layers can see them")
    if packing := passed & {*PACKING_ARGUMENTS}:
        raise InputError(
            f"{', '.join(sorted(packing))}: forward has no such argument, position_ids that restart replace it; "
            "with TRL use adaponder.integrations.PonderSFTTrainer, which leaves it out"
        )
    if unknown := passed - _ACCEPTED:
        raise InputError(f"{', '.join(sorted(unknown))}: forward has no such argument")


def kept_positions(logits_to_keep: int | Tensor) -> slice | Tensor:
    """Turns ``logits_to_keep`` into an index of the time axis: a slice, or a tensor of indices."""
    if isinstance(logits_to_keep, Tensor):
        require_whole("logits_to_keep", logits_to_keep)
        return logits_to_keep
    if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
        raise InputError(f"logits_to_keep={logits_to_keep} must be 0 (all), a number of last positions, or indices")
    return slice(-logits_to_keep, None) if logits_to_keep else slice(None)


def check_room(prompt: int, new_tokens: int, positions: int) -> None:
    """Raises if ``new_tokens`` after the prompt need more positions than the backbone has."""
    room = positions - prompt + 1  # the last new token is returned without being read, so it needs no position
    if new_tokens > room:
        tokens = "1 token" if prompt == 1 else f"{prompt} tokens"
        raise InputError(f"max_new_tokens={new_tokens}: a prompt of {tokens} leaves room for {room}")


@dataclass
class AdaPonderOutput(ModelOutput):
    """The output of a forward; values that were not requested are ``None``.

    Attributes:
        loss: the loss of ``objective``, which by default is the method's loss in training, else cross-entropy.
        logits: ``[batch, kept, vocabulary]`` after each token's last iteration, at the positions ``logits_to_keep``.
        past_key_values: the ledger, if ``use_cache`` or a ledger was given.
        hidden_states: on request, final-normed hidden states ``[batch, time, hidden]`` after each pass, the last of
            which the head reads (Hugging Face's own models return one per layer).
        depth: ``[batch, time]``, the iterations of each token; 0 for padding.
        gates: ``[batch, time, gates]`` probabilities: adaponder's ``s``, mor's router, ouro's exit ``lambda``.
        iteration_logits: on request, logits after each pass, ``[passes, batch, kept, vocabulary]`` (pause: one pass).
        terms: the unweighted terms of the loss by name, e.g. ``cross_entropy`` and ``ponder``.
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
        """Raises, because TRL's trainers would compute a loss from it that lacks the ponder term."""
        raise AttributeError(
            "last_hidden_state: open the model with AutoModel to get it. TRL's trainers read it to compute a loss of "
            "their own, which has no ponder term: DPOTrainer, GRPOTrainer and the like are not supported; for "
            "supervised fine-tuning use adaponder.integrations.PonderSFTTrainer"
        )


@dataclass
class AdaPonderModelOutput(ModelOutput):
    """The output of ``AutoModel``; ``last_hidden_state`` is final-normed, after each token's last iteration."""

    last_hidden_state: Tensor | None = None
    past_key_values: Ledger | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    depth: Tensor | None = None
    gates: Tensor | None = None
