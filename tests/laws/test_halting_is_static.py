"""Law 3: halting is monotone, and a halted token's keys, values and hidden state are those of its last iteration."""

import pytest
import torch

from adaponder import ForcedDepths
from laws import assert_static_after_halting, make_case
from support import HALTING, tiny


@pytest.mark.parametrize("method", HALTING)
@pytest.mark.parametrize("execution", ["dense", "compact"])
@pytest.mark.parametrize("pattern", ["all", "none", "alternating", "ragged"])
def test_a_halted_token_never_moves_again(method, execution, pattern):
    model = tiny(method, "llama", iterations=4)
    assert_static_after_halting(model, make_case(3, 11, 4, pattern, "both", 7), execution)


@pytest.mark.parametrize("method", ["adaponder", "ouro", "act", "pondernet", "anytime", "relay", "reread"])
def test_the_row_read_is_the_last_one_written(method):
    depths = torch.tensor([[1, 4, 2, 3, 1, 2]])
    ledger = tiny(method, iterations=4)(depths, policy=ForcedDepths(depths), use_cache=True).past_key_values
    for slot, depth in enumerate(depths[0].tolist()):
        rows = ledger.table[0, slot].tolist()
        assert len(set(rows[:depth])) == depth, "each iteration up to the depth has a row of its own"
        assert rows == [rows[min(i, depth - 1)] for i in range(4)], "later iterations read the last row"
    assert ledger.rows == int(depths.sum())


def test_in_mor_a_halted_token_vanishes():
    depths = torch.tensor([[1, 4, 2, 3]])
    ledger = tiny("mor", iterations=4)(depths, policy=ForcedDepths(depths), use_cache=True).past_key_values
    present = ledger.table[0] >= 0
    assert torch.equal(present, torch.arange(4) < depths[0][:, None])


def test_a_policy_cannot_revive_a_token():
    def flicker(seen):
        return seen.position % 2 == seen.iteration % 2

    output = tiny(iterations=4)(torch.arange(8)[None], policy=flicker, execution="dense")
    assert output.depth.tolist() == [[2, 1, 2, 1, 2, 1, 2, 1]]


def test_kv_only_reuse_moves_the_hidden_state_and_skipping_it_needs_consent():
    case = make_case(2, 9, 4, "ragged", "none", 3)
    model = tiny(iterations=4, reuse="kv")
    exact = model(case.ids, policy=case.policy)
    with pytest.warns(UserWarning, match="allow_mismatch"):
        skipped = model(case.ids, policy=case.policy, allow_mismatch=True, execution="compact")
    assert torch.equal(exact.depth, skipped.depth)
    assert not torch.allclose(exact.logits, skipped.logits), "kv-only reuse moves halted tokens' hidden states"
    frozen = tiny(iterations=4, reuse="state")(case.ids, policy=case.policy)
    torch.testing.assert_close(skipped.logits, frozen.logits, rtol=0, atol=1e-12)
