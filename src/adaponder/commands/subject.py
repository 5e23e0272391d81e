"""What evaluation commands begin with: a checkpoint that is opened, its tokenizer, and who decides depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from adaponder.checkpoints.loading import has_tokenizer, tokenizer_of
from adaponder.conversion.open import load
from adaponder.data.tokenizers import load_tokenizer as read_tokenizer
from adaponder.errors import InputError
from adaponder.evaluation.scoring import ScoringOptions, default_length
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
        with console.status(f"reading {data} …"):
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
        side: str = "",
    ) -> ScoringOptions:
        """Who decides depth, from at most one of the three ways to say it; errors name ``--profile{side}``."""
        check_most(self.model, max_iterations)
        chosen = choose_policy(self.folder, policy=policy, tau=tau, profile=profile, side=side)
        self.model.check_policy(chosen)  # before a text is read
        return ScoringOptions(policy=chosen, max_iterations=max_iterations, execution=execution, seed=seed)


def open_subject(checkpoint: str, *, tokenizer: str | None = None, dtype: str = "auto", device: str = "cpu") -> Subject:
    with console.status(f"loading {checkpoint} …"):
        model, folder = load(checkpoint, dtype=dtype, device=device)
        vocabulary = open_vocabulary(tokenizer or str(folder))
        refuse_other_tokenizer(model, folder, tokenizer, vocabulary.tokenizer.get_vocab())
        return Subject(checkpoint, model, folder, vocabulary)


def open_tokenizer(model: AdaPonderForCausalLM, folder: Path, named: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer of the checkpoint in ``folder``, or the ``named`` one (folder, hub name, ``tokenizer.json``)."""
    name = named or str(folder)
    if Path(name).is_file():
        backend, end = read_tokenizer(name)
        found: Any = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=backend.id_to_token(end))
    else:
        found = tokenizer_of(name)
    refuse_other_tokenizer(model, folder, named, found.get_vocab())
    return found


def refuse_other_tokenizer(
    model: AdaPonderForCausalLM, folder: Path, named: str | None, vocabulary: dict[str, int]
) -> None:
    """Raises where the model has no such ids, or the checkpoint's own tokenizer has other ids for these tokens."""
    highest, size = max(vocabulary.values(), default=-1), model.config.vocab_size
    if highest >= size:
        raise InputError(
            f"--tokenizer {named or folder}: its ids go up to {highest}, the model's vocabulary ends at {size - 1}: "
            "name the tokenizer that the checkpoint was trained with"
        )
    if named is None or not has_tokenizer(folder):
        return
    own = open_vocabulary(str(folder)).tokenizer.get_vocab()
    if own != vocabulary:
        differ = sum(vocabulary.get(token) != number for token, number in own.items())
        raise InputError(
            f"--tokenizer {named}: not the checkpoint's own ({differ or len(vocabulary) - len(own):,} of {len(own):,} "
            "tokens have other ids); leave it out"
        )


def check_most(model: AdaPonderForCausalLM, max_iterations: int | None) -> None:
    """Refuses more iterations than the model has, before it is run."""
    most = model.config.iterations
    if max_iterations is not None and not 1 <= max_iterations <= most:
        raise InputError(f"--max-iterations {max_iterations}: from 1 to {most}, the model's iterations")


def choose_policy(
    folder: Path,
    *,
    policy: Policy | None = None,
    tau: float | None = None,
    profile: str | None = None,
    side: str = "",
) -> Policy | None:
    """The policy that the options ask for; ``None`` leaves it to the method. Errors say ``--policy{side}``."""
    options = {"policy": policy, "tau": tau, "profile": profile}
    given = [f"--{name}{side}" for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} both say who halts: give one")
    if profile is not None:
        from adaponder.evaluation.lab.profiles import policy_of

        return policy_of(folder, profile, option=f"--profile{side}")
    return LearnedGate(tau) if tau is not None else policy
