"""Under ``transformers.Trainer`` the objective follows the step, as it does in our own loop."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adaponder.errors import InputError
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.recipes import TrainRecipe
from adaponder.training.schedule import objective_at, policy_at


class PonderCallback(TrainerCallback):
    """The two-stage objective: ``Trainer(…, callbacks=[PonderCallback(ponder_start=…, ponder_full=…)])``.

    Steps are the Trainer's updates, resumed ones included. Each process ranks its own gates, and a micro-batch weighs
    by its share of the update's targets. A policy that draws is given the step as its seed, so sequences of one update
    halt alike. The model's ``training_objective``, ``training_policy`` and ``training_seed`` are the callback's: it
    empties them when training begins, as one that raised leaves them set, and when it ends.

    Args:
        ponder_weight: the paper's lambda.
        k_max: the share of gates that bottom-K averages, once warm.
        ponder_start: the step at which stage 2 begins (S0): before it, cross-entropy alone.
        ponder_full: the step at which k has reached ``k_max`` (S1).
        gate_start: gates are not updated before this step; ``None``: a third into stage 1 for adaponder, whose gates a
            ponder term presses on; at once for mor and ouro.
        halt_before_ponder: whether gates may halt tokens in stage 1.
        capacity_warmup: mor, steps over which capacity shrinks from 1.
        exit_stage: ouro's stage.
    """

    def __init__(
        self,
        *,
        ponder_start: int,
        ponder_full: int,
        ponder_weight: float = 0.1,
        k_max: float = 0.1,
        gate_start: int | None = None,
        halt_before_ponder: bool = False,
        capacity_warmup: int = 0,
        exit_stage: Literal[1, 2] = 1,
    ):
        # One schedule for both loops, and one place where its values are checked.
        self.schedule = TrainRecipe(
            steps=max(1, ponder_full),
            global_batch=1,
            ponder_weight=ponder_weight,
            k_max=k_max,
            ponder_start=ponder_start,
            ponder_full=ponder_full,
            gate_start=gate_start,
            halt_before_ponder=halt_before_ponder,
            capacity_warmup=capacity_warmup,
            exit_stage=exit_stage,
        )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = _member(kwargs["model"])
        if not model.method.halts:
            raise InputError(f"PonderCallback: {model.config.method} never halts, so there is nothing to schedule")
        model.training_objective = model.training_policy = None
        model.training_seed = 0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = _member(kwargs["model"])
        model.training_objective = objective_at(self.schedule, state.global_step)
        model.training_policy = policy_at(self.schedule, model.method, state.global_step)
        model.training_seed = state.global_step

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        method = _member(kwargs["model"]).method
        begin = self.schedule.gates_begin if method.has_ponder_term else self.schedule.gate_start or 0
        if state.global_step < begin:
            for parameter in method.parameters():
                parameter.grad = None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = _member(kwargs["model"])
        model.training_objective = model.training_policy = None
        model.training_seed = 0


def _member(model: nn.Module) -> AdaPonderForCausalLM:
    """The member of the family in a model that adapters or wrappers may surround."""
    for module in model.modules():
        if isinstance(module, AdaPonderForCausalLM):
            return module
    raise InputError(f"PonderCallback: the Trainer's model is a {type(model).__name__}, not an AdaPonderForCausalLM")
