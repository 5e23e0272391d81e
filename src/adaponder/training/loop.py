"""The loop: draw a batch, read it, step, look; every step a pure function of the state before it."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adaponder.backbones.shape import Shape, shape_of
from adaponder.checkpoints.special_tokens import with_padding
from adaponder.data import Batch, Sampler, Shards
from adaponder.devices import autocast
from adaponder.errors import TrainingError
from adaponder.halting import bottom_k_mean
from adaponder.methods import Objective, method_class, method_names
from adaponder.modeling.model import AdaPonderForCausalLM, AdaPonderOutput
from adaponder.ops.finite import first_not_finite
from adaponder.recipes import Recipe
from adaponder.training.checkpoint import (
    load_optimizer,
    optimizer_state,
    prune,
    save_checkpoint,
    step_folder,
    weights_of,
)
from adaponder.training.controller import DepthController
from adaponder.training.distributed import World, accumulating, global_bottom_k_mean, wrap
from adaponder.training.optim import build_optimizer, set_learning_rate
from adaponder.training.schedule import objective_at, phase_at, phases, policy_at
from adaponder.training.telemetry import Telemetry
from adaponder.training.validation import count_windows, validation_sums
from adaponder.training.watch import Tally, collapse, utilisation


def data_hash(shards: Shards) -> str:
    """What the tokens are, whatever is drawn from them: the recipe says the rest."""
    sums = [[shard.tokens_sha256 for shard in split] for split in shards.manifest.splits.values()]
    return hashlib.sha256(json.dumps([sums, shards.tokenizer_hash]).encode()).hexdigest()[:16]


@dataclass
class Trainer:
    """One run in one process of a world: what it trains, and how far it is."""

    recipe: Recipe
    run: Path
    world: World
    model: AdaPonderForCausalLM
    sampler: Sampler
    validation: Shards | None
    telemetry: Telemetry | None
    step: int = 0
    resumed_from: Path | None = None
    steered: dict[str, Any] | None = None
    stop_asked: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        nn.Module.to(self.model, self.world.device)
        if self.recipe.train.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.model.method.keep_logits = self.recipe.train.keep_logits
        if self.recipe.train.compile:
            how = {"by": self.recipe.train.compile_by, "memory_budget": self.recipe.train.memory_budget}
            self.model.compile_passes(**how)
        self.shape: Shape = shape_of(self.model.config)
        rows = self.world.share(self.recipe.train.global_batch, "train.global_batch")
        self.micro = min(self.recipe.train.micro_batch or rows, rows)
        if rows % self.micro:
            raise TrainingError(f"train.micro_batch={self.micro} does not divide a process's {rows} rows of a step")
        self.micro_steps = rows // self.micro
        self.tally = Tally()
        self.called: nn.Module | None = None
        self.pending: tuple[Tensor, Tensor] | None = None
        self.logged: int | None = None  # the last step that has its line of metrics
        self.bottom_k = global_bottom_k_mean(self.world)
        self.words = with_padding(self.sampler.shards.tokenizer_files(), self.model)
        self.controller = self._controller()

    # --- the run ------------------------------------------------------------------------------------------------

    def train(self) -> bool:
        """Runs to the end, phase by phase; false if asked to stop before."""
        for phase in phases(self.recipe.train):
            if self.step >= phase.end:
                continue
            self._enter(phase.backbone_trains)
            while self.step < phase.end:
                self._one_step()
                if self._after_step(phase.end):
                    return False
        return True

    def _enter(self, backbone_trains: bool) -> None:
        """A phase begins: who trains is settled first, then wrapper and optimizer are made for them."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(backbone_trains or name.startswith("method."))
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise TrainingError(
                f"train.freeze_backbone_steps={self.recipe.train.freeze_backbone_steps}: "
                f"{self.recipe.model.method} adds no parameters that could be trained alone"
            )
        train = self.recipe.train
        if train.compile:
            # Who trains is part of a graph. A phase begins with none: those of earlier phases, or of another run in
            # this process, count towards the compiler's limit, past which it would go on uncompiled without a word.
            torch.compiler.reset()
        if self.called is None or train.parallel == "ddp":
            # FSDP shards in place, once, and follows requires_grad; DDP looks at it when it is made.
            self.called = wrap(self.model, self.world, parallel=train.parallel)
        self.optimizer = build_optimizer(self.model, train)
        # Moments belong to the phase they were made in: at its first step a new optimizer is right.
        if self.resumed_from is not None and self.step > phase_at(train, self.step).start:
            load_optimizer(self.optimizer, self.resumed_from)
        self.resumed_from = None

    def _one_step(self) -> None:
        train, step = self.recipe.train, self.step
        rate = set_learning_rate(self.optimizer, train, step)
        # Micro-steps and processes count equally in every term that is no mean over targets: both are averaged here.
        objective = replace(objective_at(train, step), share=1.0, bottom_k=self._bottom_k())
        if self.controller:
            objective = self.controller.steer(objective, step)
        parts = [self._part(drawn) for drawn in self._drawn(step)]
        items = self._targets_per_part(parts)
        total = torch.zeros((), device=self.world.device)
        for index, part in enumerate(parts):
            with accumulating(self._called(), last=index + 1 == len(parts)):
                output = self._forward(part, objective, items)
                assert output.loss is not None
                loss = output.loss / len(parts)
                loss.backward()
                self._count(output, len(parts))
                total = total + loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), train.clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tally.add("grad_norm", norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        self.tally.steps += 1
        self.tally.tokens += train.global_batch * self.recipe.data.sequence
        self._check_finite(norm, total)
        if self.controller and self.controller.due(step):
            self.controller.turn(self.world.sum(self.controller.seen))
        self.rate, self.objective = rate, objective

    def _after_step(self, phase_end: int) -> bool:
        """Logs, evaluates and saves what is due after a step; true if the run must stop here."""
        train = self.recipe.train
        step, self.step = self.step, self.step + 1
        if self.telemetry:
            self.telemetry.advance(step)
        last = self.step == train.steps
        if last or (train.log_every and self.step % train.log_every == 0):
            self._log(step)
        if last or (train.eval_every and self.step % train.eval_every == 0):
            self._validate(step)
        stop = self.world.any(self.stop_asked()) if self.world.size > 1 else self.stop_asked()
        if not last and (stop or self.step == phase_end or (train.save_every and self.step % train.save_every == 0)):
            self.save()
        return stop and not last

    # --- one forward --------------------------------------------------------------------------------------------

    def _drawn(self, step: int) -> list[Batch]:
        """This process's rows of every micro-step.

        A micro-step's rows, over all processes, follow each other in the step's batch: they are those that one process
        with as many rows at once would take.
        """
        first = [(index * self.world.size + self.world.rank) * self.micro for index in range(self.micro_steps)]
        return [self.sampler.part(step, row, self.micro) for row in first]

    def _part(self, drawn: Batch) -> dict[str, Tensor]:
        """What a forward reads of one micro-step."""
        tokens, documents = torch.from_numpy(drawn.tokens), torch.from_numpy(drawn.documents)
        batch = {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:].clone()}
        if not self.recipe.data.attend_across_documents:
            # What follows a document's end belongs to a stranger: nothing there could predict it.
            batch["targets"][documents[:, 1:] != documents[:, :-1]] = -100
            batch["document_ids"] = documents[:, :-1]
        return batch

    def _targets_per_part(self, parts: list[dict[str, Tensor]]) -> Tensor:
        """The step's targets per process and micro-step, in double: what each forward's cross-entropy is divided by."""
        mine = sum(int((part["targets"] != -100).sum()) for part in parts)
        everyone = self.world.sum(torch.tensor(mine, device=self.world.device))
        return everyone.clamp_min(1).double() / (self.world.size * len(parts))

    def _forward(self, part: dict[str, Tensor], objective: Objective, items: Tensor) -> AdaPonderOutput:
        device = self.world.device
        policy = policy_at(self.recipe.train, self.model.method, self.step)
        moved = {name: value.to(device, non_blocking=True) for name, value in part.items()}
        with self._precision():
            return self._called()(
                **moved,
                objective=objective,
                num_items_in_batch=items,
                output_logits=False,
                execution=self.recipe.train.execution,
                **({} if policy is None else {"policy": policy}),
            )

    def _precision(self) -> torch.autocast:
        """bfloat16 autocasts on a GPU; a CPU computes in float32, as the run says when it starts."""
        return autocast(self.recipe.train.dtype, self.world.device)

    def _controller(self) -> DepthController | None:
        train, config = self.recipe.train, self.model.config
        if train.target_depth is None:
            return None
        if not self.model.method.has_ponder_term or not 1 <= train.target_depth < config.iterations:
            able = " and ".join(name for name in method_names() if method_class(name).has_ponder_term)
            raise TrainingError(
                f"train.target_depth={train.target_depth}: at least 1 and below {config.iterations}, the model's "
                f"iterations, and for {able} alone; this is {config.method}"
            )
        controller = DepthController(
            target=train.target_depth,
            iterations=config.iterations,
            start=train.ponder_full,
            gain=train.target_gain,
            every=train.target_every,
        )
        if self.steered is not None:
            controller.restore(self.steered, self.world.device, leads=self.world.leads)
        return controller

    def _bottom_k(self) -> Callable[[Tensor, float], Tensor]:
        return self.bottom_k if self.recipe.train.ponder_scope == "micro" else bottom_k_mean

    # --- looking ------------------------------------------------------------------------------------------------

    def _called(self) -> nn.Module:
        assert self.called is not None  # a phase was entered
        return self.called

    def _check_finite(self, norm: Tensor, loss: Tensor) -> None:
        """Looks at the step before while this one runs: a NaN is found one step late, and always before a save."""
        before, self.pending = self.pending, (norm.detach(), loss)
        if before is not None:
            self._raise_unless_finite(*before, self.step - 1)

    def _raise_unless_finite(self, norm: Tensor, loss: Tensor, step: int) -> None:
        value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not math.isfinite(value):
            windows = [window for drawn in self._drawn(step) for window in drawn.windows.tolist()]
            if self.telemetry and step != self.logged:
                self.telemetry.log({"step": step, "loss": float(loss), "grad_norm": value})
            raise TrainingError(
                f"step {step}: the loss is {float(loss):g} and the gradient {value} on windows {windows[:8]}…; the run "
                "stops and its last checkpoint is untouched. A smaller train.lr or train.clip usually cures it"
            )

    def settle(self) -> None:
        """Makes sure that no step taken so far was NaN."""
        if self.pending is not None:
            self._raise_unless_finite(*self.pending, self.step - 1)
            self.pending = None

    def _count(self, output: AdaPonderOutput, parts: int) -> None:
        self.tally.count(output, parts, self.model.config.iterations)
        if self.controller and output.gates is not None:
            assert output.depth is not None
            self.controller.add(output.depth, output.gates, self.step)

    def _log(self, step: int) -> None:
        tally, self.tally = self.tally, Tally()
        found = tally.report(self.world)
        if not self.telemetry:
            return
        config, speed = self.model.config, found["tokens_per_second"]
        metrics: dict[str, Any] = {"step": step, "lr": self.rate, **found}
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
        if self.model.method.has_ponder_term and (seen := collapse(metrics, self.recipe.train)):
            kind, what = seen
            self.telemetry.warn(kind, f"step {step}: {what}")

    def evaluate(self, tokens: int, **asked: Any) -> dict[str, Any]:
        """Loss and depths on the first ``tokens`` tokens of the validation split; the same windows every time."""
        assert self.validation is not None
        length = self.recipe.data.sequence
        cut = {"windows": count_windows(self.validation, tokens, length=length), "length": length, "rows": self.micro}
        self.model.eval()
        with self._precision():
            sums = validation_sums(self.model, self.validation, **cut, world=self.world, **asked)
        self.model.train()
        loss, predictions, depths = float(sums[0]), float(sums[1]), sums[2:].cpu()
        return {
            "validation_loss": loss / predictions,
            "validation_depth": float((depths * torch.arange(1, len(depths) + 1)).sum()) / predictions,
            "validation_halted": (depths.cumsum(0)[:-1] / predictions).tolist(),
        }

    def _validate(self, step: int) -> None:
        if self.validation is None:
            return
        found = self.evaluate(self.recipe.train.eval_tokens)
        if self.telemetry:
            self.telemetry.log({"step": step, **found})
        self.tally.began = time.perf_counter()

    # --- keeping ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint says of itself; all processes take part."""
        found: dict[str, Any] = {
            "step": self.step,
            "recipe": self.recipe.as_dict(),
            "fingerprint": self.recipe.fingerprint,
            "data": data_hash(self.sampler.shards),
            "tokenizer": self.sampler.shards.tokenizer_hash,
            "world": self.world.size,
            "rng": torch.get_rng_state().numpy().tobytes().hex(),
            "torch": torch.__version__,
        }
        if self.controller:
            found["controller"] = self.controller.state(self.world.sum(self.controller.seen.to(self.world.device)))
        return found

    def save(self) -> None:
        """A checkpoint at this step boundary; the leading process writes, all take part in gathering."""
        self.settle()
        weights, moments = weights_of(self.model), optimizer_state(self.optimizer)
        self._require_finite(weights | moments)
        state = self.state()
        if self.world.leads:
            save_checkpoint(step_folder(self.run, self.step), self.model, weights, moments, state, self.words)
            prune(self.run, self.recipe.train.keep, saved=step_folder(self.run, self.step))
        self.world.wait()
        self.tally.began = time.perf_counter()

    def _require_finite(self, tensors: dict[str, Tensor]) -> None:
        """What is not a number is never saved: an update can overflow though its gradient was finite."""
        if (bad := first_not_finite(tensors.items())) is not None:
            raise TrainingError(
                f"step {self.step - 1}: {bad.name} is not finite; the run stops and its last checkpoint is untouched"
            )

    def finish(self) -> Path:
        """The final model folder."""
        self.settle()
        weights = weights_of(self.model)
        self._require_finite(weights)
        state = self.state()
        if self.world.leads:
            save_checkpoint(self.run / "final", self.model, weights, None, state, self.words)
        self.world.wait()
        return self.run / "final"
