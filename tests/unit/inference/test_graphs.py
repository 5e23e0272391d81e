"""Tests that passes of a body replayed as CUDA graphs equal eager ones."""

import copy

import pytest
import torch

from adaponder.backbones.wrapper import Backbone
from adaponder.inference import Engine, Request
from adaponder.inference.bodies import FusedBody, Pools
from adaponder.inference.graphs import GraphedBody, pad_prefill
from adaponder.ops.ledger_attention import Cohort, LedgerRows
from support import stock, tiny

SLOTS, LANES, ROWS = 40, 4, 200


def test_prefill_rows_are_padded_to_few_sizes():
    sizes = [pad_prefill(rows) for rows in range(1, 9000)]
    assert all(size >= rows for rows, size in enumerate(sizes, start=1))
    assert len(set(sizes)) < 40
    assert all(size <= max(rows + 63, 1.25 * rows) for rows, size in enumerate(sizes, start=1))


def cohorts(index: torch.Tensor, spans: list[tuple[int, int, int]], seed: int) -> LedgerRows:
    """Returns rows of cohorts, given (lane, iteration, tokens) of each: slots from 0 on, and pool rows of their own."""
    generator = torch.Generator().manual_seed(seed)
    free = iter((torch.randperm(ROWS - 1, generator=generator) + 1).tolist())
    index.fill_(-1)
    places, groups = [], []
    for lane, iteration, tokens in spans:
        groups.append(Cohort(len(places), len(places) + tokens, lane, iteration, tokens - 1))
        for slot in range(tokens):
            row = next(free)
            index[lane, iteration:, slot] = row
            places.append((lane, slot, iteration, row))
    lane, slot, iteration, row = torch.tensor(places).T.contiguous().cuda().unbind()
    return LedgerRows(index, lane, slot, iteration, row, num_single=0, cohorts=tuple(groups))


class _Owner:
    pool = None


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_replayed_prefill_passes_equal_eager_ones(family):
    """The second pass is smaller than the first: nothing of the first may be left in the graph."""
    backbone = Backbone(stock(family).cuda().bfloat16())
    body = FusedBody(backbone, rows=LANES, independent=True, positions=SLOTS)
    graphed = GraphedBody(body, _Owner(), LANES)
    width = backbone.stock.config.hidden_size
    index = torch.zeros(LANES + 1, 2, SLOTS, dtype=torch.int32, device="cuda")
    pools = Pools.empty(body.row_shapes(), ROWS, torch.bfloat16, torch.device("cuda"))
    for seed, spans in enumerate([[(0, 0, 30), (2, 1, 25)], [(1, 0, 9)], [(3, 1, 17), (0, 0, 2), (2, 0, 33)]]):
        rows = cohorts(index, spans, seed)
        x = torch.randn(len(rows.lane), width, device="cuda").bfloat16()
        plain = Pools.empty(body.row_shapes(), ROWS, torch.bfloat16, x.device)
        for pool in pools.keys + pools.values:
            pool.zero_()
        with torch.no_grad():
            expected, got = body.forward(x, rows.slot, rows, plain), graphed.forward(x, rows.slot, rows, pools)
        torch.testing.assert_close(got.hidden.float(), expected.hidden.float(), rtol=0.05, atol=0.05)
        torch.testing.assert_close(got.stream.float(), expected.stream.float(), rtol=0.05, atol=0.05)
        for ours, theirs in zip(pools.keys + pools.values, plain.keys + plain.values, strict=True):
            torch.testing.assert_close(ours[1:].float(), theirs[1:].float(), rtol=0.05, atol=0.05)
    assert len(graphed.graphs) <= 3


@pytest.mark.gpu
def test_a_users_policy_between_replayed_passes():
    """Prompts and decoding, with a neighbour whose policy is this package's."""
    model = tiny("adaponder", iterations=3).eval().cuda()

    def even(rows):
        return rows.slot % 2 == 0

    requests = [
        Request(prompt=[lane, 5, 7], max_new_tokens=9, temperature=0.0, policy=even if lane % 2 else None)
        for lane in range(4)
    ]
    plain = Engine(copy.deepcopy(model), lanes=4, tokens=40)
    plain.runner.graphs = plain.runner.replayed = None
    expected = plain.generate(requests)
    engine = Engine(model, lanes=4, tokens=40)
    with pytest.warns(UserWarning, match="policy="):
        completions = engine.generate(requests)
    assert engine.runner.replayed.graphs
    assert [(done.ids, done.depths) for (done,) in completions] == [(done.ids, done.depths) for (done,) in expected]
