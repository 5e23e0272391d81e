"""Tests drafting: the same tokens and depths in fewer ticks."""

import random
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "laws"))
from engine_support import (
    assert_alike,
    assert_all_as_alone,
    assert_empty,
    assert_near,
    odd_ones,
    portable,
    run,
    run_all,
    solo,
)

from adaponder import FixedDepth
from adaponder.errors import InputError
from adaponder.inference import Engine, Request
from adaponder.ops.lanes import torch as plain
from support import VOCABULARY, tiny

K = 4


@cache
def agreeing():
    """Returns a model whose later iterations change little: its gates are about 0.01."""
    model = tiny("adaponder", iterations=K, tau=0.001).eval()
    with torch.no_grad():
        for gate in model.method.gates:
            for parameter in gate.parameters():
                parameter.zero_()
            list(gate.parameters())[-1].fill_(-4.6)
    return model


def greedy(length: int = 5, new: int = 12, **fields) -> Request:
    draw = random.Random(length)
    prompt = [draw.randrange(VOCABULARY) for _ in range(length)]
    return Request(**({"prompt": prompt, "max_new_tokens": new, "temperature": 0.0} | fields))


def opened(model, **options) -> Engine:
    return Engine(model, **{"tokens": 40, "lanes": 1, "drafts": K - 1} | options)


def drafted(model, request: Request, **options):
    """Returns a completion with drafts and the engine's statistics, after comparing it with one without drafts."""
    engine = opened(model, **options)
    (completion,) = engine.generate([request])[0]
    assert_empty(engine)
    plain_engine = opened(model, **options | {"drafts": 0})
    assert_alike(completion, plain_engine.generate([request])[0][0])
    assert engine.statistics["ticks"] <= plain_engine.statistics["ticks"]
    return completion, engine.statistics


METHODS = {"adaponder": (1, 3), "ponder": (2,), "loop": (3,), "mor": (3,), "ouro": (1,), "act": (3,), "pondernet": (2,)}


@pytest.mark.parametrize(("method", "drafts"), [(method, drafts) for method in METHODS for drafts in METHODS[method]])
def test_greedy_tokens_and_depths_are_those_of_generate(method, drafts):
    model = tiny(method, iterations=K, seed=1).eval()
    requests = [greedy(1, 9), greedy(4, 9, **({"policy": FixedDepth(K)} if model.method.halts else {}))]
    engine = opened(model, drafts=drafts)
    for request, done in zip(requests, run(engine, requests), strict=True):
        assert (done.ids, done.depths) == portable(model, request)
    assert 0 < engine.statistics["accepted"] < engine.statistics["drafted"]


def test_each_tick_completes_a_token_where_every_draft_is_right():
    for drafts in (1, 9):
        _, statistics = drafted(agreeing(), greedy(1, 16), drafts=drafts)
        assert statistics["drafted"] == statistics["accepted"] == 15
        # A window takes in a token per tick until it is full, and each leaves it after K ticks.
        full, more = divmod(15, min(drafts + 1, K))
        assert statistics["ticks"] == K * full + more + K
        assert statistics["rows"] == 16 * K


def test_a_stop_id_inside_a_window_ends_the_completion():
    model, request = agreeing(), greedy(temperature=1.0, seed=3)
    ids = solo(model, request, tokens=40)[0].ids
    stopped = replace(request, stop_ids=(ids[2],))
    for burst in (1, 16):  # tokens that a launch samples after the stop id are dropped
        done, _ = drafted(model, stopped, burst=burst)
        assert (done.ids, done.finish_reason, done.stop_id) == (ids[: ids.index(ids[2]) + 1], "stop", ids[2])
    drafted(model, replace(stopped, min_new_tokens=7))


@pytest.mark.parametrize("new", [1, 3])
def test_no_draft_is_started_beyond_the_last_token(new):
    _, statistics = drafted(agreeing(), greedy(3, new), late=True, burst=5)
    assert statistics["drafted"] == new - 1
    assert statistics["rows"] == 2 * K + new * K


