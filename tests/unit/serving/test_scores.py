"""What ``/score`` answers after edits is what it answers when it sees a text for the first time."""

from __future__ import annotations

import json

import pytest

from adaponder.evaluation.token_scores import Reading
from adaponder.policies import LearnedGate
from adaponder.serving import scores
from adaponder.serving.scores import ScoreWriter
from serving_support import tiny_served

WAYS = (
    {"gates": False, "top": 0, "full_depth": False},
    {"gates": True, "top": 0, "full_depth": False},
    {"gates": True, "top": 2, "full_depth": True},
    {"gates": True, "top": 3, "full_depth": False},
)


def answer(writer: ScoreWriter, ids: list[int], *, top: int, **how) -> dict:
    parts = writer(ids, Reading(LearnedGate(0.4), top=top), **how)
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return json.loads(end.value)


def same(told: dict, expected: dict) -> None:
    """Equal but for rounding, and for what is known of the past and of time."""
    for one in (told, expected):
        one.pop("seconds")
        one["usage"].pop("cached_tokens")
    assert [token.keys() for token in told["tokens"]] == [token.keys() for token in expected["tokens"]]
    assert flat(told) == pytest.approx(flat(expected), abs=1e-12)


def flat(value) -> dict:
    """Every number and text of an answer by its place."""
    if isinstance(value, dict):
        return {f"{key}.{place}": one for key, part in value.items() for place, one in flat(part).items()}
    if isinstance(value, list):
        return flat({str(number): part for number, part in enumerate(value)})
    return {"": value}


def test_answers_after_edits_are_those_of_a_text_never_seen(monkeypatch):
    monkeypatch.setattr(scores, "_PART", 5)
    served = tiny_served()
    edited, text = ScoreWriter(served), [7, 3, 9, 4, 4, 8, 2, 6, 5, 1, 7, 7]
    for end in ([], [3], [3, 5], [5], [5, 1, 2], [], [1]):
        for way in WAYS:
            same(answer(edited, text + end, **way), answer(ScoreWriter(served), text + end, **way))


def test_what_a_row_said_is_written_once(monkeypatch):
    written = []
    plain = scores._json
    monkeypatch.setattr(scores, "_json", lambda value: written.append(value) or plain(value))
    edited, text, way = ScoreWriter(tiny_served()), [7, 3, 9, 4, 4, 8, 2, 6, 5, 1, 7, 7], WAYS[1]
    answer(edited, text, **way)
    first = len(written)
    answer(edited, [*text, 5], **way)
    assert len(written) - first == 4  # the frame, the row, and the row before it, which is followed by something
    assert first == 2 * len(text)
