"""The chunked expectation over the vocabulary equals the plain one, in value and in every gradient."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adaponder.ops.vocab_expectation import plain_vocab_expectation, vocab_expectation
from poison import poisoned  # noqa: F401

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    # On processors without bf16 products torch says so once; it then computes them another way.
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]

# What the chunked version may lose beyond the plain one of the same precision, as relative error: about a rounding,
# because sums run in another order.
FLOOR = {torch.float32: 2e-7, torch.bfloat16: 1.5e-3}
SHAPES = [(1, 1, 2, 1), (7, 5, 11, 3), (13, 16, 61, 16), (0, 5, 11, 3)]  # tokens, d, vocabulary, e


class Given(NamedTuple):
    hidden: Tensor
    weight: Tensor
    table: Tensor
    bias: Tensor | None


class Result(NamedTuple):
    mixed: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    table: Tensor | None
    bias: Tensor | None


def given(tokens: int, d: int, vocabulary: int, e: int, *, bias: bool = True, seed: int = 0) -> Given:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return Given(random(tokens, d), random(vocabulary, d), random(vocabulary, e), random(vocabulary) if bias else None)


def differentiate(
    function, data: Given, *, dtype: torch.dtype = torch.float64, frozen: tuple[str, ...] = (), **options
) -> Result:
    """The mixture and the gradient of every input that is not frozen, for one fixed random cotangent."""
    leaves = {}
    for name, value in data._asdict().items():
        wants = value is not None and name not in frozen
        leaves[name] = None if value is None else value.detach().to(dtype).requires_grad_(wants)
    if data.table is data.weight:
        leaves["table"] = leaves["weight"]
    mixed = function(leaves["hidden"], leaves["weight"], leaves["table"], bias=leaves["bias"], **options)
    cotangent = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if mixed.requires_grad:
        mixed.backward(cotangent.to(mixed.dtype))
    gradients = {name: None if leaf is None else leaf.grad for name, leaf in leaves.items()}
    return Result(mixed.detach(), **gradients)


def distance(ours: Tensor, truth: Tensor) -> float:
    """The largest difference, relative to the largest true entry."""
    assert ours.shape == truth.shape
    if truth.numel() == 0:
        return 0.0
    scale = max(float(truth.double().abs().max()), 1e-300)
    return float((ours.double() - truth.double()).abs().max()) / scale


def assert_equal(ours: Result, plain: Result, bound: float) -> None:
    for name, mine, theirs in zip(Result._fields, ours, plain, strict=True):
        assert (mine is None) == (theirs is None), name
        if mine is not None and theirs is not None:
            error = distance(mine, theirs)
            # A true gradient of zero (one token in the vocabulary) has no scale to be relative to.
            assert error <= bound or float((mine - theirs).abs().max()) <= bound, (name, error)


@pytest.mark.parametrize("top_k", [None, 1, 5, 1000])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("chunk", [1, 3, 100, None])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_chunked_expectation_equals_the_plain_one_in_value_and_every_gradient(shape, chunk, bias, top_k):
    data = given(*shape, bias=bias)
    ours = differentiate(vocab_expectation, data, chunk=chunk, top_k=top_k)
    plain = differentiate(plain_vocab_expectation, data, top_k=top_k)
    assert ours.mixed.shape == (shape[0], shape[3])
    assert_equal(ours, plain, 1e-14)


@pytest.mark.parametrize("top_k", [None, 1, 5, 1000])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_the_gradient_of_a_tied_weight_is_the_sum_of_both_its_parts(chunk, top_k):
    apart = given(13, 5, 11, 5)
    apart = apart._replace(table=apart.weight.clone())
    tied = apart._replace(table=apart.weight)
    ours = differentiate(vocab_expectation, tied, chunk=chunk, top_k=top_k)
    plain = differentiate(plain_vocab_expectation, tied, top_k=top_k)
    parts = differentiate(plain_vocab_expectation, apart, top_k=top_k)
    assert_equal(ours, plain, 1e-14)
    assert distance(ours.weight, parts.weight + parts.table) <= 1e-14


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize(
    "frozen",
    [("weight", "table", "bias"), ("hidden",), ("hidden", "weight", "bias"), ("hidden", "weight", "table"), ("table",)],
    ids="+".join,
)
def test_the_frozen_inputs_get_no_gradient_and_the_others_theirs(frozen, top_k):
    data = given(7, 5, 11, 3)
    ours = differentiate(vocab_expectation, data, frozen=frozen, chunk=3, top_k=top_k)
    plain = differentiate(plain_vocab_expectation, data, frozen=frozen, top_k=top_k)
    assert_equal(ours, plain, 1e-14)
    assert all(getattr(ours, name) is None for name in frozen)


@pytest.mark.parametrize("top_k", [None, 5])
def test_the_leading_axes_and_strides_of_hidden_do_not_matter(top_k):
    data = given(24, 5, 11, 3)
    grid = data._replace(hidden=data.hidden.view(4, 2, 3, 5).transpose(0, 2))
    ours = differentiate(vocab_expectation, grid, chunk=5, top_k=top_k)
    assert ours.mixed.shape == (3, 2, 4, 3)
    assert_equal(ours, differentiate(plain_vocab_expectation, grid, top_k=top_k), 1e-14)


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_the_gradients_are_those_of_finite_differences(bias, tied, top_k):
    data = given(5, 3, 7, 3, bias=bias)
    hidden, weight, table = (value.requires_grad_() for value in (data.hidden, data.weight, data.table))

    def function(*leaves: Tensor) -> Tensor:
        leaf = iter(leaves)
        h, w = next(leaf), next(leaf)
        e = w if tied else next(leaf)
        return vocab_expectation(h, w, e, bias=next(leaf) if bias else None, top_k=top_k, chunk=2)

    inputs = [hidden, weight] + ([] if tied else [table])
    if data.bias is not None:
        inputs.append(data.bias.requires_grad_())
    assert torch.autograd.gradcheck(function, inputs)


class _Sizes(TorchDispatchMode):
    """Remembers the shape of every tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.shapes += [tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return result


@pytest.mark.parametrize("top_k", [None, 1, 5, 40, 1000])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_largest_tensor_ever_made_is_one_chunk_of_tokens_by_vocabulary(tied, top_k):
    tokens, d, vocabulary, chunk = 40, 6, 101, 3
    data = given(tokens, d, vocabulary, d)
    if tied:
        data = data._replace(table=data.weight)
    with _Sizes() as sizes:
        differentiate(vocab_expectation, data, top_k=top_k, chunk=chunk)
    parameters = {(vocabulary, d), (d, vocabulary)}
    assert max(map(math.prod, sizes.shapes)) >= chunk * vocabulary  # the chunk itself was seen
    assert [shape for shape in sizes.shapes if math.prod(shape) > chunk * vocabulary and shape not in parameters] == []


def test_the_default_chunk_is_what_the_stated_number_of_logits_allows(monkeypatch):
    monkeypatch.setattr("adaponder.ops.vocab_expectation.torch.CHUNK_ELEMENTS", 4 * 101 + 7)
    with _Sizes() as sizes:
        differentiate(vocab_expectation, given(40, 6, 101, 6))
    assert (4, 101) in sizes.shapes
    assert max(shape[0] for shape in sizes.shapes if len(shape) == 2 and shape[1] == 101 and shape[0] != 6) == 4


def mean_errors(
    function, *, dtype: torch.dtype, sharpness: float, autocast: bool = False, **options
) -> dict[str, float]:
    """Relative error (Frobenius) of the mixture and each gradient against float64 truth on the same rounded inputs.

    With ``autocast`` the inputs are float32 and autocast chooses ``dtype``.
    """
    seeds = 8
    errors = dict.fromkeys(Result._fields, 0.0)
    for seed in range(seeds):
        exact = given(33, 16, 61, 16, seed=seed)
        exact = exact._replace(hidden=exact.hidden * sharpness)
        rounded = Given(*(value.to(dtype).double() for value in exact))
        truth = differentiate(plain_vocab_expectation, rounded, top_k=options.get("top_k"))
        held = torch.float32 if autocast else dtype
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            result = differentiate(function, rounded, dtype=held, **options)
        assert result.mixed.dtype == dtype
        for name, mine, true in zip(Result._fields, result, truth, strict=True):
            assert mine.dtype == (dtype if name == "mixed" else held), name
            errors[name] += float((mine.double() - true).norm() / true.norm()) / seeds
    return errors


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_chunked_expectation_is_no_worse_than_the_plain_one_in_its_precision(dtype, sharpness, chunk, top_k):
    ours = mean_errors(vocab_expectation, dtype=dtype, sharpness=sharpness, top_k=top_k, chunk=chunk)
    plain = mean_errors(plain_vocab_expectation, dtype=dtype, sharpness=sharpness, top_k=top_k)
    worse = {name: (ours[name], plain[name]) for name in ours if ours[name] > plain[name] + FLOOR[dtype]}
    assert worse == {}


@pytest.mark.parametrize("top_k", [None, 1])
def test_the_gradients_of_many_chunks_are_summed_wider_than_the_weights(top_k):
    # 512 equal contributions of 1: bf16 would stop counting at 256.
    hidden = torch.zeros(512, 1, dtype=torch.bfloat16)
    weight = torch.zeros(1, 1, dtype=torch.bfloat16)
    table = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    vocab_expectation(hidden, weight, table, chunk=1, top_k=top_k).sum().backward()
    assert float(table.grad) == 512.0


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 3.0])
def test_the_autocast_expectation_agrees_with_the_plain_one_in_bf16(sharpness, top_k):
    given_as = {"dtype": torch.bfloat16, "sharpness": sharpness, "top_k": top_k}
    ours = mean_errors(vocab_expectation, **given_as, autocast=True, chunk=5)
    plain = mean_errors(plain_vocab_expectation, **given_as)
    worse = {name: (ours[name], plain[name]) for name in ours if ours[name] > plain[name] + FLOOR[torch.bfloat16]}
    assert worse == {}