@pytest.mark.parametrize("by_kernels", [False, pytest.param(True, marks=pytest.mark.every)])
def test_halted_tokens_may_have_padding_rows(monkeypatch, by_kernels):
    """A GPU computes padding rows, so that shapes do not depend on halting; also by its kernels, interpreted."""
    begin, end = partial(plain.begin_windows, every=True), plain.end_windows
    if by_kernels:
        kernels = pytest.importorskip("adaponder.ops.lanes.triton", reason="no Triton on this platform")
        begin, end = kernels.begin_windows, kernels.end_windows
    monkeypatch.setattr("adaponder.inference.drafting.begin_windows", begin)
    monkeypatch.setattr("adaponder.inference.drafting.end_windows", end)
    model = tiny("mor", iterations=K, seed=1).eval()
    requests = [greedy(3, 7, gates=True), greedy(6, 4), greedy(2, 7, temperature=1.0, log_probabilities=2)]
    engine = opened(model, lanes=2, burst=3, late=True)
    assert_all_as_alone(model, requests, run_all(engine, requests), tokens=40)
    assert engine.statistics["accepted"] > 0


@pytest.mark.parametrize("fields", [{"frequency_penalty": 0.5}, {"policy": odd_ones}])
def test_requests_that_depend_on_other_tokens_are_not_drafted(fields):
    _, statistics = drafted(agreeing(), greedy(**fields))
    assert statistics["drafted"] == 0


@pytest.mark.parametrize(
    ("method", "drafts", "options"), [("vanilla", 1, {}), ("pause", 2, {}), ("ponder", 1, {"max_iterations": 1})]
)
def test_impossible_drafts_are_refused(method, drafts, options):
    model = tiny(method, iterations=1 if method == "vanilla" else 3).eval()
    with pytest.raises(InputError, match=f"drafts={drafts}"):
        opened(model, drafts=drafts, **options)


@pytest.mark.parametrize(
    ("lanes", "method", "options", "size"),
    [
        (4, "adaponder", {}, 3),
        (5, "adaponder", {}, 0),
        (1, "adaponder", {"drafts": 0}, 0),
        (1, "ponder", {"max_iterations": 2}, 2),
        (1, "pause", {}, 0),
        (1, "vanilla", {}, 0),
    ],
)
def test_few_lanes_draft_by_default(lanes, method, options, size):
    model = tiny(method, iterations=1 if method == "vanilla" else 3).eval()
    drafts = Engine(model, lanes=lanes, tokens=20, **options).runner.drafts
    assert (drafts.size if drafts else 0) == size


def test_rows_of_wrong_drafts_are_counted():
    """Every computed row is part of a token's depth or of a dropped token."""
    done, statistics = drafted(tiny("adaponder", iterations=K, seed=1).eval(), greedy(4, 12), late=False)
    assert done.dropped_rows > 0
    assert statistics["rows"] == sum(done.depths) + done.dropped_rows


@pytest.mark.parametrize("drafts", [0, 1, K - 1])
def test_results_and_counts_do_not_depend_on_the_ticks_of_a_launch(drafts):
    """The iterations of a token, and the ticks in which it waits in a window, may lie in several launches."""
    model = tiny("adaponder", iterations=K, seed=1).eval()
    request = greedy(4, 14, gates=True, log_probabilities=2, iteration_top=1)
    results = []
    for burst in (1, 2, 5, 16):
        engine = opened(model, drafts=drafts, burst=burst, late=False)
        (done,) = engine.generate([request])[0]
        # Without drafts, ticks after the last token count too.
        counts = [engine.statistics[name] for name in ("rows", "drafted", "accepted") if drafts]
        results.append((done.tokens, done.depths, done.dropped_rows, counts))
    assert len({token.depth for token in done.tokens}) > 1
    for result in results[1:]:
        assert_near(result, results[0])
