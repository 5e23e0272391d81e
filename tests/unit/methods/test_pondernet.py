"""PonderNet by hand: exits, expected loss and prior of tokens that are alone in their sequences."""

import math

import pytest
import torch
from torch import Tensor

from adaponder import AdaPonderForCausalLM, FixedDepth, Objective
from adaponder.methods.pondernet import PonderNet, geometric_log_probabilities, mean_exit
from adaponder.policies import ExitThreshold, SampledExit, sequence_seeds
from support import VOCABULARY, assert_same_gradients, stock, tiny

K, PRIOR, WEIGHT = 4, 0.3, 0.2
TOKENS = torch.arange(24)[:, None]
TARGETS = (TOKENS * 7 + 3) % VOCABULARY


def pondernet(**options) -> AdaPonderForCausalLM:
    settings = {"exit_prior": PRIOR, "exit_prior_weight": WEIGHT, "exit_threshold": 0.5, "embedding_scale": 2.0}
    model = tiny("pondernet", iterations=K, **(settings | options))
    with torch.no_grad():
        model.method.gates[0].out.weight.mul_(0.3)
    return model


def by_hand(model: AdaPonderForCausalLM, token: int) -> tuple[list[Tensor], list[Tensor]]:
    """Returns (states, exit probabilities) of a token alone in its sequence, by a loop over the stock decoder."""
    unit, read = model.method.gates[0].out, model.backbone.base_model
    x = model.get_input_embeddings()(torch.tensor([[token]])) * 2.0
    hidden, staying, states, exits = torch.zeros_like(x), torch.ones(()), [], []
    for n in range(1, K + 1):
        hidden = read(inputs_embeds=x + model.config.state_scale * hidden).last_hidden_state
        chance = torch.sigmoid(hidden[0, 0] @ unit.weight[0] + unit.bias[0])
        states.append(hidden[0, 0])
        exits.append(staying * chance if n < K else staying)
        staying = staying * (1 - chance)
    return states, exits


@pytest.mark.parametrize(("execution", "scale"), [("dense", 1.0), ("compact", 0.25)], ids=["dense", "compact"])
def test_the_loss_and_every_gradient_are_those_of_the_equations(execution, scale):
    model = pondernet(state_scale=scale).train()
    output = model(TOKENS, targets=TARGETS, objective=Objective(), execution=execution)
    assert output.depth.unique().tolist() == [K], "training runs every iteration"
    prior = [PRIOR * (1 - PRIOR) ** n for n in range(K - 1)] + [(1 - PRIOR) ** (K - 1)]
    expected = divergence = depth = torch.zeros(())
    for token, target in zip(TOKENS[:, 0].tolist(), TARGETS[:, 0].tolist(), strict=True):
        states, exits = by_hand(model, token)
        for n, (state, p) in enumerate(zip(states, exits, strict=True)):
            nll = -model.get_output_embeddings()(state).log_softmax(-1)[target]
            expected = expected + p * nll / len(TOKENS)
            divergence = divergence + p * (p.log() - math.log(prior[n])) / len(TOKENS)  # KL(p || prior)
            depth = depth + (n + 1) * p / len(TOKENS)
    for name, value in {"expected": expected, "prior_divergence": divergence, "expected_depth": depth}.items():
        torch.testing.assert_close(output.terms[name], value.detach(), rtol=1e-11, atol=0, msg=name)
    loss = expected + WEIGHT * divergence
    torch.testing.assert_close(output.loss, loss, rtol=1e-11, atol=0)
    assert_same_gradients(model, output.loss, loss)


def test_a_token_exits_at_the_median_of_its_own_distribution():
    model = pondernet()
    output = model(TOKENS)
    for token, depth in zip(TOKENS[:, 0].tolist(), output.depth[:, 0].tolist(), strict=True):
        states, exits = by_hand(model, token)
        total = torch.stack(exits).cumsum(0)
        assert depth == 1 + int((total < 0.5).sum())
        torch.testing.assert_close(output.logits[token, 0], model.get_output_embeddings()(states[depth - 1]))
    assert len(output.depth.unique()) >= 3


def test_sampled_exits_have_the_models_own_distribution():
    model, token = pondernet(), 5
    seeds = sequence_seeds(0, torch.arange(3000))
    depth = model(torch.full((3000, 1), token), policy=SampledExit(), seed=seeds).depth
    shares = torch.bincount(depth[:, 0], minlength=K + 1)[1:] / 3000
    exits = torch.stack(by_hand(model, token)[1]).detach().float()
    assert sum(exits > 0.05) >= 3, "several exits are likely"
    torch.testing.assert_close(shares, exits, rtol=0, atol=0.03)
    alone = [int(model(torch.tensor([[token]]), policy=SampledExit(), seed=int(seed)).depth) for seed in seeds[:12]]
    assert alone == depth[:12, 0].tolist(), "the same in any batch"


def test_the_prior_is_a_distribution_and_its_mean_is_what_training_asks_for():
    log_prior = geometric_log_probabilities(0.3, 4)
    assert log_prior.exp().tolist() == pytest.approx([0.3, 0.21, 0.147, 0.343])
    mean = 0.3 + 2 * 0.21 + 3 * 0.147 + 4 * 0.343
    assert mean_exit(0.3, 4) == pytest.approx(mean)
    assert PonderNet.requested_depth(pondernet().config, 0.0) == pytest.approx(mean)


def test_training_runs_every_iteration_and_evaluation_exits_at_the_median():
    method = AdaPonderForCausalLM.from_backbone(stock(), method="pondernet", iterations=K).method
    assert method.default_policy(training=True) == FixedDepth(K)
    assert method.default_policy(training=False) == ExitThreshold(0.5)
