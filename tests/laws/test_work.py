"""Skipping is real: rows computed are the sum of the tokens' depths, and so are the rows a ledger holds."""

import pytest
import torch

from adaponder import Random
from laws import counted_rows, make_case
from support import FAMILIES, METHODS, ids, tiny


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pattern", ["all", "none", "alternating", "ragged"])
def test_compact_prefill_computes_exactly_the_sum_of_depths(family, pattern):
    model = tiny("adaponder", family, iterations=4)
    case = make_case(3, 10, 4, pattern, "both", 11)
    with counted_rows(model) as rows:
        output = model(case.ids, attention_mask=case.mask, policy=case.policy)
    assert rows == [int(output.depth.sum())] * len(rows)
    assert int(output.depth.sum()) == int(case.depths[case.real].sum())


@pytest.mark.parametrize("method", METHODS)
def test_decoding_computes_and_keeps_exactly_the_sum_of_depths(method):
    model = tiny(method, iterations=4)
    options = {"policy": Random(0.5)} if model.method.halts else {}
    prompt, mask = ids(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    with counted_rows(model) as rows:
        options |= {"attention_mask": mask, "max_new_tokens": 6, "pad_token_id": 0}
        output = model.generate(prompt, return_dict_in_generate=True, **options)
    ledger = output.past_key_values
    assert ledger.depth.shape == (2, 12), "the last new token is returned unread"
    assert rows == [int(ledger.depth.sum())] * len(rows)
    assert ledger.rows == int(ledger.depth.sum())
