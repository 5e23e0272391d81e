"""The loss and its weighted sum: what they ignore, refuse and compute once. Equality with the plain: test_chunks.py."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from adaponder.methods.objectives import Scorer, Trajectory
from adaponder.ops import chunks
from adaponder.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_sum
from adaponder.ops.linear_cross_entropy import triton as kernels
from kernel_support import PLACES, draw

pytestmark = pytest.mark.usefixtures("poisoned")


def inputs(tokens=(2, 7), d=5, vocabulary=11, *, dtype=torch.float64):
    """Draws hidden states, head, targets (some ignored) and bias."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(vocabulary, tokens, generator=generator)
    targets[torch.rand(tokens, generator=generator) < 0.3] = -100
    shapes = ((*tokens, d), (vocabulary, d), (vocabulary,))
    hidden, weight, bias = (draw(*shape, seed=n, dtype=dtype).requires_grad_() for n, shape in enumerate(shapes))
    return hidden, weight, targets, bias


def weights_for(targets):
    """Draws a weight of each token; a third of them are 0."""
    weights = draw(*targets.shape, seed=7).abs()
    return weights * (draw(*targets.shape, seed=8) < 0.5)


@pytest.mark.parametrize("device", PLACES)
def test_a_target_that_does_not_exist_makes_its_loss_nan_in_a_kernel(device):
    hidden, weight, bias = (
        draw(*shape, seed=1, dtype=torch.float32, device=device) for shape in ((4, 5), (33, 5), (33,))
    )
    targets = torch.tensor([3, -1, 33, -100], device=device)
    losses = kernels.linear_cross_entropy(hidden, weight, targets, bias=bias)
    assert losses.isnan().tolist() == [False, True, True, False]
    for weights in (torch.ones(4, device=device), torch.tensor([1.0, 0.0, 0.0, 1.0], device=device)):
        assert kernels.linear_cross_entropy_sum(hidden, weight, targets, weights, bias=bias).isnan()


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


def test_the_logits_are_computed_once_and_only_the_gradients_that_are_needed(monkeypatch):
    """A chunk takes three products, in forward: one if nothing has a gradient, two if the head is frozen."""
    counts = {"logits": 0, "gradients": 0}

    def counted(name, function):
        def call(*args):
            counts[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(torch.nn.functional, "linear", counted("logits", torch.nn.functional.linear))
    monkeypatch.setattr(chunks, "add_product_", counted("gradients", chunks.add_product_))
    hidden, weight, targets, _ = inputs((6,))
    for requires_grad, gradients in (((True, True), 2), ((True, False), 1), ((False, True), 1), ((False, False), 0)):
        counts.update(logits=0, gradients=0)
        leaves = [x.detach().requires_grad_(wanted) for x, wanted in zip((hidden, weight), requires_grad, strict=True)]
        total = linear_cross_entropy_sum(*leaves, targets, weights_for(targets), chunk=3)
        if total.requires_grad:
            total.backward()
        assert counts == {"logits": 2, "gradients": 2 * gradients}
        assert [leaf.grad is not None for leaf in leaves] == list(requires_grad)


def test_a_second_backward_is_right():
    hidden, weight, targets, _ = inputs()
    total = linear_cross_entropy_sum(hidden, weight, targets, weights_for(targets), chunk=3)
    total.backward(retain_graph=True)
    once = [leaf.grad.clone() for leaf in (hidden, weight)]
    # As an optimizer would between the two: the gradients are changed in place.
    for leaf in (hidden, weight):
        leaf.grad.zero_()
    total.backward(torch.tensor(3.0, dtype=torch.float64))
    for leaf, first in zip((hidden, weight), once, strict=True):
        torch.testing.assert_close(leaf.grad, 3 * first, rtol=0, atol=1e-12)


def test_wrong_shapes_weights_that_learn_and_unknown_targets_are_refused():
    hidden, weight, targets, _ = inputs()
    weights = weights_for(targets)
    with pytest.raises(ValueError, match="targets"):
        linear_cross_entropy(hidden, weight, targets[:, 1:])
    with pytest.raises(ValueError, match="token_weights"):
        linear_cross_entropy_sum(hidden, weight, targets, weights[:, 1:])
    with pytest.raises(ValueError, match="token_weights requires grad"):
        linear_cross_entropy_sum(hidden, weight, targets, weights.clone().requires_grad_())
    with pytest.raises(IndexError, match="out of bounds"):
        # Even where it weighs nothing, as for the losses themselves.
        linear_cross_entropy_sum(hidden, weight, torch.full_like(targets, 11), torch.zeros(targets.shape))


@pytest.mark.parametrize("items", [None, 7], ids=["its own", "of more batches"])
def test_a_scorers_mean_is_the_same_with_logits_and_without(items):
    """Padding and ignored targets count nothing in either."""
    hidden, weight, targets, bias = inputs()
    real = torch.ones_like(targets, dtype=torch.bool)
    real[0, :3] = False
    trajectory = Trajectory(hidden)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    with_logits, without = (Scorer(trajectory, z, targets, real, (weight, bias), items) for z in (logits, None))
    means = [with_logits.mean(with_logits.nll(hidden)), with_logits.mean_nll(hidden), without.mean_nll(hidden)]
    expected, *others = (
        [mean.detach(), *torch.autograd.grad(mean, (hidden, weight, bias), retain_graph=True)] for mean in means
    )
    for found in others:
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(expected, found, strict=True))


class WithoutDoubles(TorchFunctionMode):
    """Makes tensors report the device MPS, which has no float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.double:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return torch.device("mps") if func == torch.Tensor.device.__get__ else func(*args, **kwargs or {})


def test_a_share_needs_no_float64_where_the_device_has_none():
    hidden, weight, targets, bias = inputs(dtype=torch.float32)
    real = torch.ones_like(targets, dtype=torch.bool)
    with WithoutDoubles():
        share = Scorer(Trajectory(hidden), None, targets, real, (weight, bias), torch.tensor(20)).share
    assert share.dtype == torch.float32
    assert share.item() == pytest.approx((targets != -100).sum().item() / 20)
