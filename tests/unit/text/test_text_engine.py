"""Prompts become text over an engine of ids: stop strings end a request, and each token keeps its text and depth."""

from __future__ import annotations

import pytest

from adaponder.errors import InputError
from adaponder.inference.outputs import Completion, Event, Token
from adaponder.text.engine import TextEngine
from word_support import small_tokenizer


class ScriptedEngine:
    """An engine that says what it is told, one token of each sample per step, each of depth 1, 2, 3, 1 …"""

    eos_ids = frozenset({0})

    def __init__(self, *texts: str):
        self.ids = [small_tokenizer()(text).input_ids for text in texts]
        self.running: dict[int, list[Completion]] = {}
        self.cancelled: list[tuple[int, int | None]] = []

    def submit(self, request):
        number = len(self.running)
        prompt = list(request.prompt)
        self.running[number] = [
            Completion(request, sample, prompt, prompt_depths=[3] * len(prompt)) for sample in range(request.samples)
        ]
        return number

    def cancel(self, number, sample=None):
        self.cancelled.append((number, sample))

    def step(self):
        events = []
        for number, completions in self.running.items():
            for completion, ids in zip(completions, self.ids, strict=False):
                if completion.finish_reason is not None:
                    continue
                made = len(completion.tokens)
                if {(number, None), (number, completion.sample)} & set(self.cancelled):
                    completion.finish_reason = "cancelled"
                elif made == len(ids):
                    completion.finish_reason = "length"
                else:
                    completion.tokens.append(Token(ids[made], depth=made % 3 + 1))
                    events.append(Event(number, completion.sample, completion.tokens[-1]))
                    continue
                events.append(Event(number, completion.sample, completion=completion))
        return events


def finished(engine: TextEngine) -> list:
    events = []
    while engine.busy:
        events += engine.step()
    return events


def test_a_stop_string_ends_the_text_and_cancels_the_request():
    scripted = ScriptedEngine("one two three four")
    engine = TextEngine(scripted, small_tokenizer())
    (writing,) = engine.submit("ab", stops=["two t", "four"])
    events = finished(engine)
    assert writing.text == "".join(piece.text for event in events for piece in event.pieces) == "one "
    assert (writing.finish_reason, writing.stream.stop) == ("stop", "two t")
    assert scripted.cancelled == [(0, 0)]
    assert len(writing.tokens) == len(writing.pieces) == len("one two t")
    assert writing.depths == [3, 3, *[2, 3, 1, 2, 3, 1, 2, 3], 0]
    assert [event.done for event in events].count(True) == 1


def test_of_several_samples_each_has_its_own_end():
    scripted = ScriptedEngine("one stop and more", "two", "three stops")
    engine = TextEngine(scripted, small_tokenizer())
    writings = engine.submit([1, 2], stops=["stop"], samples=3)
    finished(engine)
    assert [writing.text for writing in writings] == ["one ", "two", "three "]
    assert [writing.finish_reason for writing in writings] == ["stop", "length", "stop"]
    assert scripted.cancelled == [(0, 0), (0, 2)]
    assert len(scripted.running[0][0].tokens) == len("one stop"), "it says no more while the others go on"


def test_what_was_held_back_is_text_if_the_end_comes_first():
    scripted = ScriptedEngine("one st")
    engine = TextEngine(scripted, small_tokenizer())
    (writing,) = engine.submit("a", stops=["stop"])
    finished(engine)
    assert (writing.text, writing.finish_reason) == ("one st", "length")
    assert "".join(writing.pieces[-2:]) == "st"


def test_cancelling_keeps_what_there_is_and_ending_ids_have_no_text():
    scripted = ScriptedEngine("one two")
    scripted.ids[0].insert(2, 0)
    engine = TextEngine(scripted, small_tokenizer())
    (writing,) = engine.submit("a")
    for _ in range(4):
        engine.step()
    engine.cancel_all()
    finished(engine)
    assert (writing.text, writing.finish_reason) == ("one", "cancelled")
    assert writing.pieces == ["o", "n", "", "e"]


def test_nothing_is_no_prompt_and_stop_strings_are_checked_first():
    engine = TextEngine(ScriptedEngine(), small_tokenizer())
    with pytest.raises(InputError, match="prompt"):
        engine.submit("")
    with pytest.raises(InputError, match="stop=''"):
        engine.submit("a", stops=[""])
    assert not engine.busy
