"""A batch is a pure function of seed and step, and an epoch reads each window once."""

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaponder.data import DataError, Sampler, Shards, read_windows
from adaponder.data.prepare import prepare
from adaponder.data.sampler import permute, round_keys
from adaponder.errors import InputError

seeds = st.integers(-(2**70), 2**70)


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Shards:
    """A few hundred bytes in several shards, so that windows cross their borders."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text(chr(97 + number % 26) * (1 + 7 * number % 23))
    out = folder.parent / f"{folder.name}-out"
    prepare([str(folder)], out=out, tokenizer="train-bpe:257", validation=0, shard_tokens=100)
    opened = Shards.open(out)
    assert len(opened.manifest.splits["train"]) > 3
    return opened


@pytest.fixture(scope="module")
def tokens(shards) -> np.ndarray:
    files = sorted((shards.folder / "train").glob("*.bin"))
    return np.concatenate([np.fromfile(path, "<u2") for path in files]).astype(np.int64)


def sampler_without_files(windows: int, **options) -> Sampler:
    """A sampler whose windows are blank: only their numbers count."""

    def blank(starts, count):
        return np.zeros((len(starts), count), np.int64)

    readers = {"read_blocks": blank, "number_blocks": blank, "learned_blocks": blank}
    return Sampler(SimpleNamespace(tokens=2 * windows, folder="", split="", **readers), sequence=1, **options)


@given(size=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 10**9))
def test_a_permutation_is_a_bijection(size, seed, epoch):
    moved = permute(np.arange(size), size, keys=round_keys(seed, epoch))
    assert moved.dtype == np.int64
    assert np.array_equal(np.sort(moved), np.arange(size))


@given(size=st.integers(1, 2**62), seed=seeds)
def test_a_permutation_of_any_size_needs_no_array_of_it(size, seed):
    values = np.unique(np.array([0, size // 3, size // 2, size - 1]))
    moved = permute(values, size, keys=round_keys(seed, 0))
    assert (moved >= 0).all()
    assert (moved < size).all()
    assert len(np.unique(moved)) == len(values)


@given(windows=st.integers(8, 300), global_batch=st.integers(1, 8), seed=seeds)
def test_each_epoch_visits_each_window_exactly_once(windows, global_batch, seed):
    sampler = sampler_without_files(windows, global_batch=global_batch, seed=seed)
    steps = -(-2 * windows // global_batch)
    drawn = np.concatenate([sampler.batch(step).windows for step in range(steps)])
    first, second = drawn[:windows], drawn[windows : 2 * windows]
    assert Counter(first.tolist()) == Counter(second.tolist()) == Counter(range(windows))
    if windows > 12:
        assert not np.array_equal(first, second)


def test_another_seed_is_another_order():
    orders = [sampler_without_files(50, global_batch=16, seed=seed).batch(0).windows.tolist() for seed in (1, 1, 2, 3)]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3


@given(data=st.data(), global_batch=st.integers(1, 12), step=st.integers(0, 10**6))
def test_slices_by_process_and_accumulation_add_up_to_the_whole(data, global_batch, step):
    sampler = sampler_without_files(100, global_batch=global_batch, seed=1)
    cuts = data.draw(st.lists(st.integers(0, global_batch), max_size=4))
    slices = [sampler.part(step, a, b - a).windows for a, b in pairwise([0, *sorted(cuts), global_batch])]
    assert np.array_equal(sampler.batch(step).windows, np.concatenate(slices))


def test_a_row_is_its_window_of_the_concatenated_split(shards, tokens):
    numbers = np.concatenate([[0], np.cumsum(tokens == shards.end_id)[:-1]])
    batch = Sampler(shards, sequence=12, global_batch=20, seed=3).batch(2)
    for row, window in enumerate(batch.windows):
        block = slice(window * 13, window * 13 + 13)
        assert np.array_equal(batch.tokens[row], tokens[block])
        assert np.array_equal(batch.documents[row], numbers[block])
    assert batch.tokens.dtype == batch.documents.dtype == batch.windows.dtype == np.int64
    count = shards.tokens // 11
    rows = read_windows(shards, np.arange(count), sequence=10).tokens
    assert np.array_equal(rows.ravel(), tokens[: 11 * count])


@given(data=st.data())
def test_any_range_reads_as_a_slice_of_the_whole(shards, tokens, data):
    start = data.draw(st.integers(0, len(tokens)))
    count = data.draw(st.integers(0, len(tokens) - start))
    assert np.array_equal(shards.read(start, count), tokens[start : start + count])
    numbers = np.concatenate([[0], np.cumsum(tokens == shards.end_id)])
    assert np.array_equal(shards.number_blocks(np.array([start]), count)[0], numbers[start : start + count])
    with pytest.raises(DataError):
        shards.read(start, len(tokens) - start + 1)


@pytest.mark.parametrize(
    ("options", "error", "field"),
    [
        ({"sequence": 0}, InputError, "sequence=0"),
        ({"sequence": -1}, InputError, "sequence=-1"),
        ({"global_batch": 0}, InputError, "global_batch=0"),
        ({"sequence": 5000}, DataError, "sequence"),
        ({"sequence": 100, "global_batch": 100}, DataError, "lower global_batch to"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(shards, options, error, field):
    with pytest.raises(error, match=field):
        Sampler(shards, **{"sequence": 4, "global_batch": 1, "seed": 0} | options)


def test_a_part_or_a_split_that_does_not_exist_is_refused(shards):
    sampler = Sampler(shards, sequence=4, global_batch=4, seed=0)
    for step, first, count in ((-1, 0, 1), (0, 3, 2), (0, -1, 1)):
        with pytest.raises(InputError, match="step"):
            sampler.part(step, first, count)
    with pytest.raises(DataError, match="'test'"):
        Shards.open(shards.folder, "test")
