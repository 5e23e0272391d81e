"""Attention with a mask never runs by cuDNN, whose backward returns NaN for it; attention without one may."""

import math

import pytest
import torch
from torch.backends.cuda import cudnn_sdp_enabled

from adaponder.ops.compact_attention import PackedRows
from adaponder.ops.compact_attention import torch as reference
from adaponder.ops.masks import Places, masked_attention, spans_of
from support import ids, tiny

PADDED = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])}
PACKED = {"document_ids": torch.tensor([[0, 0, 1, 1, 1, 2]] * 2)}


def cudnn_allowed(model, *, replay=False, compiles=False, **given) -> set[bool]:
    """Returns whether cuDNN was allowed, in every pass of a training step and its replays."""
    allowed = set()
    if replay:
        model.gradient_checkpointing_enable()
    if compiles:
        model.compile_passes(backend="aot_eager")
    layer = model.backbone.base_model.layers[0]
    hook = layer.attention.register_forward_pre_hook(lambda *_: allowed.add(cudnn_sdp_enabled()))
    try:
        model.train()(ids(2, 6), labels=ids(2, 6), **given).loss.backward()
    finally:
        hook.remove()
    return allowed


@pytest.mark.parametrize(
    ("how", "masked"),
    [({}, PADDED), ({}, PACKED), ({"replay": True}, PADDED), ({"replay": True}, PACKED), ({"compiles": True}, PADDED)],
    ids=["padded", "packed", "padded, replayed", "packed, replayed", "padded, compiled"],
)
def test_a_masked_pass_never_runs_by_cudnn(how, masked):
    assert cudnn_allowed(tiny("adaponder", iterations=2), **masked, **how) == {False}
    assert cudnn_sdp_enabled()


def test_a_graph_holds_the_choice_too():
    graphs = []

    def attend(query, mask):
        with masked_attention():
            return torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)

    given = torch.randn(1, 1, 4, 8), torch.ones(4, 4, dtype=torch.bool).tril()
    torch.compile(attend, backend=lambda graph, _: graphs.append(graph.code) or graph, fullgraph=True)(*given)
    chosen = graphs[0].split("scaled_dot_product_attention(")[0]
    assert "EFFICIENT_ATTENTION" in chosen
    assert "CUDNN" not in chosen


def test_a_plain_causal_pass_may_run_by_cudnn():
    assert cudnn_allowed(tiny("adaponder")) == {True}


def test_the_last_of_overlapping_contexts_restores_the_choice_also_after_an_error():
    other = masked_attention()
    with masked_attention():
        other.__enter__()
    with pytest.raises(ZeroDivisionError), masked_attention():
        raise ZeroDivisionError
    assert not cudnn_sdp_enabled()
    other.__exit__(None, None, None)
    assert cudnn_sdp_enabled()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_under_a_mask_are_finite_where_cudnn_returns_nan(dtype):
    """704 tokens, all scores near -120: what cuDNN cannot do (NaN in the gradient of the queries)."""
    length, size = 704, 64
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(length, 1, size, generator=generator) * scale for scale in (0.1, 0.1, 1.0))
    query[..., 0], key[..., 0] = 1.0, -120 * math.sqrt(size)
    given = [query, *(x.transpose(0, 1)[None] for x in (key, value))]
    slot = torch.arange(length, device="cuda")[None]
    rows = PackedRows(torch.zeros(length, dtype=torch.long, device="cuda"), Places(slot, slot), Places(slot, slot))

    def gradients(dtype):
        leaves = [x.to("cuda", dtype).detach().clone().requires_grad_() for x in given]
        reference.compact_attention(*leaves, rows).square().sum().backward()
        return [leaf.grad.double() for leaf in leaves]

    given = [x.to(dtype).double() for x in given]  # rounded once, for both
    for found, true in zip(gradients(dtype), gradients(torch.float64), strict=True):
        assert found.isfinite().all()
        # The first part of a query meets a constant: its true gradient is 0, a sum of large numbers that cancel.
        found, true = found[..., 1:], true[..., 1:]
        assert (found - true).norm() <= 0.05 * true.norm()


def test_spans_name_the_first_and_the_last_slot_of_each_document():
    document = torch.tensor([[7, 7, 2, 2, 7], [1, 2, 3, 3, 3], [4, 4, 4, 4, 4]])
    ids, first, last = spans_of(document)
    assert torch.equal(ids, document)
    assert first.tolist() == [[0, 0, 2, 2, 0], [0, 1, 2, 2, 2], [0] * 5]
    assert last.tolist() == [[4, 4, 3, 3, 4], [0, 1, 4, 4, 4], [4] * 5]
