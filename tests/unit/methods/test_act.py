"""ACT by hand: halting, remainder, mean of states and ponder cost of tokens that are alone in their sequences."""

import pytest
import torch
from torch import Tensor

from adaponder import AdaPonderForCausalLM, FixedDepth, Objective
from adaponder.methods.act import remainder
from adaponder.policies import ExitThreshold
from support import VOCABULARY, assert_same_gradients, ids, tiny

K, COST = 4, 0.3
TOKENS = torch.arange(24)[:, None]
TARGETS = (TOKENS * 7 + 3) % VOCABULARY


def act(threshold: float = 0.6, **options) -> AdaPonderForCausalLM:
    """Returns a model whose halting probabilities reach the threshold in one iteration, in several, or never."""
    model = tiny("act", iterations=K, halting_cost=COST, exit_threshold=threshold, **options)
    with torch.no_grad():
        model.method.gates[0].out.weight.mul_(0.5)
        model.method.gates[0].out.bias.fill_(-1.0)
    return model


def by_hand(model: AdaPonderForCausalLM, token: int, threshold: float) -> tuple[Tensor, int, Tensor]:
    """Returns (output, N, R) of a token alone in its sequence, by a loop over the stock decoder."""
    unit = model.method.gates[0].out
    read = model.backbone.base_model
    x = model.get_input_embeddings()(torch.tensor([[token]])) * model.config.input_scale
    halting, states = [], []
    for n in range(1, K + 1):
        states.append(read(inputs_embeds=x).last_hidden_state[0, 0])
        halting.append(torch.sigmoid(states[-1] @ unit.weight[0] + unit.bias[0]))
        if float(sum(halting).detach()) >= threshold or n == K:
            break
        x = states[-1][None, None] + model.method.signals[n - 1]
    rest = 1 - sum(halting[:-1], torch.zeros(()))
    weights = [*halting[:-1], rest]
    return sum(p * s for p, s in zip(weights, states, strict=True)), len(states), rest


@pytest.mark.parametrize(("threshold", "execution"), [(0.6, "dense"), (0.8, "compact")])
def test_depth_output_loss_and_every_gradient_are_those_of_the_equations(threshold, execution):
    model = act(threshold).train()
    output = model(TOKENS, targets=TARGETS, objective=Objective(), execution=execution)
    hand = [by_hand(model, int(token), threshold) for token in TOKENS]
    logits = model.get_output_embeddings()(torch.stack([y for y, _, _ in hand]))
    cross_entropy = torch.nn.functional.cross_entropy(logits, TARGETS[:, 0])
    cost = sum(count + rest for _, count, rest in hand) / len(hand)
    assert output.depth[:, 0].tolist() == [count for _, count, _ in hand]
    assert len(output.depth.unique()) >= 3, "a threshold that tells tokens apart"
    torch.testing.assert_close(output.logits[:, 0], logits, rtol=1e-11, atol=1e-12)
    for name, value in {"cross_entropy": cross_entropy, "ponder_cost": cost}.items():
        torch.testing.assert_close(output.terms[name], value, rtol=1e-12, atol=0)
    loss = cross_entropy + COST * cost
    torch.testing.assert_close(output.loss, loss, rtol=1e-12, atol=0)
    assert_same_gradients(model, output.loss, loss)


def test_the_remainder_is_what_earlier_iterations_left():
    logits = torch.logit(torch.tensor([[0.2, 0.5, 0.6]], dtype=torch.float64).expand(4, -1))
    expected = torch.tensor([1.0, 0.8, 0.3, 0.0], dtype=torch.float64)  # never below 0
    torch.testing.assert_close(remainder(logits, torch.tensor([1, 2, 3, 4])), expected)


def test_a_token_without_remainder_keeps_its_output():
    model = act(1.0)
    with torch.no_grad():
        model.method.gates[0].out.bias.fill_(1.0)
    own = model(TOKENS)
    further = model(TOKENS, policy=FixedDepth(K))
    assert bool((own.depth < K).any())
    torch.testing.assert_close(further.logits, own.logits, rtol=1e-12, atol=1e-12)


def test_it_begins_as_its_settings_say_and_halts_by_its_own_rule_from_the_first_step():
    model = AdaPonderForCausalLM.from_backbone(act().backbone, method="act", iterations=K, gate_bias=-1.0)
    assert model.config.exit_threshold == 0.99
    assert not torch.stack(list(model.method.signals)).any()
    assert model(ids(), policy=FixedDepth(K)).gates.unique().tolist() == [pytest.approx(0.7310585786)]
    assert model(ids()).depth.unique().tolist() == [2], "0.73 and 0.73"
    for policy in (model.method.training_policy(0.0), model.method.default_policy(training=True)):
        assert policy == ExitThreshold(0.99)
