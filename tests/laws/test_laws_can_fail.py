"""Each law is held against a deliberate mistake: a check that cannot fail proves nothing."""

import pytest
import torch
from test_against_the_paper import test_values_and_gradients_equal_the_plain_reference as against_the_paper
from test_work import test_compact_prefill_computes_exactly_the_sum_of_depths as prefill_work

from adaponder.backbones.views import DenseView, GridView
from adaponder.execution.base import Execution
from adaponder.execution.compact import Packed
from adaponder.execution.ledger import Ledger
from laws import assert_causal_everywhere, assert_one_function, assert_static_after_halting, make_case
from support import tiny

CASE = make_case(2, 9, 4, "ragged", "none", 3)


def model():
    return tiny("adaponder", iterations=4)


def test_an_inverted_merge_mask_is_caught(monkeypatch):
    original = DenseView.__init__

    def inverted(self, layers, *, previous, active):
        original(self, layers, previous=previous, active=None if active is None else ~active)

    monkeypatch.setattr(DenseView, "__init__", inverted)
    with pytest.raises(AssertionError, match="compact"):
        assert_one_function(model(), CASE)
    with pytest.raises(AssertionError):
        against_the_paper(0, "none", "dense")


def test_a_hidden_state_that_is_not_frozen_is_caught(monkeypatch):
    monkeypatch.setattr(Execution, "freeze", lambda self, new, old: new)
    for execution in ("dense", "compact"):
        with pytest.raises(AssertionError, match="moved"):
            assert_static_after_halting(model(), CASE, execution)
        with pytest.raises(AssertionError):
            against_the_paper(0, "none", execution)


def test_a_gate_shifted_by_one_iteration_is_caught(monkeypatch):
    right = Execution.gate
    monkeypatch.setattr(Execution, "gate", lambda self, gates, values: right(self, [gates[0], *gates[:-1]], values))
    for execution in ("dense", "compact"):
        with pytest.raises(AssertionError):
            against_the_paper(0, "none", execution)


def test_a_ledger_read_one_iteration_late_is_caught(monkeypatch):
    original = Ledger.write

    def late(self, sequence, slot, lanes, iteration):
        original(self, sequence, slot, lanes, iteration)
        return self.table[lanes, :, max(0, iteration - 1)]

    monkeypatch.setattr(Ledger, "write", late)
    with pytest.raises(AssertionError):
        assert_one_function(model(), CASE)


def test_detached_rows_are_caught(monkeypatch):
    original = GridView._put
    monkeypatch.setattr(
        GridView, "_put", lambda self, new, old: original(self, new, None if old is None else old.detach())
    )
    with pytest.raises(AssertionError, match="gradient"):
        against_the_paper(0, "none", "compact")


def test_a_token_that_comes_back_is_caught(monkeypatch):
    def revive(self, keep):
        self.active = keep & self.tokens.real

    monkeypatch.setattr(Execution, "_halt", revive)
    # Forced depths never ask for a revival; a policy that flickers does.
    flickering = make_case(1, 6, 4, "none", "none", 1)
    flickering.depths = torch.tensor([[2, 1, 2, 1, 2, 1]])
    monkeypatch.setattr(
        type(flickering), "policy", property(lambda case: lambda seen: seen.position % 2 == seen.iteration % 2)
    )
    with pytest.raises(AssertionError):
        assert_static_after_halting(model(), flickering, "dense")


def test_looking_ahead_is_caught():
    def greedy(seen):
        return seen.gate >= seen.gate.mean(-1, keepdim=True)

    with pytest.raises(AssertionError, match="before the change"):
        assert_causal_everywhere(model(), 9, policy=greedy, execution="dense")


def test_computing_a_halted_row_is_caught(monkeypatch):
    monkeypatch.setattr(Packed, "computed", lambda self: self.tokens.real)
    with pytest.raises(AssertionError):
        prefill_work("gpt_neox", "ragged")
