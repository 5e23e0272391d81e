"""Prescribed shares of tokens: ranked within the sequence, or by calibrated thresholds."""

import dataclasses
import math

import pytest
import torch

import support
from adaponder import AdaPonderError, FixedDepth, Geometric, Policy, Ranked, Uniform
from adaponder.policies import Shares, thresholds_for
from policy_support import EXECUTIONS, K, padded

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
