"""Row products: the kernels equal the plain version, and the plain norm equals its module."""

import pytest
import torch
from torch import Tensor, nn

from adaponder.ops.row_linear import Linear, Norm, Piece, Term
from adaponder.ops.row_linear import torch as plain
from adaponder.ops.row_linear import triton as kernels
from kernel_support import PLACES, draw, error, widest

pytestmark = pytest.mark.usefixtures("poisoned")

# Relative errors that rounding may leave beyond the plain version's.
FLOOR = {torch.float32: 5e-7, torch.bfloat16: 4e-3}
# (rows, inputs): a power of two, and others; one row and several.
SHAPES = [(1, 32), (3, 40), (0, 24)]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Makes blocks so small that the interpreter meets several."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(kernels, "few_cut", lambda inputs, outputs: kernels.Cut(4, 1))
        monkeypatch.setattr(kernels, "some_cut", lambda rows, inputs, outputs: kernels.Cut(16, 1, 16, 1, splits=2))
        monkeypatch.setattr(kernels, "some_gated_cut", lambda rows: kernels.Cut(16, 1, 16, 1))


class Case:
    """Draws rows, linear maps and norms, the same in every precision."""

    def __init__(self, rows: int, inputs: int, dtype: torch.dtype = torch.float64, device: str = "cpu"):
        self.rows, self.inputs, self.make = rows, inputs, {"dtype": dtype, "device": device}

    def x(self) -> Tensor:
        return draw(self.rows, self.inputs + 5, seed=1, **self.make)[:, : self.inputs] + 0.5  # off centre

    def strided(self, inputs: int, seed: int) -> Tensor:
        return draw(self.rows, inputs + 7, seed=seed, **self.make)[:, 3 : 3 + inputs]

    def linear(self, outputs: int, seed: int, *, bias: bool = True, inputs: int | None = None) -> Linear:
        inputs = inputs or self.inputs
        weight = (draw(outputs, inputs, seed=seed) / inputs**0.5).to(**self.make)
        return Linear(weight, draw(outputs, seed=seed + 50, **self.make) if bias else None)

    def norm(self, seed: int, *, centred: bool) -> Norm:
        weight, bias = (draw(self.inputs, seed=seed + extra, **self.make) for extra in (0, 60))
        return Norm(weight, bias if centred else None, 1e-5, centred)


def pieces_of(name: str, case: Case) -> list[Piece]:
    rms = case.norm(3, centred=False)
    return {
        "neox": lambda: [
            Piece((case.linear(11, 2),), case.norm(3, centred=True)),
            Piece((case.linear(9, 4),), case.norm(5, centred=True), "gelu"),
        ],
        "llama": lambda: [Piece(tuple(case.linear(size, 6 + size, bias=size == 4) for size in (11, 4, 6)), rms)],
        "head": lambda: [Piece((case.linear(13, 2, bias=False),), None, "gelu_tanh")],
        "one norm": lambda: [Piece((case.linear(11, 2),), rms), Piece((case.linear(9, 4),))],
    }[name]()


def compute(name: str, op, case: Case) -> Tensor:
    """Computes one of the uses of the kernels."""
    mixed, between, residual = case.strided(24, 21), case.strided(45, 22), case.strided(9, 23)
    out, down = case.linear(9, 9, inputs=24), case.linear(9, 10, inputs=45, bias=False)
    gate, up, rms = case.linear(10, 7), case.linear(10, 8, bias=False), case.norm(3, centred=False)
    if name == "gated":
        return op.gated_linear(case.x(), gate, up, rms, activation="silu")
    if name == "sum":
        return op.residual_linears(residual, (Term(mixed, out), Term(between, down)))
    if name == "term":
        return op.residual_linears(residual, (Term(between, down),))
    if name.endswith("norm") and name != "one norm":
        return op.row_norm(case.x(), case.norm(3, centred=name == "layer norm"))
    x = case.strided(case.inputs, 21) if name == "one norm" else case.x()
    return torch.cat(op.normed_linears(x, pieces_of(name, case)), -1)


NAMES = ("neox", "llama", "head", "one norm", "gated", "sum", "term", "layer norm", "rms norm")


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_equal_the_plain_version(name, shape, device):
    case = Case(*shape, widest(device), device)
    ours = compute(name, kernels, case)
    assert ours.dtype == widest(device)
    truth = compute(name, plain, Case(*shape))
    assert error(ours, truth) <= error(compute(name, plain, case), truth) + FLOOR[ours.dtype]


@pytest.mark.parametrize(("few", "some"), [(8, 64), (0, 64), (2, 2)], ids=["each", "together", "by the library"])
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_rows_equals_the_plain_version(name, few, some, monkeypatch, interpreted):
    monkeypatch.setattr(kernels, "FEW", few)
    monkeypatch.setattr(kernels, "SOME", some)
    ours, truth = compute(name, kernels, Case(3, 40, torch.float32)), compute(name, plain, Case(3, 40))
    assert error(ours, truth) <= 5e-7


@pytest.mark.parametrize("rows", [1, 3])
def test_transposed_rows_and_weights_are_read_by_their_strides(rows, interpreted):
    """``nn.Parameter(kernel.T)`` gives such weights."""

    def across(x: Tensor) -> Tensor:
        return x.t().contiguous().t()

    case = Case(rows, 40, torch.float32)
    x, norm, linear = case.x(), case.norm(3, centred=False), case.linear(10, 7)
    for given, lying in ((x, linear._replace(weight=across(linear.weight))), (across(x), linear)):
        wanted = plain.gated_linear(x, linear, linear, norm, activation="silu")
        assert error(kernels.gated_linear(given, lying, linear, norm, activation="silu"), wanted) <= 1e-6
        wanted = plain.normed_linears(x, [Piece((linear,), norm)])[0]
        assert error(kernels.normed_linears(given, [Piece((lying,), norm)])[0], wanted) <= 1e-6
        wanted = plain.residual_linears(x[:, :10], (Term(x, linear),))
        assert error(kernels.residual_linears(x[:, :10], (Term(given, lying),)), wanted) <= 1e-6


@pytest.mark.parametrize("version", [plain, kernels], ids=["torch", "kernels"])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_norms_that_share_a_weight_are_computed_apart(version, rows, interpreted):
    case = Case(rows, 40, torch.float32)
    norm, linear = case.norm(3, centred=True), case.linear(9, 4)
    for other in (norm._replace(bias=norm.bias + 1), norm._replace(eps=0.5)):
        pieces = [Piece((linear,), norm), Piece((linear,), other)]
        for ours, piece in zip(version.normed_linears(case.x(), pieces), pieces, strict=True):
            assert error(ours, plain.normed_linears(case.x(), [piece])[0]) <= 1e-6


@pytest.mark.parametrize("centred", [True, False])
def test_the_plain_norm_equals_the_module(centred):
    case = Case(3, 20)
    norm, x = case.norm(3, centred=centred), case.x()
    module = (nn.LayerNorm(20, eps=1e-5) if centred else nn.RMSNorm(20, eps=1e-5)).double()
    module.load_state_dict({"weight": norm.weight} | ({"bias": norm.bias} if centred else {}))
    assert error(plain.row_norm(x, norm), module(x).detach()) <= 1e-15


@pytest.mark.parametrize("activation", plain.ACTIVATIONS)
def test_every_activation_equals_the_plain_one(activation, interpreted):
    case = Case(2, 32, torch.float32)
    piece = Piece((case.linear(9, 4),), case.norm(5, centred=False), activation)
    ours, theirs = (version.normed_linears(case.x(), [piece])[0] for version in (kernels, plain))
    assert error(ours, theirs) <= 1e-6
