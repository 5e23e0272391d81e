"""Head and expectation of a tick's rows equal the plain ones; rows that halt cost nothing and leave zeros."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="no Triton on this platform")

from adaponder.ops.row_linear import triton as products
from adaponder.ops.row_vocabulary import torch as plain
from adaponder.ops.row_vocabulary import triton as kernels
from adaponder.ops.vocab_expectation import plain_vocab_expectation
from poison import poisoned  # noqa: F401

pytestmark = pytest.mark.usefixtures("poisoned")

PLACES = [
    pytest.param("cpu", torch.float32, id="interpreted"),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu, id="gpu-bfloat16"),
]
FLOOR = {torch.float32: 1e-6, torch.bfloat16: 6e-3}
# (rows, d, vocabulary, width of the table)
SHAPES = [(1, 32, 61, 16), (3, 20, 130, 40), (7, 16, 33, 24), (0, 8, 20, 8)]


@pytest.fixture(autouse=True)
def _small_blocks(request, monkeypatch):
    if torch.cuda.is_available():
        if "gpu" not in request.keywords:
            pytest.skip("kernels are compiled for the GPU in this process, not interpreted")
        return
    monkeypatch.setattr(products, "blocks_for", lambda inputs, outputs: products.Blocks(8, 1))
    monkeypatch.setattr(kernels, "slices_for", lambda width: kernels.Slices(3, 16, 16, 1, 1))


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def error(ours: Tensor, truth: Tensor) -> float:
    assert ours.shape == truth.shape
    assert ours.isfinite().all()
    return float((ours.double().cpu() - truth).norm() / truth.norm().clamp_min(1e-30)) if truth.numel() else 0.0


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_equal_the_heads(shape, device, dtype, bias):
    rows, d, vocabulary, _ = shape
    hidden, weight = draw(rows, d, seed=0), draw(vocabulary, d, seed=1)
    shift = draw(vocabulary, seed=2) if bias else None
    narrow = [None if x is None else x.to(device, dtype) for x in (hidden, weight, shift)]
    ours = kernels.row_logits(narrow[0], narrow[1], bias=narrow[2])
    assert ours.dtype == dtype
    truth = plain.row_logits(*(x.double().cpu() for x in narrow[:2]), bias=shift if bias else None)
    assert error(ours, truth) <= FLOOR[dtype]


@pytest.mark.parametrize("sharpness", [0.3, 8.0])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_expectation_equals_the_plain_one(shape, device, dtype, sharpness):
    rows, _, vocabulary, width = shape
    logits = (draw(rows, vocabulary, seed=3) * sharpness).to(device, dtype)
    table = draw(vocabulary, width, seed=4).to(device, dtype)
    truth = plain.row_expectation(logits.double().cpu(), table.double().cpu(), scale=1.7)
    ours = kernels.row_expectation(logits, table, scale=1.7)
    same = plain.row_expectation(logits, table, scale=1.7)
    assert ours.dtype == dtype
    assert error(ours, truth) <= error(same, truth) + FLOOR[dtype]


@pytest.mark.parametrize("most", [16, 2], ids=["few", "many"])
def test_rows_that_do_not_go_on_leave_zeros_and_touch_nothing(monkeypatch, most):
    monkeypatch.setattr(kernels, "ROWS", most)
    logits, table = draw(5, 61, seed=3).float(), draw(61, 24, seed=4).float()
    goes_on = torch.tensor([True, False, True, False, False])
    logits[1] = float("nan") if most == 16 else logits[1]  # never looked at
    ours = kernels.row_expectation(logits, table, goes_on, scale=0.5)
    truth = plain.row_expectation(logits[goes_on].double(), table.double(), scale=0.5)
    assert error(ours[goes_on], truth) <= 1e-6
    assert not ours[~goes_on].any()


def test_where_no_row_goes_on_the_table_is_not_read(monkeypatch):
    def multiplied(*arguments, **options):
        raise AssertionError("a program multiplied with the table")

    logits, table = draw(3, 61, seed=3).float(), draw(61, 24, seed=4).float()
    monkeypatch.setattr(kernels.tl, "dot", multiplied)
    assert not kernels.row_expectation(logits, table, torch.zeros(3, dtype=torch.bool)).any()
    with pytest.raises(Exception, match="multiplied with the table"):
        kernels.row_expectation(logits, table, torch.tensor([False, True, False]))


@pytest.mark.parametrize("top_k", [None, 1, 5, 1000])
def test_the_plain_expectation_is_the_backbones(top_k):
    hidden, weight, table = draw(4, 8, seed=0), draw(20, 8, seed=1), draw(20, 6, seed=2)
    goes_on = torch.tensor([True, True, False, True])
    ours = plain.row_expectation(plain.row_logits(hidden, weight), table, goes_on, scale=2.0, top_k=top_k)
    theirs = plain_vocab_expectation(hidden, weight, table, top_k=top_k) * 2.0
    assert error(ours[goes_on], theirs[goes_on]) <= 1e-15
    assert not ours[2].any()


def test_an_infinite_logit_is_a_token_that_cannot_come():
    logits, table = draw(2, 61, seed=3).float(), draw(61, 24, seed=4).float()
    logits[0, :40] = -float("inf")
    truth = plain.row_expectation(logits.double(), table.double())
    assert error(kernels.row_expectation(logits, table), truth) <= 1e-6
