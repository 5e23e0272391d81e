"""The model that is served, with its tokenizer and profiles, and the facts about it that clients can ask for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from adaponder.backbones.shape import Shape, shape_of
from adaponder.evaluation.lab import profiles as stored_profiles
from adaponder.inference.config import eos_ids, max_tokens
from adaponder.inference.request import Request, check_request
from adaponder.methods.cost import parameters_of
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import LearnedGate
from adaponder.policies.base import registered_policies
from adaponder.text import TokenSpeller, has_template


@dataclass(frozen=True, eq=False)
class Served:
    """A model as clients know it.

    Attributes:
        name: the value of ``model`` in requests.
        profiles: policies calibrated for a budget, by name, as stored beside the weights.
        tokens: longest sequence, prompt and completion together.
        iterations: most iterations of a token.
        template: whether the tokenizer has a chat template.
    """

    name: str
    model: AdaPonderForCausalLM
    tokenizer: PreTrainedTokenizerBase
    profiles: Mapping[str, Mapping[str, Any]]
    tokens: int
    iterations: int
    created: int
    shape: Shape
    eos_ids: frozenset[int]
    spell: TokenSpeller
    template: bool = False

    @classmethod
    def of(
        cls,
        model: AdaPonderForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path | None = None,
        *,
        name: str = "adaponder",
        tokens: int | None = None,
    ) -> Served:
        """Returns the model with the profiles in its folder; ``tokens`` is the engine's option."""
        tokenizer("a")  # sets its own defaults before two threads use it
        return cls(
            name=name,
            model=model,
            tokenizer=tokenizer,
            profiles={} if folder is None else stored_profiles.stored(folder),
            tokens=max_tokens(model, tokens),
            iterations=model.config.iterations,
            created=int(time.time()),
            shape=shape_of(model.config),
            eos_ids=eos_ids(model),
            spell=TokenSpeller(tokenizer),
            template=has_template(tokenizer),
        )

    @property
    def vocabulary(self) -> int:
        return self.model.config.vocab_size

    def check(self, request: Request) -> None:
        """Raises :class:`adaponder.errors.InputError` if the engine would refuse the request."""
        check_request(request, self.model, positions=self.tokens, iterations=self.iterations, eos_ids=self.eos_ids)

    def facts(self) -> dict[str, Any]:
        """Returns what ``/v1/models`` says about the model under ``adaponder``."""
        config, method = self.model.config, self.model.method
        default = method.default_policy(training=False)
        policies = [
            kind.word
            for kind in registered_policies()
            if method.halts and kind.causal and kind.row_by_row and kind.signal in (None, method.signal)
        ]
        return {
            "method": config.method,
            "iterations": self.iterations,
            "tau": default.tau if isinstance(default, LearnedGate) else None,
            "halts": method.halts,
            "positions": self.tokens,
            "vocabulary": self.vocabulary,
            "parameters": parameters_of(config, shape=self.shape).total,
            "chat": self.template,
            "policies": policies,
            "profiles": [
                {"name": name, "budget": profile.get("budget"), "depth": profile.get("depth")}
                | {"policy": profile["policy"]}
                for name, profile in self.profiles.items()
            ],
        }
