"""One flipped byte in any file of a checkpoint is found when it is loaded, and its file is named (promise 31)."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from adaponder import AdaPonderForCausalLM
from adaponder.checkpoints.loading import tokenizer_of
from adaponder.checkpoints.manifest import MANIFEST, read_manifest, write_manifest
from adaponder.commands import doctor
from adaponder.conversion.convert import convert
from adaponder.conversion.open import describe, load
from adaponder.errors import CheckpointError
from adaponder.evaluation.lab import profiles
from adaponder.training.run import train
from fault_support import flip
from support import stock, tiny
from training_support import small
from word_support import small_tokenizer

open_model = AdaPonderForCausalLM.from_pretrained


@pytest.fixture(scope="module")
def folders(shards, tmp_path_factory) -> dict[str, Path]:
    """Writes a checkpoint in each way: in training, at its end, by conversion (both ways), by hand."""
    here = tmp_path_factory.mktemp("folders")
    train(small(shards, "train.steps=3", "train.ponder_start=1", "train.ponder_full=2"), out=here / "run", quiet=True)
    stock(dtype=torch.float32).save_pretrained(here / "stock")
    small_tokenizer().save_pretrained(here / "stock")
    convert(str(here / "stock"), here / "converted", iterations=2)
    convert(str(here / "converted"), here / "plain", method="backbone")
    tiny(dtype=torch.float32).save_pretrained(here / "saved", max_shard_size="10KB")
    trained = {"step": here / "run" / "checkpoints" / "step-00000002", "final": here / "run" / "final"}
    return trained | {name: here / name for name in ("converted", "plain", "saved")}


@pytest.fixture
def copy(folders, tmp_path):
    return lambda kind: Path(shutil.copytree(folders[kind], tmp_path / "checkpoint"))


@pytest.mark.one_of(2)
@pytest.mark.parametrize("kind", ["step", "final", "plain", "converted", "saved"])
def test_one_flipped_byte_in_any_file_is_found_at_load_and_its_file_named(copy, kind):
    folder = copy(kind)
    load(str(folder))
    listed = {path.name for path in folder.iterdir()}
    # Tokenizers and cards are often written after save_pretrained: it does not vouch for its card.
    listed -= {"README.md"} if kind == "saved" else set()
    assert {MANIFEST, "config.json", "generation_config.json"} <= listed
    for name in sorted(listed):
        before = (folder / name).read_bytes()
        for place in (0, 0.37, -1):
            flip(folder / name, place)
            with pytest.raises(CheckpointError, match=name) as refusal:
                load(str(folder))
            assert "\n" not in str(refusal.value)
            if kind != "plain":
                with pytest.raises(CheckpointError, match=name):
                    open_model(folder)
            (folder / name).write_bytes(before)
    load(str(folder))


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.every), 7])
def test_every_single_byte_of_a_manifest_counts(copy, step):
    folder = copy("converted")
    whole = (folder / MANIFEST).read_bytes()
    for place in range(0, len(whole), step):
        change = 1 << place % 8
        (folder / MANIFEST).write_bytes(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=MANIFEST):
            read_manifest(folder)


def test_the_doors_that_read_less_find_what_they_read(copy):
    folder = copy("final")
    for name, door in {
        "config.json": lambda: describe(str(folder)),
        "tokenizer.json": lambda: tokenizer_of(folder),
    }.items():
        door()
        before = (folder / name).read_bytes()
        flip(folder / name, 0.5)
        with pytest.raises(CheckpointError, match=name):
            door()
        (folder / name).write_bytes(before)


def test_what_loading_does_without_need_not_be_there_and_all_else_must(copy):
    folder = copy("step")
    for name in ("README.md", "optimizer.safetensors"):
        (folder / name).unlink()
    open_model(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        open_model(folder)


def test_verifying_can_be_left_out(copy, monkeypatch):
    folder = copy("final")
    flip(folder / "model.safetensors", -1)
    open_model(folder, verify=False)
    monkeypatch.setenv("ADAPONDER_VERIFY", "0")
    open_model(folder)
    load(str(folder))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_model(folder, verify=True)


def test_who_edits_a_config_by_hand_is_told_the_cure_and_it_cures(copy):
    folder = copy("final")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"tau": 0.25}))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_model(folder)
    assert not doctor.check_checkpoint(str(folder), seal=True)["problems"]
    assert open_model(folder).config.tau == 0.25
    flip(folder / "model.safetensors", -1)
    assert "model.safetensors" in doctor.check_checkpoint(str(folder))["problems"]["checksums"]


def test_saving_again_over_a_folder_seals_it_again(copy):
    folder = copy("converted")
    model = open_model(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1.0)
    model.save_pretrained(folder)
    assert torch.equal(open_model(folder).get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_checkpoints_of_earlier_versions_load_and_one_without_manifest_is_said_to_be_unverified(copy, command):
    folder = copy("final")
    content = read_manifest(folder)
    older = {"format": 1, "step": 2, "files": content["files"]}
    (folder / MANIFEST).write_text(json.dumps(older, indent=1))
    open_model(folder)
    flip(folder / "config.json", 0.5)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_model(folder)
    flip(folder / "config.json", 0.5)
    (folder / MANIFEST).unlink()
    (folder / "generation_config.json").unlink()
    with pytest.warns(UserWarning, match=r"unverified, there is no manifest\.json"):
        open_model(folder)
    assert "unverified" in doctor.check_checkpoint(str(folder))["checks"]["checksums"]
    code, _, shown = command("generate", str(folder), "--prompt", "the", "--max-new-tokens=1")
    assert code == 0
    assert shown.startswith("warning: ")
    assert (shown.count("\n"), shown.count("unverified")) == (1, 1)


def test_a_manifest_of_somebody_elses_is_none_of_ours(copy, folders):
    folder = copy("plain")
    (folder / MANIFEST).write_text('{"name": "an app"}')
    load(str(folder))
    with pytest.raises(CheckpointError, match=r"nowhere\.txt"):
        write_manifest(folder, ["nowhere.txt"])


def test_a_flipped_byte_in_profiles_is_found_when_one_is_asked_for(copy):
    folder = copy("final")
    path = profiles.store(folder, "fast", {"policy": "gate:0.3"})
    open_model(folder)
    whole = path.read_bytes()
    for place in range(0, len(whole) - 1, 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"profiles\.json"):
            profiles.stored(folder)
