"""Attention through an index: the reference equals a softmax written out, the kernels are no further from the truth."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from adaponder.ops.ledger_attention import Angles, LedgerRows, Projection, Scratch, scratch_for
from adaponder.ops.ledger_attention import torch as reference
from adaponder.ops.ledger_attention import triton as kernels
from kernel_support import draw
from ledger_support import case

pytestmark = pytest.mark.usefixtures("poisoned")

PRECISIONS = (torch.bfloat16, torch.float16, torch.float32)
# What plain attention may be off by and the kernel too: one rounding of the result.
FLOOR = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def places(count: int) -> list:
    """Lists (case, device, precision): interpreted in float32, every third case in float16; on a GPU in all."""
    here = [(number, "cpu", torch.float32) for number in range(count)]
    here += [(number, "cpu", torch.float16) for number in range(1, count, 3)]
    there = itertools.product(range(count), ["cuda"], PRECISIONS)
    return here + [pytest.param(*place, marks=pytest.mark.gpu) for place in there]


@pytest.fixture(autouse=True)
def _small_blocks(request, monkeypatch):
    """Makes blocks and parts so small that the interpreter meets several."""
    params = getattr(getattr(request.node, "callspec", None), "params", {})
    size = 16 if params.get("device") == "cuda" else 4
    monkeypatch.setattr(kernels, "ALONE", {128: {math.inf: (size, 4, params.get("number", 0) % 2 == 0)}})
    monkeypatch.setattr(kernels, "SHARED", (size, 4, False))
    monkeypatch.setattr(kernels, "COHORT", {16: (16, 4, 2)})
    monkeypatch.setattr(kernels, "LEAST", 4)


def written_out(query: Tensor, keys: Tensor, values: Tensor, rows: LedgerRows, window: int | None) -> Tensor:
    """Computes attention one query, head and key at a time."""
    groups = query.shape[1] // keys.shape[1]
    mixed = torch.zeros(*query.shape[:2], values.shape[-1], dtype=torch.float64)
    for n in range(query.shape[0]):
        lane, slot, iteration = (int(x[n]) for x in (rows.lane, rows.slot, rows.iteration))
        first = 0 if window is None else max(0, slot - window + 1)
        ids = [int(i) for i in rows.index[lane, iteration, first : slot + 1] if i >= 0]
        for head in range(query.shape[1]):
            k, v = keys[ids, head // groups].double(), values[ids, head // groups].double()
            weight = torch.softmax(k @ query[n, head].double() / math.sqrt(query.shape[-1]), 0)
            mixed[n, head] = weight @ v
    return mixed


REFERENCE_CASES = [
    {},
    {"seed": 1, "heads": 4, "key_heads": 2, "size": 6, "window": 3},
    {"seed": 2, "heads": 6, "key_heads": 2, "size": 5, "value_size": 3, "absent": 0.3},
    {"seed": 3, "alone": 0, "cohorts": 3},
    {"seed": 4, "alone": 9, "cohorts": 0, "window": 1},
]


@pytest.mark.parametrize("gathered", [1 << 27, 1], ids=["at once", "in chunks"])
@pytest.mark.parametrize("given", REFERENCE_CASES, ids=range(len(REFERENCE_CASES)))
def test_a_query_reads_the_rows_its_index_names(given, gathered, monkeypatch):
    monkeypatch.setattr(reference, "GATHERED", gathered)
    made = case(**given)
    mixed = reference.ledger_attention(made.query, made.keys, made.values, made.rows, window=made.window)
    truth = written_out(made.query, made.keys, made.values, made.rows, made.window)
    torch.testing.assert_close(mixed, truth, rtol=1e-12, atol=1e-12)


def test_reach_never_exceeds_the_index():
    rows = case(seed=7).rows
    assert rows._replace(longest=10_000).reach == rows._replace(longest=None).reach == rows.index.shape[2]
    assert rows._replace(longest=2).reach == 2


def no_further(kernel: Tensor, plain: Tensor, truth: Tensor) -> None:
    """Asserts error(kernel) <= error(plain, same precision) + FLOOR."""
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
    settings, splits = CASES[number]
    made = case(seed=number, dtype=dtype, device=device, **settings)
    given = (made.query, made.keys, made.values, made.rows)
    truth = reference.ledger_attention(*(x.double() for x in given[:3]), made.rows, window=made.window)
    plain = reference.ledger_attention(*given, window=made.window)
    no_further(kernels.ledger_attention(*given, window=made.window, splits=splits), plain, truth)


ON = torch.ones(())
SHAPES = [
    (Projection(2, 2, 8, packed=True, rotary=2, bias=ON), 3),
    (Projection(3, 1, 20, rotary=20, query_norm=ON, key_norm=ON), 1),
    (Projection(1, 1, 16), 2),
    (Projection(4, 2, 5, bias=ON, rotary=4), 3),
]
LEARNED = ("bias", "query_norm", "key_norm")


def entering(number: int, dtype: torch.dtype, device: str):
    """Returns a case, the QKV product of its rows, a projection with its parameters, and the rotary tables."""
    shape, _ = SHAPES[number]
    sizes = {"heads": shape.heads, "key_heads": shape.key_heads, "size": shape.size}
    made = case(seed=number, alone=2, cohorts=0, slots=17, absent=0.2 * number, dtype=dtype, device=device, **sizes)
    n, width = made.rows.num_single, (shape.heads + 2 * shape.key_heads) * shape.size
    # A slice of a wider product, in one case of a wider type.
    qkv = draw(n, width + 7, seed=number, dtype=torch.float32 if number == 3 else dtype, device=device)[:, :width]
    angle = draw(50, max(1, shape.rotary // 2), seed=number + 10, dtype=torch.float32, device=device).repeat(1, 2)
    position = torch.randint(50, (n,), generator=torch.Generator().manual_seed(number)).to(device)
    lengths = {"bias": width, "query_norm": shape.size, "key_norm": shape.size}
    learned = {
        name: draw(lengths[name], seed=number + 20 + place, dtype=dtype, device=device)
        for place, name in enumerate(LEARNED)
        if getattr(shape, name) is not None
    }
    # The rows' own keys and values are not there yet.
    made.keys[made.rows.row], made.values[made.rows.row] = torch.nan, torch.nan
    return made, qkv, shape._replace(**learned), Angles(position, angle.cos(), angle.sin())


@pytest.mark.parametrize(("number", "device", "dtype"), places(len(SHAPES)))
def test_a_row_that_enters_is_written_and_reads_itself(number, device, dtype):
    splits, window = SHAPES[number][1], 5 if number == 2 else None
    made, qkv, shape, angles = entering(number, dtype, device)
    rows = made.rows
    wide = [x.double() for x in (qkv, made.keys, made.values)]
    learned = {name: getattr(shape, name) for name in LEARNED}
    wide_shape = shape._replace(**{name: None if x is None else x.double() for name, x in learned.items()})
    truth = reference.decode_attention(*wide, rows, wide_shape, angles, window=window)
    plain_pools, pools, fresh = ([made.keys.clone(), made.values.clone()] for _ in range(3))
    plain = reference.decode_attention(qkv, *plain_pools, rows, shape, angles, window=window)
    scratch = scratch_for(rows.num_single, shape.heads, shape.size, device)
    for _ in range(2 if number == 2 else 1):  # the counters are as they were
        out = torch.empty(rows.num_single, shape.heads * shape.size, dtype=dtype, device=device)
        options = {"window": window, "scratch": scratch, "splits": splits}
        kernels.decode_attention(qkv, *pools, rows, shape, angles, out=out, **options)
        no_further(out.view(truth.shape), plain, truth)
        assert not scratch.counter.any()
    query = kernels.enter(qkv, *fresh, rows.row, shape, angles)
    expected = reference.enter(qkv, *plain_pools, rows.row, shape, angles)
    no_further(query, expected, reference.enter(*wide, rows.row, wide_shape, angles))
    for written in (pools, fresh):
        for pool, other, exact in zip(written, plain_pools, wide[1:], strict=True):
            no_further(pool[rows.row], other[rows.row], exact[rows.row])
            # No other row was written.
            pool[rows.row] = other[rows.row]
            assert torch.equal(pool.nan_to_num(), other.nan_to_num())


def test_splits_fill_the_device_and_no_more():
    for programs, processors, reach in itertools.product((1, 16, 131, 2048), (2, 132), (1, 9, 10_000)):
        splits = kernels.splits_for(programs, processors, reach)
        assert 1 <= splits <= min(kernels.MOST_SPLITS, -(-reach // kernels.LEAST))
        assert splits == 1 or splits * programs <= processors
    assert kernels.splits_for(16, 132, 10_000) == 8


@pytest.mark.parametrize("version", [reference, kernels], ids=["torch", "kernels"])
def test_a_query_that_sees_nothing_gets_zeros(version, interpreted):
    made = case(seed=6, alone=2, cohorts=0, dtype=torch.float32)
    rows = made.rows._replace(slot=torch.tensor([-1, int(made.rows.slot[1])]))
    options = {"splits": 2} if version is kernels else {}
    mixed = version.ledger_attention(made.query, made.keys, made.values, rows, **options)
    assert not mixed[0].any()
    assert mixed[1].all()


def test_a_scratch_is_enough_for_every_split_and_a_smaller_one_is_refused():
    scratch = scratch_for(1, 4, 8, "cpu")
    for rows, key_heads, processors in itertools.product((1, 2, 7, 100), (1, 2, 4), (2, 132, 10_000)):
        splits = kernels.splits_for(rows * key_heads, processors, 10_000)
        assert splits == 1 or rows * 4 * splits <= len(scratch.counter) == len(scratch.partial)
    made = case(seed=6, alone=3, cohorts=0, dtype=torch.float32)
    small = Scratch(*(x[: 3 * 2 * 5 - 1] for x in scratch))
    with pytest.raises(ValueError, match="scratch"):
        kernels.ledger_attention(made.query, made.keys, made.values, made.rows, splits=5, scratch=small)


@pytest.mark.parametrize(("number", "device", "dtype"), places(2))
def test_tiles_of_padded_rows_equal_cohorts(number, device, dtype):
    """Padding rows see nothing and get zeros; the table's entries beyond its tiles are none."""
    absent, window = ((0.0, None), (0.3, 9))[number]
    made = case(seed=9 + number, alone=0, cohorts=3, slots=35, heads=2, absent=absent, dtype=dtype, device=device)
    given = (made.query, made.keys, made.values)
    wanted = kernels.ledger_attention(*given, made.rows, window=window)
    count, block = len(made.query), kernels.block_of(made.rows.cohorts)
    tiles = kernels.tiles_of(made.rows.cohorts, block)
    size, padding_lane = count + block + 3, made.rows.index.shape[0] - 1
    tiles += [(first, size, padding_lane, 0) for first in range(count, size, block)]
    table = torch.zeros(len(tiles) + 4, 4, dtype=torch.int32, device=device)
    table[: len(tiles)] = torch.tensor(tiles)
    lane, slot, iteration, row = (
        torch.nn.functional.pad(x, (0, size - count), value=value)
        for x, value in zip(made.rows[1:5], (padding_lane, -1, 0, 0), strict=True)
    )
    query = torch.cat([made.query, torch.full_like(made.query, torch.nan)[:1].expand(size - count, -1, -1)])
    tiled = reference.Tiles(block, table)
    rows = LedgerRows(made.rows.index, lane, slot, iteration, row, num_single=0, tiles=tiled)
    mixed = kernels.ledger_attention(query.contiguous(), made.keys, made.values, rows, window=window)
    assert torch.equal(mixed[:count], wanted)
    assert not mixed[count:].any()
