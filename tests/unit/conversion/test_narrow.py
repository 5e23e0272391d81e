"""Narrower weights: what is quantised, what stays, and that a quantised model is as exact a member as any."""

import json

import pytest
import torch

from adaponder.commands import evaluate
from adaponder.conversion.narrow import NarrowLinear, narrow, weight_bytes
from adaponder.conversion.open import load
from adaponder.errors import CheckpointError, InputError
from adaponder.inference.bodies import unsupported
from support import tiny

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
HALF_STEP = {"int8": 1 / 254, "fp8": 1 / 16}
PRECISIONS = ("float16", "bfloat16", "float32")


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    models = [tiny(dtype=torch.float32).eval() for _ in range(2)]
    narrow(models[1], request.param)
    return models


def test_layers_are_quantised_and_nothing_else(pair):
    for weights in ("int4", "bfloat16"):  # a CPU is faster in float32
        with pytest.raises(InputError, match=f"--weights {weights}"):
            narrow(pair[0], weights)
    wide, narrowed = pair
    inside = {name for name, module in wide.named_modules() if ".layers." in name and type(module) is torch.nn.Linear}
    assert inside == {name for name, module in narrowed.named_modules() if isinstance(module, NarrowLinear)}
    assert len(inside) == 4 * wide.config.backbone_config.num_hidden_layers
    kept, before = dict(narrowed.named_parameters()), dict(wide.named_parameters())
    assert set(before) - set(kept) == {f"{name}.{part}" for name in inside for part in ("weight", "bias")}
    for name, parameter in kept.items():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_within_half_a_step_of_what_it_was(kind):
    error = HALF_STEP[kind]
    wide = torch.nn.Linear(7, 5)
    with torch.no_grad():
        wide.weight[2] = 0.0
        wide.weight[3] *= 1e-6
    narrowed = NarrowLinear(wide, KINDS[kind])
    assert narrowed.weight.element_size() == 1
    found = narrowed.weight.float() * narrowed.scale[:, None]
    # int8: of the row's largest number; fp8 has three bits after the first of each number, or the row's smallest step.
    largest = wide.weight.abs().amax(1, keepdim=True)
    allowed = largest * error if kind == "int8" else wide.weight.abs() * error + largest / 448 * 2**-9
    assert ((found - wide.weight).abs() <= allowed * 1.001).all()
    x = torch.randn(3, 7)
    torch.testing.assert_close(narrowed(x), torch.nn.functional.linear(x, found, wide.bias))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_row_of_any_precision_and_size_passes_the_last_step(kind, precision):
    """Largest numbers from 1 to 2, of which halves round some scales down, times small ones, and a row of zeros."""
    sizes = torch.cat([torch.linspace(1, 2, 300) * 2.0**-power for power in (0, 6, 12)] + [torch.zeros(1)])
    wide = torch.nn.Linear(5, len(sizes), bias=False)
    with torch.no_grad():
        wide.weight.copy_(sizes[:, None] * torch.tensor([1.0, -1.0, 0.5, -0.3, 0.0]))
    wide = wide.to(getattr(torch, precision))
    narrowed = NarrowLinear(wide, KINDS[kind])
    weight = wide.weight.detach().double()
    found = narrowed.weight.double() * narrowed.scale.double()[:, None]
    assert ((found - weight).abs() <= weight.abs().amax(1, keepdim=True) * HALF_STEP[kind] * 1.01).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_product_is_that_of_the_widened_weights_wherever_theirs_is_finite(kind, precision):
    """In float16 sums of steps would overflow at inputs of this size."""
    dtype = getattr(torch, precision)
    torch.manual_seed(0)
    wide = torch.nn.Linear(512, 300)
    with torch.no_grad():
        wide.weight.normal_(0, 0.02)
        wide.weight[:100] *= 1e-3
        wide.weight[100:200] *= 1e-4
    wide = wide.to(dtype)
    narrowed = NarrowLinear(wide, KINDS[kind])
    x = (torch.randn(16, 512) * 200).to(dtype)
    widened = narrowed.weight.double() * narrowed.scale.double()[:, None]
    expected = torch.nn.functional.linear(x.double(), widened, wide.bias.double())
    assert expected.abs().max() < 1000
    # Rounded after the product, the scale and the bias: three times, by half a step of the precision each.
    torch.testing.assert_close(narrowed(x).double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=4e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_small_rows_keep_their_numbers_in_float16(kind):
    torch.manual_seed(0)
    wide = torch.nn.Linear(512, 64, bias=False)
    with torch.no_grad():
        wide.weight.normal_(0, 1e-5)
    narrowed = NarrowLinear(wide.half(), KINDS[kind])
    x = torch.randn(16, 512).half()
    widened = narrowed.weight.double() * narrowed.scale.double()[:, None]
    expected = torch.nn.functional.linear(x.double(), widened)
    assert (narrowed(x).double() - expected).norm() < 0.01 * expected.norm()


class Strange(torch.Tensor):
    """As other libraries keep quantised weights: a tensor that says float32 and is none."""


def test_no_kernel_reads_quantised_weights_as_if_they_were_plain(pair):
    assert unsupported(pair[0]._wrapped) is None
    assert "quantised" in (unsupported(pair[1]._wrapped) or "")
    model = tiny(dtype=torch.float32).eval()
    linear = model.backbone.gpt_neox.layers[0].mlp.dense_h_to_4h
    linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(Strange), requires_grad=False)
    assert "quantised" in (unsupported(model._wrapped) or "")


def test_a_quantised_model_is_not_saved(pair, tmp_path):
    with pytest.raises(CheckpointError, match="query_key_value is quantised"):
        pair[1].save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_eval_says_what_narrower_weights_change(tmp_path, capsys):
    evaluate.evaluate("sample", data="sample", max_tokens=64, weights="int8", json=tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())["weights"]
    opened, _ = load("sample")
    assert found["bytes"][0] == weight_bytes(opened)
    assert found["bytes"][1] < 0.6 * found["bytes"][0]
    assert 0 < abs(found["difference"]["mean"]) < 0.05
    assert 0 <= found["other_depth"] < 0.2
    shown = " ".join(capsys.readouterr().out.split())
    assert f"int8 weights: {found['difference']['mean']:+.4f} nats per token" in shown
