"""The chunked loss, and its sum, equal the plain one: value and every gradient, any chunk, any precision."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from adaponder.methods.objectives import Trajectory, scorer
from adaponder.ops.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_sum,
    plain_linear_cross_entropy,
)
from adaponder.ops.linear_cross_entropy import torch as reference
from poison import poisoned  # noqa: F401

pytestmark = pytest.mark.usefixtures("poisoned")


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


# --- the weighted sum ---------------------------------------------------------------------------------------------


def weights_for(targets, seed=0):
    """What each token weighs, a third of them nothing."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(targets.shape, generator=generator, dtype=torch.float64)
    return drawn * (torch.rand(targets.shape, generator=generator) < 0.7)


def plain_sum(hidden, weight, targets, token_weights, *, bias=None):
    losses = plain_linear_cross_entropy(hidden, weight, targets, bias=bias)
    return (token_weights.to(losses.dtype) * losses).sum()


def summed(function, token_weights):
    """The function as :func:`run` calls it."""
    return lambda hidden, weight, targets, **options: function(hidden, weight, targets, token_weights, **options)


@given(
    st.integers(0, 9),
    st.integers(1, 6),
    st.integers(1, 13),
    st.integers(1, 20),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_any_chunk_of_the_sum_equals_the_plain_version(tokens, d, vocabulary, chunk, bias, ignored, data):
    seed = data.draw(st.integers(0, 99))
    case = inputs((tokens,), d, vocabulary, bias=bias, ignored=ignored, seed=seed)
    weights = weights_for(case[2], seed)
    # The cotangent that `run` draws is a number other than 1.
    plain, ours = (
        run(summed(plain_sum, weights), *case),
        run(summed(linear_cross_entropy_sum, weights), *case, chunk=chunk),
    )
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(plain, ours, strict=True))


def test_the_value_of_the_sum_is_the_per_token_losses_bit_for_bit_with_and_without_gradients():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        hidden, weight, targets, bias = inputs(dtype=dtype)
        weights = weights_for(targets)
        losses = linear_cross_entropy(hidden, weight, targets, bias=bias, chunk=3)
        with_gradients = linear_cross_entropy_sum(hidden, weight, targets, weights, bias=bias, chunk=3)
        with torch.no_grad():
            without = linear_cross_entropy_sum(hidden, weight, targets, weights, bias=bias, chunk=3)
        assert with_gradients.requires_grad
        assert not without.requires_grad
        assert with_gradients == without == (losses * weights.to(losses.dtype)).sum()


def test_gradients_of_the_sum_are_those_of_finite_differences():
    hidden, weight, targets, bias = inputs((5,), 3, 4)
    weights = weights_for(targets)
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_cross_entropy_sum(h, w, targets, weights, bias=b, chunk=2), (hidden, weight, bias)
    )


