"""Random depths are hashes: the same in any batch, and of the prescribed frequency."""

import math

import pytest
import torch

import support
from adaponder import Random
from policy_support import DECIDED, K, asked, padded


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 12345, -3, 2**40])
def test_the_random_rule_keeps_its_share_at_every_iteration_and_among_those_it_kept(keep, seed):
    count = 50_000
    alive = torch.ones(count, dtype=torch.bool)
    gate = torch.zeros(count)
    for iteration in range(3):
        kept = Random(keep)(asked(gate, iteration=iteration, seed=seed))
        for among in (torch.ones_like(alive), alive):
            n = int(among.sum())
            assert abs(float(kept[among].double().mean()) - keep) <= 3 * math.sqrt(keep * (1 - keep) / n)
        alive &= kept


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


def test_the_random_rule_that_keeps_all_or_nothing_does_so(model):
    ids, mask = padded()
    assert torch.equal(model(ids, attention_mask=mask, policy=Random(1.0)).depth, mask * K)
    assert torch.equal(model(ids, attention_mask=mask, policy=Random(0.0)).depth, mask)


@pytest.mark.parametrize("method", DECIDED)
def test_the_random_depths_of_a_batch_are_those_of_its_singles(models, method):
    ids, mask = padded()
    batch = models[method](ids, attention_mask=mask, policy=Random(0.6), seed=5)
    assert batch.depth.unique().numel() == K + 1
    for row in range(len(ids)):
        real = mask[row].bool()
        single = models[method](ids[row : row + 1, real], policy=Random(0.6), seed=5)
        assert torch.equal(single.depth[0], batch.depth[row, real])
        assert float((single.logits[0] - batch.logits[row, real]).abs().max()) <= 1e-12


@pytest.mark.parametrize("method", DECIDED)
def test_the_random_depths_of_generation_are_those_of_a_full_pass(models, method):
    generated = models[method].generate(
        support.ids(2, 4),
        policy=Random(0.5),
        seed=3,
        max_new_tokens=6,
        do_sample=False,
        return_dict_in_generate=True,
    )
    full = models[method](generated.sequences[:, :-1], policy=Random(0.5), seed=3)
    assert torch.equal(generated.past_key_values.depth, full.depth)
