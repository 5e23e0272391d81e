"""Runs TRL's ``SFTTrainer`` with the model's own loss, so that it can train the two-stage objective."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Trainer
from trl import SFTTrainer

from adaponder.errors import InputError
from adaponder.modeling.arguments import PACKING_ARGUMENTS
from adaponder.training.watch import member_of


class PonderSFTTrainer(SFTTrainer):
    """``SFTTrainer`` for an AdaPonder model: TRL's data handling, and the loss of the model's own forward.

    The stock ``SFTTrainer`` replaces a model's forward by one that computes cross-entropy only. This class keeps the
    model's forward, so that with :class:`adaponder.integrations.PonderCallback` the loss has the ponder term. Packed
    conversations do not attend to each other.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        if kwargs.get("compute_loss_func") is not None:
            raise InputError("compute_loss_func is not supported: pass your own objective to the model instead")
        super().__init__(*args, **kwargs)
        if self.args.loss_type != "nll" or self.args.label_smoothing_factor:
            raise InputError(
                f"loss_type={self.args.loss_type!r} and label_smoothing_factor={self.args.label_smoothing_factor} must "
                "keep their defaults: the loss is the model's own"
            )
        assert self.model is not None
        vars(member_of(self.model, "PonderSFTTrainer")).pop("forward", None)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        tokens = inputs["attention_mask"].sum() if "attention_mask" in inputs else inputs["input_ids"].numel()
        training = self.model is not None and self.model.training
        if training:
            self._total_train_tokens += int(tokens) * self.accelerator.num_processes
        self._metrics["train" if training else "eval"]["num_tokens"] = [self._total_train_tokens]
        inputs = {name: value for name, value in inputs.items() if name not in PACKING_ARGUMENTS}
        return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
