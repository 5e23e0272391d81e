"""Adds the two-stage objective of ``adaponder train`` to ``transformers.Trainer`` and TRL's ``SFTTrainer``."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace
from typing import Any, Literal

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from adaponder.errors import ConfigError, InputError
from adaponder.recipes import TrainRecipe
from adaponder.training.schedule import objective_at, policy_at
from adaponder.training.watch import DepthCounts, collapse, member_of


class PonderCallback(TrainerCallback):
    """Adds the two-stage objective: ``Trainer(…, callbacks=[PonderCallback(ponder_start=…, ponder_full=…)])``.

    Steps are the Trainer's updates, including those before a resume. Each process ranks its own gates, and a
    micro-batch is weighted by its share of the update's targets. During training, the callback sets the model's
    ``training_objective``, ``training_policy`` and ``training_seed``, from which each sequence's seed is derived.

    Logs gain ``depth``, the mean over the tokens since the last log, and ``halted_1 … halted_{K-1}``, the shares of
    tokens with depth at most 1 … K-1. Metrics of evaluations gain the same, with their prefix, e.g. ``eval_depth``.
    Padding does not count, and each process counts its own tokens. The callback moves itself before the Trainer's other
    callbacks, so that reporters log these values. It warns if the gates no longer distinguish tokens.

    Args:
        ponder_weight: the paper's lambda.
        k_max: the final k: the ponder loss is the mean of the lowest share k of gates.
        ponder_start: the step at which stage 2 begins (S0): before it, cross-entropy alone.
        ponder_full: the step at which k has reached ``k_max`` (S1).
        gate_start: gates are not updated before this step; ``None``: ``ponder_start // 3`` for methods with a ponder
            term, else 0.
        halt_before_ponder: whether gates may halt tokens in stage 1.
        capacity_warmup: for mor, steps over which capacity shrinks from 1.
        exit_stage: ouro's training stage; stage 2 trains only the exit gate, so freeze the backbone for it.
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
        # The same schedule and checks as in adaponder train.
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

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.depths.watch(member_of(kwargs["model"], "PonderCallback"))
        self._come_first()

    def _come_first(self) -> None:
        """Moves this callback to the front of the Trainer's list of callbacks, which it finds in the calling frames."""
        frame = inspect.currentframe()
        while frame is not None:
            if isinstance(handler := frame.f_locals.get("self"), CallbackHandler):
                handler.callbacks.sort(key=lambda callback: callback is not self)
                return
            frame = frame.f_back

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = member_of(kwargs["model"], "PonderCallback")
        if not model.method.halts:
            raise InputError(f"PonderCallback: {model.config.method} never halts; remove the callback")
        self._come_first()  # it may have been added after the Trainer was created
        self.depths.watch(model)
        self.depths.sums.clear()
        model.training_objective = model.training_policy = model.training_seed = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = member_of(kwargs["model"], "PonderCallback")
        model.training_objective = objective_at(self.schedule, state.global_step)
        model.training_policy = policy_at(self.schedule, model.method, state.global_step)
        # The index of this forward among those of all processes; on_substep_end increments it for each micro-batch.
        first = (state.global_step * args.world_size + args.process_index) * args.gradient_accumulation_steps
        model.training_seed = first

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = member_of(kwargs["model"], "PonderCallback")
        if model.training_seed is not None:
            model.training_seed += 1

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        method = member_of(kwargs["model"], "PonderCallback").method
        if not self.depths.trained:
            raise InputError(
                "PonderCallback: this trainer computes its own loss, which has no ponder term: drop "
                "label_smoothing_factor and compute_loss_func; with TRL, use adaponder.integrations.PonderSFTTrainer"
            )
        if state.global_step < self.schedule.gates_begin(pressed=method.has_ponder_term):
            for parameter in method.parameters():
                parameter.grad = None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = member_of(kwargs["model"], "PonderCallback")
        model.training_objective = model.training_policy = model.training_seed = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is None:
            return
        training = "loss" in logs
        depths = self.depths.take(training=True) if training else self._depths(logs)
        for entry in (logs, state.log_history[-1]):
            entry |= depths
        if not training:
            self.evaluated = depths
            return
        method = member_of(kwargs["model"], "PonderCallback").method
        schedule = replace(self.schedule, steps=max(state.max_steps, self.schedule.steps))
        step = max(0, state.global_step - 1)
        halted = [share for name, share in depths.items() if name != "depth"]
        warning = collapse({"step": step, "halted": halted}, schedule, pressed=method.has_ponder_term)
        if warning is not None and warning[0] not in self.warned:
            self.warned.add(warning[0])
            warnings.warn(f"step {step}: {warning[1]}", stacklevel=2)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.depths.evaluated(kwargs["eval_dataloader"])

    def _depths(self, metrics: dict[str, Any]) -> dict[str, float]:
        """Returns an evaluation's depths, named with the prefix of ``metrics`` (``eval_depth``); {} after training."""
        prefix = next((name.removesuffix("_runtime") for name in metrics if name.endswith("_runtime")), "train")
        depths = {} if prefix == "train" else self.depths.take(training=False)
        return {f"{prefix}_{name}": value for name, value in depths.items()}

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if metrics is not None:  # a trainer may have logged a copy of the metrics
            metrics |= self.evaluated
        self.evaluated = {}

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        metrics |= self._depths(metrics)


def __getattr__(name: str) -> Any:
    """Imports ``PonderSFTTrainer`` on first use, because TRL is an optional dependency."""
    if name != "PonderSFTTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from adaponder.training.sft import PonderSFTTrainer
    except ImportError as error:
        raise InputError(f"PonderSFTTrainer needs trl and peft: pip install 'adaponder[finetune]' ({error})") from None
    return PonderSFTTrainer
