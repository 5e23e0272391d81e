"""Tests that a fused body equals the stock layers: mixed iterations, decode and prefill rows, every family."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from adaponder.backbones.wrapper import Backbone
from adaponder.inference.bodies import Body, FusedBody, Pools, StockBody, unsupported
from adaponder.ops import dispatch
from adaponder.ops.ledger_attention import Cohort, LedgerRows
from support import FAMILIES, stock, widen_norms

LANES, ITERATIONS, SLOTS, ROWS = 3, 3, 12, 120
HALF_TURNED = FAMILIES["gpt_neox"].rope_parameters | {"partial_rotary_factor": 0.5}
VARIANTS = {
    "neox-serial": ("gpt_neox", {"use_parallel_residual": False}),
    "neox-partial": ("gpt_neox", {"hidden_act": "gelu_pytorch_tanh", "rope_parameters": HALF_TURNED}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "sandwich": ("hyperclovax", {}),  # Ouro's layers
}
FUSED = ("gpt_neox", "llama", "mistral", "qwen2", "qwen3", "qwen2-mixed", *VARIANTS)


def backbone_of(name: str, dtype: torch.dtype = torch.float64) -> Backbone:
    family, changes = VARIANTS.get(name, (name, {}))
    model = stock(family, dtype=dtype, **changes)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():  # norms and biases that are not 1 and 0
        if parameter.ndim == 1:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.add_(noise.to(parameter.dtype) * 0.3)
    return Backbone(model)


def fused(backbone: Backbone, apart: bool = True) -> FusedBody:
    return FusedBody(backbone, rows=LANES, independent=apart, positions=64)


def scattered(seed: int) -> tuple[Tensor, LedgerRows]:
    """Returns (position, rows): three rows of different iterations and slots, and a cohort of four rows of one lane."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(ROWS, generator=generator)[: LANES * ITERATIONS * SLOTS].int()
    index = index.reshape(LANES, ITERATIONS, SLOTS)
    index[torch.rand(index.shape, generator=generator) < 0.2] = -1  # slots that an iteration does not see
    lane = torch.tensor([1, 0, 2, 0, 0, 0, 0])
    iteration = torch.tensor([2, 0, 1, 1, 1, 1, 1])
    slot = torch.tensor([11, 4, 7, 1, 2, 5, 6])
    row = torch.arange(ROWS - len(lane), ROWS)
    index[index >= ROWS - len(lane)] = 0  # the pass writes those
    index[lane, iteration, slot] = row.int()
    rows = LedgerRows(index, lane, slot, iteration, row, num_single=3, cohorts=(Cohort(3, 7, 0, 1, 6),), longest=12)
    return slot + torch.tensor([3, 0, 1, 0, 0, 0, 0]), rows


def read(body: Body, seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[Tensor, ...]:
    """Returns what two passes return, and the pools after them."""
    generator = torch.Generator().manual_seed(seed)
    pools = Pools.empty(body.row_shapes(), ROWS, dtype, torch.device(device))
    for pool in (*pools.keys, *pools.values):
        pool.copy_(torch.randn(pool.shape, generator=generator, dtype=torch.float64))
    results: list[Tensor] = []
    for number in range(2):
        position, rows = scattered(seed + number)
        tensors = {name: value.to(device) for name, value in rows._asdict().items() if isinstance(value, Tensor)}
        x = torch.randn(len(rows.lane), 16, generator=generator, dtype=torch.float64).to(device, dtype)
        output = body.forward(x, position.to(device), rows._replace(**tensors), pools)
        results += [output.hidden, output.stream]
    return (*results, *pools.keys, *pools.values)


def errors(backbone: Backbone, body: Body, seed: int = 0) -> list[float]:
    """Returns relative differences from the stock layers, whose keys and values are gathered row by row."""
    plain = StockBody(backbone, stream=True)
    plain.gathers = True
    with torch.no_grad():
        ours, theirs = read(body, seed), read(plain, seed)
    return [float((mine - true).abs().max() / true.abs().max()) for mine, true in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "together"])
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_body_equals_the_stock_layers(name, apart):
    backbone = backbone_of(name)
    assert unsupported(backbone) is None
    body = fused(backbone, apart)
    assert body.row_shapes() == StockBody(backbone, stream=True).row_shapes()
    assert max(errors(backbone, body)) <= 1e-12


ON_GPU = itertools.product(["sandwich", "llama", "gpt_neox"], ["cuda"], [torch.float32, torch.bfloat16, torch.float16])


@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [("sandwich", "cpu", torch.float16), *(pytest.param(*case, marks=pytest.mark.gpu) for case in ON_GPU)],
)
@torch.no_grad()
def test_kernels_are_as_near_to_the_truth_as_the_stock_layers(name, device, dtype, monkeypatch):
    if device == "cpu":
        if torch.cuda.is_available():
            pytest.skip("kernels are compiled for the GPU in this process, not interpreted")
        monkeypatch.setattr(dispatch, "has_kernels", lambda *_, **__: True)
    narrow = backbone_of(name, torch.float32).stock.to(device, dtype)
    wide = copy.deepcopy(narrow).to("cpu", torch.float64)
    widen_norms(wide)
    bodies = [fused(Backbone(narrow)), StockBody(Backbone(narrow), stream=True), StockBody(Backbone(wide), stream=True)]
    for body in bodies[1:]:
        body.gathers = True
    # Mean squares over many passes: with 16 dimensions the largest error of a few is noise.
    squares = torch.zeros(2, dtype=torch.float64)
    for seed in range(2 if device == "cpu" else 16):
        truth = read(bodies[2], seed)
        for number, body in enumerate(bodies[:2]):
            for values, true in zip(read(body, seed, dtype, device), truth, strict=True):
                squares[number] += (values.double().cpu() - true).square().mean() / true.square().mean()
    kernels, plain = squares.sqrt().tolist()
    assert 0 < kernels <= 1.25 * plain


class _Adapter(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda body: setattr(body.layers[0].mlp, "dense_4h_to_h", _Adapter(24, 16)), "adapter"),
        (lambda body: setattr(body.rotary_emb, "rope_type", "dynamic"), "dynamic"),
        (lambda body: setattr(body.config, "hidden_act", "mish"), "mish"),
        (lambda body: body.layers[1].to(torch.float32), "precisions"),
        (lambda body: body.layers[1].mlp.register_forward_hook(lambda *args: None), "hooks"),
        (lambda body: setattr(body.layers[0], "post_norm2", nn.Identity()), "Identity"),
        (lambda body: setattr(body.config, "residual_multiplier", 0.5), "residual"),
    ],
    ids=["adapter", "rope", "activation", "precision", "hook", "norm", "multiplier"],
)
def test_changed_modules_are_left_to_the_stock_layers(change, reason):
    backbone = backbone_of("sandwich" if reason in ("residual", "Identity") else "gpt_neox")
    change(backbone.body)
    assert reason in str(unsupported(backbone))
    assert "olmo2" in str(unsupported(backbone_of("olmo2")))
