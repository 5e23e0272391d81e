"""Law 4: one iteration at embedding scale 1 is the stock model, for every method and family."""

import pytest
import torch

from laws import assert_close
from support import FAMILIES, METHODS, ids, stock, tiny


def usual(family: str, method: str) -> bool:
    """Returns whether make test runs this pair: every family with two methods, every method on two families."""
    return family in ("gpt_neox", "gemma3") or method in ("adaponder", "pause")


@pytest.mark.parametrize(
    ("method", "family"),
    [
        pytest.param(method, family, marks=() if usual(family, method) else pytest.mark.every)
        for method in METHODS
        for family in FAMILIES
    ],
)
def test_one_iteration_is_the_stock_model(family, method):
    prompt = ids(3, 11)
    mask = torch.ones_like(prompt)
    mask[0, :4], mask[1, 8:] = 0, 0
    position = (mask.cumsum(1) - 1).clamp_min(0)
    expected = stock(family)(prompt, attention_mask=mask, position_ids=position).logits[mask.bool()]
    for iterations, asked in ((3, {"max_iterations": 1}), (1, {})):
        model = tiny(method, family, iterations=iterations)
        for execution in ("dense", "compact"):
            output = model(prompt, attention_mask=mask, execution=execution, **asked)
            assert_close(output.logits[mask.bool()], expected, f"{method} on {family}, {execution}")
            assert torch.equal(output.depth, mask)
        # Without padding the stock model's own mask is used.
        assert_close(model(prompt, max_iterations=1).logits, stock(family)(prompt).logits, f"{method} on {family}")


@pytest.mark.parametrize("family", ["gpt_neox", "gemma3"])
def test_eager_attention_is_the_same_function_within_its_float32_softmax(family):
    model = tiny("adaponder", family)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    expected = model(ids(2, 10), attention_mask=mask)
    model.backbone.set_attn_implementation("eager")
    output = model(ids(2, 10), attention_mask=mask)
    assert torch.equal(output.depth, expected.depth)
    assert_close(output.logits[mask.bool()], expected.logits[mask.bool()], "eager", tolerance=1e-5)
