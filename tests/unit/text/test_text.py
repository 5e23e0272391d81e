"""Text comes in whole characters, equals the decoded tokens, and ends before a stop string however it was cut."""

from __future__ import annotations

import random
from functools import cache

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from adaponder.data.tokenizers import END, train_bpe
from adaponder.errors import InputError
from adaponder.text import Detokenizer, StopStrings, TextStream, pieces

TEXT = "naïve 日本語 tokens — 🙂🙃 done. Ça va? 'tis  two  spaces\nand a line\n\n" * 3


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE, of which most characters beyond ASCII take several tokens."""
    return PreTrainedTokenizerFast(tokenizer_object=train_bpe(300, ["and a line of two tokens " * 9]), eos_token=END)


@cache
def fallback() -> PreTrainedTokenizerFast:
    """Words that begin with their space, lost at the beginning of a text, and bytes for what has no token: as Llama."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzN.?', ", "▁a", "▁t", "in", "an", ""]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary = {"<unk>": 256, **vocabulary} | {letter: 257 + at for at, letter in enumerate(letters)}
    merges = [("▁", "a"), ("▁", "t"), ("i", "n"), ("a", "n")]
    backend = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZERS = pytest.mark.parametrize("tokenizer", [byte_level, fallback], ids=["byte-level", "fallback"])


def decoded(tokenizer, ids) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@TOKENIZERS
def test_pieces_join_to_the_text_and_show_no_half_character(tokenizer):
    ids = tokenizer()(TEXT).input_ids
    found = pieces(tokenizer(), ids)
    assert found.count("") > 20, "characters of several tokens are what this is about"
    assert "".join(found) == TEXT
    assert len(found) == len(ids)
    assert not any("\ufffd" in piece for piece in found)


@TOKENIZERS
def test_a_prompt_is_context_and_no_text(tokenizer):
    """Wherever the prompt ends, also within a character, what comes after it is the rest of the text."""
    for text in (TEXT, "é日本" * 9):
        ids = tokenizer()(text).input_ids
        texts = pieces(tokenizer(), ids)
        for cut in range(len(ids)):
            before = "".join(texts[:cut])
            decoder = Detokenizer(tokenizer(), ids[:cut])
            after = "".join(decoder.add(token) for token in ids[cut : cut + 12])
            assert text.startswith(before + after), cut
            assert cut + 12 < len(ids) or before + after == text


@TOKENIZERS
def test_what_a_prompt_ends_with_is_not_said_again(tokenizer):
    """A sign that stands for bytes that are no text may be the prompt's own, or stay what it is."""
    x = tokenizer()("x").input_ids
    for prompt in (tokenizer()("a \ufffd").input_ids, tokenizer()("a 日").input_ids[:-1]):
        decoder = Detokenizer(tokenizer(), prompt)
        assert "".join(decoder.add(token) for token in x).lstrip() == "x"


def test_a_token_without_text_changes_nothing_around_it():
    tokenizer = fallback()
    empty, ids = tokenizer.convert_tokens_to_ids(""), tokenizer("and a line").input_ids
    assert "".join(pieces(tokenizer, [part for token in ids for part in (empty, token, empty)])) == "and a line"


def test_of_any_bytes_the_pieces_join_to_what_all_tokens_decode_to():
    """Random tokens, with bytes that are no text among them: alone, in long runs, and between words."""
    tokenizer, draw = byte_level(), random.Random(0)
    lone = [number for number in range(300) if "\ufffd" in tokenizer.decode([number])]
    assert len(lone) > 100
    parts = tokenizer("日🙂é").input_ids  # bytes that begin characters, and seldom finish them
    for trial in range(300):
        among = (lone, [*range(1, 300), *lone], parts)[trial % 3]
        ids = [draw.choice(among) for _ in range(draw.randrange(1, 60))]
        assert "".join(pieces(tokenizer, ids)) == decoded(tokenizer, ids), ids


def test_bytes_that_are_no_text_do_not_disturb_the_text_around_them():
    tokenizer = fallback()
    byte, a = (lambda value: value), tokenizer.convert_tokens_to_ids("a")
    found = pieces(tokenizer, [a, *"日".encode(), byte(0xE6), a, *"本".encode(), a])
    assert found == ["a", "", "", "日", "", "\ufffda", "", "", "本", "a"]


