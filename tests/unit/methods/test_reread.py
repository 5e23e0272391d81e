"""Reread: PonderNet's recurrence with the losses, random halts and gates of anytime."""

import pytest
import torch

from adaponder import FixedDepth, ForcedDepths, Objective
from support import ids, tiny

K = 3


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_at_any_depths_it_computes_what_pondernet_computes_there(scale):
    reread = tiny("reread", iterations=K, state_scale=scale).eval()
    pondernet = tiny("pondernet", iterations=K, state_scale=scale).eval()
    pondernet.backbone.load_state_dict(reread.backbone.state_dict())
    tokens = ids()
    mixed = ForcedDepths(torch.randint(1, K + 1, tokens.shape, generator=torch.Generator().manual_seed(1)))
    for policy in (*map(FixedDepth, range(1, K + 1)), mixed):
        assert torch.equal(reread(tokens, policy=policy).logits, pondernet(tokens, policy=policy).logits)


def test_its_facts_are_those_of_anytime_without_the_vocabulary():
    reread, anytime = tiny("reread").method, tiny("anytime").method
    assert not reread.mixes_vocabulary
    assert anytime.mixes_vocabulary
    assert reread.gates_apart
    assert type(reread.default_policy(training=True)) is type(anytime.default_policy(training=True))
    assert not reread.can_be_exported()


def test_gates_teach_the_backbone_nothing():
    model, tokens = tiny("reread", iterations=K).train(), ids()
    term = model(tokens, labels=tokens, policy=FixedDepth(K), objective=Objective()).terms["lookahead"]
    named = dict(model.named_parameters())
    found = torch.autograd.grad(term, list(named.values()), allow_unused=True)
    learning = {name for name, grad in zip(named, found, strict=True) if grad is not None and bool(grad.any())}
    assert learning == {name for name in named if name.startswith("method.")}
