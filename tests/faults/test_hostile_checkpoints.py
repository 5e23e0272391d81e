"""Nothing that lies in a checkpoint is ever run, waited for or believed: each of these is refused in one line.

Every case stands for something a stranger could put into a folder. It goes through the commands that would open that
file, with "y" on standard input, and must leave no trace of having run.
"""

import json
import math
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from adaponder import AdaPonderForCausalLM
from adaponder.checkpoints.loading import refuse_unsafe
from adaponder.conversion.convert import convert
from adaponder.errors import CheckpointError, InputError
from support import stock
from word_support import small_tokenizer

CONFIG, SETTINGS, WORDS = "config.json", "tokenizer_config.json", "tokenizer.json"
GENERATION, INDEX, WEIGHTS = "generation_config.json", "model.safetensors.index.json", "model.safetensors"
DOORS = {
    "generate": ["generate", "CKPT", "--prompt", "ab", "--max-new-tokens", "1"],
    "inspect": ["inspect", "CKPT"],
    "eval": ["eval", "CKPT", "--data", "TEXT"],
    "convert": ["convert", "CKPT", "--method", "loop", "--out", "OUT"],
    "doctor": ["doctor", "CKPT"],
    "policies": ["policies", "CKPT", "--data", "TEXT", "--budgets", "2", "--out", "OUT"],
    "calibrate": ["calibrate", "CKPT", "--data", "TEXT", "--budget", "2"],
    "analyze": ["analyze", "CKPT", "--data", "TEXT", "--out", "OUT"],
    "compare": ["compare", "CKPT", "CKPT", "--data", "TEXT"],
    "profile": ["generate", "CKPT", "--prompt", "ab", "--profile", "fast"],
    "eval-words": ["eval", "GOOD", "--tokenizer", "CKPT", "--data", "TEXT"],
    "words": ["generate", "GOOD", "--tokenizer", "CKPT", "--prompt", "ab", "--max-new-tokens", "1"],
}
MODEL = ("generate", "doctor")
LOADS = ("generate", "convert")
ALL = ("generate", "eval", "convert", "doctor", "inspect", "policies", "calibrate", "analyze", "compare")
READS_WORDS = ("words", "eval-words", "doctor")


class Case(NamedTuple):
    """``plant(folder, canary)`` makes a good folder hostile; ``says`` must be in the refusal."""

    plant: Callable[[Path, Path], Any]
    doors: tuple[str, ...]
    says: str
    base: str = "family"


def put(name: str, **values: Any) -> Callable[[Path, Path], None]:
    """Sets fields of a JSON file; ``backbone__x`` is field ``x`` of the backbone."""

    def plant(folder: Path, canary: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        for key, value in values.items():
            inner = content["backbone_config"] if key.startswith("backbone__") else content
            inner[key.removeprefix("backbone__")] = value
        path.write_text(json.dumps(content))
        write_code(folder, canary)

    return plant


def spell(name: str, text: str) -> Callable[[Path, Path], None]:
    return lambda folder, canary: (folder / name).write_text(text)


def write_code(folder: Path, canary: Path) -> None:
    lines = ["from pathlib import Path", f"Path({str(canary)!r}).touch()", "class Evil: pass"]
    (folder / "evil.py").write_text("\n".join(lines))


class Bomb:
    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


def pickled(name: str, *, index: bool = False) -> Callable[[Path, Path], None]:
    def plant(folder: Path, canary: Path) -> None:
        keys = list(load_file(folder / WEIGHTS))
        if index:
            (folder / WEIGHTS).rename(folder / "other.safetensors")
            (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(keys, name)}))
        else:
            (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(pickle.dumps(Bomb(canary)))

    return plant


def elsewhere(name: str, *, absolute: bool = False) -> Callable[[Path, Path], None]:
    """The index names a good shard that lies outside of the folder."""

    def plant(folder: Path, canary: Path) -> None:
        keys = list(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).rename(folder.parent / "other.safetensors")
        shutil.copy(folder.parent / "other.safetensors", folder / "another.safetensors")
        target = str(folder.parent / name) if absolute else name
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(keys, target)}))

    return plant


