"""Compact execution with a constant number of rows in each pass: the same results, no shape that depends on data."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from adaponder import Objective
from adaponder.backbones import attention
from adaponder.errors import InputError
from adaponder.policies import ForcedDepths
from packed_support import DEPTHS, PADDED, assert_same
from support import HALTING, ids, stock, tiny, wrap

WAITS = (
    "aten.nonzero.default",
    "aten._local_scalar_dense.default",
    "aten.masked_select.default",
    "aten._unique2.default",
)


class NeverWaiting(TorchDispatchMode):
    """Raises where a GPU would make the host wait: a result whose shape depends on data, or a number for Python."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert str(function) not in WAITS
        indices = args[1] if str(function).startswith(("aten.index.Tensor", "aten.index_put")) else ()
        assert not any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)
        return function(*args, **(kwargs or {}))


def asked(depths):
    objective = Objective(ponder_weight=0.3, ponder_fraction=0.3)
    how = {"targets": ids(2, 6, seed=1), "output_logits": False, "objective": objective}
    return how if depths is None else how | {"policy": ForcedDepths(depths)}


def rows_of(depths, spare=0):
    return tuple(int((depths > done).sum()) + spare for done in (1, 2, 3))


def results(model, execution, depths, **given):
    model.zero_grad()
    output = model(ids(2, 6), execution=execution, **asked(depths), **given)
    output.loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return [output.loss.detach(), output.depth, *gradients]


@pytest.mark.parametrize("spare", [0, 3, 20])
@pytest.mark.parametrize("method", [*HALTING, "ponder"])
def test_padding_rows_change_nothing(method, spare):
    model = tiny(method, iterations=4).train()
    for depths in (*DEPTHS, torch.ones_like(DEPTHS[0])) if method in HALTING else (None,):
        rows = (12, 12, 12) if depths is None else rows_of(depths, spare)
        assert_same(results(model, rows, depths), results(model, "dense", depths))


@pytest.mark.parametrize(
    "given", [{"document_ids": torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 2, 2]])}, {"attention_mask": PADDED}]
)
def test_padding_rows_change_nothing_beside_documents_or_padding(given):
    model = tiny("adaponder", "llama", iterations=4).train()
    for depths in DEPTHS:
        compact = results(model, rows_of(depths, 2), depths, **given)
        assert_same(compact, results(model, "dense", depths, **given))


@pytest.mark.compiler
def test_a_compiled_pass_with_padding_rows_is_the_same():
    model = wrap(stock(num_hidden_layers=3), iterations=4).train()
    expected = [results(model, "dense", depths) for depths in DEPTHS]
    torch._dynamo.reset()
    model.compile_passes(by="layer", backend="aot_eager", fullgraph=True)
    for depths, theirs in zip(DEPTHS, expected, strict=True):
        for spare in (1, 2):
            assert_same(results(model, rows_of(depths, spare), depths), theirs)


def test_a_constant_number_of_rows_never_waits_for_the_device(monkeypatch):
    """Kernels need no count; the attention that a CPU runs does, and is left out."""
    model, plain = tiny(iterations=4).train(), attention.compact_attention

    def hidden(*arguments, **named):
        with _disable_current_modes():
            return plain(*arguments, **named)

    monkeypatch.setattr(attention, "compact_attention", hidden)
    monkeypatch.setattr(ForcedDepths, "check", lambda *_: None)
    monkeypatch.setattr("adaponder.execution.tokens._is_readable", lambda values: False)
    rows = rows_of(DEPTHS[0], 1)
    with NeverWaiting():
        results(model, rows, DEPTHS[0])
    with pytest.raises(AssertionError), NeverWaiting():
        results(model, "compact", DEPTHS[0])


def test_too_few_rows_show_in_the_depths():
    model, depths = tiny(iterations=4).train(), DEPTHS[0]
    counts = rows_of(depths)
    for short in range(3):
        rows = tuple(count - (place == short) for place, count in enumerate(counts))
        depth = model(ids(2, 6), execution=rows, **asked(depths)).depth
        assert int((depth > short + 1).sum()) == counts[short] > rows[short]


def test_rows_that_do_not_fit_the_model_are_refused():
    model = tiny(iterations=4)
    for rows, more in (((3, 3), {}), ((3, 3, 3), {"use_cache": True})):
        with pytest.raises(InputError, match="execution"):
            model(ids(2, 6), execution=rows, **more)
    model.set_attn_implementation("eager")
    with pytest.raises(InputError, match="execution"):
        model(ids(2, 6), execution=(3, 3, 3))


def test_a_pass_computes_as_many_rows_as_it_is_given():
    model, shapes = tiny(iterations=4).train(), []
    layer = model.backbone.base_model.layers[0]
    layer.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape[:2])))
    results(model, (12, 9, 5), DEPTHS[0])
    assert shapes == [(2, 6), (1, 12), (1, 9), (1, 5)]
