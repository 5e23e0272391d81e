"""Micro-batches: which windows each process gets, and what each forward divides its loss by."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from adaponder.data import Batch
from adaponder.training.data import MicroBatches
from adaponder.training.distributed import World


class CountingSampler:
    def part(self, step: int, first: int, count: int) -> Batch:
        windows = 100 * step + np.arange(first, first + count)
        tokens = windows[:, None] + np.arange(4)
        return Batch(tokens, np.broadcast_to(np.arange(4) // 2, tokens.shape).copy(), windows)


def recipe(global_batch: int, micro_batch: int | None, *, across: bool = True) -> SimpleNamespace:
    train = SimpleNamespace(global_batch=global_batch, micro_batch=micro_batch, seed=5)
    return SimpleNamespace(train=train, data=SimpleNamespace(attend_across_documents=across))


def test_a_window_has_the_same_seed_in_any_micro_batch_and_another_at_every_step():
    def seeds(micro: int, world: World, step: int) -> list[int]:
        inputs = MicroBatches(recipe(8, micro), CountingSampler(), world).inputs(step)
        return [seed for each in inputs for seed in each["seed"].tolist()]

    whole = seeds(8, World(), 3)
    assert len(set(whole)) == 8
    assert seeds(2, World(), 3) == whole
    assert seeds(2, World(rank=0, size=2), 3) == [*whole[:2], *whole[4:6]]
    assert not set(whole) & set(seeds(8, World(), 4))


@pytest.mark.parametrize(("across", "targets"), [(True, [301, 302, 303]), (False, [301, -100, 303])])
def test_targets_follow_inputs_and_the_next_document_is_none_unless_it_may_be_attended_to(across, targets):
    micro_batches = MicroBatches(recipe(4, 2, across=across), CountingSampler(), World())
    inputs = micro_batches.inputs(3)
    assert inputs[0]["input_ids"][0].tolist() == [300, 301, 302]
    assert inputs[0]["targets"][0].tolist() == targets
    assert ("document_ids" in inputs[0]) is not across
    # Two forwards of two windows each.
    mean = micro_batches.mean_targets(inputs)
    assert mean.dtype == torch.double
    assert mean.item() == 2 * sum(target != -100 for target in targets)
