"""The package against a hand-written GPT-NeoX and the paper's equations: values and every gradient."""

import pytest
import reference
import torch

from adaponder import FixedDepth, Objective
from laws import assert_close, make_case
from support import stir, tiny


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("padding", ["none", "both"])
@pytest.mark.parametrize("execution", ["dense", "compact"])
def test_values_and_gradients_equal_the_plain_reference(seed, padding, execution):
    model = tiny("adaponder", iterations=4, seed=seed, embedding_scale=3.0, initial_multiplier=1.5, tau=0.45)
    case = make_case(3, 12, 4, "ragged", padding, seed)
    objective = Objective(ponder_weight=0.3, ponder_fraction=0.35)
    model.zero_grad()
    logits, gates, depth = reference.adaponder(model, case.ids, case.real)
    expected = reference.adaponder_loss(logits, gates, case.ids, case.real, weight=0.3, fraction=0.35)
    expected.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    labels = case.ids.masked_fill(~case.real, -100)
    output = model(case.ids, attention_mask=case.mask, labels=labels, objective=objective, execution=execution)
    output.loss.backward()
    assert torch.equal(output.depth, depth)
    assert depth[case.real].unique().numel() > 1, "the gates must disagree for this to test anything"
    assert_close(output.logits[case.real], logits[case.real], "logits")
    assert_close(output.gates[case.real], gates[case.real], "gates")
    assert_close(output.loss, expected, "loss")
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, wanted[name], f"gradient of {name}")


@pytest.mark.parametrize("reuse", ["kv", "none"])
@pytest.mark.parametrize("execution", ["dense", "compact"])
def test_weaker_reuse_is_the_papers_equations_to_the_letter(reuse, execution):
    """The equations merge keys and values only; without reuse a halted token is computed like the others."""
    model = tiny("adaponder", iterations=4, reuse=reuse, tau=0.45)
    case = make_case(2, 12, 4, "ragged", "none", 1)
    logits, gates, depth = reference.adaponder(model, case.ids, case.real, reuse=reuse)
    output = model(case.ids, execution=execution)
    assert torch.equal(output.depth, depth)
    assert depth.unique().numel() > 1, "the gates must disagree for this to test anything"
    assert_close(output.logits, logits, "logits")
    assert_close(output.gates, gates, "gates")


def test_another_policy_decides_the_mask_alone():
    """The update stays weighted by the gate, also of tokens that the learned rule would halt."""
    case = make_case(2, 9, 4, "ragged", "none", 1)
    expected, _, _ = reference.adaponder(tiny(iterations=4, tau=1e-12), case.ids, case.real)
    assert_close(tiny(iterations=4, tau=0.99)(case.ids, policy=FixedDepth(4)).logits, expected, "logits")


@pytest.mark.parametrize("first", [1.0, 3.0])
def test_ponder_is_ponderlm(first):
    model = tiny("ponder", iterations=4, embedding_scale=4.0, initial_multiplier=first)
    case = make_case(2, 10, 4, "none", "left", 2)
    weights, config = reference.weights(model), model.backbone.config
    expected = reference.ponder(weights, config, case.ids, case.real, steps=3, scale=4.0, first=first)
    for execution in ("dense", "compact"):
        output = model(case.ids, attention_mask=case.mask, execution=execution)
        assert_close(output.logits[case.real], expected[case.real], execution)


def test_gradient_checkpointing_changes_no_gradient():
    case = make_case(2, 9, 4, "ragged", "left", 4)
    gradients = []
    for replay in (False, True):
        for execution in ("dense", "compact"):
            model = stir(tiny("adaponder", iterations=4)).train()
            if replay:
                model.gradient_checkpointing_enable()
            labels = case.ids.masked_fill(~case.real, -100)
            asked = {"policy": case.policy, "objective": Objective(ponder_weight=0.3, ponder_fraction=0.35)}
            model(case.ids, attention_mask=case.mask, labels=labels, execution=execution, **asked).loss.backward()
            gradients.append({name: p.grad for name, p in model.named_parameters()})
    for found in gradients[1:]:
        for name, expected in gradients[0].items():
            assert_close(found[name], expected, f"gradient of {name}")
