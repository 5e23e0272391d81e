"""A model for any depth: its losses and labels by hand, and gates and backbone that never reach each other."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from adaponder import AdaPonderForCausalLM, FixedDepth, ForcedDepths, LearnedGate, Objective
from adaponder.errors import ConfigError, InputError
from adaponder.methods.anytime import Anytime, EveryDepthLoss, LookaheadLoss, gains_ahead, mean_over_sequences
from adaponder.methods.cost import cost_of, training_flops
from adaponder.policies import GateOrChance, RandomRates, sequence_seeds
from adaponder.training.run import train
from policy_support import asked
from support import calm, ids, stock, tiny
from training_support import small

K = 4
DEPTHS = torch.tensor([[4, 1, 2, 4, 3, 4, 1], [1, 4, 3, 1, 2, 2, 4], [2, 1, 3, 1, 2, 3, 1]])
EXECUTIONS = ("dense", "compact")


def scored(model: AdaPonderForCausalLM, execution: str, tokens: Tensor | None = None, **options):
    """Returns a forward, its losses ``[K, batch, time - 1]`` of the tokens that predict, and their gates.

    Depths are those of ``DEPTHS`` unless a policy, a seed or tokens are given.
    """
    if tokens is None:
        tokens, options = ids(3, 7), {"policy": ForcedDepths(DEPTHS)} | options
    options = {"objective": Objective(), "labels": tokens} | options
    output = model(tokens, execution=execution, output_iteration_logits=True, **options)
    logits = output.iteration_logits[:, :, :-1]
    target = tokens[:, 1:].expand(len(logits), -1, -1)
    return output, -logits.log_softmax(-1).gather(-1, target[..., None])[..., 0], output.gates[:, :-1]


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("loss_prior", [None, [0.5, 0.2, 0.2, 0.1]])
@pytest.mark.parametrize("policy", [ForcedDepths(DEPTHS), RandomRates(3.0)], ids=["given", "by chance"])
def test_each_depth_weighs_its_prior_over_the_chance_to_reach_it(execution, loss_prior, policy):
    model = tiny("anytime", iterations=K, loss_prior=loss_prior).train()
    output, losses, _ = scored(model, execution, policy=policy, seed=torch.arange(3))
    depth, total = output.depth[:, :-1], 0.0
    for i, share in enumerate(loss_prior or [0.25] * K):
        reached = depth > i
        chance = 3.0 / (3.0 + i) if isinstance(policy, RandomRates) else 1.0
        total = total + share / chance * losses[i][reached].sum() / 18
        torch.testing.assert_close(output.terms[f"depth_{i + 1}"], losses[i][reached].mean())
    torch.testing.assert_close(output.terms["every_depth"], total, rtol=1e-12, atol=0)
    torch.testing.assert_close(output.loss, total + output.terms["lookahead"], rtol=1e-12, atol=0)
    own = losses.gather(0, (depth - 1)[None])[0]
    torch.testing.assert_close(output.terms["cross_entropy"], own.mean(), rtol=1e-12, atol=0)


def test_a_gain_is_that_of_the_best_later_iteration():
    losses = torch.tensor([[3.0, 2.0, 1.0, 2.0], [2.75, 2.5, 1.25, 1.0], [3.5, 1.75, 1.5, 2.0], [2.5, 2.25, 0.5, 1.5]])
    expected = torch.tensor([[0.5, 0.25, 0.5, 1.0], [0.25, 0.75, 0.75, -0.5], [1.0, -0.5, 1.0, 0.5]])
    assert torch.equal(gains_ahead(losses), expected)


def lookahead_of(losses: Tensor, logit: Tensor, *, delta: float) -> Tensor:
    """Returns the gates' loss of one sequence at depth 2, with ``losses [2, time]``."""
    execution = SimpleNamespace(
        depth=torch.full((1, losses.shape[1]), 2), passes=2, control=SimpleNamespace(policy=FixedDepth(2), seed=0)
    )
    score = SimpleNamespace(
        nll=lambda state: state,
        mean=lambda values: values.mean(),
        counted=torch.ones(1, losses.shape[1], dtype=torch.bool),
    )
    trajectory = SimpleNamespace(states=[each[None] for each in losses], gates=logit[None, :, None])
    loss = LookaheadLoss(EveryDepthLoss((0.5, 0.5)), delta=delta, by="tokens", share=1.0)
    return loss(trajectory, score, execution).terms["lookahead"]


