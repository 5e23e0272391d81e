"""Tests that a failure ends its own request alone, and that an interrupted step leaves the engine empty and usable."""

import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from engine_support import assert_empty, draw_requests, run_all, solo
from transformers import AutoModelForCausalLM, BloomConfig

from adaponder import AdaPonderForCausalLM
from adaponder.errors import BackboneError, EvaluationError, InputError
from adaponder.inference import Engine, Request
from support import VOCABULARY, tiny

GOOD = Request([1, 2, 3, 4, 5], max_new_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def model():
    return tiny("adaponder", iterations=3).eval()


@pytest.fixture(scope="module")
def good_ids(model) -> list[int]:
    return solo(model, GOOD, tokens=40)[0].ids


@pytest.fixture
def engine(model):
    engine = Engine(model, lanes=3, chunk=4, tokens=40)
    yield engine
    assert_empty(engine)


def finish(engine):
    """Steps until the engine is idle; returns the events."""
    events = []
    while engine.busy:
        events += engine.step()
    return events


def completions(events, number):
    return [event.completion for event in events if event.request == number and event.completion is not None]


def raises_later(rows):
    if bool((rows.slot >= 7).any()):
        raise ValueError("no more")
    return rows.gate > 0.5


def raises_in_the_prompt(rows):
    if bool((rows.iteration == 1).any()):
        raise KeyError("slot")
    return rows.gate > 0


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        (raises_later, "ValueError: no more"),
        (raises_in_the_prompt, "KeyError"),
        (lambda rows: rows.gate, "must return a bool tensor of shape"),
        (lambda rows: True, "must return a bool tensor of shape"),
    ],
    ids=["later", "in the prompt", "no bool", "no tensor"],
)
def test_a_policy_that_fails_ends_its_own_request_only(model, good_ids, policy, error):
    engine = Engine(model, lanes=3, chunk=4, tokens=40, late="bool" not in error, burst=2)
    bad = Request([9, 8, 7, 6, 5], max_new_tokens=8, policy=policy, samples=2)
    ended = run_all(engine, [GOOD, bad, GOOD], rush=0.9)
    for done in ended.of(1, 2):
        assert done.finish_reason == "error"
        assert done.error.startswith("policy: ")
        assert error in done.error
        assert len(done.ids) <= 3
    assert ended.completions[0, 0].ids == ended.completions[2, 0].ids == good_ids


CALLBACKS = {
    "raises": (lambda engine: 1 // 0, "on_event: ZeroDivisionError"),
    "steps": (lambda engine: engine.step(), "step()"),
    "generates": (lambda engine: engine.generate([GOOD]), "step()"),
    "streams": (lambda engine: list(engine.stream(GOOD)), "step()"),
}


@pytest.mark.parametrize("kind", CALLBACKS)
def test_a_callback_that_fails_ends_its_own_request_only(engine, good_ids, kind):
    (act, error), calls, others = CALLBACKS[kind], [], []

    def fails(event):
        calls.append(event)
        act(engine)

    number, other = engine.submit(GOOD, fails), engine.submit(GOOD, others.append)
    (end,) = completions(finish(engine), number)
    assert len(calls) == 1
    assert (end.finish_reason, error in end.error) == ("error", True)
    assert [event.token.id for event in others if event.token is not None] == good_ids, "in order, and none is lost"
    assert others[-1].completion.ids == good_ids
    assert {event.request for event in others} == {other}


def test_a_callback_may_submit_and_cancel(engine):
    ends, more = [], []

    def follow(event):
        if event.completion is not None:
            ends.append(event.completion.finish_reason)
        elif not more:
            more.append(engine.submit(GOOD, follow))
            engine.cancel(event.request)

    engine.submit(GOOD, follow)
    finish(engine)
    assert ends == ["cancelled", "length"]


def test_invalid_requests_are_refused_by_field_while_others_go_on(engine, good_ids):
    number, events = engine.submit(GOOD), []
    for field, value in {"prompt": [], "samples": 10**9, "policy": "no such policy", "salt": 3}.items():
        with pytest.raises(InputError, match=field):
            engine.submit(Request(**({"prompt": [1, 2], "max_new_tokens": 3} | {field: value})))
        assert list(engine._requests) in ([number], [])
        events += engine.step()
    assert completions(events + finish(engine), number)[0].ids == good_ids
    with pytest.raises(InputError, match="prompt"):
        engine.generate([GOOD, Request([])])  # and nothing is submitted


@pytest.mark.every  # python -O compiles every library anew
def test_no_assert_guards_input():
    """CVE-2026-41523, CVE-2026-93592, CVE-2026-93436: without asserts, wrong requests are refused by field as ever."""
    tests = Path(__file__).parents[1] / "unit" / "inference" / "test_request.py"
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-k", "test_invalid_values_are_refused", str(tests)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("options", "expected"), [({"rows": 150, "tokens": 64, "burst": 5}, 25), ({"tokens": 30}, 22), ({"rows": 1}, 0)]
)
def test_the_largest_request_that_is_taken_finishes(model, options, expected):
    """At full depth; positions limit it, or the rows of the pool, and one that needs more is refused."""
    engine = Engine(model, lanes=2, late=True, **options)
    largest = max(0, engine.longest_request - 9)
    assert largest == expected
    if largest:
        request = Request([1] * 9, max_new_tokens=largest, temperature=0.0, policy=lambda rows: rows.gate > -1)
        assert len(engine.generate([request])[0][0].ids) == largest
    with pytest.raises(InputError, match="max_new_tokens="):
        engine.submit(Request([1] * 9, max_new_tokens=largest + 1))


