"""GELU for compiled passes: as near to the truth as torch's own, in value and slope, and only where it pays."""

import copy

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import gelu as stock_gelu
from transformers.activations import GELUActivation

from adaponder import AdaPonderForCausalLM
from adaponder.ops import gelu as op
from support import ids, stock, tiny


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
    for exact, mine, torchs in zip(truth, ours, theirs, strict=True):
        error, bound = (mine.double() - exact).abs(), (torchs.double() - exact).abs()
        for start in range(-12, 12):
            here = (x >= start) & (x <= start + 1)
            # Beside what half precision loses anyway: a few times what the formula is off by.
            assert error[here].max() <= 1.01 * bound[here].max() + 1e-6
            assert error[here].mean() <= 1.01 * bound[here].mean() + 1e-6


def test_eager_passes_and_wider_precision_get_torchs_own(monkeypatch):
    x = torch.linspace(-5, 5, 101)
    assert torch.equal(op.gelu(x.bfloat16()), stock_gelu(x.bfloat16()))
    monkeypatch.setattr(op, "is_compiling", lambda: True)
    assert torch.equal(op.gelu(x.double()), stock_gelu(x.double()))
    assert torch.equal(op.gelu(x), stock_gelu(x))
    assert not torch.equal(op._distribution(x)[0], torch.special.ndtr(x))


def test_a_compiled_pass_computes_no_error_function_and_the_same():
    model = tiny(dtype=torch.bfloat16, iterations=2).train()
    seen = []

    def look(graph, given):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    def loss():
        model.zero_grad()
        found = model(ids(), targets=ids(seed=1), output_logits=False).loss
        found.backward()
        return found.detach(), torch.cat([p.grad.flatten() for p in model.backbone.parameters()])

    expected, gradient = loss()
    torch._dynamo.reset()
    model.compile_passes(backend=aot_autograd(fw_compiler=look, bw_compiler=look))
    assert any(isinstance(module, GELUActivation) for module in model.modules())
    found, slope = loss()
    assert any("exp" in name for name in seen)
    assert not [name for name in seen if "erf" in name or "gelu" in name]
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)
    assert torch.nn.functional.cosine_similarity(slope.float(), gradient.float(), dim=0) > 0.99


def test_a_model_with_another_gelu_is_copied_and_saved_as_before(tmp_path):
    model = tiny(dtype=torch.float32)
    expected = model(ids()).logits
    model.compile_passes()
    model.wrapped.compile_options = None
    twin = copy.deepcopy(model)
    model.save_pretrained(tmp_path)
    for other in (twin, AdaPonderForCausalLM.from_pretrained(tmp_path)):
        assert torch.equal(other(ids()).logits, expected)


def test_only_gelu_is_replaced():
    exact, approximate = (stock(hidden_act=activation) for activation in ("gelu", "gelu_new"))
    before = [type(layer.mlp.act) for layer in approximate.gpt_neox.layers]
    op.use(exact)
    op.use(approximate)
    assert all(layer.mlp.act.act is op.gelu for layer in exact.gpt_neox.layers)
    assert [type(layer.mlp.act) for layer in approximate.gpt_neox.layers] == before
    assert exact.config.hidden_act == "gelu"
