"""Holds the served model with its tokenizer and profiles, and describes it for ``/v1/models``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from adaponder.backbones.shape import shape_of
from adaponder.errors import CheckpointError
from adaponder.evaluation.lab import profiles as stored_profiles
from adaponder.files import read_json
from adaponder.inference.config import eos_ids, max_tokens
from adaponder.methods.cost import parameters_of
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import LearnedGate
from adaponder.policies.base import registered_policies
from adaponder.text import TokenSpeller, has_template
from adaponder.text.spelling import unknown_id

# File beside the weights with the texts that the page offers.
EXAMPLES = "examples.json"


class Served:
    """The served model, its tokenizer and its profiles.

    Args:
        folder: the checkpoint's folder, which may hold profiles and example texts; ``None``: the model has neither.
        name: the value of ``model`` in requests.
        tokens: maximum number of positions of a sequence: prompt plus completion, without the last token, which is not
            read; ``None``: all positions of the backbone.
    """

    def __init__(
        self,
        model: AdaPonderForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path | None = None,
        *,
        name: str = "adaponder",
        tokens: int | None = None,
    ):
        tokenizer("a")  # the first call sets defaults, which must not happen in two threads
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self.profiles: Mapping[str, Mapping[str, Any]] = {} if folder is None else stored_profiles.stored(folder)
        self.examples = None if folder is None else examples_of(folder)
        self.tokens = max_tokens(model, tokens)
        self.iterations: int = model.config.iterations
        self.vocabulary: int = model.config.vocab_size
        self.created = int(time.time())
        self.shape = shape_of(model.config)
        self.eos_ids = eos_ids(model)
        self.spell = TokenSpeller(tokenizer)
        end_id: Any = tokenizer.eos_token_id
        backend = getattr(tokenizer, "backend_tokenizer", None)  # a slow tokenizer has none
        self.unknown_id = None if backend is None else unknown_id(backend, end_id)
        self.template = has_template(tokenizer)

    def facts(self) -> dict[str, Any]:
        """Returns the facts about the model that ``/v1/models`` lists under ``adaponder``."""
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
            "unknown": self.unknown_id,
            "examples": self.examples,
            "profiles": [
                {"name": name} | {field: profile.get(field) for field in ("policy", "budget", "depth")}
                for name, profile in self.profiles.items()
            ],
        }


def examples_of(folder: Path) -> dict[str, Any] | None:
    """Returns the content of a checkpoint's ``examples.json``, with texts that the page offers; ``None`` if absent.

    The form is ``{"about": "A puzzle: ...", "answers": "hops", "examples": [{"name": "New puzzle", "texts": [...]}]}``.
    The page shows ``about`` above the text and, if ``answers`` is given, checks the model's answers to puzzles of that
    kind. Raises :class:`CheckpointError` if the file has another form.
    """
    path = folder / EXAMPLES
    if not path.is_file():
        return None
    about, answers, listed = map(read_json(path).get, ("about", "answers", "examples"))
    if not listed or not isinstance(listed, list) or not all(map(_is_example, listed)):
        raise CheckpointError(f'{path} must hold {{"examples": [{{"name": …, "texts": […]}}]}}; correct or remove it')
    if not isinstance(about, str | None):
        raise CheckpointError(f"{path}: about must be a text; correct or remove it")
    if answers not in (None, "hops"):
        raise CheckpointError(f'{path}: answers={answers!r} must be "hops" or absent')
    return {"about": about, "answers": answers, "examples": listed}


def _is_example(entry: Any) -> bool:
    """Returns whether an entry has a name and at least one text, none of them empty."""
    if not isinstance(entry, dict) or not isinstance(entry.get("texts"), list) or not entry["texts"]:
        return False
    return all(isinstance(text, str) and text for text in (entry.get("name"), *entry["texts"]))