def test_the_logits_are_computed_once_and_only_the_gradients_that_are_needed(monkeypatch):
    """Three products per chunk, in forward; one where nothing learns, two where the head is frozen."""
    counts = {"logits": 0, "gradients": 0}
    linear, add_product_ = torch.nn.functional.linear, reference.add_product_

    def counted(name, function):
        def call(*args):
            counts[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(torch.nn.functional, "linear", counted("logits", linear))
    monkeypatch.setattr(reference, "add_product_", counted("gradients", add_product_))
    hidden, weight, targets, _ = inputs((6,))
    weights = weights_for(targets)
    for requires_grad, gradients in (((True, True), 2), ((True, False), 1), ((False, True), 1), ((False, False), 0)):
        counts.update(logits=0, gradients=0)
        leaves = [x.detach().requires_grad_(wanted) for x, wanted in zip((hidden, weight), requires_grad, strict=True)]
        total = linear_cross_entropy_sum(*leaves, targets, weights, chunk=3)
        if total.requires_grad:
            total.backward()
        assert counts == {"logits": 2, "gradients": 2 * gradients}
        assert [leaf.grad is not None for leaf in leaves] == list(requires_grad)
    with torch.no_grad():
        counts.update(logits=0, gradients=0)
        linear_cross_entropy_sum(hidden, weight, targets, weights, chunk=3)
        assert counts == {"logits": 2, "gradients": 0}


def test_two_micro_batches_add_up_to_one():
    case = inputs((6,))
    hidden, weight, targets, bias = case
    weights = weights_for(targets)
    _, _, *whole = run(summed(linear_cross_entropy_sum, weights), *case, chunk=2)
    factor = torch.randn((), generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    for part in (slice(0, 4), slice(4, 6)):
        total = linear_cross_entropy_sum(hidden[part], weight, targets[part], weights[part], bias=bias, chunk=3)
        (total * factor).backward()
    for ours, theirs in zip((weight.grad, bias.grad), whole, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_what_weighs_nothing_teaches_nothing():
    case = inputs()
    for weights in (torch.zeros(case[2].shape), torch.zeros(case[2].shape, dtype=torch.bool)):
        total, *gradients = run(summed(linear_cross_entropy_sum, weights), *case, chunk=3)
        assert total == 0
        assert not any(gradient.any() for gradient in gradients)


def test_a_second_backward_is_right_and_a_second_derivative_refused():
    hidden, weight, targets, _ = inputs()
    total = linear_cross_entropy_sum(hidden, weight, targets, weights_for(targets), chunk=3)
    total.backward(retain_graph=True)
    once = [leaf.grad.clone() for leaf in (hidden, weight)]
    # As an optimizer would between the two: what was handed out is changed in place.
    for leaf in (hidden, weight):
        leaf.grad.zero_()
    total.backward(torch.tensor(3.0, dtype=torch.float64))
    for leaf, first in zip((hidden, weight), once, strict=True):
        assert torch.allclose(leaf.grad, 3 * first, rtol=0, atol=1e-12)
    total = linear_cross_entropy_sum(hidden, weight, targets, weights_for(targets))
    (gradient,) = torch.autograd.grad(total.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_sum_is_no_less_exact_than_the_plain_version_in_the_same_precision(dtype):
    case = inputs((64,), 32, 97, dtype=dtype, seed=3)
    weights = weights_for(case[2])
    wide = [leaf.double() if leaf is not None and leaf.is_floating_point() else leaf for leaf in case]
    truth = run(summed(plain_sum, weights), *wide)
    plain = run(summed(plain_sum, weights), *case)
    ours = run(summed(linear_cross_entropy_sum, weights), *case, chunk=17)
    for exact, theirs, mine in zip(truth, plain, ours, strict=True):
        assert theirs.dtype == mine.dtype
        lost = [float((found.double() - exact).norm() / exact.norm()) for found in (theirs, mine)]
        assert lost[1] <= 1.1 * lost[0] + torch.finfo(dtype).eps / 4


def test_the_sum_under_autocast_computes_as_the_head_would():
    case = inputs((12,), 8, 19, dtype=torch.float32)
    weights = weights_for(case[2])
    with torch.autocast("cpu", torch.bfloat16):
        plain = run(summed(plain_sum, weights), *case)
        ours = run(summed(linear_cross_entropy_sum, weights), *case, chunk=5)
    assert ours[0].dtype == torch.float32
    for theirs, mine in zip(plain, ours, strict=True):
        assert theirs.dtype == mine.dtype
        assert torch.allclose(theirs, mine, rtol=0.02, atol=0.02)


def test_the_gradients_of_many_chunks_are_summed_wider_than_the_weights():
    # 512 equal contributions of 0.5 to each row: bf16 would stop counting at 128.
    hidden = torch.ones(512, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(512, dtype=torch.long)
    linear_cross_entropy_sum(hidden, weight, targets, torch.ones(512), chunk=1).backward()
    assert weight.grad.flatten().tolist() == [-256.0, 256.0]


def test_the_sum_can_be_compiled():
    hidden, weight, targets, bias = inputs()
    weights = weights_for(targets)
    compiled = torch.compile(linear_cross_entropy_sum, backend="aot_eager", fullgraph=True)
    plain = run(summed(plain_sum, weights), hidden, weight, targets, bias)
    ours = run(summed(compiled, weights), hidden, weight, targets, bias, chunk=3)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(plain, ours, strict=True))


def test_the_sum_refuses_nonsense():
    hidden, weight, targets, _ = inputs()
    weights = weights_for(targets)
    with pytest.raises(ValueError, match="token_weights has shape"):
        linear_cross_entropy_sum(hidden, weight, targets, weights[:, 1:])
    with pytest.raises(ValueError, match="token_weights requires grad"):
        linear_cross_entropy_sum(hidden, weight, targets, weights.requires_grad_())
    with pytest.raises(ValueError, match="targets has shape"):
        linear_cross_entropy_sum(hidden[:, 1:], weight, targets, weights.detach())
    with pytest.raises(ValueError, match="chunk=0"):
        linear_cross_entropy_sum(hidden, weight, targets, weights.detach(), chunk=0)
    with pytest.raises(IndexError, match="out of bounds"):
        # Even where it weighs nothing, as for the losses themselves.
        linear_cross_entropy_sum(hidden, weight, torch.full_like(targets, 11), torch.zeros(targets.shape))


@pytest.mark.parametrize("items", [None, 7], ids=["its own", "of more batches"])
def test_a_scorers_mean_is_the_same_with_logits_and_without(items):
    """Padding and ignored targets count nothing, whichever way."""
    hidden, weight, targets, bias = inputs()
    real = torch.ones_like(targets, dtype=torch.bool)
    real[0, :3] = False
    seen = Trajectory(hidden)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    with_logits, without = (scorer(seen, z, targets, real, (weight, bias), items) for z in (logits, None))
    means = [with_logits.mean(with_logits.nll(hidden)), with_logits.mean_nll(hidden), without.mean_nll(hidden)]
    expected, *others = (
        [mean.detach(), *torch.autograd.grad(mean, (hidden, weight, bias), retain_graph=True)] for mean in means
    )
    for found in others:
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(expected, found, strict=True))


class WithoutDoubles(TorchFunctionMode):
    """Tensors say that they are on MPS, which has no float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.double:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return torch.device("mps") if func == torch.Tensor.device.__get__ else func(*args, **kwargs or {})


def test_a_share_needs_no_float64_where_the_device_has_none():
    hidden, weight, targets, bias = inputs(dtype=torch.float32)
    real = torch.ones_like(targets, dtype=torch.bool)
    with WithoutDoubles():
        share = scorer(Trajectory(hidden), None, targets, real, (weight, bias), torch.tensor(20)).share
    assert share.dtype == torch.float32
    assert share.item() == pytest.approx((targets != -100).sum().item() / 20)
