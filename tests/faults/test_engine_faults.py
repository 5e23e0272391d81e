"""What goes wrong in one request stays there; what breaks off a step leaves the engine empty and usable."""

import math
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "laws"))

from engine_support import assert_empty, draw_requests, run_all, solo

from adaponder import AdaPonderForCausalLM
from adaponder.errors import BackboneError, EvaluationError, InputError
from adaponder.inference import Engine, Request
from support import VOCABULARY, tiny

GOOD = Request([1, 2, 3, 4, 5], max_new_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def model():
    return tiny("adaponder", iterations=3).eval()


@pytest.fixture
def engine(model):
    return Engine(model, lanes=3, chunk=4, tokens=40)


def raises_later(rows):
    if bool((rows.slot >= 7).any()):
        raise ValueError("no more")
    return rows.gate > 0.5


def raises_in_the_prompt(rows):
    if bool((rows.iteration == 1).any()):
        raise KeyError("slot")
    return rows.gate > 0


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (raises_later, "ValueError: no more"),
        (raises_in_the_prompt, "KeyError"),
        (lambda rows: rows.gate, "must return a bool tensor of shape"),
        (lambda rows: rows.gate.new_ones(17, dtype=torch.bool), "must return a bool tensor of shape"),
        (lambda rows: True, "must return a bool tensor of shape"),
    ],
    ids=["later", "in the prompt", "no bool", "shape", "no tensor"],
)
def test_a_policy_that_fails_ends_its_own_request_only(model, policy, says):
    engine = Engine(model, lanes=3, chunk=4, tokens=40, late="bool" not in says, burst=2)
    bad = Request([9, 8, 7, 6, 5], max_new_tokens=8, policy=policy, samples=2)
    ended = run_all(engine, [GOOD, bad, GOOD], rush=0.9)
    for sample in range(2):
        done = ended.completions[1, sample]
        assert done.finish_reason == "error"
        assert done.error.startswith("policy: ")
        assert says in done.error
        assert len(done.ids) <= 3
    good = solo(model, GOOD, tokens=40)[0].ids
    assert ended.completions[0, 0].ids == ended.completions[2, 0].ids == good


def test_a_callback_that_raises_ends_its_own_request_only(model, engine):
    heard, told = [], []

    def fails(event):
        heard.append(event)
        raise OSError("pipe closed")

    number = engine.submit(GOOD, fails)
    other = engine.submit(GOOD, told.append)
    events = []
    while engine.busy:
        events += engine.step()
    assert len(heard) == 1
    (end,) = [event.completion for event in events if event.request == number and event.completion]
    assert (end.finish_reason, end.error) == ("error", "on_event: OSError('pipe closed')")
    assert told[-1].completion.ids == solo(model, GOOD, tokens=40)[0].ids
    assert {event.request for event in told} == {other}
    assert_empty(engine)


def test_what_is_called_back_may_submit_and_cancel(engine):
    ends, more = [], []

    def follow(event):
        if event.completion is not None:
            ends.append(event.completion.finish_reason)
        elif not more:
            more.append(engine.submit(GOOD, follow))
            engine.cancel(event.request)

    engine.submit(GOOD, follow)
    while engine.busy:
        engine.step()
    assert ends == ["cancelled", "length"]
    assert_empty(engine)


BAD = {
    "prompt": [[], [VOCABULARY], [-1], [1.5], "text", None, [True], list(range(41))],
    "max_new_tokens": [0, -1, 1.5, None, 100, "4"],
    "min_new_tokens": [-1, 5],
    "temperature": [-1, math.nan, math.inf, "hot", None],
    "top_k": [-1, 2.5],
    "top_p": [0, 1.1, math.nan],
    "min_p": [-0.1, 2],
    "repetition_penalty": [0, -1, math.inf],
    "presence_penalty": [9],
    "frequency_penalty": [-9],
    "logit_bias": [{VOCABULARY: 1.0}, {1: math.nan}, [1]],
    "seed": [1.5, None],
    "samples": [0, -2, 10**9],
    "stop_ids": [[VOCABULARY], 4],
    "ignore_eos": [None],
    "log_probabilities": [-1, 21],
    "prompt_log_probabilities": [1.5],
    "policy": ["no such policy", 3],
    "tau": [-1, math.nan],
    "max_iterations": [0, 4],
    "depths": [[4], {99: 1}, "deep"],
    "gates": ["yes"],
    "iteration_top": [-1],
    "salt": [3],
}


def test_bad_requests_are_refused_one_by_one_while_others_go_on(model, engine):
    number, done = engine.submit(GOOD), []
    for field, values in BAD.items():
        for value in values:
            given = {"prompt": [1, 2], "max_new_tokens": 3} | {field: value}
            with pytest.raises(InputError) as refused:
                engine.submit(Request(**given))
            assert field in str(refused.value), (field, value)
            assert list(engine._requests) in ([number], [])
        done += engine.step()
    while engine.busy:
        done += engine.step()
    assert done[-1].completion.ids == solo(model, GOOD, tokens=40)[0].ids
    assert_empty(engine)


