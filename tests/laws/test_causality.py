"""Law 1: the future never changes the past, for every method and every policy that may generate."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaponder import Entropy, FixedDepth, LearnedGate, Random, Ranked, Uniform
from adaponder.policies import Change, Divergence, RandomRates
from laws import assert_causal
from support import HALTING, METHODS, ids, tiny

models = {method: tiny(method, "gpt_neox", iterations=3) for method in METHODS}
CAUSAL = [
    *(LearnedGate(0.5), LearnedGate((0.3, 0.7)), FixedDepth(2), Random(0.5), RandomRates(), Entropy(2.0)),
    *(Divergence(0.3), Change(0.5), Uniform((0.4, 0.6), keep=0.5)),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("execution", ["dense", "compact"])
@settings(max_examples=6)
@given(seed=st.integers(0, 10_000), time=st.integers(2, 16), data=st.data())
def test_the_future_never_changes_the_past(method, execution, seed, time, data):
    where = data.draw(st.integers(1, time - 1))
    assert_causal(models[method], ids(2, time, seed=seed), where, execution=execution)


@pytest.mark.parametrize("method", HALTING)
@pytest.mark.parametrize("policy", CAUSAL, ids=lambda policy: type(policy).__name__)
def test_policies_that_may_generate_are_causal(method, policy):
    assert policy.causal
    for where in (1, 7):
        assert_causal(models[method], ids(2, 12, seed=where), where, policy=policy)


def test_ranking_is_flagged_because_it_does_look_at_the_future():
    policy = Ranked(Uniform(keep=0.5))
    assert not policy.causal
    with pytest.raises(AssertionError, match="before the change"):
        any(assert_causal(models["adaponder"], ids(1, 12, seed=where), where, policy=policy) for where in range(1, 12))
