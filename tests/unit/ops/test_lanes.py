"""The kernels of lanes and windows equal the plain version."""

import copy
import types

import pytest
import torch

from adaponder.halting import pondered
from adaponder.ops import dispatch, lanes
from adaponder.ops.lanes import torch as plain
from adaponder.ops.lanes import triton as kernels
from adaponder.ops.lanes.torch import Books, DraftWindows

pytestmark = pytest.mark.usefixtures("on_device")
LANES, SIZE, PASSES = 4, 3, 3


def drawn_books(seed: int) -> Books:
    torch.manual_seed(seed)
    lanes, iterations, slots, pages, size = 6, 3, 11, 4, 4

    def numbers(most: int) -> torch.Tensor:
        return torch.randint(most, (lanes,))

    index = torch.randint(-1, 50, (lanes, iterations, slots), dtype=torch.int32)
    counts = (numbers(most) for most in (99, slots, iterations, iterations, pages * size + 3))
    table = torch.randint(1, 9, (lanes, pages), dtype=torch.int32)
    return Books(index, *counts, table, torch.tensor([seed - 1]), size)


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
    kernels.end_rows(mine, lane, ours, goes_on, chosen, bad, logs[0], max_tokens=9)
    plain.end_rows(theirs, lane, wanted, goes_on, chosen, bad, logs[1], max_tokens=9)
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


@pytest.mark.parametrize("runs", [dispatch.has_kernels, lanes._has_rows])
def test_one_switch_turns_the_kernels_of_the_books_off_too(runs, monkeypatch):
    class Lanes(types.SimpleNamespace):
        def __len__(self) -> int:
            return 3

    lane = Lanes(is_cuda=True)
    assert runs(lane)
    monkeypatch.setenv("ADAPONDER_KERNELS", "0")
    assert not runs(lane)


def opened(room: int = SIZE) -> tuple[Books, DraftWindows]:
    """Returns books and windows of three lanes that begin at places 0, 4 and 2, and the padding lane."""
    slots, pages, size = 24, 20, 4
    numbers = torch.arange(LANES)
    token, place, iteration, used = (torch.zeros(LANES, dtype=torch.long) for _ in range(4))
    index = torch.full((LANES, PASSES, slots), -1, dtype=torch.int32)
    table = (1 + numbers[:, None] * pages + torch.arange(pages)).int()
    table[-1] = 0
    last = torch.full((LANES,), PASSES - 1)
    books = Books(index, token, place, iteration, last, used, table, torch.tensor([-1]), size)
    windows = DraftWindows.empty(LANES, SIZE, numbers.device)
    for lane, place in enumerate((0, 4, 2)):
        windows.front[lane] = windows.origin[lane] = place
        windows.stop[lane], windows.final[lane], windows.room[lane] = place + 1, place + 9, room
        windows.token[lane, place % SIZE] = 1
    return books, windows


def walk(first, second, lane: torch.Tensor, room: int = SIZE):
    """Advances two versions of the windows for 12 ticks by equal results; yields the rows of both after each tick.

    A version is a begin_windows and an end_windows. Few ids, so that many drafts are right; some tokens halt early.
    """
    states, generator = [opened(room), opened(room)], torch.Generator("cpu").manual_seed(0)
    logs = [torch.zeros(12, 3, 2 * SIZE + 1, dtype=torch.long) for _ in range(2)]

    def drawn(share: float) -> torch.Tensor:
        return (torch.rand(3, SIZE, generator=generator, device="cpu") < share).to(lane.device)

    for _ in range(12):
        rows = [begin(*state) for (begin, _), state in zip((first, second), states, strict=True)]
        goes_on, chosen, bad = drawn(0.6), drawn(0.5).long(), drawn(0.1)
        goes_on &= rows[1].begun.iteration.view(3, SIZE) < PASSES - 1
        for (_, end), state, log in zip((first, second), states, logs, strict=True):
            end(*state, lane, goes_on, chosen, bad, log)
        yield rows, states
    assert torch.equal(*logs)
    assert (logs[0][:, :2, -1].sum(0) > 3).all(), "too few tokens were accepted to compare"


def version(module, lane: torch.Tensor, vanishes: bool, **options):
    def begin(books, windows):
        return module.begin_windows(books, windows, lane, passes=PASSES, vanishes=vanishes, **options)

    return begin, module.end_windows


@pytest.mark.parametrize(("room", "vanishes"), [(2, True), (SIZE, False)])
def test_kernels_move_windows_alike(room, vanishes):
    lane = torch.tensor([2, 0, 3])
    versions = version(kernels, lane, vanishes), version(plain, lane, vanishes, every=True)
    for (ours, wanted), (mine, theirs) in walk(*versions, lane, room):
        for one, other in zip((*ours[:2], *ours.begun), (*wanted[:2], *wanted.begun), strict=True):
            assert torch.equal(one, other)
        for one, other in zip((*mine[0][:-1], *mine[1]), (*theirs[0][:-1], *theirs[1]), strict=True):
            assert torch.equal(one[:-1] if one.ndim == 3 else one, other[:-1] if one.ndim == 3 else other)


def test_rows_of_live_places_alone_are_those_of_every_place():
    lane = torch.tensor([0, 1, 2])
    versions = (version(plain, lane, False, every=every) for every in (False, True))
    for (live, every), (one, other) in walk(*versions, lane):
        assert live.entries is not None
        assert len(live.lane) == max(1, (every.lane != LANES - 1).sum())
        for mine, theirs in zip((*live[:2], *live.begun), (*every[:2], *every.begun), strict=True):
            assert torch.equal(mine, theirs[live.entries])
        assert torch.equal(one[0].index[:-1], other[0].index[:-1])
