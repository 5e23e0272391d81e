"""Training with the halts of one's own gates: who decides where, and what each sequence then teaches."""

import pytest
import torch
from torch import nn

from adaponder import AdaPonderForCausalLM, FixedDepth, LearnedGate, Objective
from adaponder.policies import GateOrChance, RandomRates, sequence_seeds
from support import ids, tiny

K, TAU, PRIOR = 4, 0.5, 3.0
EXECUTIONS = ("dense", "compact")
POLICY = GateOrChance(0.5, TAU, PRIOR)
SEEDS = torch.arange(4, 10)
GATED = POLICY.by_gate(SEEDS)


def own(**options) -> AdaPonderForCausalLM:
    model = tiny("anytime", iterations=K, tau=TAU, halt_prior=PRIOR, gate_share=0.5, **options).train()
    for parameter in model.method.parameters():
        parameter.data *= 0.3  # no gate is so sure that 1 - s is rounded
    return model


def test_the_seeds_here_have_sequences_of_both_kinds_and_many_have_the_share():
    assert 1 < int(GATED.sum()) < 5
    many = sequence_seeds(3, torch.arange(4000))
    for share in (0.0, 0.2, 1.0):
        assert float(GateOrChance(share, TAU, PRIOR).by_gate(many).double().mean()) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_each_sequence_is_halted_by_its_own_rule_alone(execution):
    model, tokens = own(), ids(6, 16)
    mixed = model(tokens, policy=POLICY, seed=SEEDS, execution=execution).depth
    gate = model(tokens, policy=LearnedGate(TAU), execution=execution).depth
    chance = model(tokens, policy=RandomRates(PRIOR), seed=SEEDS, execution=execution).depth
    assert torch.equal(mixed, torch.where(GATED[:, None], gate, chance))
    assert not torch.equal(gate, chance)


@pytest.mark.parametrize("method", ["anytime", "relay"])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_gated_sequence_counts_its_own_depths_and_another_every_depth(execution, method):
    model, tokens = own(loss_prior=[0.4, 0.3, 0.2, 0.1]), ids(6, 9)
    if method == "relay":
        model = tiny("relay", iterations=K, tau=TAU, halt_prior=PRIOR, gate_share=0.5, loss_prior=[0.4, 0.3, 0.2, 0.1])
    output = model.train()(
        tokens, labels=tokens, seed=SEEDS, objective=Objective(), execution=execution, output_iteration_logits=True
    )
    logits, target = output.iteration_logits[:, :, :-1], tokens[:, 1:].expand(K, -1, -1)
    losses, depth = -logits.log_softmax(-1).gather(-1, target[..., None])[..., 0], output.depth[:, :-1]
    total = 0.0
    for row in range(6):
        for t in range(8):
            d = int(depth[row, t])
            if GATED[row]:
                total += float(losses[d - 1, row, t].detach())
            else:
                total += sum(
                    share * (PRIOR + i) / PRIOR * float(losses[i, row, t].detach())
                    for i, share in enumerate([0.4, 0.3, 0.2, 0.1][:d])
                )
    assert float(output.terms["every_depth"]) == pytest.approx(total / 48, rel=1e-10)
    assert int(depth[GATED].max()) > int(depth[GATED].min())


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_labels_come_from_chance_and_tokens_without_a_target_learn_to_halt(execution):
    model, tokens = own(lookahead_delta=0.1), ids(6, 9)
    labels = tokens.clone()
    labels[:, 3:6] = -100  # what tokens 2 to 4 predict is no target, and the last predicts nothing
    output = model(
        tokens, labels=labels, seed=SEEDS, objective=Objective(), execution=execution, output_iteration_logits=True
    )
    target = tokens[:, 1:].expand(K, -1, -1)
    losses = -output.iteration_logits[:, :, :-1].log_softmax(-1).gather(-1, target[..., None])[..., 0]
    labelled, without = [], []
    for row in range(6):
        rows: tuple[list, list] = ([], [])
        for t in range(9):
            if GATED[row] or int(output.depth[row, t]) < K:
                continue
            has = t < 8 and int(labels[row, t + 1]) >= 0
            for i in range(K - 1):
                s = output.gates[row, t, i]
                helps = has and float(losses[i, row, t] - losses[i + 1 :, row, t].min()) > 0.1
                rows[0 if has else 1].append(-(s.log() if helps else (1 - s).log()))
        for found, kept in zip(rows, (labelled, without), strict=True):
            if found:
                kept.append(torch.stack(found).mean())
    assert labelled
    assert without
    expected = torch.stack(labelled).mean() + torch.stack(without).mean()
    torch.testing.assert_close(output.terms["lookahead"], expected, rtol=1e-10, atol=0)


def test_padding_learns_nothing():
    model, tokens = own(), ids(6, 9)
    options = {"objective": Objective(), "policy": FixedDepth(K)}
    alone = model(tokens, labels=tokens, **options)
    padded, mask = nn.functional.pad(tokens, (3, 0)), nn.functional.pad(torch.ones_like(tokens), (3, 0))
    beside = model(padded, attention_mask=mask, labels=padded.masked_fill(mask == 0, -100), **options)
    for name, value in alone.terms.items():
        torch.testing.assert_close(beside.terms[name], value)


def test_gates_take_part_when_the_warm_up_is_over_and_at_inference_they_decide_alone():
    method = own().method
    assert method.training_policy(0.5) == RandomRates(2 * PRIOR)
    assert method.training_policy(1.0) == method.default_policy(training=True) == POLICY
    assert method.default_policy(training=False) == LearnedGate(TAU)
    assert tiny("anytime", iterations=K).method.training_policy(1.0) == RandomRates(1.0)
