"""The expectation over the vocabulary: memory, tied tables, kept logits. Equality with the plain: test_chunks.py."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adaponder.ops import kernels as shared
from adaponder.ops.vocab_expectation import plain_vocab_expectation, vocab_expectation
from adaponder.ops.vocab_expectation import triton as kernels
from kernel_support import PLACES, assert_close, differentiate, draw, precisions

pytestmark = pytest.mark.usefixtures("poisoned")


def given(tokens=7, d=5, vocabulary=11, e=3, *, dtype=torch.float64, device="cpu") -> list[Tensor]:
    """Draws hidden states, head, table and bias."""
    shapes = (tokens, d), (vocabulary, d), (vocabulary, e), (vocabulary,)
    return [draw(*shape, seed=seed, dtype=dtype, device=device) for seed, shape in enumerate(shapes)]


def run(function, leaves, **options) -> list[Tensor]:
    return differentiate(lambda h, w, e, b: function(h, w, e, bias=b, **options), leaves)


@pytest.mark.parametrize("top_k", [None, 5])
def test_the_leading_axes_and_strides_of_hidden_do_not_matter(top_k):
    hidden, *others = given(24)
    leaves = [hidden.view(4, 2, 3, 5).transpose(0, 2), *others]
    ours = run(vocab_expectation, leaves, chunk=5, top_k=top_k)
    assert ours[0].shape == (3, 2, 4, 3)
    assert_close(ours, run(plain_vocab_expectation, leaves, top_k=top_k), 1e-13)


class _Sizes(TorchDispatchMode):
    """Remembers the shape of every tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.shapes += [tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return result


@pytest.mark.parametrize("top_k", [None, 5, 1000])
def test_the_largest_tensor_ever_made_is_one_chunk_of_tokens_by_vocabulary(top_k, monkeypatch):
    tokens, d, vocabulary, chunk = 40, 6, 101, 4
    monkeypatch.setattr("adaponder.ops.chunks.CHUNK_ELEMENTS", chunk * vocabulary + 7)
    with _Sizes() as sizes:
        run(vocab_expectation, given(tokens, d, vocabulary, d), top_k=top_k)
    parameters = {(vocabulary, d), (d, vocabulary)}
    assert (chunk, vocabulary) in sizes.shapes
    assert {shape for shape in sizes.shapes if math.prod(shape) > chunk * vocabulary} <= parameters


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_kept_logits_change_no_bit(dtype, chunk, top_k):
    for tokens in (0, 7):
        leaves, how = given(tokens, dtype=dtype), {"chunk": chunk, "top_k": top_k}
        plain, kept = (run(vocab_expectation, leaves, keep_logits=keep, **how) for keep in (False, True))
        assert all(map(torch.equal, kept, plain))


@pytest.mark.parametrize("device", ["torch", *PLACES])
def test_kept_logits_serve_a_second_backward_and_change_no_bit_in_kernels(device, monkeypatch):
    monkeypatch.setattr(shared, "BLOCK", 32)
    op = vocab_expectation if device == "torch" else kernels.vocab_expectation
    device = device.replace("torch", "cpu")
    for dtype in precisions(device):
        leaves = [x.requires_grad_() for x in given(7, 5, 131, 3, dtype=dtype, device=device)]
        plain, kept = (run(op, leaves, keep_logits=keep, chunk=3) for keep in (False, True))
        assert all(map(torch.equal, kept, plain))
        total = op(*leaves[:3], bias=leaves[3], chunk=3, keep_logits=True).square().sum()
        first, second = torch.autograd.grad(total, leaves, retain_graph=True), torch.autograd.grad(total, leaves)
        assert all(map(torch.equal, first, second))


def test_kept_logits_are_computed_once_and_kept_only_for_a_backward(monkeypatch):
    counted, linear = [], torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: counted.append(1) or linear(*args))
    leaves, saved = given(6), []
    for keep_logits, expected in ((False, 4), (True, 2)):  # two chunks
        counted.clear()
        run(vocab_expectation, leaves, chunk=3, keep_logits=keep_logits)
        assert len(counted) == expected
    leaves = [leaf.requires_grad_() for leaf in leaves[:3]]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        with torch.no_grad():
            vocab_expectation(*leaves, chunk=3, keep_logits=True)
        assert saved == []
        vocab_expectation(*leaves, chunk=3, keep_logits=True)
    assert saved.count((3, 11)) == 2
