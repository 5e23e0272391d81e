"""A profile is a budget by name: whole or absent, as written, and for the weights it was found for."""

import json
import os
import threading
from unittest.mock import Mock

import pytest
import torch

import support
from adaponder import AdaPonderError, LearnedGate, Uniform
from adaponder.checkpoints.manifest import sealed
from adaponder.errors import CheckpointError, InputError
from adaponder.evaluation.lab import profiles
from adaponder.evaluation.lab.profiles import FILE, identity, load_profile, store, stored
from adaponder.files import lock
from adaponder.modeling import AdaPonderForCausalLM

PROFILE = {"policy": "gate:0.1,0.2", "budget": 2.5, "depth": 2.4983}


@pytest.fixture
def folder(tmp_path):
    support.tiny(dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path


def test_what_was_stored_comes_back_to_the_last_digit(folder):
    store(folder, "cheap", {"policy": "gate:6.90378840e-07,0.9999999403953552"})
    store(folder, "even", {"policy": "uniform:0.5@0.1,inf"})
    assert load_profile(folder, "cheap") == LearnedGate((6.90378840e-07, 0.9999999403953552))
    assert load_profile(folder, "even") == Uniform((0.1, float("inf")), keep=0.5)
    store(folder, "cheap", PROFILE | {"budget": 10.0})
    store(folder, "other", PROFILE | {"budget": 2.0})
    assert list(stored(folder)) == ["other", "cheap", "even"], "sorted by budget, the absent one last"
    assert load_profile(folder, "cheap") == LearnedGate((0.1, 0.2))
    with pytest.raises(AdaPonderError, match="--policy"):
        store(folder, "fast", {"policy": "fast:1"})
    with pytest.raises(InputError, match=r"--profile dear.*cheap"):
        load_profile(folder, "dear")


@pytest.mark.parametrize("name", ["", "a b", "../x", "-x", "a/b", "x" * 65, "ä"])
def test_a_name_that_is_no_name_is_refused(folder, name):
    with pytest.raises(InputError, match="--name"):
        store(folder, name, PROFILE)
    assert not (folder / FILE).exists()


CHANGES = {
    "policy": lambda content: content["profiles"]["a"].update(policy="gate:0.9"),
    "no checksum": lambda content: content.pop("checksum"),
    "format": lambda content: content.update(format=2),
    "no profiles": lambda content: content.pop("profiles"),
    "profiles of another type": lambda content: content.update(profiles=[]),
}


@pytest.mark.parametrize("change", [*CHANGES, b"", b"{", b"[]", b"\xff\xfe", b"null"], ids=str)
def test_an_edited_or_damaged_file_is_refused(folder, change):
    store(folder, "a", PROFILE)
    path = folder / FILE
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content))
    assert load_profile(folder, "a") == LearnedGate((0.1, 0.2)), "another layout is the same content"
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        CHANGES[change](content)
        path.write_text(json.dumps(content))
    for use in (lambda: load_profile(folder, "a"), lambda: store(folder, "b", PROFILE)):
        with pytest.raises(CheckpointError, match=r"profiles\.json"):
            use()


@pytest.mark.parametrize("profile", [3, {}, {"policy": 3}, {"policy": "gate:0.1", "budget": "x"}, {"policy": "fast:1"}])
def test_a_sealed_file_with_wrong_types_is_refused(folder, profile):
    content = {"format": 1, "weights": identity(folder), "profiles": {"a": profile}}
    (folder / FILE).write_text(sealed(content))
    with pytest.raises(AdaPonderError, match=r"profiles\.json|--profile a"):
        load_profile(folder, "a")


def test_other_weights_or_another_config_are_refused(folder):
    store(folder, "a", PROFILE)
    original = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(json.loads(original) | {"expectation_top_k": 7}))
    with pytest.raises(CheckpointError, match="config"):
        load_profile(folder, "a")
    (folder / "config.json").write_text(original)
    model = AdaPonderForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        next(model.method.parameters()).view(-1)[0] += 1e-3
    model.save_pretrained(folder)
    with pytest.raises(CheckpointError, match="weights"):
        load_profile(folder, "a")


def test_large_weights_are_known_by_blocks_spread_over_them(folder, monkeypatch):
    monkeypatch.setattr(profiles, "_WHOLE", 1024)
    monkeypatch.setattr(profiles, "_BLOCK", 64)
    before = identity(folder)
    for other in ("optimizer.safetensors", "README.md"):
        (folder / other).write_bytes(b"neither weights nor config")
    assert before == identity(folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    for place in (10, len(content) - 10):
        changed = content.copy()
        changed[place] ^= 1
        weights.write_bytes(changed)
        assert identity(folder) != before


def test_a_write_that_fails_leaves_what_was_there(folder, monkeypatch):
    store(folder, "a", PROFILE)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match="No space"):
        store(folder, "b", PROFILE)
    assert list(stored(folder)) == ["a"]


def test_a_profile_waits_for_one_that_another_process_stores(folder):
    other = os.open(folder, os.O_RDONLY)
    assert lock(other)
    storing = threading.Thread(target=store, args=(folder, "a", PROFILE))
    storing.start()
    storing.join(0.3)
    assert storing.is_alive()
    assert not (folder / FILE).exists()
    os.close(other)
    storing.join(10)
    assert list(stored(folder)) == ["a"]
