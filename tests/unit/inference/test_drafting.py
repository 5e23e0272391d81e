"""Tests drafting: the same tokens and depths in fewer ticks, without leaks."""

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
    draw_requests,
    odd_ones,
    portable,
    run,
    run_all,
    solo,
)

from adaponder import FixedDepth
from adaponder.errors import InputError
from adaponder.inference import Engine, Request
from adaponder.inference.scheduler import Scheduler
from adaponder.ops.lanes import torch as plain
from support import VOCABULARY, tiny

RECURRENT = ("adaponder", "ponder", "loop", "mor", "ouro")
K = 4


@cache
def agreeing():
    """A model whose later iterations change little: its gates let in a hundredth of what the token expects."""
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


def drafting(model, request: Request, **options):
    """The completions of a request with drafts, and the engine's statistics."""
    engine = opened(model, **options)
    done = engine.generate([request])[0]
    assert_empty(engine)
    return done, engine.statistics


METHODS = {"adaponder": (1, 3), "ponder": (2,), "loop": (3,), "mor": (3,), "ouro": (1,), "act": (3,), "pondernet": (2,)}


@pytest.mark.parametrize(("method", "drafts"), [(method, drafts) for method in METHODS for drafts in METHODS[method]])
def test_greedy_tokens_and_depths_are_those_of_generate(method, drafts):
    model = tiny(method, iterations=K, seed=1).eval()
    requests = [greedy(1, 9), greedy(4, 9, **({"policy": FixedDepth(K)} if model.method.halts else {}))]
    engine = opened(model, drafts=drafts)
    for request, done in zip(requests, run(engine, requests), strict=True):
        assert (done.ids, done.depths) == portable(model, request)
    assert 0 < engine.statistics["accepted"] < engine.statistics["drafted"]


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_random_requests_have_the_results_of_an_engine_without_drafts(seed):
    """Sampling, penalties, stop ids, gates, log-probabilities, policies, several lanes, bursts, late results."""
    draw = random.Random(seed)
    model = tiny(RECURRENT[seed], ("gpt_neox", "llama", "mistral")[seed % 3], iterations=3, seed=seed).eval()
    requests = draw_requests(3, seed, halts=model.method.halts, iterations=3, sampled=0.5, extras=0.5)
    options = {"lanes": [1, 1, 3], "chunk": [3, 64], "burst": [1, 4], "late": [False, True], "drafts": [1, 2]}
    engine = opened(model, prefix_block=4, **{name: draw.choice(values) for name, values in options.items()})
    ended = run_all(engine, requests, seed, cancel=0.03)
    assert_all_as_alone(model, requests, ended, tokens=40)


def test_each_tick_completes_a_token_where_every_draft_is_right():
    model, request = agreeing(), greedy(1, 20)
    plain = solo(model, request, tokens=40)[0]
    for drafts in (1, 9):
        (drafted,), statistics = drafting(model, request, drafts=drafts)
        assert_alike(drafted, plain)
        assert statistics["drafted"] == statistics["accepted"] == 19
        # A window takes in a token per tick until it is full, and each leaves it after K ticks.
        full, more = divmod(19, min(drafts + 1, K))
        assert statistics["ticks"] == K * full + more + K
        assert statistics["rows"] == 20 * K


def test_drafting_never_takes_more_ticks():
    model = tiny("loop", iterations=K, seed=1).eval()
    for request in (greedy(2), greedy(2, temperature=1.5)):
        engine = opened(model, drafts=0)
        plain = engine.generate([request])[0][0]
        (drafted,), statistics = drafting(model, request)
        assert_alike(drafted, plain)
        assert statistics["ticks"] <= engine.statistics["ticks"]


def test_a_stop_id_inside_a_window_ends_the_completion():
    model, request = agreeing(), greedy(temperature=1.0, seed=3)
    ids = solo(model, request, tokens=40)[0].ids
    stopped = replace(request, stop_ids=(ids[2],))
    (done,), _ = drafting(model, stopped)
    assert (done.ids, done.finish_reason, done.stop_id) == (ids[: ids.index(ids[2]) + 1], "stop", ids[2])
    (banned,), _ = drafting(model, replace(stopped, min_new_tokens=7))
    assert_alike(banned, solo(model, replace(stopped, min_new_tokens=7), tokens=40)[0])


