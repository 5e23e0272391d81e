"""Registers the model ``adaponder`` with lm-eval when imported, and lets lm-eval's model ``hf`` open our checkpoints.

``python -m adaponder.lm_eval`` imports this first; releases of lm-eval that support entry points need no import.
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.api.registry import register_model

from adaponder.commands.shared import Depth, open_tokenizer
from adaponder.conversion.open import load
from adaponder.errors import InputError
from adaponder.evaluation.scoring import ScoringOptions
from adaponder.evaluation.tasks.harness import HarnessLM
from adaponder.terminal import errors


@register_model("adaponder")
class AdaPonderLM(HarnessLM):
    """Implements ``--model adaponder --model_args pretrained=CKPT,…``; scores as ``adaponder eval --tasks`` does.

    Args:
        pretrained: a model folder, run folder, step folder or hub name; may be a plain decoder.
        policy: the rule that decides depth, as ``adaponder eval --policy`` takes it; quote a rule with commas.
        tau, profile: as the options of ``adaponder eval``, instead of ``policy``.
        max_iterations: maximum depth of each token.
        tokenizer: folder, hub name or ``tokenizer.json``; default: the checkpoint's own.
        revision: branch, tag or commit of a hub name.
        dtype: float32, bfloat16, float16, float64, or auto: as saved.
        device: cpu, cuda, cuda:1, …; by default a GPU if there is one.
        batch_size: texts per forward; changes speed and rounding, nothing else.
        max_batch_size: ignored; lm-eval passes it to every model, for ``batch_size="auto"``, which is refused here.
        seed: seed of random policies and of sampling.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        policy: str | None = None,
        tau: float | None = None,
        profile: str | None = None,
        max_iterations: int | None = None,
        tokenizer: str | None = None,
        revision: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        seed: int = 0,
        **others: Any,
    ):
        # lm-eval adds arguments of its own, e.g. trust_remote_code; those that are None or False are ignored.
        if unknown := [name for name, value in others.items() if value not in (None, False)]:
            raise InputError(f"--model_args {', '.join(sorted(unknown))}: --model adaponder has no such argument")
        if not str(batch_size).isdecimal():
            raise InputError(f"--batch_size {batch_size} must be a whole number; it is not chosen automatically")
        model, folder = load(str(pretrained), revision=revision, dtype=dtype, device=_device(device))
        text = None if policy is None else str(policy)
        rule = Depth(policy=text, tau=tau, profile=profile).choose(model, folder)
        super().__init__(
            model,
            open_tokenizer(model, folder, tokenizer),
            batch_size=int(batch_size),
            how=ScoringOptions(policy=rule, max_iterations=max_iterations, seed=seed),
        )
        self.pretrained = str(pretrained)

    def get_model_info(self) -> dict[str, Any]:
        """Returns the facts that lm-eval writes with its results: the model, its policy, and the cost of each task."""
        policy: Any = self.how.policy
        return {
            "model_name": self.pretrained,
            "model_method": self.model.config.method,
            "model_iterations": self.how.max_iterations or self.model.config.iterations,
            "model_policy": None if policy is None else policy.spelling,
            "model_dtype": str(self.model.dtype),
            "model_num_parameters": self.model.num_parameters(),
            "model_cost": {task: meter.spent().as_dict() for task, meter in self.meters.items()},
        }


def _device(requested: str | None) -> str:
    """Returns the device to use; without a GPU, lm-eval's default ``cuda:0`` and our default ``None`` mean the CPU."""
    if torch.cuda.is_available():
        return requested or "cuda"
    if requested == "cuda:0":
        errors.print("no GPU found: computing on the CPU", style="yellow")
    return "cpu" if requested in (None, "cuda:0") else requested
