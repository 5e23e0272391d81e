"""Tokenizers: their end token, the folders they come from, their hash, and the pieces of long texts."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from adaponder.data import tokenizers
from adaponder.data.prepare import prepare
from adaponder.data.tokenizers import hash_of_content, load_tokenizer, pieces, tokenizer_hash


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    load_tokenizer("train-bpe:280", ["the same token again and again"])[0].save(str(path))
    return path


def test_the_end_token_is_the_tokenizers_own_unless_named(tmp_path):
    words = load_tokenizer("train-bpe:260", ["text"])[0]
    words.add_special_tokens([AddedToken("</s>"), AddedToken("<eos>")])
    words.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path))[1] == 0
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert load_tokenizer(str(tmp_path))[1] == words.token_to_id("</s>")
    assert load_tokenizer(str(tmp_path), end_token="<eos>")[1] == words.token_to_id("<eos>")


@pytest.mark.parametrize("where", ["final", "checkpoints/step-00000010"])
def test_the_tokenizer_of_a_run_folder_is_that_of_the_checkpoint_it_means(tmp_path, tokenizer, where):
    for name, content in (("checkpoints/step-00000009", "no tokenizer"), (where, Path(tokenizer).read_text())):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "tokenizer.json").write_text(content)
    (tmp_path / "one.txt").write_text("a word or two")
    manifests = [
        prepare([str(tmp_path / "one.txt")], out=tmp_path / str(number), tokenizer=str(spec))
        for number, spec in enumerate((tmp_path / "run", tokenizer))
    ]
    assert manifests[0].tokenizer_hash == manifests[1].tokenizer_hash
    assert manifests[0].fingerprint["tokenizer_file"] == manifests[1].fingerprint["tokenizer_file"] is not None


def test_the_hash_is_of_the_tokenizer_not_of_its_layout_or_habits(tokenizer):
    words = Tokenizer.from_file(str(tokenizer))
    assert tokenizer_hash(words) == hash_of_content(json.loads(words.to_str(pretty=True)))
    words.enable_truncation(5)
    words.enable_padding()
    assert tokenizer_hash(words) == tokenizer_hash(Tokenizer.from_file(str(tokenizer)))
    words.post_processor = TemplateProcessing(single="$A", pair="$A $B:1")  # as transformers writes it
    assert tokenizer_hash(words) == tokenizer_hash(Tokenizer.from_file(str(tokenizer)))
    end = words.get_vocab_size() - 1
    words.post_processor = TemplateProcessing(single="<e> $A", special_tokens=[("<e>", end)])
    assert tokenizer_hash(words) != tokenizer_hash(Tokenizer.from_file(str(tokenizer)))
    words = Tokenizer.from_file(str(tokenizer))
    words.add_tokens(["new"])
    assert tokenizer_hash(words) != tokenizer_hash(Tokenizer.from_file(str(tokenizer)))


def test_pieces_add_up_and_are_bounded():
    for text in ("", "a", "x" * 1000, "word " * 300, "line\n" * 300, "a" * 90 + " " + "b" * 500 + "\n" * 300):
        cut = list(pieces(text, 100))
        assert "".join(cut) == text
        assert all(len(piece) <= 100 for piece in cut)
    assert list(pieces("one two\nthree", 10)) == ["one two\n", "three"]


def test_a_tokenizer_is_trained_on_so_many_bytes_and_no_more_documents():
    assert list(tokenizers._first_bytes(iter(["éé", "é", "a"]), 5)) == ["éé", "é"]


def test_ctrl_c_ends_the_training_of_a_tokenizer(ctrl_c):
    """The library ignores the signal while it merges; the thread that waits for it raises, and no more texts come."""
    begun, ended = threading.Event(), threading.Event()

    def work(still_wanted) -> None:
        begun.set()
        while still_wanted(None):
            time.sleep(0.01)
        ended.set()

    def interrupt() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        tokenizers._interruptibly(work)
    assert ended.wait(10)