class Counting:
    """A tokenizer that counts the tokens it is asked to decode."""

    def __init__(self, inner):
        self.inner, self.decoded = inner, 0

    def decode(self, ids, **options):
        self.decoded += len(ids)
        return self.inner.decode(ids, **options)


@pytest.mark.parametrize("kind", ["text", "bytes", "nothing"])
def test_each_token_costs_the_same_however_long_the_text_is(kind):
    tokenizer = byte_level()
    continuation = next(number for number in range(300) if tokenizer.decode([number]) == "\ufffd")
    if kind == "nothing":
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"": 0, "b": 1}, [])))
        continuation = 0
    ids = byte_level()(TEXT * 3).input_ids if kind == "text" else [continuation] * 1500
    counting = Counting(tokenizer)
    pieces(counting, ids)
    assert counting.decoded < 40 * len(ids)


def cut_anyhow(text: str, draw: random.Random) -> list[str]:
    cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(0, 6)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def by_hand(text: str, strings: list[str], include: bool) -> tuple[str, str | None]:
    """The text character by character: the first end of a stop string, the longest one there."""
    for end in range(1, len(text) + 1):
        ending = [string for string in strings if text[:end].endswith(string)]
        if ending:
            string = max(ending, key=len)
            return text[: end if include else end - len(string)], string
    return text, None


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_however_it_is_cut(include):
    draw, stopped = random.Random(1), 0
    for _ in range(2000):
        text = "".join(draw.choices("aab\n", k=draw.randrange(0, 12)))
        strings = ["".join(draw.choices("ab\n", k=draw.randrange(1, 5))) for _ in range(draw.randrange(0, 4))]
        stops, shown, found = StopStrings(strings, include=include), "", None
        for piece in cut_anyhow(text, draw):
            checked = stops.add(piece)
            shown += checked.text
            assert by_hand(text, strings, include)[0].startswith(shown), "what was shown stays"
            if (found := checked.stop) is not None:
                break
        else:
            shown += stops.flush()
        assert (shown, found) == by_hand(text, strings, include), (text, strings)
        stopped += found is not None
    assert 200 < stopped < 1900


def test_only_what_may_be_a_beginning_is_held_back():
    stops = StopStrings(["END", "\n\n"])
    assert [stops.add(piece).text for piece in ("one E", "N", "ough\n", "two")] == ["one ", "", "ENough", "\ntwo"]
    assert stops.add("\nEN\n\n") == ("\nEN", "\n\n")


@pytest.mark.parametrize(
    "wrong", ["text", [""], [5], ["x" * 1001], ["x"] * 65], ids=["str", "empty", "5", "long", "many"]
)
def test_stop_strings_that_are_none_are_refused_by_name(wrong):
    with pytest.raises(InputError, match="stop="):
        StopStrings(wrong)


@TOKENIZERS
def test_a_stream_gives_each_token_its_text_and_ends_before_the_stop(tokenizer):
    ids = tokenizer()("naïve 日本語 tokens and a line").input_ids
    stream = TextStream(tokenizer(), stops=["語 tok", "line"])
    shown = []
    for number, token in enumerate(ids):
        shown += stream.add(token)
        assert all(piece.token <= number for piece in shown)
        if stream.stop:
            break
    assert number < len(ids) - 1
    assert not stream.add(ids[0])
    assert not stream.finish()
    assert "".join(piece.text for piece in shown) == "naïve 日本"
    assert stream.stop == "語 tok"
    assert [piece.token for piece in shown] == sorted({piece.token for piece in shown})


def test_the_rest_is_shown_at_the_end_and_silent_ids_never():
    tokenizer = byte_level()
    ids = tokenizer("two to").input_ids
    stream = TextStream(tokenizer, stops=["token"], silent=[0])
    held_back = "".join(piece.text for token in [*ids, 0] for piece in stream.add(token))
    assert held_back == "two "
    assert held_back + "".join(piece.text for piece in stream.finish()) == "two to"
    half = tokenizer("日").input_ids[:-1]
    stream = TextStream(tokenizer, stops=["\ufffd"])
    assert [stream.add(token) for token in half] == [[]] * len(half)
    assert stream.finish() == []
    assert stream.stop == "\ufffd"
