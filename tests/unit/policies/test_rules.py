"""Built-in rules on a model: depths, exits, measures and prescribed shares; test_rows.py computes each by hand."""

import dataclasses
import math

import pytest
import torch

import support
from adaponder import Entropy, ExitThreshold, FixedDepth, Geometric, LearnedGate, Policy, Ranked, Uniform
from adaponder.errors import AdaPonderError
from adaponder.policies import Change, Divergence, Shares, thresholds_for
from policy_support import EXECUTIONS, K, asked, padded

SCHEDULES = [
    *(Uniform(keep=0.5), Uniform(keep=0.29), Uniform(keep=1.0), Uniform(keep=0.0), Geometric(rate=0.7)),
    *(Geometric(rate=1.0), Geometric(rate=0.0), Shares(shares=(0.9, 0.5, 0.1))),
]


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(("method", "depth"), [("adaponder", 2), ("mor", 1), ("act", 2), ("ouro", K)])
def test_the_fixed_depth_equals_so_many_iterations(models, method, depth, execution):
    ids, mask = padded()
    by_policy = models[method](ids, attention_mask=mask, policy=FixedDepth(depth), execution=execution)
    so_many = models[method](ids, attention_mask=mask, policy=FixedDepth(K), max_iterations=depth, execution=execution)
    assert torch.equal(by_policy.depth, mask * depth)
    assert torch.equal(so_many.depth, by_policy.depth)
    real = mask.bool()
    assert float((by_policy.logits - so_many.logits)[real].abs().max()) <= 1e-12


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("q", [0.3, 0.6, 0.9, 1.0])
def test_the_exit_threshold_exits_once_the_exits_add_up_to_it(models, q, execution):
    ids, mask = padded()
    output = models["ouro"](ids, attention_mask=mask, policy=ExitThreshold(q), execution=execution)
    exited = 1.0 - (1.0 - output.gates[..., : K - 1]).cumprod(-1)
    assert torch.equal(output.depth, mask * (1 + (exited < q).long().cumprod(-1).sum(-1)))


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_at_an_exit_threshold_of_1_nobody_exits_early(execution):
    model = support.tiny("ouro", iterations=K, exit_threshold=1.0)
    torch.nn.init.constant_(model.method.exit.bias, 20.0)  # sure to exit, but for one part in a hundred million
    assert model(support.ids(), execution=execution).depth.unique().tolist() == [K]


@pytest.mark.parametrize("rule", [Entropy, Divergence, Change], ids=["entropy", "divergence", "change"])
def test_the_signals_of_half_precision_states_are_computed_in_float32(rule):
    """Thresholds are compared with what float32 sees: bf16 would round entropies to a sixty-fourth of a nat."""
    generator = torch.Generator().manual_seed(0)
    hidden, previous = torch.randn(2, 20, 16, generator=generator).bfloat16()
    head = torch.nn.Linear(16, 61).bfloat16()
    rows = dataclasses.replace(asked(torch.ones(20), iteration=1), hidden=hidden, previous=previous, head=head)
    exact = dataclasses.replace(
        rows, hidden=hidden.double(), previous=previous.double(), head=lambda states: head(states.bfloat16()).double()
    )
    measured = rule.measure(rows)
    assert measured.dtype == torch.float32
    torch.testing.assert_close(measured.double(), rule.measure(exact), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", [Entropy(2.5), Divergence(0.05), LearnedGate(0.5)], ids=["entropy", "kl", "gate"])
def test_the_logits_computed_to_decide_are_as_many_as_the_rule_says(model, policy, monkeypatch):
    rows = []
    logits = type(model.wrapped).logits
    monkeypatch.setattr(type(model.wrapped), "logits", lambda self, hidden: rows.append(hidden) or logits(self, hidden))
    output = model(support.ids(2, 9), policy=policy, execution="compact", output_gates=False)
    spent = sum(hidden[..., 0].numel() for hidden in rows) - 18
    active = [int((output.depth > i).sum()) for i in range(K - 1)]
    assert spent == sum(policy.heads(i) * count for i, count in enumerate(active))


def share_by_hand(schedule: Policy, iteration: int) -> float:
    if isinstance(schedule, Uniform):
        return schedule.keep
    if isinstance(schedule, Geometric):
        return schedule.rate ** (iteration + 1)
    assert isinstance(schedule, Shares)
    return schedule.shares[iteration]


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_ranked_schedule_keeps_exactly_its_share_of_each_sequence_padding_excluded(model, schedule, execution):
    ids, mask = padded(4, 17)
    output = model(ids, attention_mask=mask, policy=Ranked(schedule), execution=execution)
    shares = [share_by_hand(schedule, i) for i in range(K - 1)]
    expected = [[math.floor(share * length + 1e-9) for share in shares] for length in mask.sum(1).tolist()]
    assert [[int((row > i + 1).sum()) for i in range(K - 1)] for row in output.depth] == expected
    assert torch.equal(output.depth == 0, mask == 0)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_calibrated_thresholds_keep_the_prescribed_shares_of_their_own_data(model, schedule):
    # One token per sequence: nobody's gate depends on who else halted, so the shares must come out exactly.
    ids = torch.randperm(support.VOCABULARY, generator=torch.Generator().manual_seed(0))[:50, None]
    thresholds = thresholds_for(schedule, model(ids, policy=FixedDepth(K)).gates[:, 0])
    assert len(thresholds) == K - 1
    depth = model(ids, policy=dataclasses.replace(schedule, thresholds=thresholds)).depth
    expected = [math.floor(share_by_hand(schedule, i) * 50 + 1e-9) for i in range(K - 1)]
    assert [int((depth > i + 1).sum()) for i in range(K - 1)] == expected


@pytest.mark.parametrize("schedule", [Uniform(keep=0.5), Geometric(rate=0.5), Shares(shares=(0.5,) * 3)], ids=str)
def test_the_uncalibrated_schedule_is_refused_with_the_cure(model, schedule):
    with pytest.raises(AdaPonderError, match="thresholds") as refusal:
        model(support.ids(), policy=schedule)
    for cure in ("thresholds_for", "Ranked"):
        assert cure in str(refusal.value)