def test_a_gain_of_just_delta_is_none():
    losses = torch.tensor([[2.0], [1.5]])
    sure = torch.tensor([-20.0])
    assert lookahead_of(losses, sure, delta=0.5) < 1e-6
    assert lookahead_of(losses, sure, delta=0.25) > 10


def test_sequences_count_equally_however_many_labels_they_have():
    values = torch.tensor([[1.0, 5.0, 9.0], [2.0, 4.0, 7.0], [3.0, 3.0, 3.0]])
    chosen = torch.tensor([[True, True, True], [False, True, False], [False, False, False]])
    assert mean_over_sequences(values, chosen) == (5.0 + 4.0) / 2
    assert mean_over_sequences(values, torch.zeros_like(chosen)) == 0
    # Of two processes, the first has two sequences with labels and the second has none: 1 on average.
    parts = [mean_over_sequences(values[at], chosen[at], lambda _: torch.tensor(1.0)) for at in ([0, 1], [2])]
    assert sum(parts) / 2 == mean_over_sequences(values, chosen)


def by_hand(
    losses: Tensor, gates: Tensor, chosen: Tensor, *, delta: float = math.inf, by: str = "tokens"
) -> tuple[list[Tensor], list[float]]:
    """Returns the gates' loss and the share of labels that say "continue", of each sequence with chosen tokens."""
    surprises, helped = [], []
    for row, row_chosen in enumerate(chosen):
        values, labels = [], []
        for t in row_chosen.nonzero().flatten().tolist():
            for i in range(K - 1):
                gain = 0.0 if delta == math.inf else float(losses[i, row, t] - losses[i + 1 :, row, t].min())
                labels.append(gain > delta)
                s = gates[row, t, i]
                values.append(-(abs(gain - delta) if by == "nats" else 1.0) * (s if labels[-1] else 1 - s).log())
        if values:
            surprises.append(torch.stack(values).mean())
            helped.append(sum(labels) / len(labels))
    return surprises, helped


@pytest.mark.parametrize("by", ["tokens", "nats"])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_the_gates_loss_is_that_of_tokens_read_to_the_end(execution, by):
    model = calm(tiny("anytime", iterations=K, lookahead_delta=0.2, lookahead_by=by).train())
    output, losses, gates = scored(model, execution)
    # The third sequence has no token of full depth, and the last token of the second predicts nothing.
    surprises, helped = by_hand(losses, gates, DEPTHS[:2, :6] == K, delta=0.2, by=by)
    torch.testing.assert_close(output.terms["lookahead"], torch.stack(surprises).mean(), rtol=1e-10, atol=0)
    assert float(output.terms["helped"]) == pytest.approx(sum(helped) / 2)
    assert 0.05 < float(output.terms["helped"]) < 0.95


