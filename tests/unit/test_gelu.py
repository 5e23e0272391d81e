"""GELU for compiled passes: as near to the truth as torch's own, in value and slope, and only where it pays."""

import pytest
import torch
from torch.nn.functional import gelu as stock_gelu
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from adaponder.ops import gelu as op


def value_and_slope(function, x):
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(torch.ones_like(y))
    return y.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_value_and_slope_are_no_worse_than_torchs_own(dtype):
    x = torch.linspace(-12, 12, 20001).to(dtype)
    truth = value_and_slope(stock_gelu, x.double())
    ours, theirs = value_and_slope(op._Gelu.apply, x), value_and_slope(stock_gelu, x)
    for exact, mine, stock in zip(truth, ours, theirs, strict=True):
        error, bound = (mine.double() - exact).abs(), (stock.double() - exact).abs()
        assert error.max() <= 1.01 * bound.max()
        assert error.mean() <= 1.01 * bound.mean()


def test_the_distribution_is_right_to_a_millionth_also_far_out():
    x = torch.linspace(-40, 40, 40001)
    below, bell = op._distribution(x)
    exact = torch.special.ndtr(x.double())
    assert (below.double() - exact).abs().max() < 3e-7
    assert (bell.double() - torch.exp(-0.5 * x.double() ** 2)).abs().max() < 3e-7
    assert torch.isfinite(below).all()


def test_whoever_is_not_compiled_or_wants_more_precision_gets_torchs_own(monkeypatch):
    x = torch.linspace(-5, 5, 101)
    assert torch.equal(op.gelu(x.bfloat16()), stock_gelu(x.bfloat16()))
    monkeypatch.setattr(op, "is_compiling", lambda: True)
    assert torch.equal(op.gelu(x.double()), stock_gelu(x.double()))
    assert torch.equal(op.gelu(x), stock_gelu(x))
    assert not torch.equal(op._distribution(x)[0], torch.special.ndtr(x))


def test_only_gelu_is_replaced():
    def decoder(activation):
        shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=11, hidden_act=activation, **shape))

    exact, approximate = decoder("gelu"), decoder("gelu_new")
    before = [type(layer.mlp.act) for layer in approximate.gpt_neox.layers]
    op.use(exact)
    op.use(approximate)
    assert all(layer.mlp.act.act is op.gelu for layer in exact.gpt_neox.layers)
    assert [type(layer.mlp.act) for layer in approximate.gpt_neox.layers] == before
    assert exact.config.hidden_act == "gelu"
