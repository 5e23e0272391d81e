"""Tests the thread count of a pass: one for small passes, torch's own for large ones, restored afterwards."""

from __future__ import annotations

from contextlib import suppress

import torch
from transformers import GPTNeoXConfig

from adaponder.backbones.shape import Shape, shape_of
from adaponder.inference.runner import pass_threads, threads_of_pass


def neox(hidden: int, layers: int, vocabulary: int) -> Shape:
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    return shape_of(GPTNeoXConfig(**sizes, num_attention_heads=4, vocab_size=vocabulary))


DEMO = neox(128, 4, 4096)


def test_threads_grow_with_the_rows_and_the_model():
    assert [threads_of_pass(DEMO, rows, most=8) for rows in (0, 1, 8, 40, 4000)] == [1, 1, 1, 4, 8]
    assert threads_of_pass(neox(512, 6, 50304), 1, most=8) == 2
    assert threads_of_pass(neox(1024, 24, 50304), 1, most=2) == 2


def test_the_thread_count_is_restored():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for rows, threads in ((1, 1), (10_000, 2)):  # never more than torch was told to use
            with suppress(KeyError), pass_threads(DEMO, rows) as chosen:
                assert chosen == torch.get_num_threads() == threads
                raise KeyError
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
