"""Who may read a checkpoint."""

import os
import stat
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from adaponder.conversion.convert import convert
from adaponder.training.checkpoint import save_checkpoint
from support import tiny


@pytest.fixture
def group_may_read():
    before = os.umask(0o027)
    yield 0o640
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def test_whoever_may_read_a_folders_config_may_read_its_weights(tmp_path, group_may_read):
    model = tiny("adaponder")
    model.save_pretrained(tmp_path / "saved")
    weights, moments = model.state_dict(), {"moment": torch.ones(2)}
    save_checkpoint(tmp_path / "step", model, weights, moments, {"step": 1}, adapters={"lora": torch.ones(2)})
    convert(str(tmp_path / "saved"), tmp_path / "plain", method="backbone")
    model.add_adapter(LoraConfig(target_modules=["query_key_value"], r=2))
    model.save_pretrained(tmp_path / "adapter")
    for name, files in (("saved", 1), ("step", 3), ("plain", 1), ("adapter", 1)):
        found = modes(tmp_path / name)
        assert sum(file.endswith(".safetensors") for file in found) == files
        assert set(found.values()) == {group_may_read}, name
