"""Tests that text comes in whole characters, equals the decoded tokens, and ends before a stop string."""

import random
from functools import cache

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from adaponder.data.tokenizers import END, train_bpe
from adaponder.errors import EvaluationError, InputError
from adaponder.text import Detokenizer, TextStream, TokenSpeller, pieces

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
def test_a_prompt_is_context_and_no_text(tokenizer):
    """Wherever the prompt ends, also within a character, the rest of the text follows."""
    for text in (TEXT, "é日本" * 9):
        ids = tokenizer()(text).input_ids
        texts = pieces(tokenizer(), ids)
        assert texts.count("") > 10, "no character has several tokens"
        assert ("".join(texts), len(texts)) == (text, len(ids))
        assert not any("\ufffd" in piece for piece in texts)
        for cut in range(len(ids)):
            before = "".join(texts[:cut])
            decoder = Detokenizer(tokenizer(), ids[:cut])
            after = "".join(decoder.add(token) for token in ids[cut : cut + 12])
            assert text.startswith(before + after), cut
            assert cut + 12 < len(ids) or before + after == text


@TOKENIZERS
def test_the_end_of_a_prompt_is_not_repeated(tokenizer):
    """A sign that stands for bytes that are no text may be the prompt's own, or stay what it is."""
    x = tokenizer()("x").input_ids
    for prompt in (tokenizer()("a \ufffd").input_ids, tokenizer()("a 日").input_ids[:-1]):
        decoder = Detokenizer(tokenizer(), prompt)
        assert "".join(decoder.add(token) for token in x).lstrip() == "x"


def test_a_token_without_text():
    tokenizer = fallback()
    empty, ids = tokenizer.convert_tokens_to_ids(""), tokenizer("and a line").input_ids
    assert "".join(pieces(tokenizer, [part for token in ids for part in (empty, token, empty)])) == "and a line"


def test_pieces_of_random_tokens_join_to_their_decoded_text():
    """Random tokens, with bytes that are no text among them: alone, in long runs, and between words."""
    tokenizer, draw = byte_level(), random.Random(0)
    lone = [number for number in range(300) if "\ufffd" in tokenizer.decode([number])]
    assert len(lone) > 100
    parts = tokenizer("日🙂é").input_ids  # bytes that begin characters, and seldom finish them
    for trial in range(150):
        among = (lone, [*range(1, 300), *lone], parts)[trial % 3]
        ids = [draw.choice(among) for _ in range(draw.randrange(1, 60))]
        assert "".join(pieces(tokenizer, ids)) == decoded(tokenizer, ids), ids


def test_invalid_bytes_between_text():
    tokenizer = fallback()
    a = tokenizer.convert_tokens_to_ids("a")
    found = pieces(tokenizer, [a, *"日".encode(), 0xE6, a, *"本".encode(), a])  # ids below 256 are bytes
    assert found == ["a", "", "", "日", "", "\ufffda", "", "", "本", "a"]


class Counting:
    """A tokenizer that counts the tokens it is asked to decode."""

    def __init__(self, inner):
        self.inner, self.decoded = inner, 0

    def decode(self, ids, **options):
        self.decoded += len(ids)
        return self.inner.decode(ids, **options)


@pytest.mark.parametrize("kind", ["text", "bytes", "nothing"])
def test_cost_per_token_is_constant(kind):
    tokenizer = byte_level()
    continuation = next(number for number in range(300) if tokenizer.decode([number]) == "\ufffd")
    if kind == "nothing":
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"": 0, "b": 1}, [])))
        continuation = 0
    ids = byte_level()(TEXT * 3).input_ids if kind == "text" else [continuation] * 1500
    counting = Counting(tokenizer)
    pieces(counting, ids)
    assert counting.decoded < 40 * len(ids)


class Parts:
    """A tokenizer whose tokens are these texts."""

    def __init__(self, texts: list[str]):
        self.texts = texts

    def decode(self, ids, **options):
        return "".join(self.texts[number] for number in ids)


def by_hand(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text up to the first end of a stop string, and the longest stop string that ends there."""
    for end in range(1, len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_stop_string_ends_the_text_however_it_is_split():
    draw, stopped = random.Random(1), 0
    for _ in range(1000):
        text = "".join(draw.choices("aab\n", k=draw.randrange(0, 12)))
        stops = ["".join(draw.choices("ab\n", k=draw.randrange(1, 5))) for _ in range(draw.randrange(0, 4))]
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(0, 6)))
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        stream, shown = TextStream(Parts(parts), stops=stops), ""
        for number in range(len(parts)):
            shown += "".join(piece.text for piece in stream.add(number))
            assert by_hand(text, stops)[0].startswith(shown), "what was shown stays"
        shown += "".join(piece.text for piece in stream.finish())
        assert (shown, stream.stop) == by_hand(text, stops), (text, stops)
        stopped += stream.stop is not None
    assert 100 < stopped < 950


def test_only_a_possible_stop_string_is_held_back():
    parts = ["one E", "N", "ough\n", "two", "\nEN\n\n"]
    stream = TextStream(Parts(parts), stops=["END", "\n\n"])
    shown = [stream.add(number) for number in range(len(parts))]
    assert ["".join(piece.text for piece in new) for new in shown] == ["one ", "", "ENough", "\ntwo", "\nEN"]
    assert [piece.token for new in shown for piece in new] == [0, 0, 1, 2, 2, 3, 4]
    assert (stream.stop, stream.add(0), stream.finish()) == ("\n\n", [], [])


@pytest.mark.parametrize("stops", ["text", [""], [5], ["x" * 1001], ["x"] * 65], ids=lambda stops: repr(stops)[:9])
def test_invalid_stop_strings_are_refused(stops):
    with pytest.raises(InputError, match="stop="):
        TextStream(byte_level(), stops=stops)


def test_held_text_is_shown_at_the_end_and_silent_ids_never():
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


def test_a_panic_while_decoding_is_an_error_in_one_line():
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a" * 40 + "b": 1}, unk_token="<unk>"))
    backend.decoder = decoders.Replace(Regex(r"(a+)+$"), "x")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    for decode in (
        lambda: TextStream(tokenizer, [1]),
        lambda: pieces(tokenizer, [0, 1]),
        lambda: TokenSpeller(tokenizer)(1),
    ):
        with pytest.raises(BaseException, match="retry-limit") as refusal:
            decode()
        assert isinstance(refusal.value, EvaluationError)
        assert str(refusal.value).startswith("the tokenizer cannot decode its tokens: ")
        assert "\n" not in str(refusal.value)
