"""Random cases of attention through an index, with NaN in every pool row that nobody names."""

from typing import NamedTuple

import torch
from torch import Tensor

from adaponder.ops.ledger_attention import Cohort, LedgerRows


class Case(NamedTuple):
    """Holds the arguments of ledger attention."""

    query: Tensor
    keys: Tensor
    values: Tensor
    rows: LedgerRows
    window: int | None


def case(
    *,
    seed: int = 0,
    alone: int = 4,
    cohorts: int = 2,
    heads: int = 2,
    key_heads: int | None = None,
    size: int = 8,
    value_size: int | None = None,
    slots: int = 20,
    iterations: int = 3,
    absent: float = 0.0,
    window: int | None = None,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> Case:
    """Draws lanes at different slots and iterations; a share of the earlier rows is absent; cohorts have gaps."""
    random = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    key_heads = heads if key_heads is None else key_heads
    lanes = alone + cohorts + 1
    # Entries beyond a lane's slot, or at other iterations, name rows that hold NaN.
    pool = 2 * lanes * iterations * slots
    index = torch.randperm(pool, generator=random)[: pool // 2].view(lanes, iterations, slots).int()
    index[torch.rand(index.shape, generator=random) < absent] = -1
    free = iter(sorted(set(range(pool)) - set(index.flatten().tolist())))
    order = torch.randperm(lanes, generator=random).tolist()
    places = [(lane, integer(0, slots - 1), integer(0, iterations - 1)) for lane in order[:alone]]
    groups: list[Cohort] = []
    for number in range(cohorts):
        lane, iteration, start = order[alone + number], integer(0, iterations - 1), len(places)
        own = torch.randperm(slots, generator=random)[: integer(1, slots)].sort().values.tolist()
        places += [(lane, slot, iteration) for slot in own]
        groups.append(Cohort(start, len(places), lane, iteration, own[-1]))
    row = []
    for lane, slot, iteration in places:
        if index[lane, iteration, slot] < 0:
            index[lane, iteration, slot] = next(free)
        row.append(int(index[lane, iteration, slot]))
    lane, slot, iteration = (torch.tensor([place[k] for place in places], dtype=torch.int64) for k in range(3))
    named = torch.zeros(pool, dtype=torch.bool)
    for one_lane, one_slot, one_iteration in places:
        ids = index[one_lane, one_iteration, : one_slot + 1]
        named[ids[ids >= 0].long()] = True

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    keys, values = draw(pool, key_heads, size), draw(pool, key_heads, value_size or size)
    keys[~named], values[~named] = torch.nan, torch.nan
    longest = max([place[1] + 1 for place in places[:alone]], default=0)
    rows = LedgerRows(
        index.to(device),
        lane.to(device),
        slot.to(device),
        iteration.to(device),
        torch.tensor(row, dtype=torch.int64, device=device),
        alone,
        tuple(groups),
        longest,
    )
    query, keys, values = (x.to(device, dtype) for x in (draw(len(places), heads, size), keys, values))
    return Case(query, keys, values, rows, window)
