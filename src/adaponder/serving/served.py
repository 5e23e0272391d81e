"""What is served: a model, its words and its profiles, and the facts that a client may ask for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from adaponder.backbones.shape import Shape, shape_of
from adaponder.evaluation.lab import profiles as stored_profiles
from adaponder.inference.config import eos_ids, max_tokens
from adaponder.inference.request import Request, check_request
from adaponder.methods.cost import parameters_of
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import LearnedGate, Policy, parse_policy
from adaponder.policies.base import registered_policies
from adaponder.serving.spelling import Spelling
from adaponder.text import encode, has_template


@dataclass(frozen=True, eq=False)
class Served:
    """A model as clients know it.

    Attributes:
        name: what ``model`` must be in a request.
        tokens: the longest sequence, prompt and completion together.
        iterations: the most iterations of a token.
        profiles: policies calibrated for a budget, by name: as stored beside the weights.
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
    spelling: Spelling
    template: bool = False
    policies: Mapping[str, Policy] = field(default_factory=dict)

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
        """The model with the profiles that lie in its folder; ``tokens`` as the engine is told."""
        profiles = {} if folder is None else stored_profiles.stored(folder)
        tokenizer("a")  # it settles its own defaults before two threads may use it
        return cls(
            name=name,
            model=model,
            tokenizer=tokenizer,
            profiles=profiles,
            tokens=max_tokens(model, tokens),
            iterations=model.config.iterations,
            created=int(time.time()),
            shape=shape_of(model.config),
            eos_ids=eos_ids(model),
            spelling=Spelling(tokenizer),
            template=has_template(tokenizer),
            policies={name: parse_policy(profile["policy"]) for name, profile in profiles.items()},
        )

    @property
    def vocabulary(self) -> int:
        return self.model.config.vocab_size

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        return encode(self.tokenizer, prompt)

    def check(self, request: Request) -> None:
        """Raises :class:`adaponder.errors.InputError` on what the engine would refuse."""
        check_request(request, self.model, positions=self.tokens, iterations=self.iterations, eos_ids=self.eos_ids)

    def facts(self) -> dict[str, Any]:
        """What ``/v1/models`` says of the model under ``adaponder``."""
        model, own = self.model, self.model.method.default_policy(training=False)
        return {
            "method": model.config.method,
            "iterations": self.iterations,
            "tau": own.tau if isinstance(own, LearnedGate) else None,
            "halts": model.method.halts,
            "positions": self.tokens,
            "vocabulary": self.vocabulary,
            "parameters": parameters_of(model.config, shape=self.shape).total,
            "chat": self.template,
            "policies": self._policy_words(),
            "profiles": [
                {"name": name, "budget": one.get("budget"), "depth": one.get("depth"), "policy": one["policy"]}
                for name, one in self.profiles.items()
            ],
        }

    def _policy_words(self) -> list[str]:
        """Words of the policies that this model can be generated with."""
        method = self.model.method
        if not method.halts:
            return []
        return [
            kind.word
            for kind in registered_policies()
            if kind.causal and kind.row_by_row and kind.signal in (None, method.signal)
        ]
