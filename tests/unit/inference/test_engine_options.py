"""Tests the options of an engine."""

import pytest

from adaponder.errors import InputError
from adaponder.inference import Engine, Request
from adaponder.inference.config import EngineConfig
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


def test_options_override_the_config():
    engine = Engine(tiny().eval(), EngineConfig(lanes=3, tokens=20), lanes=2)
    assert (engine.config.lanes, engine.config.tokens) == (2, 20)


def test_a_policy_that_runs_on_the_host_warns(monkeypatch):
    engine = Engine(tiny("adaponder", iterations=3).eval(), lanes=2, tokens=40)
    monkeypatch.setattr(engine.runner, "graphs", object())  # as on a GPU; nothing is launched
    with pytest.warns(UserWarning, match="policy="):
        engine.submit(Request(prompt=[1], max_new_tokens=1, policy=lambda rows: rows.slot % 2 == 0))
    engine.submit(Request(prompt=[1], max_new_tokens=1, policy=FixedDepth(2)))