@pytest.mark.parametrize("lanes", [2, 6])  # with drafts, and without
def test_weights_that_are_nan_end_requests_with_an_error(lanes):
    model = tiny("adaponder", iterations=3).eval()
    engine = Engine(model, lanes=lanes, chunk=4, tokens=40)
    with torch.no_grad():
        model.backbone.get_output_embeddings().weight[3] = math.nan
    # Two that decode, and one whose samples wait.
    for samples in engine.generate([GOOD, GOOD, Request([1, 2], max_new_tokens=3, samples=2)]):
        for done in samples:
            assert (done.finish_reason, done.ids) == ("error", [])
            assert "NaN" in done.error
    assert_empty(engine)
    with pytest.raises(EvaluationError, match="NaN"):
        list(engine.stream(GOOD))


def interrupt(patch, target, name, at):
    """Makes the call number ``at`` of a method raise, as Ctrl-C in it does."""
    method, calls = getattr(target, name), []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return method(*args, **kwargs)

    patch.setattr(target, name, interrupted)


@pytest.mark.parametrize(("where", "late"), [("launch", True), ("launch", False), ("wait", True), ("plan", True)])
def test_ctrl_c_in_a_step_ends_all_requests_and_leaves_the_engine_usable(model, good_ids, monkeypatch, where, late):
    engine = Engine(model, lanes=2, chunk=4, tokens=40, late=late)
    targets = {
        "launch": (engine.runner, "tick"),
        "wait": (engine.postprocessor, "process"),
        "plan": (engine.scheduler, "_allocate_decode"),
    }
    events = []
    bystander = engine.submit(Request([7, 8, 9], max_new_tokens=9, samples=2), events.append)
    with monkeypatch.context() as patch:
        interrupt(patch, *targets[where], at=5)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([GOOD, GOOD])
    assert engine.busy
    engine.step()
    ends = completions(events, bystander)
    assert [end.finish_reason for end in ends] == ["error", "error"]
    assert ends[0].error.endswith("KeyboardInterrupt")
    assert_empty(engine)
    assert [done.ids for (done,) in engine.generate([GOOD] * 4)] == [good_ids] * 4


def test_ctrl_c_between_steps_cancels_the_requests_of_generate(engine, monkeypatch):
    other = engine.submit(GOOD)
    with monkeypatch.context() as patch:
        interrupt(patch, engine, "step", at=3)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([GOOD, GOOD])
    ends = {event.request: event.completion.finish_reason for event in finish(engine) if event.completion}
    assert ends == {other: "length", other + 1: "cancelled", other + 2: "cancelled"}


