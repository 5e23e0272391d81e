"""Law 2 for the engine: whatever else is in the batch, its tokens and depths are those of the portable path."""

import random
from dataclasses import replace

import pytest
from engine_support import draw_requests, portable, run

from adaponder.inference import Engine
from adaponder.inference.scheduler import Scheduler
from support import METHODS, stir, tiny

SETTINGS = {"adaponder": {"tau": 0.5}, "ouro": {"exit_threshold": 0.6}}


def assert_equals_portable(model, requests, **options) -> Engine:
    engine = Engine(model, **options)
    for request, done in zip(requests, run(engine, requests), strict=True):
        ids, depths = portable(model, request)
        assert done.error is None
        assert (done.ids, done.depths) == (ids, depths), request
    return engine


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_the_same_in_the_engine(method):
    model = tiny(method, iterations=1 if method == "vanilla" else 4, **SETTINGS.get(method, {})).eval()
    stir(model)
    requests = draw_requests(8, 1, halts=model.method.halts, iterations=model.config.iterations)
    assert_equals_portable(model, requests, lanes=3, chunk=7, tokens=40)


@pytest.mark.parametrize("seed", range(6))
def test_no_arrival_chunk_burst_or_preemption_changes_a_token(seed):
    """Small pools, so that sequences are preempted and read their tokens again."""
    draw = random.Random(seed)
    method = draw.choice(["adaponder", "adaponder", "mor", "ouro", "ponder"])
    model = tiny(method, draw.choice(["gpt_neox", "llama"]), iterations=3, **SETTINGS.get(method, {})).eval()
    stir(model)
    requests = draw_requests(10, seed, halts=model.method.halts, iterations=3)
    engine = assert_equals_portable(
        model,
        requests,
        lanes=draw.randint(1, 5),
        rows=draw.choice([None, 170, 210, 300]),
        chunk=draw.choice([1, 3, 8, 64]),
        burst=draw.choice([1, 2, 5]),
        late=draw.random() < 0.7,
        prefix_block=draw.choice([2, 4, 16]),
        tokens=40,
    )
    assert engine.statistics["resident"] == engine.statistics["waiting"] == 0


def test_sequences_that_were_preempted_say_the_same(monkeypatch):
    """Admission expects no rows at all, so that too many sequences come in and the youngest must give way."""
    monkeypatch.setattr(Scheduler, "expected_rows", lambda self, sequence: 0)
    model = tiny("adaponder", iterations=3, tau=0.5).eval()
    stir(model)
    requests = draw_requests(12, 3, halts=True, iterations=3)
    engine = assert_equals_portable(model, requests, lanes=6, rows=210, chunk=16, tokens=40, late=True, burst=2)
    assert engine.statistics["preemptions"] > 3


def test_prompts_that_begin_alike_are_read_once():
    model = tiny("adaponder", iterations=3, tau=0.5).eval()
    stir(model)
    requests = [
        replace(one, policy=None, max_iterations=None) for one in draw_requests(12, 4, halts=True, iterations=3)
    ]
    engine = assert_equals_portable(model, requests, lanes=2, chunk=16, tokens=40, prefix_block=3)
    assert engine.statistics["prefix_tokens_reused"] > 20