def linked(name: str, to: str | None = None) -> Callable[[Path, Path], None]:
    def plant(folder: Path, canary: Path) -> None:
        outside = folder.parent / f"outside-{name}"
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside if to is None else to)

    return plant


def piped(name: str) -> Callable[[Path, Path], None]:
    def plant(folder: Path, canary: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return plant


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path, Path], None]:
    def plant(folder: Path, canary: Path) -> None:
        held = load_file(folder / WEIGHTS)
        change(held)
        save_file(held, folder / WEIGHTS, metadata={"format": "pt"})

    return plant


def spoil(value: float) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda held: next(held[key] for key in held if key.endswith("embed_in.weight"))[3, 2].fill_(value)


def template_elsewhere(whole: bool) -> Callable[[Path, Path], None]:
    """A further chat template, or the folder of them, is a link to a file outside."""

    def plant(folder: Path, canary: Path) -> None:
        outside, inside = folder.parent / "templates", folder / "additional_chat_templates"
        outside.mkdir()
        (outside / "rag.jinja").write_text("{{ messages }}")
        if whole:
            inside.symlink_to(outside)
        else:
            inside.mkdir()
            (inside / "rag.jinja").symlink_to(outside / "rag.jinja")

    return plant


def empty_tensors(count: int) -> Callable[[Path, Path], None]:
    def plant(folder: Path, canary: Path) -> None:
        raw = (folder / WEIGHTS).read_bytes()
        size = int.from_bytes(raw[:8], "little")
        entry = json.dumps({"dtype": "F32", "shape": [0], "data_offsets": [len(raw) - 8 - size] * 2})
        added = "".join(f', "empty.{number}": {entry}' for number in range(count))
        written = raw[8 : 8 + size].rstrip()[:-1] + added.encode() + b"}"
        (folder / WEIGHTS).write_bytes(len(written).to_bytes(8, "little") + written + raw[8 + size :])

    return plant


