"""Attention with a mask never runs by cuDNN, whose backward returns NaN for it; attention without one may."""

import pytest
import torch
from torch.backends.cuda import cudnn_sdp_enabled

from adaponder.ops.masks import masked_attention
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
