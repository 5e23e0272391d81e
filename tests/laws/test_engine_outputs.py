"""Tests that log-probabilities, gates and early predictions of an engine are those of the model's forward."""

import math
from dataclasses import replace

import pytest
import torch
from engine_support import SETTINGS, assert_near, in_one_forward, plain_greedy

from adaponder import FixedDepth, Random
from adaponder.inference import Engine, Request
from adaponder.policies import RandomRates, SampledExit
from support import tiny

PROMPT = [5, 17, 2, 44, 9, 31, 8, 60, 0, 12]


def completed(model, request, **options):
    """Returns the completions of a request beside others with fewer and with more outputs."""
    engine = Engine(model, lanes=4, chunk=12, tokens=40, **options)
    fewer = Request(PROMPT[:2], max_new_tokens=3, temperature=0.0)
    more = Request(PROMPT[7:], max_new_tokens=2, log_probabilities=20, gates=True)
    return engine.generate([fewer, request, more])[1]


def alone(model, request):
    return Engine(model, lanes=1, tokens=40).generate([request])[0]


def likeliest(logits, count):
    values, ids = torch.log_softmax(logits, -1).sort(descending=True, stable=True)
    return list(zip(ids[:count].tolist(), values[:count].tolist(), strict=True))


@pytest.mark.parametrize(("method", "count"), [("adaponder", 3), ("mor", 0), ("pause", 3), ("vanilla", 1)])
def test_log_probabilities_are_those_of_a_dense_forward(method, count):
    model = tiny(method, iterations=1 if method == "vanilla" else 3, **SETTINGS.get(method, {})).eval()
    sampling = {"temperature": 1.3, "top_k": 5, "repetition_penalty": 1.4, "logit_bias": {4: 2.0}, "samples": 2}
    scores = {"log_probabilities": count, "prompt_log_probabilities": count}
    request = Request(PROMPT, max_new_tokens=4, **sampling, **scores)
    for done in completed(model, request):
        logits = in_one_forward(model, request, done.ids).logits[0]
        first, *others = done.prompt_log_probabilities
        assert (first.id, first.log_probability, first.top) == (PROMPT[0], None, ())
        assert [token.id for token in others] == PROMPT[1:]
        for token, row in zip([*others, *done.tokens], logits, strict=True):
            assert_near(token.log_probability, float(torch.log_softmax(row, -1)[token.id]))
            assert_near(list(token.top), likeliest(row, count))


def test_a_prompt_of_one_token_has_one_entry_and_outputs_that_are_not_requested_are_absent():
    model = tiny().eval()
    for done in completed(model, Request([7], max_new_tokens=2, prompt_log_probabilities=1, samples=2)):
        assert [(token.id, token.log_probability) for token in done.prompt_log_probabilities] == [(7, None)]
    (done,) = completed(model, Request(PROMPT, max_new_tokens=3, temperature=0.0))
    assert done.prompt_log_probabilities is None
    details = {(token.log_probability, token.top, token.gates, token.iteration_top) for token in done.tokens}
    assert details == {(None, (), (), ())}


@pytest.mark.parametrize(
    ("method", "asked"),
    [
        *((method, {}) for method in ("adaponder", "ouro", "act", "anytime", "relay", "reread")),
        *((method, {"policy": FixedDepth(3)}) for method in ("mor", "ouro", "act")),
        ("adaponder", {"policy": Random(0.5)}),
        ("adaponder", {"max_iterations": 2}),
        ("pondernet", {"policy": SampledExit()}),
        ("anytime", {"policy": RandomRates()}),
    ],
)
def test_gates_and_early_predictions_are_those_of_the_models_forward(method, asked):
    """Compares the iterations up to each token's depth."""
    model = tiny(method, iterations=3, **SETTINGS.get(method, {})).eval()
    request = Request(PROMPT, max_new_tokens=4, temperature=0.0, gates=True, iteration_top=2, seed=3, **asked)
    (done,) = completed(model, request)
    output = in_one_forward(model, request, done.ids, output_gates=True, output_iteration_logits=True)
    assert plain_greedy(request)
    start, decisions = len(PROMPT) - 1, (request.max_iterations or 3) - 1
    for place, token in enumerate(done.tokens):
        assert token.depth == int(output.depth[0, start + place])
        wanted = wants(method, output.gates[0, start + place].tolist())[: min(token.depth, decisions)]
        # Gates come back in float32.
        assert_near(list(token.gates), wanted, 1e-6)
        assert len(token.iteration_top) == token.depth
        for iteration, top in enumerate(token.iteration_top):
            assert_near(list(top), likeliest(output.iteration_logits[iteration, 0, start + place], 2))


def wants(method, gates):
    """Returns what a policy sees of each gate: for exit gates, the probability of not having exited."""
    if method not in ("ouro", "act", "pondernet"):
        return gates
    so_far = [gates[: place + 1] for place in range(len(gates))]
    if method == "act":  # its probabilities add up
        return [max(0.0, 1 - sum(exits)) for exits in so_far]
    return [math.prod(1 - one for one in exits) for exits in so_far]


def test_stop_and_end_of_text_ids_end_a_completion_after_the_least_number_of_tokens():
    model = tiny().eval()
    plain = Request(PROMPT, max_new_tokens=5, temperature=0.0)
    ids = alone(model, plain)[0].ids
    stop, first = ids[2], ids.index(ids[2])
    ended = (ids[: first + 1], "stop", stop)
    (done,) = alone(model, replace(plain, stop_ids=[stop]))
    assert (done.ids, done.finish_reason, done.stop_id) == ended
    (later,) = alone(model, replace(plain, stop_ids=[stop], min_new_tokens=5))
    assert stop not in later.ids[:4]
    assert later.ids[:first] == ids[:first]
    model.generation_config.eos_token_id = [stop]
    (done,) = alone(model, plain)
    assert (done.ids, done.finish_reason, done.stop_id) == ended
    (done,) = alone(model, replace(plain, ignore_eos=True))
    assert (done.ids, done.finish_reason, done.stop_id) == (ids, "length", None)
