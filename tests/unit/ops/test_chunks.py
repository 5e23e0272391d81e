"""The operations over the vocabulary, a chunk of tokens at a time: value and every gradient of the plain versions."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adaponder.ops import kernels as shared
from adaponder.ops import linear_cross_entropy as loss_op
from adaponder.ops import vocab_expectation as expectation_op
from adaponder.ops.chunks import rows_per_chunk
from adaponder.ops.linear_cross_entropy import plain_linear_cross_entropy
from adaponder.ops.linear_cross_entropy import torch as loss_reference
from adaponder.ops.linear_cross_entropy import triton as loss_kernels
from adaponder.ops.vocab_expectation import plain_vocab_expectation, vocab_expectation
from adaponder.ops.vocab_expectation import torch as expectation_reference
from adaponder.ops.vocab_expectation import triton as expectation_kernels
from kernel_support import PLACES, assert_close, assert_no_worse, differentiate, draw, precisions

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    # On processors without bf16 products torch says so once; it then computes them another way.
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]


def plain_sum(hidden, weight, targets, token_weights, *, bias=None):
    losses = plain_linear_cross_entropy(hidden, weight, targets, bias=bias)
    return (token_weights.to(losses.dtype) * losses).sum()


# Each operation plain, by torch, by kernels, and as the package calls it.
EXPECTATIONS = (expectation_reference, expectation_kernels, expectation_op)
LOSSES = (loss_reference, loss_kernels, loss_op)
OPS = {
    "expectation": [plain_vocab_expectation, *(module.vocab_expectation for module in EXPECTATIONS)],
    "loss": [plain_linear_cross_entropy, *(module.linear_cross_entropy for module in LOSSES)],
    "sum": [plain_sum, *(module.linear_cross_entropy_sum for module in LOSSES)],
}
PLAIN, TORCH, KERNELS, PUBLIC = range(4)
IMPLEMENTATIONS = [pytest.param(TORCH, "cpu", id="torch")]
IMPLEMENTATIONS += [pytest.param(KERNELS, *p.values, marks=p.marks, id=p.id) for p in PLACES]
# (tokens, d, vocabulary, e): less than a block, exactly one, one and a bit, several.
SHAPES = [(1, 1, 1, 1), (7, 5, 32, 3), (13, 16, 33, 16), (5, 8, 131, 8), (0, 5, 11, 3)]
every_op = pytest.mark.parametrize("op", OPS)


@pytest.fixture(autouse=True)
def _small_blocks(request, monkeypatch):
    """Makes blocks so small that the interpreter meets several in a row."""
    if "large" not in request.keywords:
        monkeypatch.setattr(shared, "BLOCK", 32)


def leaves_of(op, shape=(7, 5, 131, 3), *, dtype=torch.float64, device="cpu", bias=True, sharpness=1.0, seed=0):
    """Draws hidden states, head, the expectation's table, and the bias if ``bias``."""
    tokens, d, vocabulary, e = shape
    shapes = {0: (tokens, d), 1: (vocabulary, d)} | ({2: (vocabulary, e)} if op == "expectation" else {})
    shapes |= {3: (vocabulary,)} if bias else {}
    leaves = [draw(*size, seed=seed + place, dtype=dtype, device=device) for place, size in shapes.items()]
    return [leaves[0] * sharpness, *leaves[1:]]


def targets_of(tokens: int, vocabulary: int, device: str = "cpu") -> Tensor:
    targets = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(5))
    targets[::3] = -100
    return targets.to(device)


def token_weights_of(tokens: int, device: str = "cpu") -> Tensor:
    weights = draw(tokens, seed=6, dtype=torch.float32, device=device).abs()
    weights[1::4] = 0
    return weights


def function(op: str, version: int, shape, device="cpu", *, bias=True, targets=None, token_weights=None, **options):
    """Returns an operation as a function of its leaves alone."""
    targets = targets_of(shape[0], shape[2], device) if targets is None else targets
    token_weights = token_weights_of(shape[0], device) if token_weights is None else token_weights
    data = {"expectation": [], "loss": [targets], "sum": [targets, token_weights]}[op]

    def call(hidden, weight, *others):
        shift = {"bias": others[-1]} if bias else {}
        return OPS[op][version](hidden, weight, *others[: len(others) - bias], *data, **shift, **options)

    return call


