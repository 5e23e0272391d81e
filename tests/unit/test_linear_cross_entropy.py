"""The chunked loss equals the plain one: value and every gradient, any chunk, any precision, ignored targets too."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaponder.ops.linear_cross_entropy import linear_cross_entropy, plain_linear_cross_entropy


def inputs(tokens=(2, 7), d=5, vocabulary=11, *, bias=True, dtype=torch.float64, seed=0, ignored=True):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(vocabulary, tokens, generator=generator)
    if ignored:
        targets[torch.rand(tokens, generator=generator) < 0.3] = -100
    return draw(*tokens, d), draw(vocabulary, d), targets, draw(vocabulary) if bias else None


def run(function, hidden, weight, targets, bias, **options):
    """The losses and every gradient, for one fixed random cotangent."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in (hidden, weight, bias) if leaf is not None]
    losses = function(leaves[0], leaves[1], targets, bias=leaves[2] if bias is not None else None, **options)
    cotangent = torch.randn(losses.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    losses.backward(cotangent.to(losses.dtype))
    return [losses.detach(), *(leaf.grad for leaf in leaves)]


@given(
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(1, 13),
    st.integers(1, 20),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_any_chunk_equals_the_plain_version(tokens, d, vocabulary, chunk, bias, ignored, data):
    case = inputs((tokens,), d, vocabulary, bias=bias, ignored=ignored, seed=data.draw(st.integers(0, 99)))
    plain, ours = run(plain_linear_cross_entropy, *case), run(linear_cross_entropy, *case, chunk=chunk)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(plain, ours, strict=True))


def test_gradients_are_those_of_finite_differences():
    hidden, weight, targets, bias = inputs((5,), 3, 4)
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_cross_entropy(h, w, targets, bias=b, chunk=2), (hidden, weight, bias)
    )


def test_what_is_ignored_costs_nothing_and_teaches_nothing():
    hidden, weight, targets, bias = inputs()
    losses, *gradients = run(linear_cross_entropy, hidden, weight, torch.full_like(targets, -100), bias)
    assert not losses.any()
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_extreme_logits_stay_finite(scale):
    hidden, weight, targets, bias = inputs(dtype=torch.float32)
    with torch.no_grad():
        hidden.mul_(scale)
    for ours, plain in zip(
        run(linear_cross_entropy, hidden, weight, targets, bias, chunk=3),
        run(plain_linear_cross_entropy, hidden, weight, targets, bias),
        strict=True,
    ):
        assert ours.isfinite().all()
        assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_less_exact_than_the_plain_version_in_the_same_precision(dtype):
    case = inputs((64,), 32, 97, dtype=dtype, seed=3)
    wide = [leaf.double() if leaf is not None and leaf.is_floating_point() else leaf for leaf in case]
    truth = run(plain_linear_cross_entropy, *wide)
    plain, ours = run(plain_linear_cross_entropy, *case), run(linear_cross_entropy, *case, chunk=17)
    for exact, theirs, mine in zip(truth, plain, ours, strict=True):
        lost = [float((found.double() - exact).norm() / exact.norm()) for found in (theirs, mine)]
        assert lost[1] <= 1.1 * lost[0] + torch.finfo(dtype).eps / 4


def test_under_autocast_it_computes_as_the_head_would():
    case = inputs((12,), 8, 19, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        plain, ours = run(plain_linear_cross_entropy, *case), run(linear_cross_entropy, *case, chunk=5)
    assert ours[0].dtype == torch.float32
    for theirs, mine in zip(plain, ours, strict=True):
        assert theirs.dtype == mine.dtype
        assert torch.allclose(theirs, mine, rtol=0.02, atol=0.02)


def test_frozen_parts_get_no_gradient_and_nonsense_is_refused():
    hidden, weight, targets, bias = inputs()
    weight.requires_grad_(False)
    linear_cross_entropy(hidden, weight, targets, bias=bias).sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None
    with pytest.raises(ValueError, match="they must agree"):
        linear_cross_entropy(hidden, weight, targets[:, 1:])
    with pytest.raises(ValueError, match="chunk=0"):
        linear_cross_entropy(hidden, weight, targets, chunk=0)