@pytest.mark.parametrize("numbers", [{"seed": np.uint64((1 << 64) - 1)}, {"max_new_tokens": np.uint64(4)}])
def test_whole_numbers_of_numpy_are_as_good_as_pythons(engine, numbers):
    request = replace(GOOD, **numbers)
    (one,), (other,) = engine.generate([GOOD, request])
    assert one.ids == other.ids
    assert_empty(engine)


def test_one_refused_request_keeps_generate_from_beginning(engine):
    with pytest.raises(InputError, match="prompt"):
        engine.generate([GOOD, Request([])])
    assert_empty(engine)


def test_a_request_larger_than_the_pool_is_refused(model):
    engine = Engine(model, lanes=2, rows=120, tokens=64)
    with pytest.raises(InputError, match=r"max_new_tokens=30 .* 150 rows"):
        engine.submit(Request([1] * 20, max_new_tokens=30))
    assert engine.generate([GOOD])[0][0].finish_reason == "length"


def test_the_largest_request_that_is_taken_finishes(model):
    """At full depth, with bursts whose answers come late."""
    engine = Engine(model, lanes=2, rows=150, tokens=64, burst=5, late=True)
    largest = next(new for new in range(60, 0, -1) if _is_taken(engine, new))
    assert engine.longest_request == 9 + largest
    request = Request([1] * 9, max_new_tokens=largest, temperature=0.0, policy=lambda rows: rows.gate > -1)
    assert len(engine.generate([request])[0][0].ids) == largest


def test_without_want_of_rows_positions_say_how_long_a_request_may_be(model):
    engine = Engine(model, lanes=2, tokens=30)
    largest = next(new for new in range(60, 0, -1) if _is_taken(engine, new))
    assert engine.longest_request == 9 + largest == 31


def _is_taken(engine, new):
    try:
        engine._check(Request([1] * 9, max_new_tokens=new))
    except InputError:
        return False
    return True


def test_weights_that_are_nan_end_requests_with_an_error():
    model = tiny("adaponder", iterations=3).eval()
    engine = Engine(model, lanes=2, chunk=4, tokens=40)
    with torch.no_grad():
        model.backbone.get_output_embeddings().weight[3] = math.nan
    # Two that decode, and one whose samples wait.
    for completions in engine.generate([GOOD, GOOD, Request([1, 2], max_new_tokens=3, samples=2)]):
        for done in completions:
            assert done.finish_reason == "error"
            assert "NaN" in done.error
            assert done.ids == []
    assert_empty(engine)
    with pytest.raises(EvaluationError, match="NaN"):
        list(engine.stream(GOOD))


@pytest.mark.parametrize(("where", "late"), [("launch", True), ("launch", False), ("wait", True), ("plan", True)])
def test_ctrl_c_in_a_step_ends_all_requests_and_leaves_the_engine_usable(model, monkeypatch, where, late):
    engine = Engine(model, lanes=2, chunk=4, tokens=40, late=late)
    expected = engine.generate([GOOD])[0][0].ids
    ends = []
    bystander = engine.submit(Request([7, 8, 9], max_new_tokens=9, samples=2), ends.append)
    with monkeypatch.context() as patch:
        _interrupt(patch, engine, where, at=5)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([GOOD, GOOD])
    assert engine.busy
    engine.step()
    told = [event.completion for event in ends if event.completion is not None]
    assert [one.finish_reason for one in told] == ["error", "error"]
    assert told[0].error.endswith("KeyboardInterrupt")
    assert {event.request for event in ends} == {bystander}
    assert_empty(engine)
    assert [one[0].ids for one in engine.generate([GOOD] * 4)] == [expected] * 4


def _interrupt(patch, engine, where, at):
    from adaponder.inference.runner import Launch

    target = {
        "launch": (engine.runner, "tick"),
        "wait": (Launch, "wait"),
        "plan": (engine.scheduler, "_allocate_decode"),
    }[where]
    whole, count = getattr(*target), []

    def interrupted(*args, **kwargs):
        count.append(1)
        if len(count) == at:
            raise KeyboardInterrupt
        return whole(*args, **kwargs)

    patch.setattr(*target, interrupted)


def test_ctrl_c_between_steps_cancels_what_generate_began(engine, monkeypatch):
    other = engine.submit(GOOD)
    whole, count = engine.step, []

    def interrupted():
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return whole()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([GOOD, GOOD])
    monkeypatch.undo()
    events = []
    while engine.busy:
        events += engine.step()
    assert [event.completion.finish_reason for event in events if event.completion][-1] == "length"
    assert other == 0
    assert_empty(engine)


