"""In which precision a checkpoint is opened."""

import pytest
import torch

from adaponder.conversion.open import load
from support import ids, tiny


@pytest.fixture
def saved_in_half(tmp_path):
    tiny(dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    return str(tmp_path / "half")


def test_a_cpu_opens_half_precision_as_float32_and_changes_no_weight(saved_in_half):
    model, _ = load(saved_in_half)
    asked, _ = load(saved_in_half, dtype="bfloat16")
    assert (model.dtype, model.config.dtype, asked.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    for (name, wide), narrow in zip(model.named_parameters(), asked.parameters(), strict=True):
        assert wide.dtype == torch.float32, name
        assert torch.equal(wide.bfloat16(), narrow), name
    assert model(ids()).logits.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wider_precisions_stay_as_they_were_saved(dtype, tmp_path):
    tiny(dtype=dtype).save_pretrained(tmp_path / "wide")
    assert load(str(tmp_path / "wide"))[0].dtype == dtype