def folder_as_weights(folder: Path, canary: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


CODE = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]}
BAD_JSON = {
    "deep": partial(spell, text='{"a":' * 100_000),
    "long-number": partial(spell, text='{"vocab_size": ' + "9" * 5000 + "}"),
    "pipe": piped,
}
CASES = {
    "auto-map": Case(put(CONFIG, auto_map=CODE), ALL, "auto_map"),
    "auto-map-of-the-backbone": Case(put(CONFIG, backbone__auto_map=CODE), ("generate", "inspect"), "auto_map"),
    "auto-map-of-a-part": Case(put(CONFIG, text_config={"a": [{"auto_map": CODE}]}), ("generate", "inspect"), "auto_"),
    "auto-map-of-a-foreign-family": Case(put(CONFIG, model_type="evil", auto_map=CODE), ALL, "auto_map", "stock"),
    "auto-map-elsewhere": Case(put(CONFIG, auto_map={"AutoConfig": "a/b--evil.Evil"}), ("inspect",), "auto_map"),
    "auto-map-of-the-tokenizer": Case(put(SETTINGS, auto_map=CODE), (*ALL, "words"), "auto_map"),
    "auto-map-of-old": Case(put(SETTINGS, auto_map=["evil.Evil", None]), (*READS_WORDS, "inspect"), "auto_map"),
    "auto-map-of-a-stock-tokenizer": Case(
        put(SETTINGS, auto_map=CODE, tokenizer_class="Evil"), (*READS_WORDS, "convert"), "auto_map", "stock"
    ),
    "auto-map-of-generation": Case(put(GENERATION, auto_map=CODE), ("generate",), "auto_map"),
    "auto-map-of-a-processor": Case(put("processor_config.json", auto_map=CODE), ("generate",), "auto_map"),
    "auto-map-of-a-preprocessor": Case(put("preprocessor_config.json", auto_map=CODE), ("eval",), "auto_map"),
    "kernel": Case(put(CONFIG, attn_implementation="a/b"), ("generate", "inspect"), "attn_implementation"),
    "kernel-of-a-part": Case(put(CONFIG, backbone___attn_implementation="a/b"), ("generate",), "attn_impl"),
    "generation": Case(put(GENERATION, custom_generate="a/b"), ("generate",), "custom_generate"),
    "adapter": Case(put("adapter_config.json", base_model_name_or_path="a/b"), MODEL, "adapter_config.json", "stock"),
    "tokenizer-class": Case(put(SETTINGS, tokenizer_class=5), ("generate", "words"), "tokenizer", "stock"),
    "pickle": Case(pickled("pytorch_model.bin"), MODEL, "pytorch_model.bin"),
    "pickle-in-the-index": Case(pickled("w.bin", index=True), MODEL, "'w.bin'"),
    "pickle-in-a-stock-index": Case(pickled("w.bin", index=True), MODEL, "'w.bin'", "stock"),
    "pickle-by-name": Case(put(CONFIG, transformers_weights="adapter_model.bin"), MODEL, "transformers_weights"),
    "shard-outside": Case(elsewhere("sub/../../other.safetensors"), MODEL, "outside", "stock"),
    "shard-absolute": Case(elsewhere("other.safetensors", absolute=True), MODEL, "outside"),
    "link-to-weights": Case(linked(WEIGHTS), MODEL, "link"),
    "link-to-config": Case(linked(CONFIG), ("inspect", "generate"), "link"),
    "link-to-words": Case(linked(WORDS), READS_WORDS, "link"),
    "link-to-a-device": Case(linked(WEIGHTS, "/dev/zero"), MODEL, "link"),
    "link-to-a-template": Case(template_elsewhere(False), READS_WORDS, "link"),
    "link-to-templates": Case(template_elsewhere(True), READS_WORDS, "link"),
    "quantisation": Case(put(CONFIG, quantization_config={"quant_method": "gptq", "bits": 4}), ALL, "quantization_c"),
    "quantisation-of-a-part": Case(put(CONFIG, backbone__quantization_config={"a": 1}), MODEL, "quantization_config"),
    "quantisation-of-stock": Case(put(CONFIG, quantization_config={"a": 1}), MODEL, "quantization_config", "stock"),
    "tensors-by-the-hundred-thousand": Case(empty_tensors(200_000), LOADS, "headers of"),
    "tensors-by-the-thousand": Case(empty_tensors(20_000), LOADS, "the weights hold 20,0"),
    "surplus-tensors": Case(empty_tensors(3_000), LOADS, "empty.100 and 2,996 more"),
    "folder-as-weights": Case(folder_as_weights, MODEL, "ordinary file"),
    "pipe-as-weights": Case(piped(WEIGHTS), MODEL, "ordinary file"),
    "pipe-as-template": Case(piped("chat_template.jinja"), READS_WORDS, "ordinary file"),
    **{
        f"{kind}-{name}": Case(plant(name), doors, name)
        for name, doors in {
            CONFIG: ("inspect", "generate"),
            SETTINGS: READS_WORDS,
            WORDS: READS_WORDS,
            GENERATION: ("generate",),
            INDEX: MODEL,
            "manifest.json": MODEL,
            "profiles.json": ("profile",),
        }.items()
        for kind, plant in BAD_JSON.items()
    },
    "words-cut-short": Case(lambda f, _: os.truncate(f / WORDS, 2000), READS_WORDS, WORDS),
    "words-of-no-model": Case(spell(WORDS, '{"model": 5}'), READS_WORDS, "tokenizer"),
    "words-of-nothing": Case(spell(WORDS, "{}"), READS_WORDS, "tokenizer"),
    "layers": Case(put(CONFIG, backbone__num_hidden_layers=10**6), ("inspect", "generate"), "num_hidden_layers"),
    "layers-beyond-the-weights": Case(put(CONFIG, backbone__num_hidden_layers=4000), ("generate",), "tensors"),
    "vocabulary-beyond-the-weights": Case(put(CONFIG, vocab_size=16 * 10**6), LOADS, "vocab_size", "stock"),
    "width": Case(put(CONFIG, backbone__intermediate_size=2**31 - 1), ("generate",), "intermediate_size=2147483647"),
    "stock-layers": Case(put(CONFIG, num_hidden_layers=10**6), ("inspect", "convert"), "num_hidden_layers", "stock"),
    "negative-stock": Case(put(CONFIG, hidden_size=-64), ("inspect", "eval"), "hidden_size", "stock"),
    "gate-width": Case(put(CONFIG, gate_width=10**9), ("generate",), "gate_width"),
    "family-unknown": Case(put(CONFIG, model_type="nobody"), ("inspect", "generate"), "nobody", "stock"),
    "family-no-name": Case(put(CONFIG, model_type=5), ("inspect", "generate"), "model_type=5", "stock"),
    "activation": Case(put(CONFIG, backbone__hidden_act="import os"), ("generate",), "import os"),
    "dtype": Case(put(CONFIG, dtype="load"), ("generate",), "CKPT"),
    "nan": Case(weights(spoil(math.nan)), LOADS, "backbone.gpt_neox.embed_in.weight"),
    "nan-stock": Case(weights(spoil(math.nan)), LOADS, "gpt_neox.embed_in.weight", "stock"),
    "infinity": Case(weights(spoil(-math.inf)), LOADS, "embed_in.weight"),
    "ends": Case(put(CONFIG, backbone__eos_token_id=2), MODEL, "eos_token_id=2"),
    "ends-of-generation": Case(put(GENERATION, eos_token_id=[2, 3]), MODEL, "eos_token_id=[2, 3]"),
    "padding": Case(put(GENERATION, pad_token_id=2), MODEL, "pad_token_id=2"),
    "length": Case(put(SETTINGS, model_max_length=4096), MODEL, "model_max_length=4096"),
    "end-unknown": Case(put(SETTINGS, eos_token="</nowhere>"), MODEL, "</nowhere>"),
    "manifest-outside": Case(
        spell("manifest.json", json.dumps({"format": 1, "files": {"../x": {"bytes": 1, "sha256": ""}}})),
        MODEL,
        "manifest.json",
    ),
    "manifest-list": Case(spell("manifest.json", "[]"), MODEL, "manifest.json"),
}
RUNS = [(name, door) for name, case in CASES.items() for door in case.doors]
# make test tries each checkpoint through one of its doors, in turn, and each JSON file with one of its faults;
# make test-every all of them.
TRIED = {
    name: case.doors[number % len(case.doors)]
    for number, (name, case) in enumerate(CASES.items())
    if not name.startswith("long-number-")
}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """``stock`` and ``family``, two good checkpoints with a tokenizer, and a text."""
    here = tmp_path_factory.mktemp("good")
    stock(dtype=torch.float32).save_pretrained(here / "stock")
    small_tokenizer().save_pretrained(here / "stock")
    convert(str(here / "stock"), here / "family", iterations=2)
    (here / "text.txt").write_text("abba " * 60)
    return here


