"""Encoding: the tokens of a document, whoever computes them, in bounded memory."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from adaponder.data import encode
from adaponder.data.encode import Encoder, encode_in_order
from adaponder.data.readers import Document
from adaponder.data.tokenizers import load_tokenizer, pieces
from adaponder.errors import InputError


@pytest.mark.parametrize("learned", [None, ((0, 1),)], ids=["text", "conversation"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("unknown", ["[x]", None], ids=["panic", "no id for the word"])
def test_text_that_the_tokenizer_cannot_encode_is_an_error_in_one_line(workers, learned, unknown, capfd):
    """The library panics in its regular expression, or raises a bare Exception for a word without an id."""
    words = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "[x]": 1}, unk_token=unknown))
    if unknown:
        words.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a+)+$"), "isolated")
    encoder = Encoder(words.to_str(), end_id=0, vocab_size=2, dtype="uint16", validation=0.0)
    chunks = [[(0, Document("a" * 40 + "b", "s", learned=learned))]]
    message = "the tokenizer cannot encode the text: .*retry-limit" if unknown else "--tokenizer"
    with ThreadPoolExecutor(1) as drawing:
        drawing.submit(int)  # progress has a thread of its own
        with pytest.raises(InputError, match=message) as refused:
            list(encode_in_order(encoder, chunks, workers=workers))
    assert "\n" not in str(refused.value)
    assert capfd.readouterr().err == ""


def test_a_long_document_is_never_with_the_library_at_once(monkeypatch):
    monkeypatch.setattr(encode, "PIECE", 1000)
    monkeypatch.setattr(encode, "pieces", lambda text: pieces(text, 1000))
    words, end_id = load_tokenizer("train-bpe:300", ["the same token again and óne more short"])
    given = []

    class Spy:
        def encode_batch_fast(self, texts, **options):
            given.append(sum(map(len, texts)))
            return words.encode_batch_fast(texts, **options)

    encoder = Encoder(words.to_str(), end_id, 300, "uint16", 0.0)
    encoder.tokenizer = Spy()
    texts = ["short", "the same token again " * 150, "", "and óne more " * 100, "short"]
    made = encoder([(index, Document(text, "s")) for index, text in enumerate(texts)])
    assert max(given) < 2000
    assert len(given) >= 3
    whole = [encoded.ids for text in texts for encoded in words.encode_batch_fast(list(pieces(text, 1000)))]
    tokens = np.concatenate([document.tokens for document in made])
    assert tokens[tokens != end_id].tolist() == [token for ids in whole for token in ids]
    assert [document.utf8_bytes for document in made] == [len(text.encode()) for text in texts]
    hashes = [hashlib.sha256(text.encode()).digest() for text in texts]
    assert [document.hash for document in made] == [int.from_bytes(digest[:8], "big") for digest in hashes]
