"""Law 2: dense-masked, compact and cached execution are one function, for any halt pattern."""

from functools import lru_cache
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaponder import FixedDepth, Objective
from laws import assert_close, assert_one_function, make_case
from support import ALIKE, HALTING, METHODS, tiny

cached_tiny = lru_cache(maxsize=None)(tiny)
patterns = st.sampled_from(["all", "none", "alternating", "ragged"])
paddings = st.sampled_from(["none", "left", "right", "both"])


def families(method: str, first: str, *others: str) -> tuple[str, ...]:
    return (first,) if method in ALIKE else (first, *others)


@st.composite
def cases(draw, longest: int = 40, deepest: int = 5):
    iterations = draw(st.integers(1, deepest))
    batch, time = draw(st.integers(1, 3)), draw(st.integers(1, longest))
    return iterations, make_case(batch, time, iterations, draw(patterns), draw(paddings), draw(st.integers(0, 10_000)))


# Examples per case: a method, a family.
few = settings(max_examples=7)
chunkings = st.lists(st.integers(1, 7), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("method", "family"),
    [
        *((method, "llama") for method in METHODS),
        *(("adaponder", family) for family in ("gpt_neox", "mistral", "gpt2")),
    ],
)
@few
@given(drawn=cases(), chunks=chunkings)
def test_every_method_is_one_function(method, family, drawn, chunks):
    iterations, case = drawn
    assert_one_function(cached_tiny(method, family, iterations=iterations), case, chunks)


@pytest.mark.parametrize(
    ("method", "family"), [("adaponder", "gpt_neox"), ("adaponder", "llama"), ("mor", "gpt_neox"), ("ouro", "gpt_neox")]
)
@few
@given(drawn=cases(longest=20), chunks=chunkings)
def test_learned_gates_decide_alike_however_the_model_is_run(method, family, drawn, chunks):
    iterations, case = drawn
    model = cached_tiny(method, family, iterations=iterations)
    assert_one_function(model, case, chunks, policy=model.method.default_policy(training=False))


@pytest.mark.parametrize("family", ["gpt_neox", "gemma3"])
@few
@given(drawn=cases(longest=20, deepest=4), chunks=chunkings)
def test_an_attention_that_is_not_ours_gives_the_same_function(family, drawn, chunks):
    """Rows are then not packed: sequences with equally many rows share a rectangle."""
    iterations, case = drawn
    with patch("adaponder.backbones.wrapper.Backbone.packs", return_value=False):
        assert_one_function(cached_tiny("adaponder", family, iterations=iterations), case, chunks)


OPTIONS = [("reuse", "kv"), ("reuse", "none"), ("shared_gate", True), ("gate_width", 0), ("expectation_top_k", 5)]


@pytest.mark.parametrize("option", [*OPTIONS, ("embedding_scale", 4.0)], ids=lambda option: "-".join(map(str, option)))
@few
@given(drawn=cases(longest=14, deepest=4), chunks=chunkings)
def test_options_keep_the_function_one(option, drawn, chunks):
    iterations, case = drawn
    assert_one_function(cached_tiny("adaponder", "gpt_neox", iterations=iterations, **dict([option])), case, chunks)


@pytest.mark.parametrize("method", HALTING)
@few
@given(drawn=cases(longest=12, deepest=4))
def test_compact_gradients_equal_dense_gradients(method, drawn):
    iterations, case = drawn
    model = cached_tiny(method, "gpt_neox", iterations=iterations)
    objective = Objective(ponder_weight=0.7, ponder_fraction=0.4)
    gradients = {}
    for execution in ("dense", "compact"):
        model.zero_grad(set_to_none=True)
        asked = {"attention_mask": case.mask, "labels": case.ids.masked_fill(~case.real, -100), "policy": case.policy}
        loss = model(case.ids, **asked, execution=execution, objective=objective).loss
        loss.backward()
        gradients[execution] = {"loss": loss.detach()} | {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in model.named_parameters()
        }
    for name, expected in gradients["dense"].items():
        assert_close(gradients["compact"][name], expected, f"gradient of {name}")


@pytest.mark.parametrize("method", HALTING)
def test_the_same_parameters_have_gradients_though_every_token_halts_at_once(method):
    """Processes wait for each other's gradients, so a gradient of 0 must exist."""
    model, ids = cached_tiny(method, "gpt_neox", iterations=3), torch.arange(12).view(2, 6)
    learn = {}
    for how in ({"execution": "dense"}, {"execution": "compact"}, {"use_cache": True}):
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids, policy=FixedDepth(1), objective=Objective(), **how).loss.backward()
        learn[str(how)] = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    dense, *others = learn.values()
    assert others == [dense, dense], learn


@pytest.mark.parametrize("method", HALTING)
def test_gradients_flow_through_the_rows_of_a_ledger(method):
    """Reused rows are not detached: neither from pass to pass, nor from one forward to the next."""
    model, case = tiny(method, iterations=4), make_case(2, 9, 4, "ragged", "left", 4)

    def forward(start: int, end: int, **more):
        return model(case.ids[:, start:end], attention_mask=case.mask[:, :end], policy=case.policy, **more)

    def in_parts() -> torch.Tensor:
        first = forward(0, 5, use_cache=True)
        return torch.cat([first.logits, forward(5, 9, past_key_values=first.past_key_values).logits], 1)

    def gradients(logits: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        (logits[case.real] * torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)).sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    expected = gradients(forward(0, 9, execution="dense").logits)
    for what, logits in (("one forward", forward(0, 9, use_cache=True).logits), ("two forwards", in_parts())):
        found = gradients(logits)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(found[name], value, f"{what}: gradient of {name}")


def test_packed_documents_equal_documents_alone():
    torch.manual_seed(1)
    documents = [torch.randint(61, (1, n)) for n in (5, 1, 8)]
    packed = torch.cat(documents, 1)
    numbers = torch.cat([torch.full_like(doc, i) for i, doc in enumerate(documents)], 1)
    restarting = torch.cat([torch.arange(doc.shape[1])[None] for doc in documents], 1)
    for method in METHODS:
        for family in families(method, "gpt_neox", "gemma3"):
            model = tiny(method, family)
            alone = [model(doc) for doc in documents]
            for execution in ("dense", "compact"):
                for how in ({"document_ids": numbers}, {"position_ids": restarting}):
                    together = model(packed, execution=execution, **how)
                    assert_close(together.logits, torch.cat([out.logits for out in alone], 1), f"{method} {family}")
                    assert torch.equal(together.depth, torch.cat([out.depth for out in alone], 1))


@pytest.mark.parametrize("method", METHODS)
def test_padding_changes_nothing(method):
    for family in families(method, "gpt_neox", "mistral", "opt"):
        model = tiny(method, family)
        single = torch.randint(61, (1, 9), generator=torch.Generator().manual_seed(2))
        alone = model(single)
        for left, right in ((4, 0), (0, 3), (2, 2)):
            padded = torch.nn.functional.pad(single, (left, right), value=7)
            mask = torch.nn.functional.pad(torch.ones_like(single), (left, right))
            for execution in ("dense", "compact"):
                output = model(padded, attention_mask=mask, execution=execution)
                assert_close(output.logits[:, left : left + 9], alone.logits, f"{family} padded {left}, {right}")
                assert torch.equal(output.depth[:, left : left + 9], alone.depth)
                assert output.depth.sum() == alone.depth.sum(), "padding has depth"
