"""The kernels of ledger attention equal their references, and are no further from the truth in any precision."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="no Triton on this platform")

from adaponder.ops.ledger_attention import Projection, Scratch, Turn, launch, scratch_for
from adaponder.ops.ledger_attention import torch as reference
from ledger_support import case
from poison import poisoned  # noqa: F401

pytestmark = pytest.mark.usefixtures("poisoned")

PRECISIONS = (torch.bfloat16, torch.float16, torch.float32)


def places(count: int) -> list:
    """(case, device, precision): interpreted in float32, and every third case in float16; on a GPU in all."""
    here = [(number, "cpu", torch.float32) for number in range(count)]
    here += [(number, "cpu", torch.float16) for number in range(1, count, 3)]
    there = [
        pytest.param(number, "cuda", dtype, marks=pytest.mark.gpu) for number in range(count) for dtype in PRECISIONS
    ]
    return [*here, *there]


# What plain attention may be off by and the kernel too: one rounding of the result.
FLOOR = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def _small_blocks(request, monkeypatch):
    """Several blocks and parts at sizes an interpreter can walk."""
    on_gpu = request.node.get_closest_marker("gpu") is not None
    if not on_gpu and torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU in this process, not interpreted")
    number = request.node.callspec.params.get("number", 0) if hasattr(request.node, "callspec") else 0
    block = (16 if on_gpu else 4, 4, number % 2 == 0)
    monkeypatch.setattr(launch, "ALONE", {128: {math.inf: block}})
    monkeypatch.setattr(launch, "SHARED", (16 if on_gpu else 4, 4, False))
    monkeypatch.setattr(launch, "COHORT", {16: (16, 4, 2)})
    monkeypatch.setattr(launch, "LEAST", 4)


def no_further(kernel: Tensor, plain: Tensor, truth: Tensor) -> None:
    """Error(kernel) <= error(plain, same precision) + the floor."""
    assert not kernel.isnan().any()
    error, allowed = ((x.double() - truth).abs().max().item() for x in (kernel, plain))
    assert error <= allowed + FLOOR[kernel.dtype] * max(1.0, truth.abs().max().item())


# A case and the number of programs that share a row's keys.
CASES = [
    ({"alone": 3, "cohorts": 0, "slots": 14, "heads": 1}, 1),
    ({"alone": 3, "cohorts": 0, "slots": 23, "heads": 2}, 3),
    ({"alone": 3, "cohorts": 0, "slots": 18, "heads": 3, "key_heads": 1, "size": 5, "absent": 0.3}, 3),
    ({"alone": 2, "cohorts": 2, "slots": 40, "heads": 1, "size": 20, "window": 6}, 2),
    ({"alone": 1, "cohorts": 2, "slots": 37, "heads": 4, "key_heads": 2, "size": 16, "absent": 0.3}, None),
    ({"alone": 0, "cohorts": 3, "slots": 33, "heads": 1, "size": 24, "absent": 0.5, "window": 17}, 1),
]


@pytest.mark.parametrize(("number", "device", "dtype"), places(len(CASES)))
def test_the_kernels_equal_the_reference(number, device, dtype):
    given, splits = CASES[number]
    made = case(seed=number, dtype=dtype, device=device, **given)
    given = (made.query, made.keys, made.values, made.rows)
    wide = tuple(x.double() for x in given[:3])
    truth = reference.ledger_attention(*wide, made.rows, window=made.window)
    plain = reference.ledger_attention(*given, window=made.window)
    assert launch.fits(*given)
    no_further(launch.ledger_attention(*given, window=made.window, splits=splits), plain, truth)


def entering(seed: int, *, dtype: torch.dtype, device: str, shape: Projection, wide: bool = False, **given):
    """A case, the QKV product of its rows, and a projection with its tables."""
    made = case(
        seed=seed, cohorts=0, heads=shape.heads, key_heads=shape.key_heads, size=shape.size,
        dtype=dtype, device=device, **given,
    )  # fmt: skip
    random = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64)

    n, width = made.rows.alone, (shape.heads + 2 * shape.key_heads) * shape.size
    # A slice of a wider product.
    qkv = draw(n, width + 7).to(device, torch.float32 if wide else dtype)[:, :width]
    angle = draw(50, max(1, shape.rotary // 2)).repeat(1, 2)
    turn = Turn(
        torch.randint(50, (n,), generator=random).to(device),
        *(f(angle).float().to(device) for f in (torch.cos, torch.sin)),
    )
    extra = {
        name: draw(*size).to(device, dtype)
        for name, size in {"bias": (width,), "query_norm": (shape.size,), "key_norm": (shape.size,)}.items()
        if getattr(shape, name) is not None
    }
    # The rows' own keys and values are not there yet.
    made.keys[made.rows.row], made.values[made.rows.row] = torch.nan, torch.nan
    return made, qkv, shape._replace(**extra), turn


ON = torch.ones(())
SHAPES = [
    (Projection(2, 2, 8, packed=True, rotary=2, bias=ON), 3),
    (Projection(3, 1, 20, rotary=20, query_norm=ON, key_norm=ON), 1),
    (Projection(1, 1, 16), 2),
    (Projection(4, 2, 5, bias=ON, rotary=4), 3),
]


@pytest.mark.parametrize(("number", "device", "dtype"), places(len(SHAPES)))
def test_a_row_that_enters_is_written_and_reads_itself(number, device, dtype):
    shape, splits = SHAPES[number]
    window = 5 if number == 2 else None
    made, qkv, shape, turn = entering(
        number,
        dtype=dtype,
        device=device,
        shape=shape,
        wide=number == 3,
        alone=2,
        slots=17,
        absent=0.2 * number,
    )
    rows = made.rows
    wide = [x.double() for x in (qkv, made.keys, made.values)]
    wide_shape = shape._replace(
        **{
            name: getattr(shape, name).double()
            for name in ("bias", "query_norm", "key_norm")
            if getattr(shape, name) is not None
        }
    )
    truth = reference.decode_attention(*wide, rows, wide_shape, turn, window=window)
    plain_pools = [made.keys.clone(), made.values.clone()]
    plain = reference.decode_attention(qkv, *plain_pools, rows, shape, turn, window=window)
    pools = [made.keys.clone(), made.values.clone()]
    scratch = scratch_for(rows.alone, shape.heads, shape.size, device)
    for _ in range(2 if number == 2 else 1):  # the counters are as they were
        out = torch.empty(rows.alone, shape.heads * shape.size, dtype=dtype, device=device)
        options = {"window": window, "scratch": scratch, "splits": splits}
        launch.decode_attention(qkv, *pools, rows, shape, turn, out=out, **options)
        no_further(out.view(truth.shape), plain, truth)
        assert not scratch.counter.any()
    for pool, other, exact in zip(pools, plain_pools, wide[1:], strict=True):
        no_further(pool[rows.row], other[rows.row], exact[rows.row])
        # No other row was written.
        pool[rows.row] = other[rows.row]
        assert torch.equal(pool.nan_to_num(), other.nan_to_num())
    fresh = [made.keys.clone(), made.values.clone()]
    query = launch.enter(qkv, *fresh, rows.row, shape, turn)
    no_further(
        query,
        reference.enter(qkv, *plain_pools, rows.row, shape, turn),
        reference.enter(*wide, rows.row, wide_shape, turn),
    )
    for pool, other, exact in zip(fresh, plain_pools, wide[1:], strict=True):
        no_further(pool[rows.row], other[rows.row], exact[rows.row])


def test_splits_fill_the_device_and_no_more():
    for programs, processors, reach in itertools.product((1, 16, 131, 2048), (2, 132), (1, 9, 10_000)):
        splits = launch.splits_for(programs, processors, reach)
        assert 1 <= splits <= min(launch.MOST_SPLITS, -(-reach // launch.LEAST))
        assert splits == 1 or splits * programs <= processors
    assert launch.splits_for(16, 132, 10_000) == 8


def test_few_rows_take_large_blocks(monkeypatch):
    monkeypatch.setattr(launch, "ALONE", {64: {1: (8, 8, True), math.inf: (4, 4, True)}, 128: {math.inf: (2, 2, True)}})
    assert launch.block_for(64, 132, 132) == (8, 8, True)
    assert launch.block_for(8, 133, 132) == (4, 4, True)
    assert launch.block_for(65, 1, 132) == (2, 2, True)


def test_a_query_that_sees_nothing_gets_zeros():
    made = case(seed=6, alone=2, cohorts=0, dtype=torch.float32)
    rows = made.rows._replace(slot=torch.tensor([-1, int(made.rows.slot[1])]))
    mixed = launch.ledger_attention(made.query, made.keys, made.values, rows, splits=2)
    assert not mixed[0].any()
    assert mixed[1].all()


def test_a_scratch_is_enough_for_every_split_and_a_smaller_one_is_refused():
    scratch = scratch_for(1, 4, 8, "cpu")
    for rows, key_heads, processors in itertools.product((1, 2, 7, 100), (1, 2, 4), (2, 132, 10_000)):
        splits = launch.splits_for(rows * key_heads, processors, 10_000)
        assert splits == 1 or rows * 4 * splits <= len(scratch.counter) == len(scratch.partial)
    made = case(seed=6, alone=3, cohorts=0, dtype=torch.float32)
    small = Scratch(*(x[: 3 * 2 * 5 - 1] for x in scratch))
    with pytest.raises(ValueError, match="too small: 30 places of 8 needed"):
        launch.ledger_attention(made.query, made.keys, made.values, made.rows, splits=5, scratch=small)


@pytest.mark.parametrize(("number", "device", "dtype"), places(2))
def test_tiles_of_padded_rows_equal_cohorts(number, device, dtype):
    """Rows that fill up see nothing and get zeros; what the table has beyond its tiles is none."""
    absent, window = ((0.0, None), (0.3, 9))[number]
    made = case(seed=9 + number, alone=0, cohorts=3, slots=35, heads=2, absent=absent, dtype=dtype, device=device)
    given = (made.query, made.keys, made.values)
    wanted = launch.ledger_attention(*given, made.rows, window=window)
    count, block = len(made.query), launch.block_of(made.rows.cohorts)
    tiles = launch.tiles_of(made.rows.cohorts, block)
    size, nobody = count + block + 3, made.rows.index.shape[0] - 1
    tiles += [(first, size, nobody, 0) for first in range(count, size, block)]
    table = torch.zeros(len(tiles) + 4, 4, dtype=torch.int32, device=device)
    table[: len(tiles)] = torch.tensor(tiles)
    filled = [
        torch.nn.functional.pad(x, (0, size - count), value=value)
        for x, value in ((made.rows.lane, nobody), (made.rows.slot, -1), (made.rows.iteration, 0), (made.rows.row, 0))
    ]
    query = torch.cat([made.query, torch.full_like(made.query, torch.nan)[:1].expand(size - count, -1, -1)])
    rows = reference.LedgerRows(made.rows.index, *filled, alone=0, tiles=reference.Tiles(block, table))
    mixed = launch.ledger_attention(query.contiguous(), made.keys, made.values, rows, window=window)
    assert torch.equal(mixed[:count], wanted)
    assert not mixed[count:].any()
