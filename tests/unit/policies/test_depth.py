"""Tests that a fixed depth equals a limit of iterations; test_rows.py computes every rule by hand."""

import pytest
import torch

from adaponder import FixedDepth
from policy_support import EXECUTIONS, K, padded


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(("method", "depth"), [("adaponder", 2), ("mor", 1), ("act", 2), ("ouro", K)])
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
