"""Training from scratch starts from PonderLM's weights: measured, not believed."""

import math

import pytest
import torch

from adaponder import AdaPonderForCausalLM
from adaponder.backbones.initialisation import depth_scaled_
from adaponder.errors import BackboneError
from support import FAMILIES, ids, stock


def test_matrices_have_the_variance_of_the_release_and_its_cut():
    base = stock(dtype=torch.float32)
    depth_scaled_(base, iterations=4, seed=0)
    std = math.sqrt(2 / (5 * 16))
    # A normal cut at three standard deviations keeps 98.658 % of its standard deviation.
    kept = 0.98658
    plain = torch.cat([base.gpt_neox.embed_in.weight.flatten(), base.lm_head.weight.flatten()])
    inward = torch.cat([layer.mlp.dense_h_to_4h.weight.flatten() for layer in base.gpt_neox.layers])
    outward = torch.cat([layer.mlp.dense_4h_to_h.weight.flatten() for layer in base.gpt_neox.layers])
    for found, expected in ((plain, std), (inward, std), (outward, std / math.sqrt(2 * 2 * 4))):
        assert float(found.std()) == pytest.approx(kept * expected, rel=4 / math.sqrt(2 * found.numel()))
        assert float(found.abs().max()) <= 3 * expected
    assert all(layer.input_layernorm.weight.eq(1).all() for layer in base.gpt_neox.layers)
    assert all(parameter.eq(0).all() for name, parameter in base.named_parameters() if name.endswith("bias"))


@pytest.mark.one_of(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_known_and_the_seed_decides(family):
    first, second, other = (stock(family, dtype=torch.float32) for _ in range(3))
    for model, seed in ((first, 1), (second, 1), (other, 2)):
        depth_scaled_(model, iterations=3, seed=seed)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))
    model = AdaPonderForCausalLM.from_backbone(first, embedding_scale=4.0)
    assert model(ids()).logits.isfinite().all()
    model.wrapped.verify()


def test_an_unknown_family_is_refused():
    base = stock(dtype=torch.float32)
    del base.gpt_neox.layers[1]
    with pytest.raises(BackboneError, match="2 projections"):
        depth_scaled_(base, iterations=3, seed=0)
