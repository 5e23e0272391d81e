"""Every command that takes ``--tokenizer`` refuses one that is not the checkpoint's: its ids would mean other words."""

import os
import shutil
from pathlib import Path

import pytest
import typer
from transformers import PreTrainedTokenizerFast

from adaponder.commands import generate
from adaponder.commands.shared import Opening, listed, open_subject, open_tokenizer, output_file
from adaponder.conversion.open import load
from adaponder.data.tokenizers import END, train_bpe
from adaponder.errors import InputError
from harness_support import VOCABULARY, reader, words
from support import stock


def another(entries: int, text: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=train_bpe(entries, [text]), eos_token=END)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saves a checkpoint with its tokenizer, and three tokenizers: an equal one, one of other words, a larger one."""
    root = tmp_path_factory.mktemp("tokenizers")
    (root / "bare").mkdir()
    for name in ("own", "bare"):
        reader().save_pretrained(root / name)
    for name in ("own", "same"):
        words().save_pretrained(root / name)
    another(VOCABULARY, "zzz yyy xxx " * 9).save_pretrained(root / "other")
    letters = [chr(a) + chr(b) for a in range(97, 123) for b in range(97, 123)]
    another(VOCABULARY + 99, " ".join(letters * 2)).save_pretrained(root / "large")
    return root


def doors(folder, tokenizer):
    """Yields every way in which a command opens a checkpoint's tokenizer."""
    model, path = load(str(folder))
    yield lambda: open_tokenizer(model, path, tokenizer)
    yield lambda: open_subject(str(folder), Opening(tokenizer=tokenizer))
    yield lambda: generate.generate(str(folder), prompt="A", tokenizer=tokenizer, max_new_tokens=1, greedy=True)


@pytest.mark.parametrize(("name", "message"), [("other", "not the checkpoint's own"), ("large", "has ids up to")])
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_another_tokenizer_is_refused(folders, name, message, kind):
    tokenizer = str(folders / name / ("tokenizer.json" if kind == "file" else ""))
    for door in doors(folders / "own", tokenizer):
        with pytest.raises(InputError, match=f"--tokenizer .*{name}.*{message}") as error:
            door()
        assert "\n" not in str(error.value)


def test_the_same_tokenizer_from_elsewhere_is_taken_and_so_is_one_where_there_is_none(folders):
    for door in doors(folders / "own", str(folders / "same")):
        assert door() is not None
    model, folder = load(str(folders / "bare"))
    assert open_tokenizer(model, folder, str(folders / "same")).get_vocab() == words().get_vocab()
    with pytest.raises(InputError, match="has ids up to"):
        open_tokenizer(model, folder, str(folders / "large"))
    with pytest.raises(InputError, match="bare has no tokenizer; name a folder"):
        open_tokenizer(model, folder, None)


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "gpt2"])
def test_a_stock_decoder_saved_without_its_tokenizer_has_none(tmp_path, family):
    stock(family).save_pretrained(tmp_path)  # for some families transformers would make an empty tokenizer
    with pytest.raises(InputError, match=f"{tmp_path.name} has no tokenizer; name a folder"):
        open_subject(str(tmp_path))


def test_a_checkpoint_smaller_than_its_own_tokenizer_is_refused(folders, tmp_path):
    shutil.copytree(folders / "large", tmp_path, dirs_exist_ok=True)
    reader().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has ids up to"):
        open_subject(str(tmp_path))


def test_a_device_or_a_pipe_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (*map(Path, ("/dev/stdout", "/dev/null", "/dev/fd/1", "/proc/self/fd/1")), tmp_path / "pipe"):
        with pytest.raises(typer.BadParameter, match="device or a pipe"):
            output_file(path)
    assert output_file(tmp_path / "new.json") == tmp_path / "new.json"


def test_lists_are_read_from_text_and_taken_as_they_are():
    assert listed("--depths", "1, 2") == listed("--depths", [1, 2]) == (1, 2)
    assert listed("--budgets", "1.5", float) == (1.5,)
    assert listed("--only", "a, b", str) == ("a", "b")
    assert listed("--depths", None) == ()
    for text, kind in (("two", int), ("0", int), ("nan", float), ("a,", str)):
        with pytest.raises(InputError, match="--depths"):
            listed("--depths", text, kind)
