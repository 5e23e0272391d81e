"""Tests sampling: a token depends on its row's logits, settings, seed and position only, and draws are fair."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from adaponder.inference.request import Request
from adaponder.inference.sampler import Features, Sampled, SamplerState, likeliest, prompt_log_probabilities, score
from cuda_graphs import captured

VOCABULARY = 23
EVERYTHING = Features(True, True, True, True, False, 5)
REQUESTS = {
    "greedy": {"temperature": 0},
    "plain": {},
    "cool": {"temperature": 0.3, "seed": 5},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.6},
    "min-p": {"min_p": 0.2, "temperature": 1.5},
    "all three": {"top_k": 9, "top_p": 0.8, "min_p": 0.1},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    "greedy penalties": {"temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": 1.0},
    "bias": {"logit_bias": {3: 2.0, 7: -100.0}},
    "least": {"min_new_tokens": 4, "stop_ids": [1, 2, 3]},
}


def noise(rows: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(rows, VOCABULARY, generator=generator, dtype=torch.float64)).to(dtype)


def request(**fields: Any) -> Request:
    return Request(**{"prompt": [1, 2, 3]} | fields)


def opened(lanes: int, *requests: Request) -> SamplerState:
    """Returns a sampler whose lanes have these requests in turn."""
    state = SamplerState(lanes, VOCABULARY, eos_ids=(0,))
    for lane in range(lanes if requests else 0):
        state.set(lane, requests[lane % len(requests)], 0, [1])
    return state


def alone(logits: Tensor, request: Request, position: int, *, sample: int = 0, output: Sequence[int] = ()) -> Sampled:
    """Returns the choice for one row in a sampler of its own."""
    state = SamplerState(1, logits.shape[-1], eos_ids=(0,))
    state.set(0, request, sample, request.prompt, output)
    return state.choose(logits[None], torch.tensor([0]), torch.tensor([position]), Features.of(request))


@settings(max_examples=25)
@given(
    rows=st.lists(st.tuples(st.sampled_from(sorted(REQUESTS)), st.integers(0, 40)), min_size=1, max_size=8),
    shuffle=st.randoms(use_true_random=False),
    padding=st.integers(0, 5),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_a_token_does_not_depend_on_batch_lane_or_padding(rows, shuffle, padding, dtype):
    logits = noise(len(rows) + padding, dtype=dtype)
    lanes = list(range(len(rows) + 3))
    shuffle.shuffle(lanes)
    state = SamplerState(len(lanes), VOCABULARY, eos_ids=(0,))
    output = (5, 5, 9)
    for lane, (name, _) in zip(lanes, rows, strict=False):
        state.set(lane, request(**REQUESTS[name]), lane % 3, [1, 2, 3], output)
    needed = Features.union(Features.of(request(**REQUESTS[name])) for name, _ in rows)
    where = torch.tensor(lanes[: len(rows)] + [lanes[-1]] * padding)
    position = torch.tensor([place for _, place in rows] + [0] * padding)
    for features in (needed, EVERYTHING):
        together = state.choose(logits, where, position, features)
        for row, (lane, (name, place)) in enumerate(zip(lanes, rows, strict=False)):
            settings = {"sample": lane % 3, "output": output}
            solo = alone(logits[row], request(**REQUESTS[name]), place, **settings)
            assert int(together.token[row]) == int(solo.token)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_greedy_rows_take_the_first_of_the_likeliest_tokens(dtype):
    logits = noise(9, dtype=dtype).round()  # full of ties
    first = (logits == logits.amax(-1, keepdim=True)).long().argmax(-1)
    greedy = [request(temperature=0), request(top_k=1, seed=3)]
    assert Features.union(map(Features.of, greedy)) == Features()
    state = opened(9, *greedy)
    state.set(8, request(**REQUESTS["penalties"], logit_bias={1: 1.0}), 0, [1])
    for features in (Features(), EVERYTHING):
        chosen = state.choose(logits[:8], torch.arange(8), torch.arange(8), features)
        assert chosen.token.tolist() == first[:8].tolist()
        assert not chosen.bad.any()


def test_penalties_equal_hugging_face_s():
    prompt, output = [1, 2, 2, 3], [4, 2, 4]
    logits = noise(1, seed=8)[0]
    state = SamplerState(2, VOCABULARY)
    fields = {"repetition_penalty": 1.7, "presence_penalty": 0.4, "frequency_penalty": -0.3}
    state.set(1, request(**fields), 0, prompt, output[:1])
    for token in output[1:]:
        lanes = torch.tensor([1, 0, 1])
        state.record(torch.tensor([token, 9, 9]), lanes, torch.tensor([True, True, False]))
    assert state._occurrences is not None
    numbers = state._penalties[torch.tensor([1])].split(1, dim=1)
    penalised = state._occurrences.penalise(logits[None], torch.tensor([1]), *numbers)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits[None].clone())
    for token, count in ((4, 2), (2, 1)):
        expected[0, token] -= 0.4 - 0.3 * count
    torch.testing.assert_close(penalised, expected)


def test_logit_bias_applies_to_one_request():
    state, zero = opened(1), torch.tensor([0])
    for bias, expected in (({7: 0.5, 0: -1.0}, 7), ({0: -0.5}, 1), ({}, 0)):
        state.set(0, request(temperature=0, logit_bias=bias), 0, [1])
        assert int(state.choose(torch.zeros(1, VOCABULARY), zero, zero, Features(biased=True)).token) == expected


def test_stop_ids_are_banned_until_min_new_tokens():
    logits = torch.zeros(VOCABULARY, dtype=torch.float64)
    logits[0], logits[4], logits[9] = 2.0, 3.0, 1.0
    banned = request(temperature=0, min_new_tokens=2, stop_ids=[4])
    assert [int(alone(logits, banned, position).token) for position in (2, 3, 4)] == [9, 9, 4]
    assert int(alone(logits, replace(banned, ignore_eos=True), 2).token) == 0
    banned = request(temperature=0, min_new_tokens=3, stop_ids=list(range(VOCABULARY)))
    assert [alone(logits, banned, position).bad.tolist() for position in (2, 5)] == [[True], [False]]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-300, 1e-5, 100.0])
def test_rows_without_a_valid_token_are_marked(temperature):
    logits, sampled = noise(5), request(temperature=temperature, top_p=0.9)
    logits[1, 3], logits[2], logits[3, 0] = math.nan, -math.inf, math.inf
    logits[4, 0] = -math.inf  # a token without probability is valid
    chosen = opened(5, sampled).choose(logits, torch.arange(5), torch.arange(5), Features.of(sampled))
    assert chosen.bad.tolist() == [False, True, True, True, False]
    assert ((chosen.token >= 0) & (chosen.token < VOCABULARY)).all()
    if temperature <= 1e-5:
        assert chosen.token[[0, 4]].tolist() == logits[[0, 4]].argmax(-1).tolist()


def test_ties_are_ordered_by_token_id():
    logits = noise(40, seed=2).round().clamp(-1, 1)
    logits[0] *= -0.0
    expected = logits.sort(dim=-1, descending=True, stable=True).indices[:, :7]
    for dtype in (torch.float64, torch.float32):
        assert torch.equal(likeliest(logits.to(dtype), 7), expected)
    assert likeliest(logits, 99).shape == (40, VOCABULARY)


def test_prompts_are_scored_in_chunks():
    logits, targets = noise(150, dtype=torch.float32), torch.arange(150) % VOCABULARY
    scored = prompt_log_probabilities(logits, targets, 4)
    for part, whole in zip(scored, score(logits, targets, 4), strict=True):
        torch.testing.assert_close(part, whole)
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(scored.log_probability, -expected)


def test_features():
    greedy = Features.of(request(temperature=0, top_p=0.5, stop_ids=[3]))
    drawn = Features.of(request(log_probabilities=0))
    asked = Features.of(request(top_p=0.5, log_probabilities=6, min_new_tokens=1, presence_penalty=1.0))
    assert Features.union([]) == greedy == Features()
    assert Features.union([greedy, drawn]) == drawn == Features(sampled=True, log_probabilities=0)
    assert Features.union([greedy, asked, drawn]) == asked == Features(True, True, True, True, False, 20)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cuda_graph_equals_the_cpu(dtype):
    names, vocabulary, rows = sorted(REQUESTS), 5000, 40
    states = {device: SamplerState(rows, vocabulary, device, eos_ids=(0,)) for device in ("cpu", "cuda")}

    def settle(shift: int):
        for state in states.values():
            for lane in range(rows):
                fields = REQUESTS[names[(lane + shift) % len(names)]] | {"log_probabilities": 5}
                state.set(lane, request(**fields), lane % 3, [1, 2, 3], [5, 5, 9])

    settle(0)
    lanes, position = torch.arange(rows, device="cuda"), torch.zeros(rows, dtype=torch.long, device="cuda")
    logits = torch.zeros(rows, vocabulary, dtype=dtype, device="cuda")

    def choose():
        sampled = states["cuda"].choose(logits, lanes, position, EVERYTHING)
        states["cuda"].record(sampled.token, lanes, position >= 0)
        return sampled

    replay, found = captured(choose)
    for turn in range(6):
        settle(turn)
        generator = torch.Generator().manual_seed(turn)
        values = (2 * torch.randn(rows, vocabulary, generator=generator)).to(dtype)
        where = torch.randint(0, 50, (rows,), generator=generator)
        logits.copy_(values)
        position.copy_(where)
        replay()
        expected = states["cpu"].choose(values, lanes.cpu(), where, EVERYTHING)
        states["cpu"].record(expected.token, lanes.cpu(), where >= 0)
        assert found.token.tolist() == expected.token.tolist()
        assert found.bad.tolist() == expected.bad.tolist()
        assert found.scores.top_ids.tolist() == expected.scores.top_ids.tolist()
        torch.testing.assert_close(found.scores.log_probability.cpu(), expected.scores.log_probability)


def draws(logits: Tensor, count: int, **fields: Any) -> Tensor:
    """Draws tokens at ``count`` positions from the same logits."""
    state = SamplerState(1, logits.shape[-1])
    asked = request(**fields)
    state.set(0, asked, 0, [1])
    lanes, position = torch.zeros(count, dtype=torch.long), torch.arange(count)
    return state.choose(logits.expand(count, -1), lanes, position, Features.of(asked)).token


def chi_square(tokens: Tensor, probability: Tensor) -> float:
    """Returns Pearson's statistic in standard deviations from its mean."""
    observed = torch.bincount(tokens, minlength=len(probability)).double()
    assert observed[probability == 0].sum() == 0
    possible = probability > 0
    expected = len(tokens) * probability[possible]
    freedom = int(possible.sum()) - 1
    statistic = float(((observed[possible] - expected) ** 2 / expected).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_draws_follow_the_distribution_of_the_logits():
    logits = noise(1)[0]
    assert draws(logits, 50, seed=9).tolist() == draws(logits, 50, seed=9 + (1 << 64)).tolist()
    for fields in ({}, {"temperature": 2.5}, {"seed": 1 << 70}, {"seed": -1}):
        tokens = draws(logits, 40_000, **fields)
        expected = (logits / fields.get("temperature", 1.0)).softmax(-1)
        assert abs(chi_square(tokens, expected)) < 4
