"""Scores after an edit of a text equal those of a text never seen before, and unchanged tokens are written once."""

from __future__ import annotations

import json

import pytest

from adaponder.evaluation.token_scores import Reading
from adaponder.policies import LearnedGate
from adaponder.serving import scores
from adaponder.serving.scores import ScoreWriter
from serving_support import tiny_served

TEXT = [7, 3, 9, 4, 4, 8, 2, 6, 5, 1, 7, 7]
GATES = {"gates": True, "top": 0, "full_depth": False}
OPTIONS = (
    {"gates": False, "top": 0, "full_depth": False},
    {"gates": True, "top": 2, "full_depth": True},
    {"gates": True, "top": 3, "full_depth": False},
)


def scored(writer: ScoreWriter, ids: list[int], *, top: int, **options) -> dict:
    """Returns the numbers and texts of an answer by path, without seconds and cached tokens."""
    parts = writer(ids, Reading(LearnedGate(0.4), top=top), **options)
    while True:
        try:
            next(parts)
        except StopIteration as end:
            answer = json.loads(end.value)
            break
    answer.pop("seconds")
    answer["usage"].pop("cached_tokens")
    return flat(answer)


def flat(value) -> dict:
    if isinstance(value, dict):
        return {f"{key}.{path}": leaf for key, item in value.items() for path, leaf in flat(item).items()}
    if isinstance(value, list):
        return flat({str(number): item for number, item in enumerate(value)})
    return {"": value}


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "full depth", "top"])
def test_scores_after_edits_equal_those_of_a_new_text(monkeypatch, options):
    monkeypatch.setattr(scores, "_PART", 5)
    served = tiny_served()
    edited = ScoreWriter(served)
    for end in ([], [3], [3, 5], [5, 1, 2], []):
        expected = scored(ScoreWriter(served), TEXT + end, **options)
        assert scored(edited, TEXT + end, **options) == pytest.approx(expected, abs=1e-12)


def test_unchanged_tokens_are_written_once(monkeypatch):
    written = []
    plain = scores._json
    monkeypatch.setattr(scores, "_json", lambda value: written.append(value) or plain(value))
    writer = ScoreWriter(tiny_served())
    scored(writer, TEXT, **GATES)
    first = len(written)
    scored(writer, [*TEXT, 5], **GATES)
    assert len(written) - first == 4  # the frame, the new token, and the token before it, which has a next token now
    assert first == 2 * len(TEXT)
