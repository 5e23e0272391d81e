"""Under ``transformers.Trainer`` and TRL's ``SFTTrainer`` the objective follows the step, as in our own loop."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace
from typing import Any, Literal

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from adaponder.errors import ConfigError, InputError
from adaponder.recipes import TrainRecipe
from adaponder.training.member import DepthCounts, member_of
from adaponder.training.schedule import objective_at, policy_at
from adaponder.training.watch import collapse


class PonderCallback(TrainerCallback):
    """The two-stage objective: ``Trainer(…, callbacks=[PonderCallback(ponder_start=…, ponder_full=…)])``.

    Steps are the Trainer's updates, resumed ones included. Each process ranks its own gates, and a micro-batch weighs
    by its share of the update's targets. A policy that draws gets another seed for each sequence of each micro-batch,
    the same in a resumed run. The model's ``training_objective``, ``training_policy`` and ``training_seed`` are the
    callback's: it empties them when training begins, as one that raised leaves them set, and when it ends.

    Logs gain ``depth``, the mean over the tokens read since the last log, and ``halted_1 … halted_{K-1}``, the shares
    of them that were read at most so often; evaluation's logs, and what ``evaluate`` and ``predict`` return, gain
    ``eval_depth`` and so on, by the prefix of their figures. It moves itself before the Trainer's other callbacks, so
    that reporters are told them too. A warning says when gates have collapsed. Padding does not count; each process
    counts its own tokens, by a hook that stays on the model.

    Args:
        ponder_weight: the paper's lambda.
        k_max: the share of gates that bottom-K averages, once warm.
        ponder_start: the step at which stage 2 begins (S0): before it, cross-entropy alone.
        ponder_full: the step at which k has reached ``k_max`` (S1).
        gate_start: gates are not updated before this step; ``None``: a third into stage 1 for adaponder, whose gates a
            ponder term presses on; at once for mor and ouro.
        halt_before_ponder: whether gates may halt tokens in stage 1.
        capacity_warmup: mor, steps over which capacity shrinks from 1.
        exit_stage: ouro's stage; freeze the backbone for 2, which trains exits alone.
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
        try:
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
        except ConfigError as problem:
            raise ConfigError(f"PonderCallback: {str(problem).removeprefix('train.')}") from None
        self.depths = DepthCounts()
        self.evaluated: dict[str, Any] = {}
        self.warned: set[str] = set()

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.depths.watch(member_of(kwargs["model"], "PonderCallback"))
        self._come_first()

    def _come_first(self) -> None:
        """Moves itself before reporters, which a Trainer lists first.

        A Trainer hands its callbacks everything but the list they are in, so it is taken from whoever called.
        """
        frame = inspect.currentframe()
        while frame is not None:
            if isinstance(handler := frame.f_locals.get("self"), CallbackHandler):
                handler.callbacks.sort(key=lambda one: one is not self)
                return
            frame = frame.f_back

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = member_of(kwargs["model"], "PonderCallback")
        if not model.method.halts:
            raise InputError(f"PonderCallback: {model.config.method} never halts, so there is nothing to schedule")
        self._come_first()  # it may have been added since the Trainer was made
        self.depths.watch(model)
        self.depths.sums.clear()
        model.training_objective = model.training_policy = model.training_seed = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = member_of(kwargs["model"], "PonderCallback")
        model.training_objective = objective_at(self.schedule, state.global_step)
        model.training_policy = policy_at(self.schedule, model.method, state.global_step)
        # The number of this forward among those of all processes; the further micro-batches of the step count on.
        first = (state.global_step * args.world_size + args.process_index) * args.gradient_accumulation_steps
        model.training_seed = first

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = member_of(kwargs["model"], "PonderCallback")
        if model.training_seed is not None:
            model.training_seed += 1

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        method = member_of(kwargs["model"], "PonderCallback").method
        if not self.depths.trained:
            raise InputError(
                "PonderCallback: this trainer computes a loss of its own, which has no ponder term: leave out "
                "label_smoothing_factor and compute_loss_func; of TRL's, use adaponder.integrations.PonderSFTTrainer"
            )
        if state.global_step < self.schedule.gates_begin(pressed=method.has_ponder_term):
            for parameter in method.parameters():
                parameter.grad = None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = member_of(kwargs["model"], "PonderCallback")
        model.training_objective = model.training_policy = model.training_seed = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None:
            return
        if "loss" not in logs:
            self.evaluated = self._read(logs)
            for entry in (logs, state.log_history[-1]):
                entry |= self.evaluated
            return
        read = self.depths.take(training=True)
        for entry in (logs, state.log_history[-1]):
            entry |= read
        method = member_of(kwargs["model"], "PonderCallback").method
        schedule = replace(self.schedule, steps=max(state.max_steps, self.schedule.steps))
        step = max(0, state.global_step - 1)
        halted = [share for name, share in read.items() if name != "depth"]
        warning = collapse({"step": step, "halted": halted}, schedule, pressed=method.has_ponder_term)
        if warning is not None and warning[0] not in self.warned:
            self.warned.add(warning[0])
            warnings.warn(f"step {step}: {warning[1]}", stacklevel=2)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.depths.evaluated(kwargs["eval_dataloader"])

    def _read(self, metrics: dict[str, Any]) -> dict[str, float]:
        """What the evaluation of these metrics read, by their prefix; others tell of no evaluation's time: empty."""
        prefix = next((name.removesuffix("_runtime") for name in metrics if name.endswith("_runtime")), "train")
        read = {} if prefix == "train" else self.depths.take(training=False)
        return {f"{prefix}_{name}": value for name, value in read.items()}

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if metrics is not None:  # a trainer may have logged a copy of them
            metrics |= self.evaluated
        self.evaluated = {}

    def on_predict(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        metrics |= self._read(metrics)


def __getattr__(name: str) -> Any:
    """``PonderSFTTrainer``, imported when it is first used: TRL is an extra."""
    if name != "PonderSFTTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from adaponder.training.sft import PonderSFTTrainer
    except ImportError as error:
        raise InputError(f"PonderSFTTrainer needs trl and peft: pip install 'adaponder[finetune]' ({error})") from None
    return PonderSFTTrainer
