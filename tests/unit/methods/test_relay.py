"""Relay: Ouro's recurrence with the losses, random halts and gates of anytime."""

import torch

from adaponder import FixedDepth, ForcedDepths, Objective
from support import ids, tiny

K = 3


def states_of(model, **options) -> list[torch.Tensor]:
    states: list[torch.Tensor] = []
    model(ids(), on_iteration=lambda each: states.append(each.hidden), **options)
    return states


def test_at_any_depths_it_computes_what_ouro_computes_there():
    relay = tiny("relay", iterations=K).eval()
    ouro = tiny("ouro", iterations=K).eval()
    ouro.backbone.load_state_dict(relay.backbone.state_dict())
    tokens = ids()
    mixed = ForcedDepths(torch.randint(1, K + 1, tokens.shape, generator=torch.Generator().manual_seed(1)))
    for policy in (*map(FixedDepth, range(1, K + 1)), mixed):
        assert torch.equal(relay(tokens, policy=policy).logits, ouro(tokens, policy=policy).logits)


def test_states_are_handed_on_whatever_they_predict():
    """Another head changes every prediction, and no state that a later iteration reads; anytime's states change."""
    for method, same in (("relay", True), ("anytime", False)):
        model = tiny(method, iterations=K).eval()
        before = states_of(model, policy=FixedDepth(K))
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(-3.0)
        after = states_of(model, policy=FixedDepth(K))
        assert torch.equal(before[-1], after[-1]) is same
        assert not torch.equal(before[0], before[-1])


def test_other_gates_leave_the_backbones_gradient_as_it_is():
    model, tokens = tiny("relay", iterations=K).train(), ids()
    found = []
    for _ in range(2):
        model.zero_grad()
        model(tokens, labels=tokens, policy=FixedDepth(K), objective=Objective()).loss.backward()
        grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        found.append(
            {part: {n: g for n, g in grads.items() if n.startswith("method.") is part} for part in (True, False)}
        )
        with torch.no_grad():
            for gate in model.method.gates.parameters():
                gate.mul_(-0.5)
    assert all(torch.equal(found[0][False][name], found[1][False][name]) for name in found[0][False])
    assert all((grad != 0).any() for grad in found[0][True].values())
    assert any(not torch.equal(found[0][True][name], found[1][True][name]) for name in found[0][True])


def test_it_mixes_no_vocabulary():
    assert not tiny("relay").method.mixes_vocabulary
    assert tiny("anytime").method.mixes_vocabulary