def test_streams_at_the_same_time_yield_the_tokens_of_each_alone(model, engine):
    requests = [GOOD, Request([9, 8], max_new_tokens=6, seed=3), Request([4] * 9, max_new_tokens=2, temperature=0.0)]
    streams, ids = [engine.stream(request) for request in requests], [[], [], []]
    left = engine.stream(GOOD)
    next(left)
    left.close()
    for _ in range(6):
        for stream, tokens in zip(streams, ids, strict=True):
            tokens += [token.id for token in [next(stream, None)] if token is not None]
    assert all(next(stream, None) is None for stream in streams)
    assert ids == [solo(model, request, tokens=40)[0].ids for request in requests]
    with pytest.raises(InputError, match="samples=2"):
        next(engine.stream(Request([1], max_new_tokens=2, samples=2)))
    finish(engine)


def test_a_second_thread_is_refused_while_one_steps(engine):
    inside, leave, refusals = threading.Event(), threading.Event(), []

    def wait(event):
        inside.set()
        leave.wait(20)

    engine.submit(Request([1], max_new_tokens=1), wait)
    thread = threading.Thread(target=finish, args=[engine])
    thread.start()
    assert inside.wait(20)
    for use in (lambda: engine.submit(GOOD), engine.step, engine.warm_up, lambda: engine.cancel(0)):
        try:
            use()
        except EvaluationError as refused:
            refusals.append("thread" in str(refused))
    leave.set()
    thread.join(20)
    assert refusals == [True] * 4


@pytest.mark.parametrize("seed", range(2))
def test_cancelling_at_random_leaks_nothing(model, seed):
    engine = Engine(model, lanes=4, rows=160, chunk=8, tokens=40, late=seed != 1, burst=1 + seed, prefix_block=4)
    requests = draw_requests(10, 50 + seed, halts=True, iterations=3, sampled=0.5)
    ended = run_all(engine, requests, seed, rush=0.8, cancel=0.3)
    assert len(ended.cancelled) > 2
    reasons = {done.finish_reason for (place, _), done in ended.completions.items() if place not in ended.cancelled}
    assert reasons <= {"length", "stop"}
    engine.cancel(0)
    engine.cancel(99)
    assert engine.step() == []


def test_models_that_an_engine_cannot_decode_are_refused_by_name():
    for reuse in ("kv", "none"):
        with pytest.raises(InputError, match=f"reuse='{reuse}'"):
            Engine(tiny("adaponder", reuse=reuse).eval())
    with pytest.raises(InputError, match="training mode"):
        Engine(tiny("adaponder").train())
    rotary = tiny("adaponder", "llama", iterations=3).eval()
    rotary.config.backbone_config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(BackboneError, match="rope_type='dynamic'"):
        Engine(rotary)
    config = BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=VOCABULARY)
    base = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(BackboneError, match="bloom"):
        Engine(AdaPonderForCausalLM.from_backbone(base, method="ponder", iterations=2).eval())


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("tokens", (1, 65, 10.0, "10")),
        ("body", ("fast",)),
        ("lanes", (0, True)),
        ("rows", (-1,)),
        ("chunk", (0.5,)),
        ("burst", (0,)),
        ("prefix_block", (0,)),
        ("max_iterations", (4, 2.0, True)),
        ("expectation_top_k", (2.0, VOCABULARY + 1)),
        ("drafts", (-1, True)),
    ],
)
def test_invalid_options_are_refused_by_name(model, option, values):
    for value in values:
        with pytest.raises(InputError, match=f"{option}="):
            Engine(model, **{option: value})


def test_a_chunk_holds_at_least_one_token():
    model = tiny("pause", iterations=3).eval()
    request = Request([1, 2, 3], max_new_tokens=2, temperature=0.0)
    (completion,) = Engine(model, chunk=1, tokens=10).generate([request])[0]
    assert completion.ids == solo(model, request, tokens=10)[0].ids


@pytest.mark.parametrize("method", ["adaponder", "pause"])
def test_an_engine_of_fewer_iterations_equals_a_forward_of_fewer(method):
    model = tiny(method, iterations=3).eval()
    (done,) = Engine(model, max_iterations=2, tokens=20).generate([GOOD])[0]
    assert max(done.depths) <= 2
    ids = torch.tensor([[*GOOD.prompt, *done.ids[:-1]]])
    logits = model(ids, max_iterations=2).logits
    assert done.ids == logits[0, len(GOOD.prompt) - 1 :].argmax(-1).tolist()
