"""Trains step by step: draw a batch, forward, backward, update, log."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adaponder.backbones.shape import Shape, shape_of
from adaponder.data import Sampler, Shards
from adaponder.devices import autocast
from adaponder.errors import TrainingError
from adaponder.files import read_json, write_whole
from adaponder.halting import bottom_k_mean
from adaponder.methods import Objective
from adaponder.modeling import AdaPonderForCausalLM, AdaPonderOutput
from adaponder.policies import Policy
from adaponder.recipes import Recipe
from adaponder.training.checkpoint import Saver, load_optimizer
from adaponder.training.controller import DepthController, controller_of
from adaponder.training.data import MicroBatches
from adaponder.training.distributed import World, accumulating, global_bottom_k_mean, wrap
from adaponder.training.graphs import StepGraphs, add_gradients
from adaponder.training.lora import trains
from adaponder.training.schedule import Phase, build_optimizer, objective_at, phases, policy_at, set_learning_rate
from adaponder.training.telemetry import Telemetry
from adaponder.training.validation import validate
from adaponder.training.watch import Tally, collapse, utilisation

BEFORE = "before.json"


@dataclass
class Trainer:
    """Trains one recipe in this process; a step depends only on the state before it.

    Attributes:
        run: the run folder.
        validation: the validation split; becomes ``None`` if it is shorter than one window.
        step: the next step to take.
        resumed_from: the checkpoint whose optimizer state is loaded before the first step.
        controller_state: the depth controller's state in ``resumed_from``.
        stop_requested: returns whether to stop after the current step.
        telemetry: the logs; ``None`` except in the leading process.
    """

    recipe: Recipe
    run: Path
    world: World
    model: AdaPonderForCausalLM
    sampler: Sampler
    validation: Shards | None
    step: int = 0
    resumed_from: Path | None = None
    controller_state: dict[str, Any] | None = None
    stop_requested: Callable[[], bool] = lambda: False
    telemetry: Telemetry | None = None

    def __post_init__(self) -> None:
        train = self.recipe.train
        if self.validation is not None and self.validation.tokens <= self.recipe.data.sequence:
            self.validation = None
        nn.Module.to(self.model, self.world.device)
        if train.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.model.method.keep_logits = train.keep_logits
        if train.compile:
            self.model.compile_passes(by=train.compile_by, memory_budget=train.memory_budget)
        self.shape: Shape = shape_of(self.model.config)
        self.micro_batches = MicroBatches(self.recipe, self.sampler, self.world)
        self.tally = Tally()
        self.wrapped: nn.Module | None = None
        self.last_step: Tensor | None = None  # gradient norm and loss, being copied to the host and not yet checked
        self.arrival: torch.cuda.Event | None = None  # recorded after that copy
        self.logged: int | None = None  # the last step with a line of metrics
        self.before: dict[str, Any] | None = None  # result of validating the initial checkpoint
        self.after: dict[str, Any] | None = None  # result of the latest validation
        self.bottom_k = global_bottom_k_mean(self.world) if train.ponder_scope == "micro" else bottom_k_mean
        self.saver = Saver(self.recipe, self.run, self.world, self.model, self.sampler.shards)
        self.controller: DepthController | None = controller_of(train, self.model, self.world, self.controller_state)
        if train.cuda_graphs and (self.world.device.type != "cuda" or self.world.size > 1):
            raise TrainingError("train.cuda_graphs=true needs a single process on a GPU")
        if train.exit_stage == 2 and self.model.method.has_exit_loss and train.freeze_backbone_steps < train.steps:
            raise TrainingError(
                f"train.exit_stage=2 trains the exits only: set train.freeze_backbone_steps={train.steps}, and "
                "model.backbone to a checkpoint of stage 1"
            )

    def train(self) -> bool:
        """Takes all remaining steps, phase by phase; returns false if it was stopped before the last step."""
        try:
            for phase in phases(self.recipe.train):
                if self.step >= phase.end:
                    continue
                self._enter(phase)
                first = self.step
                while self.step < phase.end:
                    self._one_step()
                    if self.step == first:
                        # Exempts the many objects of compiled graphs, which stay alive, from garbage collection.
                        gc.collect()
                        gc.freeze()
                    if self._after_step(phase.end):
                        return False
            return True
        finally:
            gc.unfreeze()

    def _enter(self, phase: Phase) -> None:
        """Begins a phase: sets which parameters train, wraps the model in DDP or FSDP, and builds the optimizer."""
        train = self.recipe.train
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(trains(name, train, backbone_trains=phase.backbone_trains))
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise TrainingError(
                f"train.freeze_backbone_steps={train.freeze_backbone_steps} must be 0: "
                f"{self.recipe.model.method} adds no parameters of its own to train"
            )
        if train.compile:
            # A compiled graph depends on which parameters train. Graphs of earlier phases, or of another run in this
            # process, count towards the recompile limit, beyond which torch silently runs eagerly: drop them.
            torch.compiler.reset()
        if self.wrapped is None or train.parallel == "ddp":
            # FSDP shards once, in place, and follows requires_grad; DDP reads requires_grad when it is constructed.
            self.wrapped = wrap(self.model, self.world, parallel=train.parallel)
        self.optimizer = build_optimizer(self.model, train)
        self.graphs = StepGraphs(self.model, train.execution) if train.cuda_graphs else None
        # The optimizer's state belongs to one phase; each phase starts with a new optimizer.
        if self.resumed_from is not None and self.step > phase.start:
            load_optimizer(self.optimizer, self.resumed_from)
        self.resumed_from = None

    def _one_step(self) -> None:
        """Takes one optimizer step: forward and backward of every micro-batch, clipping, AdamW."""
        train, step = self.recipe.train, self.step
        self.rate = set_learning_rate(self.optimizer, train, step)
        # In loss terms that are not means over targets, micro-steps and processes have equal weight.
        objective = replace(objective_at(train, step), share=1.0, bottom_k=self.bottom_k, mean_count=self.world.mean)
        if self.controller:
            objective = self.controller.steer(objective, step)
        self.objective = objective
        loss = self._accumulate_gradients(objective, policy_at(train, self.model.method, step))
        norm = self._clip(train.clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.tally.add("grad_norm", norm)
        self.tally.steps += 1
        self.tally.tokens += train.global_batch * self.recipe.data.sequence
        # The previous step is checked while this one runs: NaN is detected one step late, but always before a save.
        self.require_finite()
        self.last_step = torch.stack((norm.detach(), loss.to(norm.dtype))).to("cpu", non_blocking=norm.is_cuda)
        # Without the event, reading both numbers would wait for everything launched in the meantime.
        self.arrival = torch.cuda.current_stream().record_event() if norm.is_cuda else None
        if self.controller and self.controller.due(step):
            self.controller.update(self.world.sum(self.controller.sums))

    def _accumulate_gradients(self, objective: Objective, policy: Policy | None) -> Tensor:
        """Runs forward and backward of the step's micro-batches; returns their mean loss."""
        assert self.wrapped is not None  # set by _enter
        inputs = self.micro_batches.inputs(self.step)
        mean_targets = self.micro_batches.mean_targets(inputs)
        forward = partial(self._forward, objective, policy)
        loss = torch.zeros((), device=self.world.device)
        for index, arguments in enumerate(inputs):
            arguments["num_items_in_batch"] = mean_targets
            with accumulating(self.wrapped, last=index + 1 == len(inputs)):
                if self.graphs is None:
                    output = add_gradients(forward(arguments, self.recipe.train.execution), len(inputs))
                else:
                    output = self.graphs.run((objective, policy), arguments, forward, share=len(inputs))
                loss = loss + output.loss / len(inputs)
                self.tally.count(output, len(inputs), self.model.config.iterations)
                if self.controller and output.gates is not None:
                    self.controller.add(output.depth, output.gates, self.step)
        return loss

    def _clip(self, largest: float) -> Tensor:
        """Clips the gradients to norm ``largest`` and returns their norm before clipping.

        Methods with ``gates_apart`` clip gates and backbone separately; the returned norm is that of the backbone.
        """
        gates = list(self.model.method.parameters())
        if not self.model.method.gates_apart or not gates:
            return nn.utils.clip_grad_norm_(self.model.parameters(), largest)
        gate_norm = nn.utils.clip_grad_norm_(gates, largest)
        norm = nn.utils.clip_grad_norm_(self.model.backbone.parameters(), largest)
        return norm + 0.0 * gate_norm  # NaN if the gates' norm is not finite

    def _after_step(self, phase_end: int) -> bool:
        """Logs, validates and saves if due after a step; returns whether the run must stop here."""
        train = self.recipe.train
        step, self.step = self.step, self.step + 1
        if self.telemetry:
            self.telemetry.advance(step)
        last = self.step == train.steps

        def due(every: int) -> bool:
            return bool(every) and self.step % every == 0

        if last or due(train.log_every):
            self._log(step)
        if last or due(train.eval_every):
            self._validate(step)
        stop = self.world.any(self.stop_requested())
        if not last and (stop or self.step == phase_end or due(train.save_every)):
            self.save()
        return stop and not last

    def _forward(
        self, objective: Objective, policy: Policy | None, inputs: dict[str, Tensor], execution: Any
    ) -> AdaPonderOutput:
        train, device = self.recipe.train, self.world.device
        assert self.wrapped is not None  # set by _enter
        with autocast(train.dtype, device):
            return self.wrapped(
                **{name: value.to(device, non_blocking=True) for name, value in inputs.items()},
                objective=objective,
                output_logits=False,
                execution=execution,
                **({} if policy is None else {"policy": policy}),
            )

    def require_finite(self) -> None:
        """Raises if the gradient norm of the last step is not finite; earlier steps were checked before."""
        if self.last_step is None:
            return
        if self.arrival is not None:
            self.arrival.synchronize()
        step, norm, loss = self.step - 1, *self.last_step.tolist()
        self.last_step = None
        if math.isfinite(norm):
            return
        windows = [window for batch in self.micro_batches.draw(step) for window in batch.windows.tolist()]
        if self.telemetry and step != self.logged:
            self.telemetry.log({"step": step, "loss": loss, "grad_norm": norm})
        raise TrainingError(
            f"step {step}: the loss is {loss:g} and the gradient {norm} on windows {windows[:8]}…; the run stops, its "
            "last checkpoint is intact. A smaller train.lr or train.clip usually helps"
        )

    def _log(self, step: int) -> None:
        """Logs each metric's mean since the last log."""
        tally, self.tally = self.tally, Tally()
        means = tally.means(self.world)
        if not self.telemetry:
            return
        config, speed = self.model.config, means["tokens_per_second"]
        metrics: dict[str, Any] = {"step": step, "lr": self.rate, **means}
        if self.model.method.halts:
            metrics |= {"ponder_fraction": self.objective.ponder_fraction}
        else:
            del metrics["halted"]
        if self.objective.exit_entropy_weight is not None and self.model.method.has_exit_loss:
            metrics |= {"exit_entropy_weight": self.objective.exit_entropy_weight}
        if self.controller:
            metrics |= {"ponder_weight": self.objective.ponder_weight, "pressure": self.controller.pressure}
        metrics |= utilisation(speed, config, shape=self.shape, sequence=self.recipe.data.sequence, world=self.world)
        self.telemetry.log(metrics)
        self.logged = step
        if self.model.method.halts:
            self._warn_of_collapse(metrics)

    def _warn_of_collapse(self, metrics: dict[str, Any], prefix: str = "") -> None:
        warning = collapse(metrics, self.recipe.train, pressed=self.model.method.has_ponder_term)
        if warning is not None and self.telemetry:
            self.telemetry.warn(warning[0], f"step {metrics['step']}: {prefix}{warning[1]}")

    def measure_before(self) -> None:
        """Evaluates the checkpoint to train from, if any, into ``before.json``; a resumed run reads that file."""
        path = self.run / BEFORE
        if self.validation is None or not isinstance(self.recipe.model.backbone, str):
            return
        if self.step == 0:
            self.before = self.evaluate(self.recipe.train.eval_tokens)
            if self.world.leads:
                write_whole(path, json.dumps(self.before, indent=1).encode(), TrainingError)
        elif self.world.leads and path.is_file():
            self.before = read_json(path, TrainingError)

    def evaluate(self, tokens: int, **options: Any) -> dict[str, Any]:
        """Returns loss and depths on the first ``tokens`` validation tokens. ``options`` go to the model's forward."""
        assert self.validation is not None
        return validate(
            self.model,
            self.validation,
            tokens=tokens,
            length=self.recipe.data.sequence,
            together=self.micro_batches.size,
            world=self.world,
            dtype=self.recipe.train.dtype,
            across=self.recipe.data.attend_across_documents,
            **options,
        )

    def _validate(self, step: int) -> None:
        """Evaluates the validation split, if any, after ``step`` and logs the result."""
        if self.validation is None:
            return
        self.after = scores = self.evaluate(self.recipe.train.eval_tokens)
        if self.model.method.halts:
            self._warn_of_collapse({"step": step, "halted": scores["validation_halted"]}, "validation: ")
        if self.telemetry:
            self.telemetry.log({"step": step, **scores})
        self.tally.began = time.perf_counter()

    def save(self) -> None:
        """Writes a checkpoint between two steps."""
        self.require_finite()
        self.saver.save(self.step, self.controller, self.optimizer)
        self.tally.began = time.perf_counter()

    def finish(self) -> Path:
        """Writes the final model and returns its folder."""
        self.require_finite()
        return self.saver.save(self.step, self.controller, None)
