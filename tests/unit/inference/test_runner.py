"""Tests the thread count of a pass: one for small passes, torch's own for large ones, restored afterwards."""

from contextlib import suppress

import torch
from transformers import GPTNeoXConfig

from adaponder.backbones.shape import Shape, shape_of
from adaponder.inference.runner import pass_threads


def neox(hidden: int, layers: int, vocabulary: int) -> Shape:
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    return shape_of(GPTNeoXConfig(**sizes, num_attention_heads=4, vocab_size=vocabulary))


DEMO = neox(128, 4, 4096)


def test_threads_grow_with_rows_and_model_and_are_restored():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for shape, rows, threads in ((DEMO, 0, 1), (DEMO, 8, 1), (DEMO, 4000, 2), (neox(512, 6, 50304), 1, 2)):
            with suppress(KeyError), pass_threads(shape, rows):
                assert torch.get_num_threads() == threads
                raise KeyError
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
