"""In which precision a checkpoint is opened."""

import torch

from adaponder.conversion.open import load
from support import ids, tiny


def test_a_cpu_opens_half_precision_as_float32_and_changes_no_weight(tmp_path):
    tiny(dtype=torch.bfloat16).save_pretrained(tmp_path)
    model, _ = load(str(tmp_path))
    asked, _ = load(str(tmp_path), dtype="bfloat16")
    assert (model.dtype, model.config.dtype, asked.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    for (name, wide), narrow in zip(model.named_parameters(), asked.parameters(), strict=True):
        assert wide.dtype == torch.float32, name
        assert torch.equal(wide.bfloat16(), narrow), name
    assert model(ids()).logits.dtype == torch.float32
