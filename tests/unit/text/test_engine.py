"""Tests a text engine over a scripted engine: stop strings end a sample; each token keeps its text and depth."""

import pytest

from adaponder.errors import InputError
from adaponder.inference.outputs import Completion, Event, Token
from adaponder.text.engine import TextEngine
from word_support import small_tokenizer


class ScriptedEngine:
    """Generates the given texts, one for each sample, one token per step, with depths 1, 2, 3, 1 …"""

    eos_ids = frozenset({0})

    def __init__(self, *texts: str):
        self.ids = [small_tokenizer()(text).input_ids for text in texts]
        self.completions: list[Completion] = []
        self.cancelled: list[tuple[int, int | None]] = []

    def submit(self, request):
        prompt = list(request.prompt)
        depths = [3] * len(prompt)
        self.completions = [
            Completion(request, sample, prompt, prompt_depths=depths) for sample in range(request.samples)
        ]
        return 0

    def cancel(self, number, sample=None):
        self.cancelled.append((number, sample))

    def step(self):
        for completion, ids in zip(self.completions, self.ids, strict=False):
            count = len(completion.tokens)
            if completion.finish_reason is not None:
                continue
            if {(0, None), (0, completion.sample)} & set(self.cancelled):
                completion.finish_reason = "cancelled"
            elif count == len(ids):
                completion.finish_reason = "length"
            else:
                completion.tokens.append(Token(ids[count], depth=count % 3 + 1))
                yield Event(0, completion.sample, completion.tokens[-1])
                continue
            yield Event(0, completion.sample, completion=completion)


def generate(*texts: str, steps: int = 10**6, prompt="a", **settings):
    """Returns the scripted engine, the samples and the events; cancels after some steps."""
    scripted = ScriptedEngine(*texts)
    engine, events = TextEngine(scripted, small_tokenizer()), []
    writings = engine.submit(prompt, **settings)
    while engine.busy:
        if not steps:
            engine.cancel_all()
        events += engine.step()
        steps -= 1
    return scripted, writings, events


def test_stop_string_ends_the_text_and_cancels_the_request():
    scripted, (writing,), events = generate("one two three four", prompt="ab", stops=["two t", "four"])
    assert writing.text == "".join(piece.text for event in events for piece in event.pieces) == "one "
    assert (writing.finish_reason, writing.stream.stop) == ("stop", "two t")
    assert scripted.cancelled == [(0, 0)]
    assert len(writing.tokens) == len(writing.pieces) == len("one two t")
    assert writing.depths == [3, 3, *[2, 3, 1, 2, 3, 1, 2, 3], 0]
    assert [event.done for event in events].count(True) == 1


def test_each_sample_has_its_own_end():
    texts = ("one stop and more", "two", "three stops")
    scripted, writings, _ = generate(*texts, prompt=[1, 2], stops=["stop"], samples=3)
    assert [writing.text for writing in writings] == ["one ", "two", "three "]
    assert [writing.finish_reason for writing in writings] == ["stop", "length", "stop"]
    assert scripted.cancelled == [(0, 0), (0, 2)]
    assert len(scripted.completions[0].tokens) == len("one stop"), "it generates no more while the others go on"


def test_cancelling_keeps_the_text_and_end_of_text_ids_have_none():
    _, (writing,), _ = generate("on<|endoftext|>e two", steps=4)
    assert (writing.text, writing.finish_reason) == ("one", "cancelled")
    assert writing.pieces == ["o", "n", "", "e"]


def test_empty_prompts_and_stop_strings_are_refused():
    for field, arguments in (("prompt", {"prompt": ""}), ("stop=''", {"stops": [""]})):
        with pytest.raises(InputError, match=field):
            generate("one", **arguments)
