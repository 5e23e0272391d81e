"""Policies that compare the model's own signal with a threshold, against a computation by hand."""

import math

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


def test_the_learned_gate_with_the_configured_tau_is_the_default(model):
    ids, mask = padded()
    by_default = model(ids, attention_mask=mask)
    by_name = model(ids, attention_mask=mask, policy=LearnedGate(model.config.tau))
    assert by_default.depth.unique().numel() > 2
    assert torch.equal(by_default.depth, by_name.depth)
    assert torch.equal(by_default.logits, by_name.logits)


def test_the_gate_that_no_probability_opens_halts_everybody(model):
    assert model(support.ids(), policy=LearnedGate(math.inf)).depth.unique().tolist() == [1]
    assert model(support.ids(), policy=LearnedGate((0.0, math.inf, 0.0))).depth.unique().tolist() == [2]


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
