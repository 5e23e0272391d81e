"""A single token is spelled with its space, its bytes and its text."""

import numpy as np
from tokenizers import Tokenizer, decoders, models

from adaponder.data.tokenizers import train_bpe
from adaponder.text.spelling import token_texts


def test_bytes_that_are_no_character_alone_are_shown():
    tokenizer = train_bpe(300, ["naïve café 中文 and some more text"])
    ids = np.array(tokenizer.encode("a é中\n").ids)
    spelled = token_texts(tokenizer, np.arange(tokenizer.get_vocab_size()))
    assert len(spelled) == tokenizer.get_vocab_size()
    assert spelled[0] == "<|endoftext|>"
    assert {"\\xe4", "\\xff", " ", "\n", "a"} <= set(spelled)
    joined = "".join(spelled[i] for i in ids)
    assert joined.startswith("a ")
    assert joined.endswith("\n")


def test_whole_words_stand_apart():
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "=": 2}, unk_token="<unk>"))
    assert "".join(token_texts(tokenizer, np.array([1, 2, 1]))) == " " + tokenizer.decode([1, 2, 1]) == " a = a"


def test_sentence_pieces_keep_their_space_and_their_bytes():
    vocabulary = {"<unk>": 0, "▁the": 1, "cat": 2, "<0xE2>": 3, "<0x41>": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1)])
    assert token_texts(tokenizer, np.arange(6)) == ["<unk>", " the", "cat", "\\xe2", "A", "<5>"]
