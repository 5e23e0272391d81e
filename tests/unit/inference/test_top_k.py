"""The expectation of the k likeliest tokens alone, as an option of the engine."""

import pytest

from adaponder.errors import InputError
from adaponder.inference import Engine, Request
from support import stir, tiny

REQUEST = Request(prompt=[3, 1, 4, 1, 5, 9, 2, 6], max_new_tokens=12, temperature=0.0)


def said(model, **options) -> list[int]:
    return Engine(model, lanes=1, tokens=30, **options).generate([REQUEST])[0][0].ids


def test_an_engine_takes_fewer_embeddings_as_the_model_with_that_setting_does():
    model = tiny("adaponder", iterations=3, tau=1e-6).eval()
    stir(model)
    full, few = said(model), said(model, expectation_top_k=1)
    assert said(model, expectation_top_k=61) == full
    assert few != full
    model.config.expectation_top_k = 1
    assert said(model) == few


def test_a_top_k_that_means_nothing_is_refused():
    with pytest.raises(InputError, match="expectation_top_k=62"):
        said(tiny("adaponder", iterations=3).eval(), expectation_top_k=62)
    with pytest.raises(InputError, match="expectation_top_k=2"):
        said(tiny("loop", iterations=3).eval(), expectation_top_k=2)
