"""Attention through an index: every query against its own softmax, written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from adaponder.ops.ledger_attention import Cohort, LedgerRows
from adaponder.ops.ledger_attention import torch as reference
from ledger_support import Case, case


def written_out(query: Tensor, keys: Tensor, values: Tensor, rows: LedgerRows, window: int | None) -> Tensor:
    """One query, one head and one key at a time."""
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


CASES = [
    {},
    {"seed": 1, "heads": 4, "key_heads": 2, "size": 6, "window": 3},
    {"seed": 2, "heads": 6, "key_heads": 2, "size": 5, "value_size": 3, "absent": 0.3},
    {"seed": 3, "alone": 0, "cohorts": 3},
    {"seed": 4, "alone": 9, "cohorts": 0, "window": 1},
]


@pytest.mark.parametrize("given", CASES, ids=range(len(CASES)))
def test_a_query_reads_the_rows_its_index_names(given):
    made: Case = case(**given)
    truth = written_out(made.query, made.keys, made.values, made.rows, made.window)
    mixed = reference.ledger_attention(made.query, made.keys, made.values, made.rows, window=made.window)
    torch.testing.assert_close(mixed, truth, rtol=1e-12, atol=1e-12)


def test_rows_in_chunks_equal_rows_at_once(monkeypatch):
    made = case(seed=5, alone=7)
    whole = reference.ledger_attention(made.query, made.keys, made.values, made.rows)
    monkeypatch.setattr(reference, "GATHERED", 1)
    torch.testing.assert_close(
        reference.ledger_attention(made.query, made.keys, made.values, made.rows), whole, rtol=1e-14, atol=1e-14
    )


def test_a_query_that_sees_nothing_gets_zeros():
    made = case(seed=6, alone=2, cohorts=0)
    rows = made.rows._replace(slot=torch.tensor([-1, int(made.rows.slot[1])]))
    mixed = reference.ledger_attention(made.query, made.keys, made.values, rows)
    assert not mixed[0].any()
    assert mixed[1].all()


def test_reach_never_exceeds_the_index():
    rows = case(seed=7).rows
    assert rows._replace(longest=10_000).reach == rows._replace(longest=None).reach == rows.index.shape[2]
    assert rows._replace(longest=2).reach == 2
    assert Cohort(0, 2, 1, 0, 5).last_slot == 5
