"""Policies that compare the model's own signal with a threshold, against a computation by hand."""

import pytest
import torch

import support
from adaponder import ExitThreshold, LearnedGate
from adaponder.policies import RouterThreshold
from policy_support import EXECUTIONS, K, depth_by_hand, padded


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("tau", [0.5, (0.3, 0.6, 0.4), 0.0, 1.0], ids=str)
def test_the_learned_gate_reads_on_while_s_is_at_least_tau(model, tau, execution):
    ids, mask = padded()
    output = model(ids, attention_mask=mask, policy=LearnedGate(tau), execution=execution)
    thresholds = torch.tensor(tau if isinstance(tau, tuple) else (tau,) * (K - 1))
    assert torch.equal(output.depth, depth_by_hand(output.gates.float() >= thresholds, mask))


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_the_router_threshold_reads_on_while_the_router_leans_towards_it(models, execution):
    ids, mask = padded()
    output = models["mor"](ids, attention_mask=mask, policy=RouterThreshold(), execution=execution)
    assert output.depth[mask.bool()].unique().numel() > 1
    assert torch.equal(output.depth, depth_by_hand(output.gates > 0.5, mask))
    assert torch.equal(output.logits, models["mor"](ids, attention_mask=mask, execution=execution).logits)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("q", [0.3, 0.6, 0.9, 1.0])
def test_the_exit_threshold_exits_once_the_exits_add_up_to_it(models, q, execution):
    ids, mask = padded()
    output = models["ouro"](ids, attention_mask=mask, policy=ExitThreshold(q), execution=execution)
    exited = 1.0 - (1.0 - output.gates[..., : K - 1]).cumprod(-1)
    assert torch.equal(output.depth, depth_by_hand(exited < q, mask))


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_at_an_exit_threshold_of_1_nobody_exits_early(execution):
    model = support.tiny("ouro", iterations=K, exit_threshold=1.0)
    torch.nn.init.constant_(model.method.exit.bias, 20.0)  # sure to exit, but for one part in a hundred million
    assert model(support.ids(), execution=execution).depth.unique().tolist() == [K]