def test_a_stream_that_is_left_is_cancelled(engine):
    stream = engine.stream(GOOD)
    next(stream)
    stream.close()
    while engine.busy:
        engine.step()
    assert_empty(engine)


def test_streams_beside_each_other_say_what_each_says_alone(model, engine):
    requests = [GOOD, Request([9, 8], max_new_tokens=6, seed=3), Request([4] * 9, max_new_tokens=2, temperature=0.0)]
    streams, said = [engine.stream(one) for one in requests], [[], [], []]
    for _ in range(6):
        for stream, tokens in zip(streams, said, strict=True):
            tokens += [token.id for token in [next(stream, None)] if token is not None]
    assert all(next(stream, None) is None for stream in streams)
    assert said == [solo(model, one, tokens=40)[0].ids for one in requests]
    with pytest.raises(InputError, match="samples=2"):
        next(engine.stream(Request([1], samples=2)))


def test_a_second_thread_is_refused_while_one_steps(engine):
    inside, leave, found = threading.Event(), threading.Event(), []

    def wait(event):
        inside.set()
        leave.wait(20)

    engine.submit(Request([1], max_new_tokens=1), wait)

    def work():
        while engine.busy:
            engine.step()

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(20)
    for use in (lambda: engine.submit(GOOD), engine.step, engine.warm_up, lambda: engine.cancel(0)):
        try:
            use()
        except EvaluationError as refused:
            found.append("thread" in str(refused))
    leave.set()
    thread.join(20)
    assert found == [True] * 4
    assert_empty(engine)


@pytest.mark.parametrize("seed", range(2))
def test_cancelling_at_random_leaks_nothing(model, seed):
    engine = Engine(model, lanes=4, rows=160, chunk=8, tokens=40, late=seed != 1, burst=1 + seed, prefix_block=4)
    requests = draw_requests(10, 50 + seed, halts=True, iterations=3, sampled=0.5)
    ended = run_all(engine, requests, seed, rush=0.8, cancel=0.3)
    assert len(ended.cancelled) > 2
    reasons = {done.finish_reason for (place, _), done in ended.completions.items() if place not in ended.cancelled}
    assert reasons <= {"length", "stop"}


def test_cancelling_what_has_ended_or_never_was_does_nothing(engine):
    engine.generate([GOOD])
    engine.cancel(0)
    engine.cancel(99)
    assert engine.step() == []
    assert_empty(engine)


def test_angles_that_change_with_the_batch_are_refused():
    model = tiny("adaponder", "llama", iterations=3).eval()
    model.config.backbone_config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(BackboneError, match="rope_type='dynamic'"):
        Engine(model)


def test_models_that_an_engine_cannot_decode_are_refused_by_name():
    for reuse in ("kv", "none"):
        with pytest.raises(InputError, match=f"reuse='{reuse}'"):
            Engine(tiny("adaponder", reuse=reuse).eval())
    with pytest.raises(InputError, match="training mode"):
        Engine(tiny("adaponder").train())
    config = BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=VOCABULARY)
    base = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(BackboneError, match="bloom"):
        Engine(AdaPonderForCausalLM.from_backbone(base, method="ponder", iterations=2).eval())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tokens", 1),
        ("tokens", 65),
        ("body", "fast"),
        ("lanes", 0),
        ("rows", -1),
        ("chunk", 0.5),
        ("burst", 0),
        ("prefix_block", 0),
        ("max_iterations", 4),
        ("max_iterations", 2.0),
        ("max_iterations", True),
        ("tokens", 10.0),
        ("tokens", "10"),
        ("lanes", True),
        ("expectation_top_k", 2.0),
        ("expectation_top_k", VOCABULARY + 1),
    ],
)
def test_options_that_cannot_be_are_refused(model, option, value):
    with pytest.raises(InputError, match=f"{option}="):
        Engine(model, **{option: value})


def test_an_engine_with_hardly_any_rows_says_that_it_has_none_to_spare(model):
    with pytest.raises(InputError, match="max_new_tokens="):
        Engine(model, rows=1).submit(GOOD)


def test_a_chunk_holds_at_least_one_token():
    model = tiny("pause", iterations=3).eval()
    request = Request([1, 2, 3], max_new_tokens=2, temperature=0.0)
    (found,) = Engine(model, chunk=1, tokens=10).generate([request])
    assert found[0].ids == solo(model, request, tokens=10)[0].ids


@pytest.mark.parametrize("method", ["adaponder", "pause"])
def test_an_engine_of_fewer_iterations_reads_as_often_as_a_request_of_fewer(method):
    model = tiny(method, iterations=3).eval()
    (done,) = Engine(model, max_iterations=2, tokens=20).generate([GOOD])[0]
    assert max(done.depths) <= 2
    ids = torch.tensor([[*GOOD.prompt, *done.ids[:-1]]])
    logits = model(ids, max_iterations=2).logits
    assert done.ids == logits[0, len(GOOD.prompt) - 1 :].argmax(-1).tolist()
