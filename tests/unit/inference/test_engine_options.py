"""Options of the engine, and what callbacks may do."""

from dataclasses import FrozenInstanceError

import pytest

from adaponder.errors import InputError
from adaponder.inference import Engine, Request
from adaponder.inference.config import EngineConfig
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


def test_options_override_the_config_which_is_frozen():
    engine = Engine(tiny().eval(), EngineConfig(lanes=3, tokens=20), lanes=2)
    assert (engine.config.lanes, engine.config.tokens) == (2, 20)
    with pytest.raises(FrozenInstanceError):
        engine.config.lanes = 4
    with pytest.raises(TypeError, match="lane"):
        Engine(tiny().eval(), lane=2)


@pytest.mark.parametrize("nested", ["step", "generate", "stream"])
def test_a_callback_that_steps_the_engine_is_refused_and_ends_its_own_request(nested):
    engine = Engine(tiny().eval(), lanes=2, tokens=30)
    calls = {
        "step": engine.step,
        "generate": lambda: engine.generate([REQUEST]),
        "stream": lambda: list(engine.stream(REQUEST)),
    }
    seen = []
    number = engine.submit(REQUEST, lambda event: calls[nested]())
    other = engine.submit(REQUEST, seen.append)
    completions = {}
    while engine.busy:
        completions |= {event.request: event.completion for event in engine.step() if event.completion is not None}
    assert completions[number].finish_reason == "error"
    assert "step()" in completions[number].error
    assert [event.token for event in seen[:-1]] == completions[other].tokens
    assert completions[other].finish_reason == "length"
