"""Policies that measure a prediction, or its change in the last iteration; test_rows.py computes each by hand."""

import dataclasses

import pytest
import torch

import support
from adaponder import Entropy, LearnedGate
from adaponder.policies import Change, Divergence
from policy_support import K, asked


@pytest.mark.parametrize("rule", [Entropy, Divergence, Change], ids=["entropy", "divergence", "change"])
def test_the_signals_of_half_precision_states_are_computed_in_float32(rule):
    """Thresholds are compared with what float32 sees: bf16 would round entropies to a sixty-fourth of a nat."""
    generator = torch.Generator().manual_seed(0)
    hidden, previous = torch.randn(2, 20, 16, generator=generator).bfloat16()
    head = torch.nn.Linear(16, 61).bfloat16()
    rows = dataclasses.replace(asked(torch.ones(20), iteration=1), hidden=hidden, previous=previous, head=head)
    exact = dataclasses.replace(
        rows, hidden=hidden.double(), previous=previous.double(), head=lambda states: head(states.bfloat16()).double()
    )
    measured = rule.measure(rows)
    assert measured.dtype == torch.float32
    torch.testing.assert_close(measured.double(), rule.measure(exact), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", [Entropy(2.5), Divergence(0.05), LearnedGate(0.5)], ids=["entropy", "kl", "gate"])
def test_the_logits_computed_to_decide_are_as_many_as_the_rule_says(model, policy, monkeypatch):
    rows = []
    logits = type(model.wrapped).logits
    monkeypatch.setattr(type(model.wrapped), "logits", lambda self, hidden: rows.append(hidden) or logits(self, hidden))
    output = model(support.ids(2, 9), policy=policy, execution="compact", output_gates=False)
    spent = sum(hidden[..., 0].numel() for hidden in rows) - 18
    active = [int((output.depth > i).sum()) for i in range(K - 1)]
    assert spent == sum(policy.heads(i) * count for i, count in enumerate(active))
