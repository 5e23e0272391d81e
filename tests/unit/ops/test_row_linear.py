"""Products of few rows: the kernels equal the plain version, and the plain version the modules it stands for.

Without a GPU the kernels run in Triton's interpreter, in float32; bf16 is tested on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="no Triton on this platform")

from adaponder.ops.row_linear import Linear, Norm, Piece, Term, some
from adaponder.ops.row_linear import torch as plain
from adaponder.ops.row_linear import triton as kernels
from poison import poisoned  # noqa: F401

pytestmark = pytest.mark.usefixtures("poisoned")

GPU = pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu, id="gpu-bfloat16")
PLACES = [pytest.param("cpu", torch.float32, id="interpreted"), GPU]
# Relative errors that rounding may leave beyond the plain version's.
FLOOR = {torch.float32: 5e-7, torch.bfloat16: 4e-3}
# (rows, inputs): a power of two, and others; one row and several.
SHAPES = [(1, 32), (3, 40), (0, 24)]


@pytest.fixture(autouse=True)
def _small_blocks(request, monkeypatch):
    """Several blocks at sizes an interpreter can walk."""
    if torch.cuda.is_available():
        if "gpu" not in request.keywords:
            pytest.skip("kernels are compiled for the GPU in this process, not interpreted")
        return
    monkeypatch.setattr(kernels, "blocks_for", lambda inputs, outputs: kernels.Blocks(4, 1))
    monkeypatch.setattr(some, "cut_for", lambda rows, inputs, outputs: some.Cut(16, 16, 1, 1, splits=2))
    monkeypatch.setattr(some, "gated_cut_for", lambda rows: some.Cut(16, 16, 1, 1))


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Case:
    """Random rows, maps and norms, the same in every precision."""

    def __init__(self, rows: int, inputs: int):
        self.rows, self.inputs = rows, inputs

    def x(self, like: Tensor, inputs: int | None = None, seed: int = 1) -> Tensor:
        wide = draw(self.rows, (inputs or self.inputs) + 5, seed=seed).to(like)
        return wide[:, : inputs or self.inputs] + 0.5  # off centre

    def strided(self, like: Tensor, inputs: int, seed: int) -> Tensor:
        return draw(self.rows, inputs + 7, seed=seed).to(like)[:, 3 : 3 + inputs]

    def linear(self, like: Tensor, outputs: int, seed: int, *, bias: bool = True, inputs: int | None = None) -> Linear:
        weight = draw(outputs, inputs or self.inputs, seed=seed) / (inputs or self.inputs) ** 0.5
        return Linear(weight.to(like), draw(outputs, seed=seed + 50).to(like) if bias else None)

    def norm(self, like: Tensor, seed: int, *, centred: bool) -> Norm:
        weight, bias = (draw(self.inputs, seed=seed + extra).to(like) for extra in (0, 60))
        return Norm(weight, bias if centred else None, 1e-5, centred)


def neox_pieces(case: Case, like: Tensor) -> list[Piece]:
    return [
        Piece((case.linear(like, 11, 2),), case.norm(like, 3, centred=True)),
        Piece((case.linear(like, 9, 4),), case.norm(like, 5, centred=True), "gelu"),
    ]


def llama_pieces(case: Case, like: Tensor) -> list[Piece]:
    norm = case.norm(like, 3, centred=False)
    return [Piece(tuple(case.linear(like, size, 6 + size, bias=size == 4) for size in (11, 4, 6)), norm)]


def head_pieces(case: Case, like: Tensor) -> list[Piece]:
    return [Piece((case.linear(like, 13, 2, bias=False),), None, "gelu_tanh")]


def computations(case: Case, like: Tensor) -> dict:
    """Name -> function of (operations) for every way the kernels are used."""
    x = case.x(like)
    norm = case.norm(like, 3, centred=False)
    gate, up = case.linear(like, 10, 7), case.linear(like, 10, 8, bias=False)
    mixed, between = case.strided(like, 24, 21), case.strided(like, 45, 22)
    out, down = case.linear(like, 9, 9, inputs=24), case.linear(like, 9, 10, inputs=45, bias=False)
    residual = case.strided(like, 9, 23)
    return {
        "neox": lambda op: torch.cat(op.normed_linears(x, neox_pieces(case, like)), -1),
        "llama": lambda op: torch.cat(op.normed_linears(x, llama_pieces(case, like)), -1),
        "head": lambda op: torch.cat(op.normed_linears(x, head_pieces(case, like)), -1),
        "gated": lambda op: op.gated_linear(x, gate, up, norm, activation="silu"),
        "sum": lambda op: op.residual_linears(residual, (Term(mixed, out), Term(between, down))),
        "term": lambda op: op.residual_linears(residual, (Term(between, down),)),
        "layer norm": lambda op: op.row_norm(x, case.norm(like, 3, centred=True)),
        "rms norm": lambda op: op.row_norm(x, norm),
    }


def error(ours: Tensor, truth: Tensor) -> float:
    assert ours.shape == truth.shape
    assert ours.isfinite().all()
    return float((ours.double().cpu() - truth).norm() / truth.norm().clamp_min(1e-30)) if truth.numel() else 0.0


NAMES = ("neox", "llama", "head", "gated", "sum", "term", "layer norm", "rms norm")


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_equal_the_plain_version(name, shape, device, dtype):
    like = torch.empty(0, dtype=dtype, device=device)
    ours = computations(Case(*shape), like)[name](kernels)
    assert ours.dtype == dtype
    same = computations(Case(*shape), like)[name](plain)
    truth = computations(Case(*shape), torch.empty(0, dtype=torch.float64))[name](plain)
    assert error(ours, truth) <= error(same, truth) + FLOOR[dtype]


@pytest.mark.parametrize("few", [8, 0], ids=["each", "together"])
@pytest.mark.parametrize("name", ["neox", "llama", "gated", "sum", "term"])
def test_rows_are_multiplied_each_or_together(name, few, monkeypatch):
    monkeypatch.setattr(kernels, "FEW", few)
    like, true = torch.empty(0, dtype=torch.float32), torch.empty(0, dtype=torch.float64)
    ours = computations(Case(3, 40), like)[name](kernels)
    assert error(ours, computations(Case(3, 40), true)[name](plain)) <= 5e-7


@pytest.mark.parametrize("name", NAMES)
def test_many_rows_equal_the_plain_version_too(name, monkeypatch):
    monkeypatch.setattr(kernels, "SOME", 2)
    like, true = torch.empty(0, dtype=torch.float32), torch.empty(0, dtype=torch.float64)
    ours = computations(Case(5, 40), like)[name](kernels)
    assert error(ours, computations(Case(5, 40), true)[name](plain)) <= 5e-7


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_and_weights_that_lie_across_are_read_as_they_lie(rows):
    """As ``nn.Parameter(kernel.T)`` does."""

    def across(x: Tensor) -> Tensor:
        return x.t().contiguous().t()

    case, like = Case(rows, 40), torch.empty(0, dtype=torch.float32)
    x, norm = case.x(like), case.norm(like, 3, centred=False)
    linear = case.linear(like, 10, 7)
    turned = linear._replace(weight=across(linear.weight))
    for given, one in ((x, turned), (across(x), linear)):
        wanted = plain.gated_linear(x, linear, linear, norm, activation="silu")
        assert error(kernels.gated_linear(given, one, linear, norm, activation="silu"), wanted.double()) <= 1e-6
        wanted = plain.normed_linears(x, [Piece((linear,), norm)])[0]
        assert error(kernels.normed_linears(given, [Piece((one,), norm)])[0], wanted.double()) <= 1e-6
        term, other = Term(x, linear), Term(given, one)
        wanted = plain.residual_linears(x[:, :10], (term,))
        assert error(kernels.residual_linears(x[:, :10], (other,)), wanted.double()) <= 1e-6


def test_a_map_with_a_norm_and_one_without_read_the_same_slice():
    case, like = Case(3, 40), torch.empty(0, dtype=torch.float32)
    x, norm = case.strided(like, 40, 21), case.norm(like, 3, centred=False)
    pieces = [Piece((case.linear(like, 11, 2),), norm), Piece((case.linear(like, 9, 4),))]
    for ours, theirs in zip(kernels.normed_linears(x, pieces), plain.normed_linears(x, pieces), strict=True):
        assert error(ours, theirs.double()) <= 1e-6


@pytest.mark.parametrize("centred", [True, False])
def test_the_plain_norm_equals_the_module(centred):
    case, like = Case(3, 20), torch.empty(0, dtype=torch.float64)
    norm, x = case.norm(like, 3, centred=centred), case.x(like)
    module = (nn.LayerNorm(20, eps=1e-5) if centred else nn.RMSNorm(20, eps=1e-5)).double()
    module.load_state_dict({"weight": norm.weight} | ({"bias": norm.bias} if centred else {}))
    assert error(plain.row_norm(x, norm), module(x).detach()) <= 1e-15


def test_every_activation_equals_the_plain_one():
    like = torch.empty(0, dtype=torch.float32)
    case = Case(2, 32)
    for activation in plain.ACTIVATIONS:
        piece = Piece((case.linear(like, 9, 4),), case.norm(like, 5, centred=False), activation)
        x = case.x(like)
        ours, theirs = kernels.normed_linears(x, [piece])[0], plain.normed_linears(x, [piece])[0]
        assert error(ours, theirs.double()) <= 1e-6, activation
