"""Given depths through every execution; random depths are hashes, of the prescribed frequency."""

import math

import pytest
import torch

from adaponder import FixedDepth, Random
from policy_support import EXECUTIONS, K, asked, padded


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


@pytest.mark.parametrize(("keep", "seed"), [(0.1, 0), (0.5, 12345), (0.9, -3), (0.5, 2**40)])
def test_the_random_rule_keeps_its_share_at_every_iteration_and_among_those_it_kept(keep, seed):
    count = 50_000
    alive = torch.ones(count, dtype=torch.bool)
    gate = torch.zeros(count)
    for iteration in range(3):
        continues = Random(keep)(asked(gate, iteration=iteration, seed=seed))
        for among in (torch.ones_like(alive), alive):
            n = int(among.sum())
            assert abs(float(continues[among].double().mean()) - keep) <= 3 * math.sqrt(keep * (1 - keep) / n)
        alive &= continues


def test_the_random_rule_depends_on_seed_position_and_iteration_alone():
    gate = torch.zeros(2000)
    answer = Random(0.5)(asked(gate, seed=1))
    assert torch.equal(answer, Random(0.5)(asked(gate + 1.0, seed=1, sequence=torch.arange(2000))))
    others = [
        Random(0.5)(asked(gate, seed=2)),
        Random(0.5)(asked(gate, seed=1, iteration=1)),
        Random(0.5)(asked(gate, seed=1, position=torch.arange(2000) + 1)),
    ]
    for other in others:
        # Independent coins agree half the time: 3 sigma of 2000.
        assert abs(float((answer == other).double().mean()) - 0.5) <= 3 * 0.5 / math.sqrt(2000)