@pytest.mark.parametrize("new", [1, 3])
def test_no_draft_is_started_beyond_the_last_token(new):
    model = agreeing()
    (done,), statistics = drafting(model, greedy(3, new), late=True, burst=5)
    assert_alike(done, solo(model, greedy(3, new), tokens=40)[0])
    assert statistics["drafted"] == new - 1
    assert statistics["rows"] == 2 * K + new * K


def test_cancelling_inside_a_window_leaks_nothing():
    model = agreeing()
    for late in (False, True):
        engine = opened(model, late=late)
        number = engine.submit(greedy())
        for _ in range(6):
            engine.step()
        engine.cancel(number)
        after = greedy(7, seed=9)
        assert_alike(engine.generate([after])[0][0], solo(model, after, tokens=40)[0])
        assert_empty(engine)


@pytest.mark.parametrize("by_kernels", [False, True])
def test_halted_tokens_may_have_padding_rows(monkeypatch, by_kernels):
    """As on a GPU, where shapes do not depend on which tokens have halted; and by its kernels, interpreted."""
    if by_kernels:
        kernels = pytest.importorskip("adaponder.ops.lanes.triton", reason="no Triton on this platform")
        monkeypatch.setattr("adaponder.inference.drafting.begin_windows", kernels.begin_windows)
        monkeypatch.setattr("adaponder.inference.drafting.end_windows", kernels.end_windows)
    else:
        monkeypatch.setattr("adaponder.inference.drafting.begin_windows", partial(plain.begin_windows, every=True))
    model = tiny("mor", iterations=K, seed=1).eval()
    requests = [greedy(3, 7, gates=True), greedy(6, 4), greedy(2, 7, temperature=1.0, log_probabilities=2)]
    engine = opened(model, lanes=2, burst=3, late=True)
    assert_all_as_alone(model, requests, run_all(engine, requests), tokens=40)
    assert engine.statistics["accepted"] > 0


def test_preempted_sequences_have_the_same_results(monkeypatch):
    monkeypatch.setattr(Scheduler, "expected_rows", lambda self, sequence: 0)
    model = tiny("ponder", iterations=3, seed=1).eval()
    requests = [greedy(length, 9, temperature=0.5) for length in (3, 9, 14, 5)]
    engine = opened(model, lanes=4, rows=150, chunk=16, late=True, burst=2, drafts=2)
    ended = run_all(engine, requests)
    assert_all_as_alone(model, requests, ended, tokens=40)
    assert engine.statistics["preemptions"] > 1


def test_prefixes_and_samples_share_rows():
    model = tiny("ponder", iterations=3, seed=1).eval()
    request = greedy(14, 6, temperature=1.0, samples=3)
    engine = opened(model, drafts=2, prefix_block=4)
    for _ in range(2):
        for done, alone in zip(engine.generate([request])[0], solo(model, request, tokens=40), strict=True):
            assert_alike(done, alone)
    assert engine.statistics["prefix_tokens_reused"] >= 12
    assert engine.statistics["accepted"] > 0


@pytest.mark.parametrize("fields", [{"frequency_penalty": 0.5}, {"policy": odd_ones}])
def test_requests_that_depend_on_other_tokens_are_not_drafted(fields):
    model, request = agreeing(), greedy(**fields)
    (done,), statistics = drafting(model, request)
    assert_alike(done, solo(model, request, tokens=40)[0])
    assert statistics["drafted"] == 0


def test_nan_logits_end_the_request_alone():
    model = agreeing()
    engine = opened(model)
    weight = model.get_output_embeddings().weight.detach()
    before = weight.clone()
    weight.fill_(torch.nan)
    done = engine.generate([greedy()])[0][0]
    weight.copy_(before)
    assert done.finish_reason == "error"
    assert "NaN" in done.error
    assert_alike(engine.generate([greedy()])[0][0], solo(model, greedy(), tokens=40)[0])


@pytest.mark.parametrize(
    ("method", "drafts", "options"),
    [
        ("vanilla", 1, {}),
        ("pause", 2, {}),
        ("ponder", 1, {"max_iterations": 1}),
        ("ponder", -1, {}),
        ("ponder", True, {}),
    ],
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
    model = tiny("adaponder", iterations=K, seed=1).eval()
    (done,), statistics = drafting(model, greedy(4, 12), late=False)
    (plain,), _ = drafting(model, greedy(4, 12), drafts=0)
    assert done.depths == plain.depths
    assert plain.dropped_rows == 0 < done.dropped_rows
    assert statistics["rows"] == sum(done.depths) + done.dropped_rows
