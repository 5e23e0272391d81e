"""Prescribed shares of tokens: ranked within the sequence, or by calibrated thresholds."""

import math

import pytest
import torch

import support
from adaponder import AdaPonderError, AdaPonderOutput, Geometric, Policy, Ranked, Uniform
from adaponder.policies import Shares, thresholds_for
from policy_support import DECIDED, EXECUTIONS, K, gates_at_full_depth, padded


def survivors(output: AdaPonderOutput) -> list[list[int]]:
    """For each sequence, how many tokens read on after iterations 0, 1, …"""
    return [[int((row > i + 1).sum()) for i in range(K - 1)] for row in output.depth]


SCHEDULES = [
    Uniform(keep=0.5),
    Uniform(keep=0.29),
    Uniform(keep=1.0),
    Uniform(keep=0.0),
    Geometric(rate=0.7),
    Geometric(rate=1.0),
    Geometric(rate=0.0),
    Shares(shares=(0.9, 0.5, 0.1)),
]


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
    expected = [
        [math.floor(share_by_hand(schedule, i) * length + 1e-9) for i in range(K - 1)]
        for length in mask.sum(1).tolist()
    ]
    assert survivors(output) == expected
    assert torch.equal(output.depth == 0, mask == 0)


@pytest.mark.parametrize("method", ["mor", "ouro"])
def test_the_ranked_schedule_serves_every_method_that_halts(models, method):
    ids, mask = padded(4, 17)
    output = models[method](ids, attention_mask=mask, policy=Ranked(Geometric(rate=0.7)))
    expected = [[int(0.7 ** (i + 1) * length) for i in range(K - 1)] for length in mask.sum(1).tolist()]
    assert survivors(output) == expected


def test_the_ranked_schedule_prunes_the_lowest_gates_among_those_still_active(model):
    ids, mask = padded(4, 17)
    output = model(ids, attention_mask=mask, policy=Ranked(Geometric(rate=0.7)))
    for i in range(K - 1):
        for row in range(len(ids)):
            gate = output.gates[row, :, i]
            stayed, left = gate[output.depth[row] > i + 1], gate[output.depth[row] == i + 1]
            assert float(stayed.min()) >= float(left.max())


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("method", DECIDED)
def test_the_calibrated_thresholds_keep_the_prescribed_shares_of_their_own_data(models, method, schedule):
    # One token per sequence: nobody's gate depends on who else halted, so the shares must come out exactly.
    ids = torch.randperm(support.VOCABULARY, generator=torch.Generator().manual_seed(0))[:50, None]
    gates = gates_at_full_depth(models[method], ids)
    thresholds = thresholds_for(schedule, gates)
    assert len(thresholds) == K - 1
    calibrated = {
        Uniform: lambda s: Uniform(keep=s.keep, thresholds=thresholds),
        Geometric: lambda s: Geometric(rate=s.rate, thresholds=thresholds),
        Shares: lambda s: Shares(shares=s.shares, thresholds=thresholds),
    }[type(schedule)](schedule)
    depth = models[method](ids, policy=calibrated).depth
    expected = [math.floor(share_by_hand(schedule, i) * 50 + 1e-9) for i in range(K - 1)]
    assert [int((depth > i + 1).sum()) for i in range(K - 1)] == expected


def test_the_calibrated_thresholds_keep_the_highest_gates():
    gates = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.6, 0.7], [0.4, 0.95]])
    thresholds = thresholds_for(Shares(shares=(0.75, 0.5)), gates)
    assert thresholds == pytest.approx((0.4, 0.7))


def test_the_calibrated_policy_is_causal_and_generates(model):
    gates = gates_at_full_depth(model, support.ids(4, 16))
    policy = Uniform(keep=0.5, thresholds=thresholds_for(Uniform(keep=0.5), gates))
    generated = model.generate(
        support.ids(2, 4), policy=policy, max_new_tokens=5, do_sample=False, return_dict_in_generate=True
    )
    full = model(generated.sequences[:, :-1], policy=policy)
    assert torch.equal(generated.past_key_values.depth, full.depth)


@pytest.mark.parametrize("schedule", [Uniform(keep=0.5), Geometric(rate=0.5), Shares(shares=(0.5,) * 3)], ids=str)
def test_the_uncalibrated_schedule_is_refused_with_the_cure(model, schedule):
    with pytest.raises(AdaPonderError, match="thresholds") as refusal:
        model(support.ids(), policy=schedule)
    for cure in ("thresholds_for", "Ranked"):
        assert cure in str(refusal.value)
