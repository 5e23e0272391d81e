"""Given depths, through every execution."""

import pytest
import torch

from adaponder import FixedDepth, ForcedDepths
from policy_support import DECIDED, EXECUTIONS, K, padded


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("method", DECIDED)
@pytest.mark.parametrize("depth", [1, 2, K])
def test_the_fixed_depth_equals_so_many_iterations(models, method, depth, execution):
    ids, mask = padded()
    by_policy = models[method](ids, attention_mask=mask, policy=FixedDepth(depth), execution=execution)
    by_number = models[method](
        ids, attention_mask=mask, policy=FixedDepth(K), max_iterations=depth, execution=execution
    )
    assert torch.equal(by_policy.depth, mask * depth)
    assert torch.equal(by_number.depth, by_policy.depth)
    real = mask.bool()
    assert float((by_policy.logits - by_number.logits)[real].abs().max()) <= 1e-12


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("method", DECIDED)
def test_the_forced_depths_are_the_depths(models, method, execution):
    ids, mask = padded()
    depths = torch.randint(1, K + 1, ids.shape, generator=torch.Generator().manual_seed(3))
    output = models[method](ids, attention_mask=mask, policy=ForcedDepths(depths), execution=execution)
    assert torch.equal(output.depth, depths * mask)


@pytest.mark.parametrize("method", DECIDED)
def test_the_forced_depths_replay_a_run_exactly(models, method):
    ids, mask = padded()
    first = models[method](ids, attention_mask=mask)
    replay = models[method](ids, attention_mask=mask, policy=ForcedDepths(first.depth))
    assert first.depth.unique().numel() > 2
    assert torch.equal(first.logits, replay.logits)
