"""The kernels of the books against the plain version, in Triton's interpreter."""

import copy
import types

import pytest
import torch

pytest.importorskip("triton", reason="no Triton on this platform")

from adaponder.halting import pondered
from adaponder.ops import fused, lane_books, lane_windows
from adaponder.ops.lane_books import torch as plain
from adaponder.ops.lane_books import triton as kernels
from adaponder.ops.lane_books.torch import Books

pytestmark = pytest.mark.usefixtures("on_device")


def drawn_books(seed: int) -> Books:
    torch.manual_seed(seed)
    lanes, iterations, slots, pages, size = 6, 3, 11, 4, 4

    def numbers(most: int) -> torch.Tensor:
        return torch.randint(most, (lanes,))

    return Books(
        index=torch.randint(-1, 50, (lanes, iterations, slots), dtype=torch.int32),
        token=numbers(99),
        place=numbers(slots),
        iteration=numbers(iterations),
        last=numbers(iterations),
        used=numbers(pages * size + 3),
        pages=torch.randint(1, 9, (lanes, pages), dtype=torch.int32),
        tick=torch.tensor([seed - 1]),
        page_size=size,
    )


@pytest.mark.parametrize("vanishes", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_kernels_keep_the_same_books(seed, vanishes):
    mine = drawn_books(seed)
    theirs = copy.deepcopy(mine)
    lane = torch.tensor([4, 0, 5, 2])
    ours = kernels.begin_rows(mine, lane, width=1, vanishes=vanishes)
    wanted = plain.begin_rows(theirs, lane, width=1, vanishes=vanishes)
    assert all(torch.equal(one, other) for one, other in zip(ours, wanted, strict=True))
    goes_on, chosen = torch.tensor([True, False, False, True]), torch.tensor([1, 2, 3, 4])
    bad, logs = torch.tensor([True, False, True, False]), [torch.full((4, 4), -9) for _ in range(2)]
    kernels.end_rows(mine, lane, ours, goes_on, chosen, bad, logs[0], places=9)
    plain.end_rows(theirs, lane, wanted, goes_on, chosen, bad, logs[1], places=9)
    assert torch.equal(*logs)
    assert logs[0][seed].tolist() == [-1, 2, -2, -1]
    for name in ("index", "token", "place", "iteration", "used", "tick"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_resume_and_ponder_alike(dtype):
    torch.manual_seed(0)
    first, kept, expected = torch.randn(3, 1, 20), torch.randn(5, 1, 20), torch.randn(3, 1, 20)
    first, kept, expected = (one.to(dtype) for one in (first, kept, expected))
    lane, iteration = torch.tensor([4, 0, 2]), torch.tensor([0, 2, 1])
    ours = kernels.resume_rows(first, kept, lane, iteration)
    assert torch.equal(ours, plain.resume_rows(first, kept, lane, iteration))
    assert torch.equal(ours[0], first[0])
    assert torch.equal(ours[1], kept[0])
    active, s = torch.tensor([[True], [False], [True]]), torch.rand(3, 1)
    pondered_rows = kernels.ponder_rows(ours, expected, active, s)
    assert torch.equal(pondered_rows, plain.ponder_rows(ours, expected, active, s))
    assert torch.equal(plain.ponder_rows(ours, expected, active, s), pondered(ours, expected, active, s))


def test_kernels_force_alike():
    torch.manual_seed(1)
    forced, last = torch.randint(0, 4, (5, 9), dtype=torch.int32), torch.randint(0, 3, (5, 3))
    lane, place, iteration = torch.randint(5, (40, 1)), torch.randint(9, (40, 1)), torch.randint(3, (40, 1))
    keep = torch.rand(40, 1) < 0.5
    ours = kernels.force_rows(keep, forced, lane, place, iteration, last[:, 2])
    wanted = plain.force_rows(keep, forced, lane, place, iteration, last[:, 2])
    assert torch.equal(ours, wanted)
    assert 0 < int(wanted.sum()) < 40


@pytest.mark.parametrize("runs", [fused.has_kernels, lane_books._by_kernels, lane_windows._by_kernels])
def test_one_switch_turns_the_kernels_of_the_books_off_too(runs, monkeypatch):
    class Lanes(types.SimpleNamespace):
        def __len__(self) -> int:
            return 3

    lane = Lanes(is_cuda=True)
    assert runs(lane)
    monkeypatch.setenv("ADAPONDER_KERNELS", "0")
    assert not runs(lane)
