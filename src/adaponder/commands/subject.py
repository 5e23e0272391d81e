"""What evaluation commands begin with: opening a checkpoint and its tokenizer, and choosing the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from adaponder.checkpoints.loading import has_tokenizer, tokenizer_of
from adaponder.checkpoints.shipped import data_of
from adaponder.commands.options.shared import CheckpointOptions, DepthOptions, WindowOptions
from adaponder.conversion.open import load
from adaponder.data.tokenizers import load_tokenizer as read_tokenizer
from adaponder.errors import InputError
from adaponder.evaluation.scoring import ScoringOptions, default_length
from adaponder.evaluation.text import Text, Vocabulary, Windows, open_text, open_vocabulary
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import LearnedGate, Policy
from adaponder.terminal import console


class Subject(NamedTuple):
    """A checkpoint that is evaluated: its name on the command line, its model, its folder and its vocabulary."""

    name: str
    model: AdaPonderForCausalLM
    folder: Path
    vocabulary: Vocabulary

    def text(self, data: str, options: WindowOptions) -> Text:
        """The part of ``data`` that the options name, as the checkpoint's tokens; ``sample`` is a shipped text."""
        data = data_of(data)
        with console.status(f"reading {data} …"):
            return open_text(data, self.vocabulary, whose=self.name, split=options.split, max_tokens=options.max_tokens)

    def windows(self, options: WindowOptions) -> Windows:
        """The windows that the options describe; without ``options.window``, of :func:`default_length`."""
        length = default_length(self.model) if options.window is None else options.window
        return Windows(length, options.stride, options.across_documents)

    def scoring(
        self, options: DepthOptions, *, execution: str | None = None, seed: int = 0, side: str = ""
    ) -> ScoringOptions:
        """How to score, with the policy of :func:`choose_policy`; raises if the model cannot run that policy."""
        chosen = choose_policy(self.model, self.folder, options, side=side)
        self.model.check_policy(chosen)  # before a text is read
        return ScoringOptions(policy=chosen, max_iterations=options.max_iterations, execution=execution, seed=seed)


def open_subject(options: CheckpointOptions, *, weights: str | None = None) -> Subject:
    """The checkpoint that the options name, on its device and in its precision, with its tokenizer.

    ``weights`` makes them narrower, as ``--weights`` says.
    """
    checkpoint, tokenizer = options.checkpoint, options.tokenizer
    with console.status(f"loading {checkpoint} …"):
        model, folder = load(checkpoint, dtype=options.dtype, device=options.device, weights=weights)
        vocabulary = open_vocabulary(tokenizer or str(folder))
        refuse_other_tokenizer(model, folder, tokenizer, vocabulary.tokenizer.get_vocab())
        return Subject(checkpoint, model, folder, vocabulary)


def open_tokenizer(model: AdaPonderForCausalLM, folder: Path, named: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer of the checkpoint in ``folder``, or the ``named`` one (folder, hub name, ``tokenizer.json``)."""
    name = named or str(folder)
    if Path(name).is_file():
        backend, end = read_tokenizer(name)
        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=backend.id_to_token(end))
    else:
        tokenizer = tokenizer_of(name)
    refuse_other_tokenizer(model, folder, named, tokenizer.get_vocab())
    return tokenizer


def refuse_other_tokenizer(
    model: AdaPonderForCausalLM, folder: Path, named: str | None, vocabulary: dict[str, int]
) -> None:
    """Raises if ``vocabulary`` has ids that the model lacks, or differs from the checkpoint's own tokenizer."""
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


def choose_policy(model: AdaPonderForCausalLM, folder: Path, options: DepthOptions, *, side: str = "") -> Policy | None:
    """The policy of ``--policy``, ``--tau`` or ``--profile``; ``None`` if there is none of them: the method's own.

    Raises if there are two, or if ``--max-iterations`` is not from 1 to the model's. Errors call the options
    ``--policy{side}`` and so on, for commands that have them twice.
    """
    most = model.config.iterations
    if options.max_iterations is not None and not 1 <= options.max_iterations <= most:
        raise InputError(f"--max-iterations{side} {options.max_iterations}: from 1 to {most}, the model's iterations")
    ways = {"policy": options.policy, "tau": options.tau, "profile": options.profile}
    named = [f"--{name}{side}" for name, value in ways.items() if value is not None]
    if len(named) > 1:
        raise InputError(f"{' and '.join(named)} both say who halts: give one")
    if options.profile is not None:
        from adaponder.evaluation.lab.profiles import load_profile

        return load_profile(folder, options.profile, option=f"--profile{side}")
    return LearnedGate(options.tau) if options.tau is not None else options.policy
