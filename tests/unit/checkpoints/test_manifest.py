"""Who may read a checkpoint."""

import os
import stat
from functools import partial

import torch
from peft import LoraConfig

from adaponder.conversion.convert import convert
from adaponder.training.checkpoint import save_checkpoint
from support import tiny


def test_whoever_may_read_a_folders_config_may_read_its_weights(tmp_path, request):
    request.addfinalizer(partial(os.umask, os.umask(0o027)))
    model = tiny("adaponder")
    model.save_pretrained(tmp_path / "saved")
    weights, moments = model.state_dict(), {"moment": torch.ones(2)}
    save_checkpoint(tmp_path / "step", model, weights, moments, {"step": 1}, adapters={"lora": torch.ones(2)})
    convert(str(tmp_path / "saved"), tmp_path / "plain", method="backbone")
    model.add_adapter(LoraConfig(target_modules=["query_key_value"], r=2))
    model.save_pretrained(tmp_path / "adapter")
    for name, files in (("saved", 1), ("step", 3), ("plain", 1), ("adapter", 1)):
        paths = list((tmp_path / name).iterdir())
        assert sum(path.suffix == ".safetensors" for path in paths) == files
        assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o640}, name
