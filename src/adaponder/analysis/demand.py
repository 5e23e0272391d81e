"""Does depth follow need? Accuracy and depth of a checkpoint on puzzles, grouped by the depth that a question needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from adaponder.analysis.tables import spearman
from adaponder.data.puzzles import SYMBOLS, needed
from adaponder.data.tokenizers import load_tokenizer, tokenizer_hash
from adaponder.errors import InputError
from adaponder.evaluation.scoring import check_fits
from adaponder.evaluation.text import Text, Windows
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import FixedDepth


class Demand(NamedTuple):
    """Entries are per need, in the order of ``needs``: the hops of a question, or the height of its tree.

    Answers that are forced (the last of a document of hops) are left out: a model that reads once tells most of them.

    Attributes:
        questions: how many ask for each need.
        at_depth: share answered rightly, by the depth that every token was given, from 1 to K.
        accuracy: share answered rightly at the checkpoint's own depths.
        depth: mean depth, under its own policy, of the token that answers.
        by_depth: how many of those tokens have depth 1, 2, … K.
        rho: Spearman's correlation of need and own depth over questions; ``None`` where all have the same depth.
    """

    needs: list[int]
    questions: list[int]
    at_depth: dict[int, list[float]]
    accuracy: list[float]
    depth: list[float]
    by_depth: list[list[int]]
    rho: float | None

    def least_depth(self, share: float = 0.95) -> list[int | None]:
        """For each need the least depth for all tokens at which ``share`` of its questions are answered rightly."""
        return [
            next((depth for depth, found in sorted(self.at_depth.items()) if found[index] >= share), None)
            for index in range(len(self.needs))
        ]

    def as_dict(self) -> dict[str, Any]:
        return self._asdict() | {"at_depth": {str(depth): found for depth, found in self.at_depth.items()}}


class _Answers(NamedTuple):
    """Of each question: what it needs, whether the model's likeliest token is the text's, and the depth of that."""

    needed: np.ndarray
    right: np.ndarray
    depth: np.ndarray


def measure_demand(model: AdaPonderForCausalLM, text: Text, *, batch_size: int = 32) -> Demand:
    """Reads each document of ``text`` alone, from its first token, at depths 1 to K and by the model's own policy.

    A text made of ``hops`` or ``mano`` in tokens of ``symbols`` is needed. A method that never halts has K as its own.
    """
    if text.vocabulary.hash != tokenizer_hash(load_tokenizer(SYMBOLS)[0]):
        raise InputError(f"the text is not in tokens of {SYMBOLS}: needed depths are known for hops and mano alone")
    if batch_size < 1:
        raise InputError(f"batch_size={batch_size}: at least 1")
    longest = int(np.diff(text.starts, append=text.predictions).max())
    check_fits(model, text, Windows(max(1, longest - 1)))
    depths = range(1, model.config.iterations + 1)
    own = _answers(model, text, batch_size, {})
    fixed = {depth: _answers(model, text, batch_size, at_depth(model, depth)) for depth in depths}
    needs = np.unique(own.needed)
    groups = [own.needed == need for need in needs]
    return Demand(
        needs=needs.tolist(),
        questions=[int(group.sum()) for group in groups],
        at_depth={depth: _means(found.right, groups) for depth, found in fixed.items()},
        accuracy=_means(own.right, groups),
        depth=_means(own.depth, groups),
        by_depth=[np.bincount(own.depth[group], minlength=len(depths) + 1)[1:].tolist() for group in groups],
        rho=spearman(own.needed, own.depth),
    )


def at_depth(model: AdaPonderForCausalLM, depth: int) -> dict[str, Any]:
    """Arguments of the model's ``forward`` by which every token has this depth."""
    return {"policy": FixedDepth(depth)} if model.method.halts else {"max_iterations": depth}


def _means(values: np.ndarray, groups: list[np.ndarray]) -> list[float]:
    return [float(values[group].mean()) for group in groups]


@torch.inference_mode()
def _answers(model: AdaPonderForCausalLM, text: Text, batch_size: int, arguments: dict[str, Any]) -> _Answers:
    parts: list[_Answers] = []
    training = model.training
    model.eval()
    try:
        for tokens in _batches(text, batch_size):
            ids = torch.from_numpy(tokens).to(model.device)
            output = model(ids[:, :-1], **arguments)
            right = (output.logits.argmax(-1) == ids[:, 1:]).cpu().numpy()
            need = np.stack([needed(row) for row in tokens])[:, 1:]
            asked = need > 0
            parts.append(_Answers(need[asked], right[asked], output.depth.cpu().numpy()[asked]))
    finally:
        model.train(training)
    if not parts:
        raise InputError("the text has no document of more than one token")
    found = _Answers(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    if not len(found.needed):
        raise InputError(
            "the text asks nothing that needs depth: hops or mano are wanted, and of hops two questions a document"
        )
    return found


def _batches(text: Text, size: int) -> Iterator[np.ndarray]:
    """Documents of equal length side by side, ``int64[documents, length]``; ones of a single token ask nothing."""
    tokens = text.stream[1:]
    lengths = np.diff(text.starts, append=text.predictions)
    for length in np.unique(lengths[lengths > 1]).tolist():
        starts = text.starts[lengths == length]
        for first in range(0, len(starts), size):
            yield tokens[starts[first : first + size, None] + np.arange(length)]
