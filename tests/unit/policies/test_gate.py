"""Tests the exit threshold on a model; test_rows.py computes every rule by hand."""

import pytest
import torch

import support
from adaponder import ExitThreshold
from policy_support import EXECUTIONS, K, padded


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("q", [0.3, 0.6, 0.9, 1.0])
def test_the_exit_threshold_exits_once_the_exits_add_up_to_it(models, q, execution):
    ids, mask = padded()
    output = models["ouro"](ids, attention_mask=mask, policy=ExitThreshold(q), execution=execution)
    exited = 1.0 - (1.0 - output.gates[..., : K - 1]).cumprod(-1)
    assert torch.equal(output.depth, mask * (1 + (exited < q).long().cumprod(-1).sum(-1)))


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_at_an_exit_threshold_of_1_nobody_exits_early(execution):
    model = support.tiny("ouro", iterations=K, exit_threshold=1.0)
    torch.nn.init.constant_(model.method.exit.bias, 20.0)  # sure to exit, but for one part in a hundred million
    assert model(support.ids(), execution=execution).depth.unique().tolist() == [K]