@every_op
@given(
    st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(1, 13), st.integers(1, 4)),
    st.integers(1, 20),
    st.booleans(),
    st.sampled_from([None, 1, 5, 1000]),
    st.integers(0, 99),
)
def test_any_chunk_equals_the_plain_version(op, shape, chunk, bias, top_k, seed):
    options = {"bias": bias} | ({"top_k": top_k} if op == "expectation" else {})
    leaves = leaves_of(op, shape, bias=bias, seed=seed)
    ours = differentiate(function(op, PUBLIC, shape, chunk=chunk, **options), leaves)
    assert_close(ours, differentiate(function(op, PLAIN, shape, **options), leaves), 1e-12)


@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sharpness", [0.1, 3.0])
def test_the_torch_version_is_no_worse_than_the_plain_one(op, dtype, sharpness):
    shape = (33, 16, 61, 16)
    make = partial(leaves_of, op, shape, sharpness=sharpness)
    assert_no_worse(make, function(op, TORCH, shape, chunk=17), function(op, PLAIN, shape), dtype)


@pytest.mark.one_of(7)
@every_op
@pytest.mark.parametrize("sharpness", [0.1, 10.0])
@pytest.mark.parametrize(("bias", "chunk"), [(True, 3), (False, None)], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device", PLACES)
def test_the_kernels_are_no_worse_than_the_plain_version(device, shape, chunk, bias, sharpness, op):
    make = partial(leaves_of, op, shape, device=device, bias=bias, sharpness=sharpness)
    ours = function(op, KERNELS, shape, device, bias=bias, chunk=chunk)
    for dtype in precisions(device):
        assert_no_worse(make, ours, function(op, PLAIN, shape, device, bias=bias), dtype)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.one_of(2)
@every_op
@pytest.mark.parametrize("shape", [(300, 64, 50304, 64), (77, 128, 16384, 96), (130, 64, 50257, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_real_vocabularies_on_a_gpu(dtype, shape, op):
    make = partial(leaves_of, op, shape, device="cuda", sharpness=0.3)
    ours, plain = function(op, PUBLIC, shape, "cuda", chunk=128), function(op, PLAIN, shape, "cuda")
    assert_no_worse(make, ours, plain, dtype)


@every_op
@pytest.mark.parametrize("learns", [0, 1, 2])
def test_frozen_inputs_get_no_gradient_and_the_others_theirs(op, learns):
    shape = (7, 5, 11, 3)
    leaves = leaves_of(op, shape)
    leaves[learns].requires_grad_()
    found, expected = (
        torch.autograd.grad(function(op, version, shape)(*leaves).square().sum(), leaves[learns])
        for version in (PUBLIC, PLAIN)
    )
    assert_close(found, expected, 1e-12)


@every_op
def test_under_autocast_it_computes_as_the_head_would(op):
    shape = (12, 8, 19, 8)
    leaves = leaves_of(op, shape, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, plain = (differentiate(function(op, version, shape), leaves) for version in (PUBLIC, PLAIN))
    first = torch.bfloat16 if op == "expectation" else torch.float32
    assert [x.dtype for x in ours] == [first] + [torch.float32] * (len(ours) - 1)
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.02, atol=0.03)


@every_op
@pytest.mark.parametrize(("version", "device"), IMPLEMENTATIONS)
def test_huge_logits_and_logits_of_minus_infinity_give_no_nan(op, version, device):
    """The bias makes every token of the first block impossible."""
    shape = (5, 8, 131, 8)
    leaves = leaves_of(op, shape, dtype=torch.float32, device=device, sharpness=1e4)
    ours = differentiate(function(op, version, shape, device, chunk=3), leaves)
    assert all(value.isfinite().all() for value in ours)
    torch.testing.assert_close(ours[0], function(op, PLAIN, shape, device)(*leaves), rtol=1e-5, atol=1e-5)
    leaves = leaves_of(op, shape, dtype=torch.float32, device=device)
    leaves[-1][:64] = -float("inf")
    options = {"targets": torch.full((5,), 100, device=device)}
    ours = differentiate(function(op, version, shape, device, chunk=3, **options), leaves)
    plain = differentiate(function(op, PLAIN, shape, device, **options), leaves)
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@every_op
@pytest.mark.parametrize(("version", "device"), IMPLEMENTATIONS)
def test_an_expanded_gradient_is_read_as_it_is(op, version, device):
    shape, leaves = (7, 5, 131, 3), leaves_of(op, dtype=torch.float32, device=device)
    hidden = leaves[0].requires_grad_()
    ours, plain = (  # the gradient of a sum has stride 0
        torch.autograd.grad(function(op, which, shape, device)(*leaves).sum(), hidden) for which in (version, PLAIN)
    )
    assert_close(ours, plain, 1e-5)


@every_op
def test_a_second_derivative_is_refused(op):
    leaves = leaves_of(op)
    total = function(op, PUBLIC, (7, 5, 131, 3))(leaves[0].requires_grad_(), *leaves[1:]).square().sum()
    (gradient,) = torch.autograd.grad(total, leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@every_op
def test_the_gradients_of_many_chunks_are_summed_wider_than_the_weights(op):
    # 512 equal contributions: bf16 would stop counting at 256 times the first.
    make = partial(torch.ones, dtype=torch.bfloat16)
    hidden, weight, table = make(512, 1), 0 * make(2, 1), make(2, 1)
    weight.requires_grad_(), table.requires_grad_()
    targets = torch.zeros(512, dtype=torch.long)
    if op == "expectation":
        vocab_expectation(hidden, weight, table, chunk=1).sum().backward()
        assert table.grad.flatten().tolist() == [256.0, 256.0]
        return
    more = [targets, torch.ones(512)] if op == "sum" else [targets]
    OPS[op][PUBLIC](hidden, weight, *more, chunk=1).sum().backward()
    assert weight.grad.flatten().tolist() == [-256.0, 256.0]


@pytest.mark.parametrize(("op", "options"), [("sum", {}), ("expectation", {"keep_logits": True})])
def test_it_can_be_compiled(op, options):
    shape = (7, 5, 11, 3)
    leaves = leaves_of(op, shape)
    compiled = torch.compile(function(op, PUBLIC, shape, chunk=3, **options), backend="aot_eager", fullgraph=True)
    assert_close(differentiate(compiled, leaves), differentiate(function(op, PLAIN, shape), leaves), 1e-12)


@every_op
def test_a_chunk_of_no_token_is_refused(op):
    with pytest.raises(ValueError, match="chunk=0"):
        function(op, PUBLIC, (7, 5, 131, 3), chunk=0)(*leaves_of(op))


def test_chunks_are_even_and_whole_tiles():
    assert rows_per_chunk(1000, 10, 35) == 3
    assert rows_per_chunk(1000, 10, 6000) == 512
    assert rows_per_chunk(1000, 1000, 10) == 1
    assert rows_per_chunk(50, 10, 6000) == 600


@pytest.mark.gpu
def test_a_gpu_runs_the_kernels_and_a_compiler_or_float64_the_torch_version(monkeypatch):
    launched, original = [], expectation_kernels.launch_rows
    monkeypatch.setattr(expectation_kernels, "launch_rows", lambda *given: launched.append(1) or original(*given))
    hidden, weight, table = leaves_of("expectation", dtype=torch.bfloat16, device="cuda", bias=False)
    vocab_expectation(hidden, weight, table)
    assert launched == [1]
    torch.compile(vocab_expectation, backend="eager")(hidden, weight, table)
    vocab_expectation(hidden.double(), weight.double(), table.double())
    monkeypatch.setenv("ADAPONDER_KERNELS", "0")
    vocab_expectation(hidden, weight, table)
    assert launched == [1]
