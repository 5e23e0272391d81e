"""Measures accuracy and depth of a checkpoint on puzzle questions, by a question's number of hops or tree height."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from adaponder.analysis.tables import spearman
from adaponder.data.puzzles import SYMBOLS, needed
from adaponder.data.tokenizers import load_tokenizer, tokenizer_hash
from adaponder.errors import InputError
from adaponder.evaluation.scoring import at_depth, check_fits
from adaponder.evaluation.text import Text, Windows
from adaponder.modeling import AdaPonderForCausalLM


class Demand(NamedTuple):
    """Accuracy and depth on puzzle questions, grouped by ``needs``, a question's number of hops or tree height.

    The last answer of a hops document is left out: it follows by elimination, and one iteration mostly predicts it.

    Attributes:
        questions: number of questions in each group.
        at_depth: for each fixed depth 1 … K, the share of right answers in each group.
        accuracy: share of right answers in each group, under the model's own policy.
        depth: mean depth, in each group and under that policy, of the tokens that predict the answers.
        by_depth: for each group, how many of these tokens have depth 1, 2, … K.
        rho: Spearman's correlation, over all questions, between the number of hops or tree height and the depth of the
            token that predicts the answer; ``None`` if either is constant.
    """

    needs: list[int]
    questions: list[int]
    at_depth: dict[int, list[float]]
    accuracy: list[float]
    depth: list[float]
    by_depth: list[list[int]]
    rho: float | None

    def least_depth(self, share: float = 0.95) -> list[int | None]:
        """Returns for each group the smallest fixed depth at which at least ``share`` of the answers are right.

        ``None`` for groups that reach this share at no depth.
        """
        return [
            next((depth for depth, shares in sorted(self.at_depth.items()) if shares[index] >= share), None)
            for index in range(len(self.needs))
        ]

    def as_dict(self) -> dict[str, Any]:
        return self._asdict() | {"at_depth": {str(depth): shares for depth, shares in self.at_depth.items()}}


def measure_demand(model: AdaPonderForCausalLM, text: Text, *, batch_size: int = 32) -> Demand:
    """Scores each document of ``text`` alone, from its first token, at depths 1 … K and by the model's own policy.

    Raises unless the text consists of ``hops`` or ``mano`` puzzles in tokens of the tokenizer ``symbols``. For a method
    that never halts, the depth by the model's own policy is K.
    """
    if text.vocabulary.hash != tokenizer_hash(load_tokenizer(SYMBOLS)[0]):
        raise InputError(f"the text is not in tokens of {SYMBOLS}: needed depths are known for hops and mano alone")
    longest = int(text.lengths.max())
    check_fits(model, text, Windows(max(1, longest - 1)))
    iterations = model.config.iterations
    need, right, depth = _answers(model, text, batch_size, {})
    needs = np.unique(need)
    groups = [need == value for value in needs]

    def shares(values: np.ndarray) -> list[float]:
        return [float(values[group].mean()) for group in groups]

    return Demand(
        needs=needs.tolist(),
        questions=[int(group.sum()) for group in groups],
        at_depth={
            fixed: shares(_answers(model, text, batch_size, at_depth(model, fixed))[1])
            for fixed in range(1, iterations + 1)
        },
        accuracy=shares(right),
        depth=shares(depth),
        by_depth=[np.bincount(depth[group], minlength=iterations + 1)[1:].tolist() for group in groups],
        rho=spearman(need, depth),
    )


@torch.inference_mode()
def _answers(model: AdaPonderForCausalLM, text: Text, batch_size: int, arguments: dict[str, Any]) -> list[np.ndarray]:
    """Returns three arrays with an entry per question; raises if there are no questions.

    The arrays are the number of hops or tree height, whether the model's answer is right, and the depth of the token
    that predicts the answer.
    """
    batches = []
    training = model.training
    model.eval()
    try:
        for tokens in _batches(text, batch_size):
            ids = torch.from_numpy(tokens).to(model.device)
            output = model(ids[:, :-1], **arguments)
            right = (output.logits.argmax(-1) == ids[:, 1:]).cpu().numpy()
            need = np.stack([needed(row) for row in tokens])[:, 1:]
            batches.append([values[need > 0] for values in (need, right, output.depth.cpu().numpy())])
    finally:
        model.train(training)
    answers = [np.concatenate(values) for values in zip(*batches, strict=True)]
    if not answers or not len(answers[0]):
        raise InputError("the text asks nothing that needs depth; use hops (two questions a document or more) or mano")
    return answers


def _batches(text: Text, size: int) -> Iterator[np.ndarray]:
    """Yields batches of documents of equal length, ``int64[documents, length]``; skips documents of one token."""
    tokens = text.stream[1:]
    lengths = text.lengths
    for length in np.unique(lengths[lengths > 1]).tolist():
        starts = text.starts[lengths == length]
        for first in range(0, len(starts), size):
            yield tokens[starts[first : first + size, None] + np.arange(length)]
