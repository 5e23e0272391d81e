"""What evaluation commands begin with: a checkpoint that is opened, its tokenizer, and who decides depth."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rich.markup import escape

from adaponder.convert import load
from adaponder.errors import InputError
from adaponder.evaluation.scoring import Reading, default_length
from adaponder.evaluation.text import Text, Vocabulary, open_text, open_vocabulary
from adaponder.evaluation.windows import Windows
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import LearnedGate, Policy
from adaponder.terminal import console


class Subject(NamedTuple):
    """A checkpoint under examination: its name as given, and what it holds."""

    name: str
    model: AdaPonderForCausalLM
    folder: Path
    vocabulary: Vocabulary

    def text(self, data: str, *, split: str, max_tokens: int | None) -> Text:
        with console.status(f"reading {escape(data)} …"):
            return open_text(data, self.vocabulary, whose=self.name, split=split, max_tokens=max_tokens)

    def windows(self, length: int | None, stride: int | None, *, across_documents: bool = True) -> Windows:
        length = default_length(self.model) if length is None else length
        return Windows(length, stride, across_documents)

    def reading(
        self,
        *,
        policy: Policy | None = None,
        tau: float | None = None,
        profile: str | None = None,
        max_iterations: int | None = None,
        execution: str | None = None,
        seed: int = 0,
    ) -> Reading:
        """Who decides depth, from at most one of the three ways to say it."""
        chosen = choose_policy(self.folder, policy=policy, tau=tau, profile=profile)
        return Reading(policy=chosen, max_iterations=max_iterations, execution=execution, seed=seed)


def open_subject(checkpoint: str, *, tokenizer: str | None = None, dtype: str = "auto", device: str = "cpu") -> Subject:
    with console.status(f"loading {escape(checkpoint)} …"):
        model, folder = load(checkpoint, dtype=dtype, device=device)
        return Subject(checkpoint, model, folder, open_vocabulary(tokenizer or str(folder)))


def choose_policy(
    folder: Path, *, policy: Policy | None = None, tau: float | None = None, profile: str | None = None
) -> Policy | None:
    """The policy that the options ask for; ``None`` leaves it to the method."""
    given = [
        name for name, value in (("--policy", policy), ("--tau", tau), ("--profile", profile)) if value is not None
    ]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} both say who halts: give one")
    if profile is not None:
        from adaponder.evaluation.profiles import policy_of

        return policy_of(folder, profile)
    return LearnedGate(tau) if tau is not None else policy
