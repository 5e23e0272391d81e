"""The arguments of a forward that are neither tokens nor labels, checked and put in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from adaponder.errors import InputError
from adaponder.execution.base import Iteration
from adaponder.execution.tokens import require_whole
from adaponder.policies import Policy, PolicyInput

PolicyLike = Policy | Callable[[PolicyInput], Tensor]

# Hugging Face callers hand these to every model, generate() the tokenizer; none asks for anything this model has.
_HARMLESS = {"num_items_in_batch", "cache_position", "token_type_ids", "tokenizer"}
# What kernels are told of packed sequences beside positions that restart, which say as much as all of these.
OF_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass(frozen=True)
class RunTime:
    """Run-time control as a caller gives it: what is left out stays at its default."""

    policy: PolicyLike | None = None
    max_iterations: int | None = None
    seed: int | Tensor = 0
    on_iteration: Callable[[Iteration], None] | None = None
    allow_mismatch: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.seed, Tensor):
            require_whole("seed", self.seed)
        elif not isinstance(self.seed, int):
            raise InputError(f"seed={self.seed!r}: a whole number is needed, or a tensor with one for each sequence")

    def over(self, below: RunTime | None) -> RunTime:
        """This control, and ``below`` where this one says nothing."""
        if below is None:
            return self
        return RunTime(
            policy=below.policy if self.policy is None else self.policy,
            max_iterations=below.max_iterations if self.max_iterations is None else self.max_iterations,
            seed=below.seed if isinstance(self.seed, int) and not self.seed else self.seed,
            on_iteration=self.on_iteration or below.on_iteration,
            allow_mismatch=self.allow_mismatch or below.allow_mismatch,
        )

    def check_batch(self, sequences: int) -> None:
        """Raises where seeds are given one by one and are not as many as the sequences."""
        if isinstance(self.seed, Tensor) and self.seed.shape != (sequences,):
            raise InputError(f"seed has shape {tuple(self.seed.shape)}: one number, or [{sequences}], one per sequence")


class Wanted(NamedTuple):
    """What a forward is to return beside depths and losses, and for which positions its logits."""

    positions: slice | Tensor
    logits: bool
    gates: bool
    iteration_logits: bool
    hidden_states: bool

    @property
    def states(self) -> bool:
        """Whether hidden states after each pass are needed."""
        return self.iteration_logits or self.hidden_states


def refuse_foreign(kwargs: dict[str, Any]) -> None:
    """Raises on arguments of ``forward`` that ask for something this model does not have."""
    wished = {key for key, value in kwargs.items() if value is not None and value is not False}
    if "output_attentions" in wished:
        raise InputError("output_attentions: attention weights are not kept; hooks on backbone layers can see them")
    if packing := wished & {*OF_PACKING}:
        raise InputError(
            f"{', '.join(sorted(packing))}: forward has no such argument, and position_ids that restart say as much; "
            "of TRL's trainers use adaponder.integrations.PonderSFTTrainer, which leaves it out"
        )
    if foreign := wished - _HARMLESS:
        raise InputError(f"{', '.join(sorted(foreign))}: forward has no such argument")


def kept_positions(logits_to_keep: int | Tensor) -> slice | Tensor:
    """The positions whose logits are returned."""
    if isinstance(logits_to_keep, Tensor):
        require_whole("logits_to_keep", logits_to_keep)
        return logits_to_keep
    if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
        raise InputError(f"logits_to_keep={logits_to_keep}: 0 (all), so many of the last positions, or their indices")
    return slice(-logits_to_keep, None) if logits_to_keep else slice(None)


def check_room(prompt: int, new_tokens: int, positions: int) -> None:
    """Raises where so many tokens after a prompt of so many would need more positions than the backbone has."""
    room = positions - prompt + 1  # the last new token is returned without being read, so it needs no position
    if new_tokens > room:
        tokens = "1 token" if prompt == 1 else f"{prompt} tokens"
        raise InputError(f"max_new_tokens={new_tokens}: a prompt of {tokens} leaves room for {room}")