@pytest.mark.parametrize("top_k", [None, 5])
def test_the_huge_logits_neither_overflow_nor_vanish(top_k):
    data = given(7, 5, 11, 3)
    huge = data._replace(hidden=data.hidden * 1e4)
    ours = differentiate(vocab_expectation, huge, dtype=torch.float32, chunk=3, top_k=top_k)
    assert all(bool(torch.isfinite(value).all()) for value in ours if value is not None)
    likeliest = (huge.hidden @ huge.weight.t() + huge.bias).argmax(-1)
    assert distance(ours.mixed, huge.table[likeliest]) <= 1e-6


def test_the_expectation_cannot_be_differentiated_twice_and_says_so():
    data = given(7, 5, 11, 3)
    hidden = data.hidden.requires_grad_()
    mixed = vocab_expectation(hidden, data.weight, data.table, chunk=3)
    (gradient,) = torch.autograd.grad(mixed.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# --- kept logits --------------------------------------------------------------------------------------------------


def assert_the_same_bits(ours: Result, theirs: Result) -> None:
    for name, mine, other in zip(Result._fields, ours, theirs, strict=True):
        assert (mine is None) == (other is None), name
        assert mine is None or torch.equal(mine, other), name


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("frozen", [(), ("weight", "table", "bias"), ("hidden",)], ids=["all", "hidden", "parameters"])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_kept_logits_change_no_bit(dtype, shape, chunk, frozen, top_k):
    data, how = given(*shape), {"dtype": dtype, "frozen": frozen, "chunk": chunk, "top_k": top_k}
    plain = differentiate(vocab_expectation, data, **how)
    assert_the_same_bits(differentiate(vocab_expectation, data, keep_logits=True, **how), plain)


def test_kept_logits_are_computed_once_and_kept_only_for_a_backward(monkeypatch):
    counted, linear = [], torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: counted.append(1) or linear(*args))
    data, saved = given(6, 5, 11, 3), []
    for keep_logits, expected in ((False, 4), (True, 2)):  # two chunks
        counted.clear()
        differentiate(vocab_expectation, data, chunk=3, keep_logits=keep_logits)
        assert len(counted) == expected
    leaves = [leaf.requires_grad_() for leaf in data[:3]]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        with torch.no_grad():
            vocab_expectation(*leaves, chunk=3, keep_logits=True)
        assert saved == []
        vocab_expectation(*leaves, chunk=3, keep_logits=True)
    assert saved.count((3, 11)) == 2


def test_kept_logits_serve_a_second_backward():
    data = given(7, 5, 11, 3)
    leaves = [leaf.requires_grad_() for leaf in data[:3]]
    total = vocab_expectation(*leaves, chunk=3, keep_logits=True).square().sum()
    first, second = torch.autograd.grad(total, leaves, retain_graph=True), torch.autograd.grad(total, leaves)
    assert all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))


def test_kept_logits_can_be_compiled():
    data = given(7, 5, 11, 3)
    compiled = torch.compile(vocab_expectation, backend="aot_eager", fullgraph=True)
    ours = differentiate(compiled, data, chunk=3, keep_logits=True)
    assert_equal(ours, differentiate(plain_vocab_expectation, data), 1e-14)
