"""The ledger's books: rows come and go with the tokens that read them, and with nobody else."""

import copy

import pytest
import torch

from adaponder import ForcedDepths, Random
from adaponder.errors import CacheError, InputError
from support import ids, tiny

DEPTHS = torch.tensor([[1, 3, 2, 3, 1, 2, 3], [3, 1, 1, 2, 3, 2, 1]])


def filled(method: str = "adaponder", count: int = 5):
    model = tiny(method, iterations=3)
    policy = {"policy": ForcedDepths(DEPTHS)} if model.method.halts else {}
    with torch.no_grad():
        ledger = model(ids(2, 7)[:, :count], use_cache=True, **policy).past_key_values
    return model, ledger, policy


def go_on(model, ledger, policy, tokens):
    with torch.no_grad():
        return model(tokens, past_key_values=ledger, **policy).logits


@pytest.mark.parametrize("method", ["adaponder", "mor", "pause"])
def test_a_cropped_ledger_equals_one_that_never_had_the_tokens(method):
    model, ledger, policy = filled(method)
    _, short, _ = filled(method, count=3)
    ledger.crop(-2)
    assert ledger.rows == short.rows == int(short.depth.sum())
    assert torch.equal(ledger.depth, short.depth)
    tokens = ids(2, 7)[:, 3:5]
    torch.testing.assert_close(go_on(model, ledger, policy, tokens), go_on(model, short, policy, tokens))


def test_cropping_nothing_everything_and_too_much():
    model, ledger, _ = filled()
    ledger.crop(0)
    assert ledger.get_seq_length() == 5
    ledger.crop(-99)
    assert ledger.get_seq_length() == 0
    assert ledger.rows == 0
    with pytest.raises(CacheError, match="negative"):
        ledger.crop(3)
    with pytest.raises(CacheError, match="empty"):
        _ = model.new_ledger().depth


def test_beams_share_rows_and_the_dead_are_swept():
    model, ledger, policy = filled()
    before, rows = copy.deepcopy(ledger), ledger.rows
    ledger.batch_repeat_interleave(3)
    assert ledger.rows == rows, "copies read the same rows"
    assert torch.equal(ledger.depth, DEPTHS[:, :5].repeat_interleave(3, 0)), "copies stand side by side"
    thrice = {"policy": ForcedDepths(DEPTHS.repeat_interleave(3, 0))}
    tokens = ids(2, 7)[:, 5:6]
    copied = go_on(model, copy.deepcopy(ledger), thrice, tokens.repeat_interleave(3, 0))
    torch.testing.assert_close(copied, go_on(model, before, policy, tokens).repeat_interleave(3, 0))
    ledger.batch_select_indices(torch.tensor([5]))
    assert ledger.rows == int(ledger.depth.sum()), "the first sequence's rows are gone"
    alone = tiny(iterations=3)(ids(2, 7)[1:, :5], use_cache=True, policy=ForcedDepths(DEPTHS[1:])).past_key_values
    single = {"policy": ForcedDepths(DEPTHS[1:])}
    tokens = ids(2, 7)[1:, 5:6]
    torch.testing.assert_close(go_on(model, ledger, single, tokens), go_on(model, alone, single, tokens))


def living(ledger) -> int:
    """Counts the rows that at least one token reads."""
    return int((ledger.table.unique() >= 0).sum())


def test_many_reorderings_do_not_hoard_rows():
    model, beams, steps = tiny(iterations=3), 6, 12
    tokens, policy = ids(beams, 1 + steps), {"policy": Random(0.5)}
    tokens[:, 0] = tokens[0, 0]
    with torch.no_grad():
        ledger = model(tokens[:, :1], use_cache=True, **policy).past_key_values
    kept = tokens[:1, :1]
    for step in range(1, 1 + steps):
        logits = go_on(model, ledger, policy, tokens[:, step : step + 1])
        # One beam goes on, the others die: five rows of six that were written in this step.
        best = step % beams
        kept = torch.cat([kept, tokens[best : best + 1, step : step + 1]], 1)
        ledger.reorder_cache(torch.full((beams,), best))
        assert ledger.rows <= 2 * living(ledger), "dead rows may not outnumber the living"
    torch.testing.assert_close(logits[best, -1], model(kept, **policy).logits[0, -1])


def test_a_forward_that_fails_leaves_the_cache_as_it_was():
    model, ledger, policy = filled()
    expected = go_on(model, copy.deepcopy(ledger), policy, ids(2, 7)[:, 5:6])

    def breaks(seen):
        raise RuntimeError("a policy of poor quality")

    with pytest.raises(RuntimeError, match="poor quality"):
        model(ids(2, 7)[:, 5:6], past_key_values=ledger, policy=breaks)
    assert ledger.get_seq_length() == 5
    torch.testing.assert_close(go_on(model, ledger, policy, ids(2, 7)[:, 5:6]), expected, rtol=0, atol=0)


def test_packed_documents_and_a_cache_are_refused_together():
    numbers = torch.tensor([[0, 0, 1, 1, 1]])
    restarting = torch.tensor([[0, 1, 0, 1, 2]])
    for how in ({"document_ids": numbers}, {"position_ids": restarting}):
        with pytest.raises(InputError, match="document_ids"):
            tiny()(ids(1, 5), use_cache=True, **how)


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_under_autocast_rows_are_kept_as_narrow_as_they_are_computed(family):
    """Rotary angles widen keys to float32; attention narrows them again, and so does the ledger before."""
    model = tiny(family=family, dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        ledger = model(ids(1, 4), use_cache=True).past_key_values
    assert {rows.dtype for store in ledger.stores for rows in store.tensors()} == {torch.bfloat16}


def test_a_change_of_precision_is_named():
    model = tiny(dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        ledger = model(ids(1, 4), use_cache=True).past_key_values
    with pytest.raises(CacheError, match="autocast"):
        model(ids(1, 1), past_key_values=ledger)