@pytest.fixture
def run(command, monkeypatch) -> Callable[..., tuple[int, str]]:
    """Returns exit code and standard error (``doctor``: output) of a command; it must ask no question."""
    monkeypatch.setattr("builtins.input", lambda prompt="": pytest.fail(prompt))

    def run(*arguments: str) -> tuple[int, str]:
        code, output, errors = command(*arguments)
        return code, output if arguments[0] == "doctor" else errors

    return run


def hostile(name: str, good: Path, tmp_path: Path) -> tuple[Case, Path, Path]:
    """(case, folder, canary): a good folder made hostile, and the file that its code would create."""
    case, canary = CASES[name], tmp_path / "canary"
    folder = Path(shutil.copytree(good / case.base, tmp_path / "CKPT"))
    if "manifest" not in name:
        (folder / "manifest.json").unlink(missing_ok=True)  # whoever changes a file can seal it anew
    case.plant(folder, canary)
    return case, folder, canary


def arguments(door: str, checkpoint: Path, good: Path, tmp_path: Path) -> list[str]:
    places = {"CKPT": checkpoint, "GOOD": good / "family", "TEXT": good / "text.txt", "OUT": tmp_path / "out"}
    return [str(places.get(word, word)) for word in DOORS[door]]


@pytest.mark.parametrize(("base", "door"), [("family", "generate"), ("stock", "inspect"), ("stock", "words")])
def test_the_folders_are_good_before_they_are_spoiled(good, tmp_path, run, base, door):
    code, errors = run(*arguments(door, good / base, good, tmp_path))
    assert not code, errors