def gradients(model: AdaPonderForCausalLM, term: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(term, list(named.values()), retain_graph=True, allow_unused=True)
    return {name: grad for name, grad in zip(named, found, strict=True) if grad is not None and bool(grad.any())}


@pytest.mark.parametrize(("method", "execution"), [("anytime", "dense"), ("relay", "compact"), ("reread", "dense")])
@pytest.mark.parametrize("policy", [ForcedDepths(DEPTHS), FixedDepth(K)], ids=["random", "full"])
def test_gates_and_backbone_learn_from_their_own_loss_alone(method, execution, policy):
    model = tiny(method, iterations=K).train()
    output, _, _ = scored(model, execution, policy=policy)
    for part, term in (("backbone.", "every_depth"), ("method.", "lookahead")):
        learning = gradients(model, output.terms[term])
        assert learning.keys() == {name for name, _ in model.named_parameters() if name.startswith(part)}


def test_at_full_depth_it_is_ponderlm():
    options = {"iterations": K, "embedding_scale": 4.0}
    build = AdaPonderForCausalLM.from_backbone
    ponder, anytime = (build(stock(), method=method, **options) for method in ("ponder", "anytime"))
    torch.testing.assert_close(anytime(ids(), policy=FixedDepth(K)).logits, ponder(ids()).logits, rtol=0, atol=1e-12)


def trained(shards, folder, *overrides: str) -> AdaPonderForCausalLM:
    plain = ["train.ponder_weight=0", "train.clip=0.05", "model.gate_bias=0", "train.save_every=0", *overrides]
    train(small(shards, *plain, method="anytime"), out=folder, quiet=True)
    return AdaPonderForCausalLM.from_pretrained(folder / "final")


def test_the_backbone_trains_to_the_same_bits_whatever_its_gates_learn(shards, tmp_path, monkeypatch):
    learning, resting = trained(shards, tmp_path / "a"), trained(shards, tmp_path / "b", "train.gate_lr=0")

    def alike(one: AdaPonderForCausalLM, other: AdaPonderForCausalLM, part: str) -> bool:
        pairs = zip(getattr(one, part).parameters(), getattr(other, part).parameters(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)

    assert alike(learning, resting, "backbone")
    assert not alike(learning, resting, "method")
    monkeypatch.setattr(Anytime, "gates_apart", False)  # one norm for both, and a large gradient of either is felt
    assert not alike(learning, trained(shards, tmp_path / "c"), "backbone")


def test_sequences_differ_and_each_has_tokens_at_both_ends():
    seed, position = sequence_seeds(7, torch.arange(400)).repeat_interleave(256), torch.arange(256).repeat(400)
    rows = (asked(torch.zeros(400 * 256), iteration=i, seed=seed, position=position) for i in range(K - 1))
    keeps = [RandomRates()(given) for given in rows]
    depth = 1 + torch.stack(keeps).long().cumprod(0).sum(0).view(400, 256)
    means = depth.double().mean(1)
    assert means.min() < 1.7
    assert means.max() > 2.9
    assert bool((depth == K).any(1).all()), "labels and full depth in every context"
    assert bool((depth == 1).any(1).all())
    assert len({tuple(line) for line in depth.tolist()}) == 400


def test_seeds_of_sequences_reach_the_policy_one_by_one():
    model, tokens = tiny("anytime", iterations=K), ids(3, 16)
    seeds = torch.tensor([4, -9, 4])
    for execution in EXECUTIONS:
        depth = model(tokens, policy=RandomRates(), seed=seeds, execution=execution).depth
        alone = [model(tokens[:1], policy=RandomRates(), seed=seed, execution=execution).depth for seed in (4, -9)]
        assert torch.equal(depth, torch.cat([alone[0], alone[1], alone[0]]))
        assert not torch.equal(alone[0], alone[1])
    with pytest.raises(InputError, match="seed has shape"):
        model(tokens, policy=RandomRates(), seed=seeds[:2])
    with pytest.raises(InputError, match=r"seed is torch\.float32"):
        model(tokens, policy=RandomRates(), seed=torch.zeros(3))


@pytest.mark.parametrize(("prior", "says"), [([0.5, 0.5], "iterations=3"), ([0.5, 0.5, 0.5], r"1\.5")])
def test_an_invalid_prior_is_refused(prior, says):
    with pytest.raises(ConfigError, match=rf"^loss_prior.*{says}"):
        tiny("anytime", iterations=3, loss_prior=prior)


def test_training_halts_by_chance_and_evaluation_by_the_gates():
    model = tiny("anytime", iterations=K, halt_prior=2.0)
    assert model.method.default_policy(training=True) == model.method.training_policy(1.0) == RandomRates(2.0)
    assert model.method.training_policy(1.7) == RandomRates(2.0)
    assert model.method.training_policy(0.25) == RandomRates(8.0), "halts become more frequent"
    rare = model.method.training_policy(0.0)
    assert isinstance(rare, RandomRates)
    assert rare.reaching(K) > 0.999
    depth = model(ids()).depth
    expected = 1 + (model(ids(), policy=FixedDepth(K)).gates[..., 0] >= 0.5)
    assert torch.equal(depth.clamp_max(2), expected)
    assert isinstance(model.method.objective(Objective()), LookaheadLoss)
    assert model.method.objective(Objective()).depths == EveryDepthLoss((0.25, 0.25, 0.25, 0.25))


@pytest.mark.parametrize(
    "method",
    ["anytime", "act", "pondernet", *(pytest.param(method, marks=pytest.mark.every) for method in ("ouro", "ponder"))],
)
def test_training_flops_count_the_head_as_often_as_the_loss_reads_it(method):
    """Compares with torch's counter of a forward with its loss; a backward costs two forwards."""
    model = tiny(method, iterations=K, dtype=torch.float32).train()
    tokens = ids(2, 16)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), counter:
        model(tokens, labels=tokens, objective=Objective(), output_logits=False, execution="dense")
    cost = cost_of(torch.full((2, 16), K), model.config, every_gate=True, attention="square")
    heads = 1 if method in ("act", "ponder") else K
    assert counter.get_total_flops() == cost.flops + (heads - 1) * cost.head
    causal = cost_of(torch.full((1, 16), K), model.config, every_gate=True)
    assert training_flops(model.config, sequence=16) == 3 * (causal.flops + (heads - 1) * causal.head) / 16


@pytest.mark.parametrize(
    ("method", "original", "scale"),
    [("relay", "ouro", 1.0), ("reread", "pondernet", 1.0), ("reread", "pondernet", 0.25)],
)
def test_relay_and_reread_equal_their_originals_at_any_depths(method, original, scale):
    model = tiny(method, iterations=3, state_scale=scale).eval()
    twin = tiny(original, iterations=3, state_scale=scale).eval()
    twin.backbone.load_state_dict(model.backbone.state_dict())
    tokens = ids()
    mixed = ForcedDepths(torch.randint(1, 4, tokens.shape, generator=torch.Generator().manual_seed(1)))
    for policy in (*map(FixedDepth, range(1, 4)), mixed):
        assert torch.equal(model(tokens, policy=policy).logits, twin(tokens, policy=policy).logits)


TAU, PRIOR, SHARES = 0.5, 3.0, [0.4, 0.3, 0.2, 0.1]
POLICY = GateOrChance(0.5, TAU, PRIOR)
SEEDS = torch.arange(4, 10)
GATED = POLICY.by_gate(SEEDS)


def half_gated(method: str = "anytime", **options) -> AdaPonderForCausalLM:
    return calm(tiny(method, iterations=K, tau=TAU, halt_prior=PRIOR, gate_share=0.5, **options).train())


def test_the_seeds_here_have_sequences_of_both_kinds_and_many_have_the_share():
    assert 1 < int(GATED.sum()) < 5
    many = sequence_seeds(3, torch.arange(4000))
    for share in (0.0, 0.2, 1.0):
        assert float(GateOrChance(share, TAU, PRIOR).by_gate(many).double().mean()) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_each_sequence_is_halted_by_its_own_rule_alone(execution):
    model, tokens = half_gated(), ids(6, 16)
    mixed = model(tokens, policy=POLICY, seed=SEEDS, execution=execution).depth
    gate = model(tokens, policy=LearnedGate(TAU), execution=execution).depth
    chance = model(tokens, policy=RandomRates(PRIOR), seed=SEEDS, execution=execution).depth
    assert torch.equal(mixed, torch.where(GATED[:, None], gate, chance))
    assert not torch.equal(gate, chance)


@pytest.mark.parametrize("method", ["anytime", "relay"])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_gated_sequence_counts_its_own_depths_and_another_every_depth(execution, method):
    output, losses, _ = scored(half_gated(method, loss_prior=SHARES), execution, ids(6, 9), seed=SEEDS)
    depth, losses = output.depth[:, :-1], losses.detach()
    own = losses.gather(0, (depth - 1)[None])[0]
    weights = torch.tensor([share * (PRIOR + i) / PRIOR for i, share in enumerate(SHARES)], dtype=losses.dtype)
    every = (weights[:, None, None] * losses * (depth > torch.arange(K)[:, None, None])).sum(0)
    expected = torch.where(GATED[:, None], own, every).mean()
    torch.testing.assert_close(output.terms["every_depth"].detach(), expected, rtol=1e-10, atol=0)
    assert int(depth[GATED].max()) > int(depth[GATED].min())


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_labels_come_from_chance_and_tokens_without_a_target_learn_to_halt(execution):
    model, tokens = half_gated(lookahead_delta=0.1), ids(6, 9)
    labels = tokens.clone()
    labels[:, 3:6] = -100  # what tokens 2 to 4 predict is no target, and the last predicts nothing
    output, losses, _ = scored(model, execution, tokens, labels=labels, seed=SEEDS)
    finished = (output.depth == K) & ~GATED[:, None]
    target = torch.cat([labels[:, 1:] >= 0, torch.zeros(6, 1, dtype=torch.bool)], 1)
    labelled, _ = by_hand(losses, output.gates, finished & target, delta=0.1)
    without, _ = by_hand(losses, output.gates, finished & ~target)
    expected = torch.stack(labelled).mean() + torch.stack(without).mean()
    torch.testing.assert_close(output.terms["lookahead"], expected, rtol=1e-10, atol=0)


def test_gates_take_part_when_the_warm_up_is_over_and_at_inference_they_decide_alone():
    method = half_gated().method
    assert method.training_policy(0.5) == RandomRates(2 * PRIOR)
    assert method.training_policy(1.0) == method.default_policy(training=True) == POLICY
    assert method.default_policy(training=False) == LearnedGate(TAU)
    assert tiny("anytime", iterations=K).method.training_policy(1.0) == RandomRates(1.0)
