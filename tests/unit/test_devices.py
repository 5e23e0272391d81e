"""One device check, one rule of precision, one list of layers, one search for what is not a number."""

import pytest
import torch
from torch import nn

from adaponder.backbones.families import decoder_layers
from adaponder.devices import as_device, autocast, product_dtype
from adaponder.errors import InputError
from adaponder.ops.finite import first_not_finite
from support import tiny

CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_device_that_is_not_there_is_refused_by_name(monkeypatch):
    assert as_device("cpu") == CPU
    with pytest.raises(InputError, match="--device toaster"):
        as_device("toaster")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert as_device("cuda:1").index == 1
    with pytest.raises(InputError, match="--device cuda:2"):
        as_device("cuda:2")


@pytest.mark.parametrize(
    ("dtype", "device", "computed"),
    [
        ("bfloat16", "cpu", torch.float32),
        ("bfloat16", "cuda", torch.bfloat16),
        ("bfloat16", "mps", torch.bfloat16),
        ("float32", "cuda", torch.float32),
        ("float64", "cpu", torch.float64),
    ],
)
def test_bfloat16_autocasts_everywhere_but_on_a_cpu(monkeypatch, dtype, device, computed):
    made = {}
    monkeypatch.setattr(torch, "autocast", lambda kind, low, enabled: made.update(kind=kind, enabled=enabled))
    place = torch.device(device)
    assert product_dtype(dtype, place) == computed
    autocast(dtype, place)
    assert made == {"kind": device, "enabled": computed == torch.bfloat16}


def test_the_layers_of_a_decoder_are_its_list_of_that_length_and_not_a_longer_one():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.ModuleList([nn.Linear(1, 1) for _ in range(9)]) for _ in range(3)])

    body = Routed()
    assert decoder_layers(body, 3) == list(body.layers)
    assert decoder_layers(body, 4) == []
    model = tiny()
    layers = decoder_layers(model.backbone, model.config.num_hidden_layers)
    assert len(layers) == model.config.num_hidden_layers
    assert {type(layer).__name__ for layer in layers} == {"GPTNeoXLayer"}


def test_the_first_tensor_that_is_not_finite_is_named():
    tensors = {
        "counts": torch.arange(3),
        "offloaded": torch.full((2,), torch.nan, device=META),
        "eighth": torch.zeros(2).to(torch.float8_e4m3fn),
        "large": torch.tensor([1.0, -torch.inf], dtype=torch.float16),
        "lost": torch.tensor([torch.inf, torch.nan]),
    }
    assert first_not_finite(tensors.items()) == ("large", "an infinity", torch.float16)
    del tensors["large"]
    assert first_not_finite(tensors.items()) == ("lost", "NaN", torch.float32)
    del tensors["lost"]
    assert first_not_finite(tensors.items()) is None
