"""Dense passes with padding or packed documents, whose attention takes rows instead of a mask where kernels run."""

import pytest
import torch

from adaponder import Objective
from adaponder.backbones.wrapper import Backbone
from adaponder.execution import dense
from adaponder.policies import ForcedDepths
from kernel_support import calm
from packed_support import DEPTHS, PADDED, assert_same
from support import METHODS, ids, tiny

DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 1], [3, 3, 0, 0, 3, 3]])
MASKED = [
    {"document_ids": DOCUMENTS},
    {"attention_mask": PADDED},
    {"document_ids": DOCUMENTS, "attention_mask": PADDED},
]


def results(model, given):
    model.zero_grad()
    objective = Objective(ponder_weight=0.3, ponder_fraction=0.3)
    policy = {"policy": ForcedDepths(DEPTHS[0])} if model.method.halts else {}
    loss = model(ids(2, 6), targets=ids(2, 6, seed=1), execution="dense", objective=objective, **policy, **given).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


@pytest.fixture
def by_rows(monkeypatch):
    """Switches to rows as if there were kernels, and returns the list of whether each pass with a mask took them."""
    taken, as_rows = [], dense._as_rows
    monkeypatch.setattr(Backbone, "masks_by_kernels", lambda self, x: True)
    monkeypatch.setattr(dense, "_as_rows", lambda key: taken.append(True) or as_rows(key))
    return taken


@pytest.mark.parametrize("method", [method for method in METHODS if method not in ("pause", "vanilla")])
def test_rows_in_place_of_a_mask_change_nothing(method, by_rows, monkeypatch):
    model = tiny(method, "llama", iterations=4).train()
    for given in MASKED:
        rows = results(model, given)
        with monkeypatch.context() as masks:
            masks.setattr(Backbone, "masks_by_kernels", lambda self, x: False)
            expected = results(model, given)
        assert_same(rows, expected)
    assert len(by_rows) >= len(MASKED)


@pytest.mark.compiler
def test_compiled_passes_take_rows_too(by_rows):
    model = tiny("adaponder", iterations=4).train()
    expected = [results(model, given) for given in MASKED]
    torch._dynamo.reset()
    model.compile_passes(by="layer", backend="aot_eager", fullgraph=True)
    for given, theirs in zip(MASKED, expected, strict=True):
        assert_same(results(model, given), theirs)


def test_a_cpu_masks_in_torch():
    model = tiny("adaponder", dtype=torch.bfloat16)
    assert not model.wrapped.masks_by_kernels(torch.zeros(1, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_masked_training_by_kernels_is_no_worse_than_by_masks(compiled, monkeypatch):
    torch.compiler.reset()
    model = calm(tiny("adaponder", iterations=3, dtype=torch.float32)).cuda().train()
    tokens = ids(4, 60).cuda()
    document = (torch.rand(4, 60, generator=torch.Generator().manual_seed(1)) < 0.1).cumsum(1).cuda()
    padding = (torch.arange(60) >= torch.tensor([[0], [5], [30], [1]])).long().cuda()
    # A gate near tau could halt a token in one precision alone, which changes gradients more than rounding does.
    depths = ForcedDepths(1 + ids(4, 60, seed=2).cuda() % 3)
    masks = ({"document_ids": document}, {"attention_mask": padding})
    for given in masks[:1] if compiled else masks:

        def gradients(low, kernels, given=given):
            monkeypatch.setattr(Backbone, "masks_by_kernels", lambda self, x: kernels)
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=low):
                loss = model(
                    tokens, targets=tokens, policy=depths, execution="dense", output_logits=False, **given
                ).loss
            loss.backward()
            return torch.cat([weight.grad.flatten() for weight in model.backbone.parameters()]).double()

        model.wrapped.compile_options = None
        truth, masked = gradients(False, False), gradients(True, False)
        if compiled:
            model.compile_passes()
        rows = gradients(True, True)
        off = [float(1 - torch.nn.functional.cosine_similarity(found, truth, dim=0)) for found in (rows, masked)]
        assert off[0] <= 2 * off[1] + 1e-4
