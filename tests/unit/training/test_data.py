"""Micro-batches: the seed of each window; losses of whole runs test the rest."""

import numpy as np

from adaponder.data import Batch
from adaponder.recipes import load_recipe
from adaponder.training.data import MicroBatches
from adaponder.training.distributed import World


class CountingSampler:
    def part(self, step: int, first: int, count: int) -> Batch:
        windows = 100 * step + np.arange(first, first + count)
        tokens = windows[:, None] + np.arange(4)
        return Batch(tokens, np.zeros_like(tokens), windows)


def test_a_window_has_the_same_seed_in_any_micro_batch_and_another_at_every_step():
    def seeds(micro: int, world: World, step: int) -> list[int]:
        recipe = load_recipe("cpu/demo", ["train.global_batch=8", f"train.micro_batch={micro}"])
        inputs = MicroBatches(recipe, CountingSampler(), world).inputs(step)
        return [seed for each in inputs for seed in each["seed"].tolist()]

    whole = seeds(8, World(), 3)
    assert len(set(whole)) == 8
    assert seeds(2, World(), 3) == whole
    assert seeds(2, World(rank=0, size=2), 3) == [*whole[:2], *whole[4:6]]
    assert not set(whole) & set(seeds(8, World(), 4))
