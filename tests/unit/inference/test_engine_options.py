"""Tests the options of an engine, and that small passes compute in one thread."""

from contextlib import suppress

import pytest
import torch
from transformers import GPTNeoXConfig

from adaponder.backbones.shape import Shape, shape_of
from adaponder.errors import InputError
from adaponder.inference import Engine, Request
from adaponder.inference.runner import pass_threads
from adaponder.policies import FixedDepth
from support import tiny

REQUEST = Request(prompt=[3, 1, 4, 1, 5, 9, 2, 6], max_new_tokens=12, temperature=0.0)


def generated(model, **options) -> list[int]:
    return Engine(model, lanes=1, tokens=30, **options).generate([REQUEST])[0][0].ids


def test_expectation_top_k_equals_the_models_setting():
    model = tiny("adaponder", iterations=3, tau=1e-6).eval()
    full, few = generated(model), generated(model, expectation_top_k=1)
    assert generated(model, expectation_top_k=61) == full
    assert few != full
    model.config.expectation_top_k = 1
    assert generated(model) == few


def test_an_expectation_top_k_without_effect_is_refused():
    with pytest.raises(InputError, match="expectation_top_k=2"):
        generated(tiny("loop").eval(), expectation_top_k=2)


def test_a_policy_that_runs_on_the_host_warns(monkeypatch):
    engine = Engine(tiny("adaponder", iterations=3).eval(), lanes=2, tokens=40)
    monkeypatch.setattr(engine.runner, "graphs", object())  # as on a GPU; nothing is launched
    with pytest.warns(UserWarning, match="policy="):
        engine.submit(Request(prompt=[1], max_new_tokens=1, policy=lambda rows: rows.slot % 2 == 0))
    engine.submit(Request(prompt=[1], max_new_tokens=1, policy=FixedDepth(2)))


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
