"""Policies that measure a prediction, or how far the last iteration moved it, against a computation by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import support
from adaponder import Entropy, FixedDepth, LearnedGate
from adaponder.policies import Change, Confidence, Divergence, Similarity
from adaponder.policies.measures import MeasureThreshold
from policy_support import EXECUTIONS, K, asked, depth_by_hand, padded

RULES: dict[str, type[MeasureThreshold]] = {
    "entropy": Entropy,
    "confidence": Confidence,
    "kl": Divergence,
    "change": Change,
    "similarity": Similarity,
}


def measured_by_hand(rule: type[MeasureThreshold], model, states: tuple[Tensor, ...]) -> Tensor:
    """``[batch, time, K-1]`` from the hidden states after each pass; every token continues after the first where two
    iterations are compared."""
    hidden = torch.stack(states)[:-1]
    p = model.wrapped.logits(hidden).softmax(-1)
    if rule is Entropy:
        return -(p * p.log()).sum(-1).movedim(0, -1)
    if rule is Confidence:
        best = p.sort(-1, descending=True).values
        return (best[..., 0] - best[..., 1]).movedim(0, -1)
    first = torch.full_like(p[:1, ..., 0], -math.inf if rule is Similarity else math.inf)
    if rule is Divergence:
        moved = (p[1:] * (p[1:].log() - p[:-1].log())).sum(-1)
    elif rule is Change:
        moved = (hidden[1:] - hidden[:-1]).norm(dim=-1) / hidden[:-1].norm(dim=-1)
    else:
        moved = torch.cosine_similarity(hidden[1:], hidden[:-1], dim=-1)
    return torch.cat([first, moved]).movedim(0, -1)


def thresholds(model, rule: type[MeasureThreshold], *shares: float) -> tuple[float, ...]:
    """Thresholds that these shares of the tokens pass at the second iteration, and no token meets exactly."""
    ids, mask = padded()
    full = model(ids, attention_mask=mask, policy=FixedDepth(K), output_hidden_states=True)
    measured = measured_by_hand(rule, model, full.hidden_states)[mask.bool()][:, 1]
    return tuple(float(measured.quantile(share)) * 1.0003 for share in shares)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(
    ("rule", "method"),
    [*((rule, "adaponder") for rule in RULES), ("entropy", "ouro"), ("confidence", "mor"), ("kl", "ouro")],
)
def test_a_token_continues_while_its_measure_is_on_the_right_side_of_the_threshold(models, rule, method, execution):
    model, kind, (ids, mask) = models[method], RULES[rule], padded()
    numbers = thresholds(model, kind, *((0.5, 0.7, 0.3) if execution == "dense" else (0.5,) * 3))
    policy = kind(numbers if execution == "dense" else numbers[0])
    output = model(ids, attention_mask=mask, policy=policy, execution=execution, output_hidden_states=True)
    measured, bound = measured_by_hand(kind, model, output.hidden_states), torch.tensor(numbers, dtype=torch.double)
    keep = measured <= bound if kind in (Confidence, Similarity) else measured >= bound
    assert torch.equal(output.depth, depth_by_hand(keep, mask))
    assert output.depth[mask.bool()].unique().numel() > 1


def test_at_the_ends_every_token_is_read_to_the_end_or_halts_as_soon_as_it_can(model):
    ends = {Confidence(1.0): K, Confidence(-1.0): 1, Similarity(-2.0): 2, Divergence(math.inf): 2, Change(math.inf): 2}
    for policy, depth in ends.items():
        assert model(support.ids(), policy=policy).depth.unique().tolist() == [depth], policy


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
