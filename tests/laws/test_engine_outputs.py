"""What an engine says beside its tokens: log-probabilities, gates and early predictions are the model's own."""

import math

import pytest
import torch
from engine_support import SETTINGS, assert_near, in_one_forward, plain_greedy

from adaponder import FixedDepth, Random
from adaponder.inference import Engine, Request
from adaponder.policies import RandomRates, SampledExit
from support import VOCABULARY, tiny

PROMPT = [5, 17, 2, 44, 9, 31, 8, 60, 0, 12]


def completed(model, request, **options):
    """The completion of a request beside others that ask for less and for more."""
    engine = Engine(model, lanes=4, chunk=12, tokens=40, **options)
    beside = [
        Request(PROMPT[:2], max_new_tokens=3, temperature=0.0),
        Request(PROMPT[7:], max_new_tokens=2, log_probabilities=20, gates=True),
    ]
    return engine.generate([beside[0], request, beside[1]])[1]


def alone(model, request):
    return Engine(model, lanes=1, tokens=40).generate([request])[0]


def likeliest(logits, count):
    values, ids = torch.log_softmax(logits, -1).sort(descending=True, stable=True)
    return list(zip(ids[:count].tolist(), values[:count].tolist(), strict=True))


@pytest.mark.parametrize(("method", "count"), [("adaponder", 3), ("mor", 0), ("pause", 3), ("vanilla", 1)])
def test_log_probabilities_are_those_of_a_dense_forward(method, count):
    model = tiny(method, iterations=1 if method == "vanilla" else 3, **SETTINGS.get(method, {})).eval()
    request = Request(
        PROMPT,
        max_new_tokens=4,
        temperature=1.3,
        top_k=5,
        repetition_penalty=1.4,
        logit_bias={4: 2.0},
        log_probabilities=count,
        prompt_log_probabilities=count,
        samples=2,
    )
    for done in completed(model, request):
        logits = in_one_forward(model, request, done.ids).logits[0]
        said = logits[len(PROMPT) - 1 :]
        for token, row in zip(done.tokens, said, strict=True):
            assert_near(token.log_probability, float(torch.log_softmax(row, -1)[token.id]))
            assert_near(list(token.top), likeliest(row, count))
        assert done.prompt_log_probabilities is not None
        first, *others = done.prompt_log_probabilities
        assert (first.id, first.log_probability, first.top) == (PROMPT[0], None, ())
        assert [one.id for one in others] == PROMPT[1:]
        for one, row in zip(others, logits, strict=False):
            assert_near(one.log_probability, float(torch.log_softmax(row, -1)[one.id]))
            assert_near(list(one.top), likeliest(row, count))


def test_a_prompt_of_one_token_has_one_entry_without_a_number():
    model = tiny().eval()
    for done in completed(model, Request([7], max_new_tokens=2, prompt_log_probabilities=1, samples=2)):
        assert [(one.id, one.log_probability) for one in done.prompt_log_probabilities] == [(7, None)]


def test_what_was_not_asked_for_is_not_there():
    model = tiny().eval()
    (done,) = completed(model, Request(PROMPT, max_new_tokens=3, temperature=0.0))
    assert done.prompt_log_probabilities is None
    assert {(token.log_probability, token.top, token.gates, token.iteration_top) for token in done.tokens} == {
        (None, (), (), ())
    }


@pytest.mark.parametrize(
    ("method", "asked"),
    [
        ("adaponder", {}),
        ("adaponder", {"policy": Random(0.5)}),
        ("adaponder", {"max_iterations": 2}),
        ("mor", {"policy": FixedDepth(3)}),
        ("ouro", {}),
        ("ouro", {"policy": FixedDepth(3)}),
        ("act", {}),
        ("act", {"policy": FixedDepth(3)}),
        ("pondernet", {"policy": SampledExit()}),
        ("anytime", {}),
        ("anytime", {"policy": RandomRates()}),
        ("relay", {}),
        ("reread", {}),
    ],
)
def test_gates_and_early_predictions_are_those_of_the_models_forward(method, asked):
    """Of the iterations that the token took part in."""
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
    """What a policy sees of each gate: exit gates say how likely a token exits, and a policy sees that it has not."""
    if method not in ("ouro", "act", "pondernet"):
        return gates
    so_far = [gates[: place + 1] for place in range(len(gates))]
    if method == "act":  # its probabilities add up
        return [max(0.0, 1 - sum(exits)) for exits in so_far]
    return [math.prod(1 - one for one in exits) for exits in so_far]


def test_tokens_that_stop_are_the_last_and_none_comes_before_the_least_number():
    model = tiny().eval()
    (plain,) = alone(model, Request(PROMPT, max_new_tokens=5, temperature=0.0))
    stop = plain.ids[2]
    first = plain.ids.index(stop)
    (done,) = alone(model, Request(PROMPT, max_new_tokens=5, temperature=0.0, stop_ids=[stop]))
    assert (done.ids, done.finish_reason, done.stop_id) == (plain.ids[: first + 1], "stop", stop)
    request = Request(PROMPT, max_new_tokens=5, min_new_tokens=5, temperature=0.0, stop_ids=[stop])
    (later,) = alone(model, request)
    assert stop not in later.ids[:4]
    assert later.ids[:first] == plain.ids[:first]


def test_an_end_of_text_stops_unless_it_is_ignored():
    model = tiny().eval()
    (plain,) = alone(model, Request(PROMPT, max_new_tokens=5, temperature=0.0))
    model.generation_config.eos_token_id = [plain.ids[2]]
    first = plain.ids.index(plain.ids[2])
    (done,) = alone(model, Request(PROMPT, max_new_tokens=5, temperature=0.0))
    assert (done.ids, done.finish_reason, done.stop_id) == (plain.ids[: first + 1], "stop", plain.ids[2])
    (whole,) = alone(model, Request(PROMPT, max_new_tokens=5, temperature=0.0, ignore_eos=True))
    assert (whole.ids, whole.finish_reason, whole.stop_id) == (plain.ids, "length", None)


def test_biases_and_bans_change_what_is_said_and_not_its_log_probability():
    model = tiny().eval()
    bias = dict.fromkeys((3, 4), 100.0)
    (done,) = alone(model, Request(PROMPT, max_new_tokens=4, temperature=0.0, logit_bias=bias, log_probabilities=0))
    assert set(done.ids) <= {3, 4}
    logits = in_one_forward(model, done.request, done.ids).logits[0, len(PROMPT) - 1 :]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(done.ids)[:, None])[:, 0]
    assert_near([token.log_probability for token in done.tokens], expected.tolist())
    assert logits.shape[1] == VOCABULARY
