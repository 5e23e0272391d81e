"""Tests law 2 for the engine: tokens and depths are those of ``generate``, whatever else is in the batch."""

import random
from dataclasses import replace

import engine_support
import pytest
from engine_support import assert_all_as_alone, assert_as_the_model_says, draw_engine, draw_requests, run, run_all

from adaponder import LearnedGate, Random
from adaponder.inference import Engine, Request
from adaponder.inference.scheduler import Scheduler
from support import FAMILIES, METHODS, VOCABULARY, tiny


def opened(method="adaponder", family="gpt_neox", **options):
    iterations = 1 if method == "vanilla" else 3
    model = tiny(method, family, iterations=iterations, **engine_support.SETTINGS.get(method, {})).eval()
    return model, Engine(model, tokens=40, **options)


def assert_engine_as_the_model_says(model, engine):
    for done in run(engine, draw_requests(3, 2, halts=model.method.halts, iterations=3)):
        assert_as_the_model_says(model, done)


@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_and_depths_are_those_of_generate(method):
    model, engine = opened(method, lanes=2, chunk=7 * 3)
    draw = random.Random(1)
    requests = [
        Request([draw.randrange(VOCABULARY) for _ in range(length)], max_new_tokens=4, temperature=0.0, seed=length)
        for length in (1, 6, 13)
    ]
    if model.method.halts:
        requests[1] = replace(requests[1], policy=Random(0.5))
    if method not in ("pause", "vanilla"):
        requests[2] = replace(requests[2], max_iterations=2)
    if method == "adaponder":
        requests[0] = replace(requests[0], tau=0.4)
    for request, done in zip(requests, run(engine, requests), strict=True):
        assert (done.ids, done.depths) == engine_support.portable(model, request)


@pytest.mark.parametrize(
    ("family", "body"),
    [*((family, None) for family in (*FAMILIES, "deepseek_v3")), ("gpt_neox", "stock"), ("llama", "stock")],
)
def test_every_family_is_the_same_in_the_engine(family, body):
    for method in ("adaponder", "loop", "pause", "mor", "ouro") if family == "gemma3" else ("adaponder",):
        assert_engine_as_the_model_says(*opened(method, family, lanes=3, chunk=6, body=body))


def test_eager_attention_is_the_same_in_the_engine():
    """Eager attention has a float32 softmax, also in the forward that the engine is compared with."""
    model, _ = opened("adaponder", "llama")
    model.backbone.set_attn_implementation("eager")
    assert_engine_as_the_model_says(model, Engine(model, lanes=2, chunk=5, tokens=40, body="stock"))


@pytest.mark.one_of(2)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_that_shares_the_engine_changes_a_token(seed):
    """Varies arrivals, chunks, bursts, samples, shared prompts, and pools so small that sequences are preempted."""
    draw = random.Random(seed)
    method = draw.choice(["adaponder", "adaponder", "mor", "ouro"])
    model, _ = opened(method, draw.choice(["gpt_neox", "llama", "gpt2"]))
    requests = draw_requests(5, seed, halts=model.method.halts, iterations=3, sampled=0.4, extras=0.5)
    ended = run_all(Engine(model, tokens=40, **draw_engine(draw)), requests, seed, cancel=draw.choice([0.0, 0.05]))
    assert_all_as_alone(model, requests, ended, tokens=40)


@pytest.mark.parametrize(("late", "drafts"), [(False, 0), (True, 2), pytest.param(True, 0, marks=pytest.mark.every)])
def test_preempted_sequences_give_the_same_tokens(monkeypatch, late, drafts):
    """Admission expects no rows at all, so too many sequences are admitted and the youngest are preempted."""
    monkeypatch.setattr(Scheduler, "expected_rows", lambda self, sequence: 0)
    model, engine = opened(lanes=6, rows=160, chunk=16, late=late, burst=2, drafts=drafts)
    requests = draw_requests(7, 3, halts=True, iterations=3, sampled=0.4, extras=0.5)
    ended = run_all(engine, requests, 1, rush=0.9)
    assert engine.statistics["preemptions"] >= 3
    monkeypatch.undo()
    assert_all_as_alone(model, requests, ended, tokens=40)


def test_penalties_of_a_preempted_sequence_count_its_earlier_tokens(monkeypatch):
    monkeypatch.setattr(Scheduler, "expected_rows", lambda self, sequence: 0)
    model, engine = opened(lanes=4, rows=160)
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 2.0}
    requests = [Request([number] * 20, max_new_tokens=12, temperature=0.0, **penalties) for number in range(4)]
    ended = run_all(engine, requests, rush=1.0)
    assert engine.statistics["preemptions"]
    monkeypatch.undo()
    assert_all_as_alone(model, requests, ended, tokens=40)


def test_a_common_prefix_of_prompts_is_computed_once():
    model, engine = opened(lanes=2, chunk=16, prefix_block=3)
    draws = draw_requests(10, 4, halts=False, iterations=3)
    policies = [None, LearnedGate(0.3)]
    requests = [replace(one, policy=policies[place % 2]) for place, one in enumerate(draws)]
    for done in run(engine, requests):
        assert_as_the_model_says(model, done)
    assert engine.statistics["prefix_tokens_reused"] >= 12


@pytest.mark.parametrize(
    ("change", "shares"),
    [
        ({}, True),
        *(({"policy": policy}, False) for policy in (Random(0.6), lambda rows: rows.gate > 0.5)),
        *((change, False) for change in ({"seed": 1}, {"salt": "mine"}, {"max_iterations": 2}, {"depths": [1]})),
    ],
    ids=["same", "policy", "rule", "seed", "salt", "iterations", "depths"],
)
def test_a_prompt_is_shared_only_where_every_decision_is_equal(change, shares):
    model, engine = opened(lanes=1, prefix_block=4)
    first = Request(list(range(17)), max_new_tokens=3, temperature=0.0, policy=Random(0.5))
    second = replace(first, **change)
    one, other = run(engine, [first]), engine.generate([first, second])
    assert engine.statistics["prefix_tokens_reused"] == (16 if shares else 0)
    assert other[0][0].ids == one[0].ids
    assert_as_the_model_says(model, other[1][0])


@pytest.mark.parametrize("prompt", [[7], [7, 9], list(range(17))])
def test_samples_share_one_prompt_and_differ_in_what_they_draw(prompt):
    model, engine = opened(lanes=3)
    request = Request(prompt, max_new_tokens=8, samples=3, seed=4)
    (found,) = engine.generate([request])
    assert len({tuple(done.ids) for done in found}) == 3
    assert engine.statistics["most_resident"] == 3, "samples wait for each other"
    assert engine.statistics["rows"] < sum(sum(done.depths) for done in found) or len(prompt) <= 2
    for done in found:
        assert_as_the_model_says(model, done)


def test_a_sequence_may_fill_every_position():
    """Ticks launched before the last token was known stay within the lane."""
    model, engine = opened(lanes=2, burst=5, late=True)
    requests = [Request([3] * 30, max_new_tokens=11, temperature=0.0), Request([4], max_new_tokens=9, temperature=0.0)]
    for done in run(engine, requests):
        assert_as_the_model_says(model, done)
