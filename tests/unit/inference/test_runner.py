"""Tests the thread count of a pass: one for small passes, torch's own for large ones, restored afterwards."""

from __future__ import annotations

import pytest
import torch
from transformers import GPTNeoXConfig

from adaponder.backbones.shape import Shape, shape_of
from adaponder.inference.runner import pass_threads, threads_of_pass


def neox(hidden: int, layers: int, vocabulary: int) -> Shape:
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    return shape_of(GPTNeoXConfig(**sizes, num_attention_heads=4, vocab_size=vocabulary))


@pytest.fixture(scope="module")
def demo() -> Shape:
    return neox(128, 4, 4096)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_small_models_stream_has_one_thread_and_a_large_ones_has_all(demo):
    assert [threads_of_pass(demo, rows, most=8) for rows in (1, 8, 40, 4000)] == [1, 1, 4, 8]
    assert threads_of_pass(neox(512, 6, 50304), 1, most=8) == 2
    assert threads_of_pass(neox(1024, 24, 50304), 1, most=2) == 2
    assert threads_of_pass(demo, 0, most=8) == 1


def test_threads_are_given_back_whatever_happens(demo):
    torch.set_num_threads(2)
    with pass_threads(demo, 1) as chosen:
        assert chosen == torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(KeyError), pass_threads(demo, 1):
        raise KeyError
    assert torch.get_num_threads() == 2
    with pass_threads(demo, 10_000) as chosen:
        assert chosen == torch.get_num_threads() == 2, "never more than torch was told to use"