@pytest.mark.parametrize(
    ("name", "door"),
    [pytest.param(*run, marks=() if TRIED.get(run[0]) == run[1] else pytest.mark.every) for run in RUNS],
)
def test_a_hostile_checkpoint_is_refused_in_one_line_and_nothing_of_it_runs(good, tmp_path, run, name, door):
    case, folder, canary = hostile(name, good, tmp_path)
    code, said = run(*arguments(door, folder, good, tmp_path))
    said = "".join(line for line in said.splitlines(True) if ": unverified, " not in line)
    assert code in (1, 2)
    assert case.says in said
    assert "Traceback" not in said
    if door != "doctor":
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        assert len(said) < 520
    assert not canary.exists()
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


UNSAFE = ("auto-map", "pickle", "shard", "kernel", "tensors-by-the-hundred-thousand")


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(UNSAFE)])
def test_code_and_foreign_weights_are_refused_before_any_of_it_is_loaded(good, tmp_path, name):
    """By the folder's metadata alone, within a second: nothing further on has to refuse it again."""
    case, folder, _ = hostile(name, good, tmp_path)
    began = time.perf_counter()
    with pytest.raises(CheckpointError, match=re.escape(case.says)):
        refuse_unsafe(folder)
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize("name", ["x" * 5000, "./" + "x/" * 2500])
def test_a_long_name_is_refused_in_a_bounded_line_that_ends_with_the_reason(run, name):
    code, said = run("generate", name, "--prompt", "ab")
    assert code in (1, 2)
    assert (said.count("\n"), len(said) < 520) == (1, True)
    assert re.search(r"x … .*(hub|not a checkpoint folder)", said)


def test_pickles_beside_the_weights_are_never_opened_even_if_asked_for(good, tmp_path):
    folder, canary = Path(shutil.copytree(good / "family", tmp_path / "ckpt")), tmp_path / "canary"
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Bomb(canary)))
    assert AdaPonderForCausalLM.from_pretrained(folder).config.iterations == 2
    for options in ({"use_safetensors": False}, {"trust_remote_code": True}):
        with pytest.raises(InputError, match=next(iter(options))):
            AdaPonderForCausalLM.from_pretrained(folder, **options)
    assert not canary.exists()
    pickle.loads(pickle.dumps(Bomb(canary)))
    assert canary.exists(), "the bomb would have left a trace"


def test_the_links_of_the_hubs_cache_are_followed(good, tmp_path):
    """A snapshot is a folder of links to ``../../blobs``: the one place outside that may be linked to."""
    repository = tmp_path / "models--somebody--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted((good / "family").iterdir())):
        shutil.copy(path, repository / "blobs" / f"{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert AdaPonderForCausalLM.from_pretrained(snapshot).config.iterations == 2
    named = AdaPonderForCausalLM.from_pretrained("somebody/model", cache_dir=tmp_path)
    assert named.config.iterations == 2
