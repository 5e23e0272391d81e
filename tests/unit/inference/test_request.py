"""Tests the checks of a request: an invalid one is refused by the name of its field."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from own_policy import UntilLikely

from adaponder import AdaPonderForCausalLM, Engine
from adaponder.errors import InputError
from adaponder.inference.outputs import Completion, Token
from adaponder.inference.request import Request, check_request
from adaponder.policies import ExitThreshold, FixedDepth, ForcedDepths, LearnedGate, Ranked, Uniform
from support import POSITIONS, VOCABULARY, stock, tiny

PROMPT = [3, 1, 4, 1, 5]
K = 4


@pytest.fixture(scope="module")
def model() -> AdaPonderForCausalLM:
    return tiny("adaponder", iterations=K)


def check(model, request: Request, **other: Any):
    check_request(request, model, **{"positions": POSITIONS, "iterations": K, "eos_ids": (0,)} | other)


@pytest.mark.parametrize(
    "settings",
    [
        *({"prompt": prompt} for prompt in (tuple(PROMPT), np.array(PROMPT), torch.tensor(PROMPT), range(3))),
        {"max_new_tokens": POSITIONS - len(PROMPT) + 1},
        {"prompt": [1] * POSITIONS, "max_new_tokens": 1},
        {"temperature": 0},
        {"temperature": np.float32(0.7), "top_k": np.int64(5), "seed": 1 << 80},
        {"top_p": 1, "min_p": 1.0, "top_k": 10**9},
        {"repetition_penalty": 0.5, "presence_penalty": -2, "frequency_penalty": 2.0},
        {"logit_bias": {0: -100, VOCABULARY - 1: 100.0}},
        {"stop_ids": [7, np.int32(8)], "min_new_tokens": 128 - 100, "max_new_tokens": 28},
        {"log_probabilities": 0, "prompt_log_probabilities": 20, "iteration_top": 20, "gates": True},
        {"tau": math.inf},
        {"tau": 0.3, "max_iterations": 1},
        {"policy": FixedDepth(K), "depths": {0: 1, 9: K, 10: 0}, "max_new_tokens": 20},
        {"policy": ForcedDepths(torch.ones(1, 12, dtype=torch.long)), "max_new_tokens": 8},
        {"policy": lambda rows: rows.active, "depths": [1, 2, 0], "max_new_tokens": 20},
        {"policy": UntilLikely(0.5), "samples": 128, "seed": -5},
    ],
)
def test_valid_requests_pass(model, settings):
    check(model, Request(**{"prompt": PROMPT, "max_new_tokens": 40} | settings))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("prompt", ([], "text", b"text", 5, {1: 2}, [1.0], [True], [-1], [VOCABULARY], [[1]], ["1"], [1 << 300], None)),
        ("prompt", (iter([1, 2]), torch.tensor(5), np.array(5), [1] * (POSITIONS + 1))),
        ("max_new_tokens", (0, 1.5, None, "4", POSITIONS - len(PROMPT) + 2)),
        ("min_new_tokens", (-1, 41)),
        ("temperature", (-0.1, math.inf, math.nan, 1j, "hot", None)),
        *(("top_k", (-1, 2.5)), ("top_p", (0, 1.1, math.nan)), ("min_p", (-0.1, 2))),
        *(("repetition_penalty", (0, 5e-324, math.nan)), ("presence_penalty", (9,)), ("frequency_penalty", (-9,))),
        ("logit_bias", ({VOCABULARY: 1.0}, {-1: 1.0}, {1.5: 1.0}, {1: math.nan}, {1: -math.inf}, {1: 101}, [1], None)),
        ("logit_bias", (dict.fromkeys(range(1025), 1.0),)),
        ("seed", (1.5, True, "1", None)),
        ("samples", (0, 10**9)),
        ("stop_ids", ([VOCABULARY], [-1], [0.5], "ab", None, [1] * 257, iter([1]))),
        ("ignore_eos", (1, None)),
        ("log_probabilities", (-1, 21)),
        ("prompt_log_probabilities", (1.5,)),
        ("gates", ("yes",)),
        ("iteration_top", (-1,)),
        ("tau", (-0.1, 1.1, -math.inf, math.nan, True, "0.5", (0.1, 0.2, 0.3))),
        ("policy", ("no such policy", 3, FixedDepth(K + 1), ExitThreshold(0.5), LearnedGate((0.1, 0.2)))),
        ("policy", (Ranked(Uniform(keep=0.5)),)),
        ("max_iterations", (0, K + 1, 2.0, True)),
        ("depths", ([1] * 99, [K + 1], [-1], [1.5], {99: 1}, {-1: 1}, {0: True}, 3, "12")),
        ("salt", (None, 5, b"x")),
        ("client", (None, 5)),
    ],
)
def test_invalid_values_are_refused_by_the_name_of_their_field(model, field, values):
    for value in values:
        with pytest.raises(InputError, match=field):
            check(model, Request(**{"prompt": PROMPT, "max_new_tokens": 40} | {field: value}))


def test_what_is_no_request_or_no_model_is_refused(model):
    with pytest.raises(InputError, match=r"request=\[1, 2\] must be a Request"):
        next(Engine(model, lanes=1).stream([1, 2]))  # pyright: ignore[reportArgumentType]
    for wrong in ("sample", stock()):
        with pytest.raises(InputError, match=f"model is a {type(wrong).__name__}.*from_pretrained"):
            Engine(wrong)  # pyright: ignore[reportArgumentType]


def test_policies_without_thresholds_or_depths_for_every_slot_are_refused(model):
    for policy, missing in ((Uniform(keep=0.5), "thresholds"), (ForcedDepths(torch.ones(1, 9).long()), "depths")):
        with pytest.raises(InputError, match=missing):
            check(model, Request(PROMPT, max_new_tokens=8, policy=policy))


def test_whole_numbers_become_python_integers():
    """Integers of numpy wrap around, which would fail in the middle of a step and end every request."""
    settings = {"max_new_tokens": np.uint8(200), "top_k": torch.tensor(5), "seed": np.uint64((1 << 64) - 1)}
    request = Request(PROMPT, **settings, samples=np.int64(2), max_iterations=None)
    assert (request.max_new_tokens * 9, request.top_k, request.seed + 1) == (1800, 5, 1 << 64)
    assert {type(getattr(request, name)) for name in (*settings, "samples")} == {int}
    assert request.max_iterations is None


def test_min_new_tokens_needs_a_token_that_does_not_stop(model):
    others = list(range(1, VOCABULARY))
    with pytest.raises(InputError, match=r"^min_new_tokens"):
        check(model, Request(PROMPT, max_new_tokens=9, min_new_tokens=1, stop_ids=others))
    check(model, Request(PROMPT, max_new_tokens=9, min_new_tokens=1, stop_ids=others, ignore_eos=True))


def test_tau_is_the_learned_gates_alone_and_a_method_that_never_halts_takes_no_depths_and_no_policy(model):
    with pytest.raises(InputError, match=r"^tau"):
        check(model, Request(PROMPT, max_new_tokens=8, tau=0.5, policy=FixedDepth(1)))
    for method in ("ouro", "ponder"):
        with pytest.raises(InputError, match=r"^tau"):
            check(tiny(method, iterations=K), Request(PROMPT, max_new_tokens=8, tau=0.5))
    for field, value in (("depths", [1]), ("policy", FixedDepth(1))):
        with pytest.raises(InputError, match=field):
            check(tiny("ponder", iterations=K), Request(PROMPT, max_new_tokens=8, **{field: value}))


def test_depths_of_a_completion():
    tokens = [Token(9, 2, -0.5, ((9, -0.5),)), Token(8, 3), Token(7, 1)]
    completion = Completion(Request([1, 2, 3]), 0, [1, 2, 3], tokens, prompt_depths=[4, 1, 2], finish_reason="length")
    assert completion.ids == [9, 8, 7]
    assert completion.depths == [4, 1, 2, 3, 1]  # the last token is returned without being read
    assert completion.mean_depth == pytest.approx(11 / 5)
    assert Completion(Request([1]), 0, [1]).mean_depth == 0.0
