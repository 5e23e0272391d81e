"""Law 2 for rows that stand at different iterations of one pass: a method's own lines equal dense execution."""

import pytest
import torch
from staggered import decode

from adaponder import Change, Divergence, FixedDepth, ForcedDepths, LearnedGate, Random
from adaponder.policies import RandomRates
from support import HALTING, ids, stir, tiny

SETTINGS = {
    "adaponder": {"tau": 0.5},
    "adaponder, one gate": {"tau": 0.99999, "shared_gate": True},
    "ponder": {},
    "loop": {},
    "mor": {},
    "ouro": {"exit_threshold": 0.6},
    "act": {"exit_threshold": 0.6},
    "pondernet": {"exit_threshold": 0.6},
    "anytime": {"tau": 0.5},
    "relay": {"tau": 0.5},
    "reread": {"tau": 0.5},
}
POLICIES = {
    "its own": None,
    "a depth for each token": ForcedDepths(torch.randint(1, 5, (4, 7), generator=torch.Generator().manual_seed(5))),
    "random": Random(0.6),
    "random rates": RandomRates(3.0),
    "a threshold for each gate": LearnedGate((0.55, 0.45, 0.5)),
    "equal depths": FixedDepth(2),
}
# Thresholds at which this rule, which compares two iterations, keeps some tokens and halts others.
DIVERGENCE = {"adaponder": 0.3, "mor": 0.001, "ouro": 2.0, "act": 0.3, "pondernet": 2.0, "anytime": 0.3}
DIVERGENCE |= {"relay": 2.0, "reread": 2.0}


def assert_rows_apart_equal_dense(method: str, policy: str, family: str = "gpt_neox", rule=None) -> None:
    model = tiny(method.split(",")[0], family, iterations=4, **SETTINGS[method]).eval()
    stir(model)
    tokens, rule = ids(4, 7), rule or POLICIES[policy]
    states = []
    options = {"policy": rule, "seed": 3} if rule is not None else {}
    dense = model(tokens, execution="dense", on_iteration=lambda iteration: states.append(iteration.hidden), **options)
    apart = decode(model, tokens, rule, seed=3)
    assert torch.equal(apart.depth, dense.depth)
    torch.testing.assert_close(apart.hidden, states[-1], rtol=1e-12, atol=1e-12)
    assert apart.apart > 1, "all rows stood at one iteration: the case shows nothing"


@pytest.mark.parametrize("method", SETTINGS)
def test_rows_at_different_iterations_run_the_same_lines(method):
    assert_rows_apart_equal_dense(method, "its own")


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "its own"])
@pytest.mark.parametrize("method", HALTING)
def test_every_kind_of_policy_decides_for_rows_at_different_iterations(method, policy):
    assert_rows_apart_equal_dense(method, policy)


@pytest.mark.parametrize("method", ["adaponder", "ouro"])
def test_a_rule_that_compares_hidden_states_sees_each_row_s_own(method):
    assert_rows_apart_equal_dense(method, "change", rule=Change(0.8))


@pytest.mark.parametrize("method", DIVERGENCE)
def test_a_rule_that_compares_two_iterations_sees_each_row_s_own(method):
    assert_rows_apart_equal_dense(method, "divergence", rule=Divergence(DIVERGENCE[method]))


def test_grouped_heads_and_rotary_positions_too():
    assert_rows_apart_equal_dense("adaponder", "a depth for each token", "llama")
