"""A policy decides who reads on, and nothing else: each rule against a computation by hand, through the model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import support
from adaponder import (
    AdaPonderError,
    AdaPonderForCausalLM,
    AdaPonderOutput,
    Entropy,
    ExitThreshold,
    FixedDepth,
    ForcedDepths,
    Geometric,
    LearnedGate,
    Policy,
    PolicyInput,
    Random,
    Ranked,
    Uniform,
)
from adaponder.errors import InputError
from adaponder.policies import (
    Change,
    Confidence,
    Custom,
    Divergence,
    RandomRates,
    RouterThreshold,
    SampledExit,
    Shares,
    Similarity,
    as_policy,
    parse_policy,
    thresholds_for,
)
from adaponder.policies.measures import MeasureThreshold

NAN = math.nan
K = 4
# Act and pondernet give policies the signal that ouro gives; the laws try them.
DECIDED = tuple(name for name in support.HALTING if name not in ("act", "pondernet"))
EXECUTIONS = ("dense", "compact")


def calm(model: AdaPonderForCausalLM) -> AdaPonderForCausalLM:
    """Gates of moderate opinion: as stirred, many are 1 in float32, and equal gates have no rank."""
    model.requires_grad_(False)
    for parameter in model.method.parameters():
        parameter.mul_(0.3)
    return model


@pytest.fixture(scope="module")
def models() -> dict[str, AdaPonderForCausalLM]:
    """One model of each method; no test changes them."""
    return {method: calm(support.tiny(method, iterations=K)) for method in support.METHODS}


@pytest.fixture(scope="module")
def model(models) -> AdaPonderForCausalLM:
    return models["adaponder"]


def padded(batch: int = 3, time: int = 12) -> tuple[Tensor, Tensor]:
    """Token ids and a mask with left padding, right padding and none."""
    mask = torch.ones(batch, time, dtype=torch.long)
    mask[0, :4] = 0
    mask[1, -3:] = 0
    return support.ids(batch, time), mask


def depth_by_hand(keep: Tensor, real: Tensor) -> Tensor:
    """Depth from what each gate said ``[batch, time, gates]``: one reading, and one more for each yes in a row."""
    return torch.where(real.bool(), 1 + keep.long().cumprod(-1).sum(-1), 0)


def asked(gate: Tensor, *, iteration: int = 0, seed: int = 0, **given) -> PolicyInput:
    """What a policy is shown of one sequence without a model behind it."""
    slot = torch.arange(gate.shape[0])
    given = {"position": slot, "sequence": torch.zeros_like(slot), "slot": slot} | given
    return PolicyInput(
        iteration=torch.full_like(slot, iteration),
        gate=gate,
        hidden=gate[:, None],
        seed=torch.full_like(slot, seed),
        active=torch.ones_like(slot, dtype=torch.bool),
        head=lambda hidden: hidden,
        **given,
    )


def gates_at_full_depth(model: AdaPonderForCausalLM, ids: Tensor) -> Tensor:
    """``[tokens, K-1]``: what the policy is shown of each token when nobody halts."""
    seen: list[Tensor] = []

    def watch(iteration) -> None:
        if iteration.gate is not None:
            seen.append(iteration.gate.flatten())

    model(ids, policy=FixedDepth(K), on_iteration=watch)
    return torch.stack(seen, dim=-1)


def survivors(output: AdaPonderOutput) -> list[list[int]]:
    """For each sequence, how many tokens read on after iterations 0, 1, …"""
    return [[int((row > i + 1).sum()) for i in range(K - 1)] for row in output.depth]


# --- each rule by hand --------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("method", DECIDED)
@pytest.mark.parametrize("depth", [1, 2, K])
def test_the_fixed_depth_equals_so_many_iterations(models, method, depth, execution):
    ids, mask = padded()
    by_policy = models[method](ids, attention_mask=mask, policy=FixedDepth(depth), execution=execution)
    by_number = models[method](
        ids, attention_mask=mask, policy=FixedDepth(K), max_iterations=depth, execution=execution
    )
    assert torch.equal(by_policy.depth, mask * depth)
    assert torch.equal(by_number.depth, by_policy.depth)
    real = mask.bool()
    assert float((by_policy.logits - by_number.logits)[real].abs().max()) <= 1e-12


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("method", DECIDED)
def test_the_forced_depths_are_the_depths(models, method, execution):
    ids, mask = padded()
    depths = torch.randint(1, K + 1, ids.shape, generator=torch.Generator().manual_seed(3))
    output = models[method](ids, attention_mask=mask, policy=ForcedDepths(depths), execution=execution)
    assert torch.equal(output.depth, depths * mask)


@pytest.mark.parametrize("method", DECIDED)
def test_the_forced_depths_replay_a_run_exactly(models, method):
    ids, mask = padded()
    first = models[method](ids, attention_mask=mask)
    replay = models[method](ids, attention_mask=mask, policy=ForcedDepths(first.depth))
    assert first.depth.unique().numel() > 2
    assert torch.equal(first.logits, replay.logits)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("method", DECIDED)
@pytest.mark.parametrize("threshold", [2.6, (2.8, 2.6, 2.4)], ids=str)
def test_the_entropy_rule_reads_on_while_the_next_token_is_uncertain(models, method, threshold, execution):
    ids, mask = padded()
    output = models[method](
        ids, attention_mask=mask, policy=Entropy(threshold), execution=execution, output_iteration_logits=True
    )
    log_p = torch.log_softmax(output.iteration_logits[:-1], dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1).movedim(0, -1)
    thresholds = torch.tensor(threshold if isinstance(threshold, tuple) else (threshold,) * (K - 1))
    assert torch.equal(output.depth, depth_by_hand(entropy >= thresholds, mask))
    assert output.depth[mask.bool()].unique().numel() > 1


@pytest.mark.parametrize("rule", [Entropy, Divergence, Change], ids=["entropy", "divergence", "change"])
def test_the_signals_of_half_precision_states_are_computed_in_float32(rule):
    """Thresholds are compared with what float32 sees: bf16 would round entropies to a sixty-fourth of a nat."""
    generator = torch.Generator().manual_seed(0)
    hidden, previous = torch.randn(2, 20, 16, generator=generator).bfloat16()
    head = torch.nn.Linear(16, 61).bfloat16()
    slot = torch.arange(20)
    seen = PolicyInput(
        iteration=torch.ones_like(slot),
        gate=torch.ones(20),
        hidden=hidden,
        position=slot,
        seed=torch.zeros_like(slot),
        sequence=torch.zeros_like(slot),
        slot=slot,
        active=slot >= 0,
        head=head,
        previous=previous,
    )
    exact = dataclasses.replace(
        seen, hidden=hidden.double(), previous=previous.double(), head=lambda states: head(states.bfloat16()).double()
    )
    found = rule.measure(seen)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), rule.measure(exact), rtol=1e-5, atol=1e-6)


def read_twice_then(signal: Tensor, threshold: float | tuple[float, ...], mask: Tensor) -> Tensor:
    """Depth by a signal ``[batch, time, K-2]`` that exists from the second iteration on."""
    several = threshold[1:] if isinstance(threshold, tuple) else (threshold,) * (K - 2)
    thresholds = torch.tensor(several, dtype=signal.dtype)
    first = torch.ones_like(signal[..., :1], dtype=torch.bool)
    return depth_by_hand(torch.cat([first, signal >= thresholds], dim=-1), mask)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("method", DECIDED)
@pytest.mark.parametrize("share", [0.5, (0.0, 0.7, 0.3)], ids=str)
def test_the_divergence_rule_reads_on_while_the_prediction_moves(models, method, share, execution):
    ids, mask = padded()
    full = models[method](ids, attention_mask=mask, policy=FixedDepth(K), output_iteration_logits=True)
    log_p = torch.log_softmax(full.iteration_logits, dim=-1)
    scale = (log_p[1].exp() * (log_p[1] - log_p[0])).sum(-1)[mask.bool()]
    threshold = tuple(float(scale.quantile(q)) for q in share) if isinstance(share, tuple) else float(scale.median())
    output = models[method](
        ids, attention_mask=mask, policy=Divergence(threshold), execution=execution, output_iteration_logits=True
    )
    log_p = torch.log_softmax(output.iteration_logits, dim=-1)
    moved = (log_p[1:-1].exp() * (log_p[1:-1] - log_p[:-2])).sum(-1).movedim(0, -1)
    assert torch.equal(output.depth, read_twice_then(moved, threshold, mask))
    assert output.depth[mask.bool()].unique().numel() > 1


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("method", DECIDED)
def test_the_change_rule_reads_on_while_the_hidden_state_moves(models, method, execution):
    ids, mask = padded()

    def states(policy: Policy) -> tuple[Tensor, AdaPonderOutput]:
        seen: list[Tensor] = []
        output = models[method](
            ids,
            attention_mask=mask,
            policy=policy,
            execution=execution,
            on_iteration=lambda iteration: seen.append(iteration.hidden),
        )
        hidden = torch.stack(seen)
        return ((hidden[1:] - hidden[:-1]).norm(dim=-1) / hidden[:-1].norm(dim=-1)).movedim(0, -1), output

    moved, _ = states(FixedDepth(K))
    threshold = float(moved[mask.bool()][:, 0].median())
    moved, output = states(Change(threshold))
    assert torch.equal(output.depth, read_twice_then(moved[..., :-1], threshold, mask))
    assert output.depth[mask.bool()].unique().numel() > 1


@pytest.mark.parametrize("policy", [Divergence(math.inf), Change(math.inf)], ids=["kl", "change"])
def test_the_rules_that_compare_iterations_read_every_token_at_least_twice(model, policy):
    assert model(support.ids(), policy=policy).depth.unique().tolist() == [2]


def middling(model: AdaPonderForCausalLM, rule: type[MeasureThreshold]) -> Policy:
    """A rule whose threshold half of the tokens pass at the second iteration, and no token meets exactly."""
    ids, mask = padded()
    found: list[Tensor] = []

    def watch(seen: PolicyInput) -> Tensor:
        if bool((seen.iteration == 1).all()):
            found.append(rule.measure(seen)[seen.active])
        return torch.ones_like(seen.active)

    model(ids, attention_mask=mask, policy=watch)
    return rule(float(found[0].median()) * 1.0001)


LOOKING: dict[str, type[MeasureThreshold]] = {"kl": Divergence, "change": Change, "entropy": Entropy}


@pytest.mark.parametrize("method", DECIDED)
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
@pytest.mark.parametrize("rule", LOOKING)
def test_the_rules_that_look_at_predictions_are_one_function_dense_compact_and_cached(method, family, rule):
    model = calm(support.tiny(method, family, iterations=K))
    policy = middling(model, LOOKING[rule])
    ids, mask = padded()
    dense, compact = (
        model(ids, attention_mask=mask, policy=policy, execution=execution, output_gates=False)
        for execution in EXECUTIONS
    )
    real = mask.bool()
    assert torch.equal(compact.depth, dense.depth)
    assert float((compact.logits - dense.logits)[real].abs().max()) <= 1e-12
    ledger, logits = None, []
    for start, end in ((0, 5), (5, 6), (6, 7), (7, 12)):
        output = model(
            ids[:, start:end],
            attention_mask=mask[:, :end],
            policy=policy,
            past_key_values=ledger,
            use_cache=True,
        )
        ledger = output.past_key_values
        logits.append(output.logits)
    assert torch.equal(ledger.depth, dense.depth)
    assert float((torch.cat(logits, 1) - dense.logits)[real].abs().max()) <= 1e-12
    assert dense.depth[real].unique().numel() > 1


def test_the_rules_that_compute_logits_to_decide_say_how_many():
    for policy in (LearnedGate(0.5), Change(0.1), Random(0.5), Uniform(keep=0.5)):
        assert [policy.heads(i) for i in range(3)] == [0, 0, 0]
    assert [Similarity(0.5).heads(i) for i in range(3)] == [0, 0, 0]
    assert [Entropy(1.0).heads(i) for i in range(3)] == [1, 1, 1]
    assert [Confidence(1.0).heads(i) for i in range(3)] == [1, 1, 1]
    assert [Divergence(1.0).heads(i) for i in range(3)] == [0, 2, 2]


@pytest.mark.parametrize("policy", [Entropy(2.5), Divergence(0.05), LearnedGate(0.5)], ids=["entropy", "kl", "gate"])
def test_the_logits_computed_to_decide_are_as_many_as_the_rule_says(model, policy, monkeypatch):
    rows = []
    whole = type(model.wrapped).logits
    monkeypatch.setattr(type(model.wrapped), "logits", lambda self, hidden: rows.append(hidden) or whole(self, hidden))
    output = model(support.ids(2, 9), policy=policy, execution="compact", output_gates=False)
    spent = sum(hidden[..., 0].numel() for hidden in rows) - 18
    active = [int((output.depth > i).sum()) for i in range(K - 1)]
    assert spent == sum(policy.heads(i) * count for i, count in enumerate(active))


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


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("method", DECIDED)
def test_the_users_own_callable_is_a_policy(models, method, execution):
    ids, mask = padded()
    position = (mask.cumsum(1) - 1).clamp_min(0)
    output = models[method](
        ids,
        attention_mask=mask,
        policy=lambda seen: (seen.position + seen.seed) % K > seen.iteration,
        seed=1,
        execution=execution,
    )
    expected = 1 + ((position + 1) % K).clamp_max(K - 1)
    assert torch.equal(output.depth, expected * mask)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_the_policy_sees_one_entry_per_token_in_every_field(model, execution):
    ids, mask = padded()
    position = (mask.cumsum(1) - 1).clamp_min(0)
    seen: list[PolicyInput] = []

    def watch(given: PolicyInput) -> Tensor:
        seen.append(given)
        return torch.ones_like(given.active)

    output = model(ids, attention_mask=mask, policy=watch, seed=7, execution=execution, output_iteration_logits=True)
    assert len(seen) == K - 1
    for iteration, given in enumerate(seen):
        real = given.active
        fields = (given.gate, given.position, given.sequence, given.slot, given.iteration, given.seed)
        assert {value.shape for value in fields} == {real.shape}
        assert given.iteration.dtype == given.seed.dtype == torch.int64
        assert given.iteration.unique().tolist() == [iteration]
        at = (given.sequence[real], given.slot[real])
        assert mask[at].all()
        assert real.sum() == mask.sum()
        assert torch.equal(given.position[real], position[at])
        assert torch.equal(given.gate[real], output.gates[..., iteration][at])
        assert (given.previous is None) == (iteration == 0)
        if given.previous is not None:
            before = given.head(given.previous)[real]
            assert torch.allclose(before, output.iteration_logits[iteration - 1][at], rtol=0, atol=1e-12)
        assert torch.allclose(given.logits[real], output.iteration_logits[iteration][at], rtol=0, atol=1e-12)
        assert given.seed.unique().tolist() == [7]


# --- random -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 12345, -3, 2**40])
def test_the_random_rule_keeps_its_share_at_every_iteration_and_among_those_it_kept(keep, seed):
    count = 50_000
    alive = torch.ones(count, dtype=torch.bool)
    gate = torch.zeros(count)
    for iteration in range(3):
        kept = Random(keep)(asked(gate, iteration=iteration, seed=seed))
        for among in (torch.ones_like(alive), alive):
            n = int(among.sum())
            assert abs(float(kept[among].double().mean()) - keep) <= 3 * math.sqrt(keep * (1 - keep) / n)
        alive &= kept


def test_the_random_rule_depends_on_seed_position_and_iteration_alone():
    gate = torch.zeros(2000)
    answer = Random(0.5)(asked(gate, seed=1))
    assert torch.equal(answer, Random(0.5)(asked(gate + 1.0, seed=1, sequence=torch.arange(2000))))
    others = [
        Random(0.5)(asked(gate, seed=2)),
        Random(0.5)(asked(gate, seed=1, iteration=1)),
        Random(0.5)(asked(gate, seed=1, position=torch.arange(2000) + 1)),
    ]
    for other in others:
        # Independent coins agree half the time: 3 sigma of 2000.
        assert abs(float((answer == other).double().mean()) - 0.5) <= 3 * 0.5 / math.sqrt(2000)


def test_the_random_rule_that_keeps_all_or_nothing_does_so(model):
    ids, mask = padded()
    assert torch.equal(model(ids, attention_mask=mask, policy=Random(1.0)).depth, mask * K)
    assert torch.equal(model(ids, attention_mask=mask, policy=Random(0.0)).depth, mask)


@pytest.mark.parametrize("method", DECIDED)
def test_the_random_depths_of_a_batch_are_those_of_its_singles(models, method):
    ids, mask = padded()
    batch = models[method](ids, attention_mask=mask, policy=Random(0.6), seed=5)
    assert batch.depth.unique().numel() == K + 1
    for row in range(len(ids)):
        real = mask[row].bool()
        single = models[method](ids[row : row + 1, real], policy=Random(0.6), seed=5)
        assert torch.equal(single.depth[0], batch.depth[row, real])
        assert float((single.logits[0] - batch.logits[row, real]).abs().max()) <= 1e-12


@pytest.mark.parametrize("method", DECIDED)
def test_the_random_depths_of_generation_are_those_of_a_full_pass(models, method):
    generated = models[method].generate(
        support.ids(2, 4),
        policy=Random(0.5),
        seed=3,
        max_new_tokens=6,
        do_sample=False,
        return_dict_in_generate=True,
    )
    full = models[method](generated.sequences[:, :-1], policy=Random(0.5), seed=3)
    assert torch.equal(generated.past_key_values.depth, full.depth)


# --- shares -------------------------------------------------------------------------------------------------------

SCHEDULES = [
    Uniform(keep=0.5),
    Uniform(keep=0.29),
    Uniform(keep=1.0),
    Uniform(keep=0.0),
    Geometric(rate=0.7),
    Geometric(rate=1.0),
    Geometric(rate=0.0),
    Shares(shares=(0.9, 0.5, 0.1)),
]


def share_by_hand(schedule: Policy, iteration: int) -> float:
    if isinstance(schedule, Uniform):
        return schedule.keep
    if isinstance(schedule, Geometric):
        return schedule.rate ** (iteration + 1)
    assert isinstance(schedule, Shares)
    return schedule.shares[iteration]


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_ranked_schedule_keeps_exactly_its_share_of_each_sequence_padding_excluded(model, schedule, execution):
    ids, mask = padded(4, 17)
    output = model(ids, attention_mask=mask, policy=Ranked(schedule), execution=execution)
    expected = [
        [math.floor(share_by_hand(schedule, i) * length + 1e-9) for i in range(K - 1)]
        for length in mask.sum(1).tolist()
    ]
    assert survivors(output) == expected
    assert torch.equal(output.depth == 0, mask == 0)


@pytest.mark.parametrize("method", ["mor", "ouro"])
def test_the_ranked_schedule_serves_every_method_that_halts(models, method):
    ids, mask = padded(4, 17)
    output = models[method](ids, attention_mask=mask, policy=Ranked(Geometric(rate=0.7)))
    expected = [[int(0.7 ** (i + 1) * length) for i in range(K - 1)] for length in mask.sum(1).tolist()]
    assert survivors(output) == expected


def test_the_ranked_schedule_prunes_the_lowest_gates_among_those_still_active(model):
    ids, mask = padded(4, 17)
    output = model(ids, attention_mask=mask, policy=Ranked(Geometric(rate=0.7)))
    for i in range(K - 1):
        for row in range(len(ids)):
            gate = output.gates[row, :, i]
            stayed, left = gate[output.depth[row] > i + 1], gate[output.depth[row] == i + 1]
            assert float(stayed.min()) >= float(left.max())


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("method", DECIDED)
def test_the_calibrated_thresholds_keep_the_prescribed_shares_of_their_own_data(models, method, schedule):
    # One token per sequence: nobody's gate depends on who else halted, so the shares must come out exactly.
    ids = torch.randperm(support.VOCABULARY, generator=torch.Generator().manual_seed(0))[:50, None]
    gates = gates_at_full_depth(models[method], ids)
    thresholds = thresholds_for(schedule, gates)
    assert len(thresholds) == K - 1
    calibrated = {
        Uniform: lambda s: Uniform(keep=s.keep, thresholds=thresholds),
        Geometric: lambda s: Geometric(rate=s.rate, thresholds=thresholds),
        Shares: lambda s: Shares(shares=s.shares, thresholds=thresholds),
    }[type(schedule)](schedule)
    depth = models[method](ids, policy=calibrated).depth
    expected = [math.floor(share_by_hand(schedule, i) * 50 + 1e-9) for i in range(K - 1)]
    assert [int((depth > i + 1).sum()) for i in range(K - 1)] == expected


def test_the_calibrated_thresholds_keep_the_highest_gates():
    gates = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.6, 0.7], [0.4, 0.95]])
    thresholds = thresholds_for(Shares(shares=(0.75, 0.5)), gates)
    assert thresholds == pytest.approx((0.4, 0.7))


def test_the_calibrated_policy_is_causal_and_generates(model):
    gates = gates_at_full_depth(model, support.ids(4, 16))
    policy = Uniform(keep=0.5, thresholds=thresholds_for(Uniform(keep=0.5), gates))
    generated = model.generate(
        support.ids(2, 4), policy=policy, max_new_tokens=5, do_sample=False, return_dict_in_generate=True
    )
    full = model(generated.sequences[:, :-1], policy=policy)
    assert torch.equal(generated.past_key_values.depth, full.depth)


@pytest.mark.parametrize("schedule", [Uniform(keep=0.5), Geometric(rate=0.5), Shares(shares=(0.5,) * 3)], ids=str)
def test_the_uncalibrated_schedule_is_refused_with_the_cure(model, schedule):
    with pytest.raises(AdaPonderError, match="thresholds") as refusal:
        model(support.ids(), policy=schedule)
    for cure in ("thresholds_for", "Ranked"):
        assert cure in str(refusal.value)


# --- the mask only ------------------------------------------------------------------------------------------------


def test_the_policy_decides_the_mask_only_and_the_update_stays_weighted_by_s():
    model = calm(support.tiny(iterations=3, tau=0.99, embedding_scale=2.0))
    stock, method = model.backbone, model.method
    token = torch.tensor([[17]])
    # One token attends to itself alone, so each iteration is a plain forward of the stock model on its embedding.
    embedding = 2.0 * stock.get_input_embeddings()(token)
    table = 2.0 * stock.get_input_embeddings().weight
    for i in range(2):
        hidden = stock.base_model(inputs_embeds=embedding, use_cache=False).last_hidden_state
        s = torch.sigmoid(method.gates[i](hidden))
        assert float(s) < 0.99  # the learned rule would have halted here
        expected = torch.softmax(stock.get_output_embeddings()(hidden), dim=-1) @ table
        embedding = embedding + s[..., None] * expected
    by_hand = stock(inputs_embeds=embedding, use_cache=False).logits
    for execution in EXECUTIONS:
        kept = model(token, policy=FixedDepth(3), execution=execution)
        assert kept.depth.item() == 3
        assert float((kept.logits - by_hand).abs().max()) <= 1e-12
    assert model(token).depth.item() == 1


def test_the_policy_of_mor_decides_the_mask_only_and_the_update_stays_weighted_by_the_router():
    model = calm(support.tiny("mor", iterations=2))
    backbone, router = model.wrapped, model.method.routers[0]

    def stream_of(x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        hook = backbone.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        model.backbone.base_model(inputs_embeds=x, use_cache=False)
        hook.remove()
        return seen[0]

    halted = 0
    for token in range(8):
        ids = torch.tensor([[token]])
        x = stream_of(model.backbone.get_input_embeddings()(ids))
        logit = router(x)
        by_hand = x + model.config.router_alpha * torch.sigmoid(logit)[..., None] * stream_of(x)
        logits = model.backbone.get_output_embeddings()(backbone.norm(by_hand))
        kept = model(ids, policy=FixedDepth(2))
        # mor's sigmoid is taken in float32.
        assert torch.allclose(kept.logits, logits, rtol=1e-6, atol=1e-6)
        halted += int(model(ids).depth.item() == 1)
    assert halted > 0  # the learned rule would have sent some of them away


def test_the_answers_about_halted_tokens_do_not_matter(model):
    ids, mask = padded()

    def resurrect(seen: PolicyInput) -> Tensor:
        return (seen.iteration > 0) | (seen.position % 2 == 0)

    depth = model(ids, attention_mask=mask, policy=resurrect, execution="dense").depth
    even = (mask.cumsum(1) - 1) % 2 == 0
    assert torch.equal(depth, torch.where(even, K, 1) * mask)


# --- refusals -----------------------------------------------------------------------------------------------------


class _Oracle(Policy):
    """A user's own policy that looks ahead, and says so."""

    causal = False

    def __call__(self, seen: PolicyInput) -> Tensor:
        return torch.ones_like(seen.active)


@pytest.mark.parametrize(
    "policy", [Ranked(Uniform(keep=0.5)), Ranked(Geometric(rate=0.5)), _Oracle()], ids=["uniform", "geometric", "own"]
)
def test_the_policies_that_look_ahead_are_refused_with_a_cache_and_in_generation(model, policy):
    ids = support.ids()
    assert model(ids, policy=policy).depth.shape == ids.shape
    with pytest.raises(AdaPonderError, match="policy"):
        model(ids, policy=policy, use_cache=True)
    ledger = model(ids, use_cache=True).past_key_values
    with pytest.raises(AdaPonderError, match="policy"):
        model(ids[:, :1], policy=policy, past_key_values=ledger)
    for use_cache in (True, False):
        with pytest.raises(AdaPonderError, match="policy"):
            model.generate(ids, policy=policy, max_new_tokens=2, do_sample=False, use_cache=use_cache)


@pytest.mark.parametrize(
    "policy", [FixedDepth(1), Random(0.5), lambda seen: seen.active], ids=["fixed", "random", "own"]
)
@pytest.mark.parametrize("method", [name for name in support.METHODS if name not in support.HALTING])
def test_the_methods_that_never_halt_take_no_policy(models, method, policy):
    with pytest.raises(AdaPonderError, match=r"policy.*max_iterations"):
        models[method](support.ids(), policy=policy)
    with pytest.raises(AdaPonderError, match=r"policy.*max_iterations"):
        models[method].generate(support.ids(), policy=policy, max_new_tokens=2, do_sample=False)


WRONG_VALUES: list[tuple[str, Callable[[], object]]] = [
    ("tau", lambda: LearnedGate(1.5)),
    ("tau", lambda: LearnedGate(-0.1)),
    ("tau", lambda: LearnedGate(NAN)),
    ("tau", lambda: LearnedGate((0.5, 2.0))),
    ("q", lambda: ExitThreshold(0.0)),
    ("q", lambda: ExitThreshold(1.1)),
    ("q", lambda: ExitThreshold(NAN)),
    ("depth", lambda: FixedDepth(0)),
    ("depth", lambda: FixedDepth(-1)),
    ("depth", lambda: FixedDepth(2.5)),
    ("depth", lambda: FixedDepth(NAN)),
    ("depths", lambda: ForcedDepths(torch.tensor([1, 2, 3]))),
    ("depths", lambda: ForcedDepths(torch.ones(2, 3))),
    ("threshold", lambda: Entropy(NAN)),
    ("threshold", lambda: Entropy((1.0, NAN))),
    ("threshold", lambda: Divergence(NAN)),
    ("threshold", lambda: Change((0.1, NAN))),
    ("keep", lambda: Random(1.5)),
    ("keep", lambda: Random(-0.5)),
    ("keep", lambda: Random(NAN)),
    ("keep", lambda: Uniform(keep=2.0)),
    ("keep", lambda: Uniform(keep=NAN)),
    ("thresholds", lambda: Uniform(keep=0.5, thresholds=(0.1, NAN))),
    ("rate", lambda: Geometric(rate=-1.0)),
    ("shares", lambda: Shares(shares=(0.5, 1.2))),
    ("schedule", lambda: Ranked(FixedDepth(2))),
    ("policy", lambda: as_policy("fast")),
    ("policy", lambda: as_policy(None)),
    ("threshold", lambda: Confidence(NAN)),
    ("threshold", lambda: Similarity((0.1, NAN))),
]


@pytest.mark.parametrize(
    ("field", "make"), WRONG_VALUES, ids=[f"{i}-{name}" for i, (name, _) in enumerate(WRONG_VALUES)]
)
def test_the_wrong_values_are_refused_where_they_enter_and_the_field_is_named(field, make):
    with pytest.raises(AdaPonderError, match=rf"\b{field}\b"):
        make()


def test_who_gives_a_policy_as_text_is_told_what_reads_it():
    with pytest.raises(AdaPonderError, match=r"policy='fixed:2': .*adaponder.policies.parse_policy"):
        as_policy("fixed:2")


TOO_SHORT: list[tuple[str, Policy]] = [
    ("tau", LearnedGate((0.0, 0.0))),
    ("threshold", Entropy((0.0, 0.0))),
    ("threshold", Divergence((0.0, 0.0))),
    ("threshold", Change((0.0, 0.0))),
    ("thresholds", Uniform(keep=1.0, thresholds=(0.0, 0.0))),
    ("shares", Ranked(Shares(shares=(1.0, 1.0)))),
    ("depths", ForcedDepths(torch.full((2, 5), K))),
    ("depths", ForcedDepths(torch.full((1, 9), K))),
    ("threshold", Confidence((0.0, 0.0))),
]


@pytest.mark.parametrize(("field", "policy"), TOO_SHORT, ids=[f"{i}-{name}" for i, (name, _) in enumerate(TOO_SHORT)])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_the_settings_too_short_for_the_run_are_refused_and_named(model, field, policy, execution):
    with pytest.raises(AdaPonderError, match=rf"\b{field}\b"):
        model(support.ids(), policy=policy, execution=execution)


UNFIT: list[tuple[str, str, Policy]] = [
    ("adaponder", "policy=fixed:9", FixedDepth(9)),
    ("mor", f"policy=fixed:{K + 1}", FixedDepth(K + 1)),
    ("ouro", "ForcedDepths", ForcedDepths(torch.full((2, 9), K + 1))),
    ("adaponder", "policy=gate:.*tau", LearnedGate((0.1,) * K)),
    ("adaponder", "policy=entropy:.*threshold", Entropy((0.1,) * K)),
    ("adaponder", "policy=kl:.*threshold", Divergence((0.1,) * K)),
    ("adaponder", "policy=change:.*threshold", Change((0.1,) * K)),
    ("adaponder", "policy=uniform:0.5@.*thresholds", Uniform(keep=0.5, thresholds=(0.1,) * K)),
    ("mor", "policy=shares:.*shares", Ranked(Shares(shares=(0.9,) * K))),
    ("adaponder", "policy=router", RouterThreshold()),
    ("ouro", "policy=router", RouterThreshold()),
    ("adaponder", "policy=exit:0.9", ExitThreshold(0.9)),
    ("mor", "policy=exit:0.9", ExitThreshold(0.9)),
]


@pytest.mark.parametrize(("method", "said", "policy"), UNFIT, ids=[f"{i}-{row[0]}" for i, row in enumerate(UNFIT)])
def test_a_policy_that_does_not_fit_the_model_is_refused_and_both_are_named(models, method, said, policy):
    with pytest.raises(AdaPonderError, match=said) as error:
        models[method](support.ids(), policy=policy)
    assert "\n" not in str(error.value)
    with pytest.raises(AdaPonderError, match=said):
        models[method].generate(support.ids(), policy=policy, max_new_tokens=2, do_sample=False)


WRONG_ANSWERS: dict[str, Callable[[PolicyInput], object]] = {
    "too-short": lambda seen: torch.ones_like(seen.active)[..., :-1],
    "one-axis-more": lambda seen: torch.ones_like(seen.active)[..., None],
    "a-scalar": lambda seen: True,
    "nothing": lambda seen: None,
    # A gate's probabilities instead of a comparison: every one of them is "true".
    "not-bool": lambda seen: seen.gate,
}


@pytest.mark.parametrize("answer", WRONG_ANSWERS)
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_the_users_callable_must_answer_with_one_bool_per_token(model, answer, execution):
    with pytest.raises(AdaPonderError, match="policy"):
        model(support.ids(), policy=WRONG_ANSWERS[answer], execution=execution)


# --- fingerprints -------------------------------------------------------------------------------------------------


def _own(seen: PolicyInput) -> Tensor:
    return seen.active


def _own_too(seen: PolicyInput) -> Tensor:
    return ~seen.active


DISTINCT: list[Callable[[], Policy]] = [
    lambda: LearnedGate(0.1),
    lambda: LearnedGate(0.2),
    lambda: LearnedGate((0.1, 0.2)),
    lambda: FixedDepth(2),
    lambda: FixedDepth(3),
    lambda: ForcedDepths(torch.tensor([[1, 2], [3, 1]])),
    lambda: ForcedDepths(torch.tensor([[1, 2], [3, 2]])),
    lambda: ForcedDepths(torch.tensor([[1, 2, 3, 1]])),
    # Large enough that printing a tensor would leave the middle out.
    lambda: ForcedDepths(torch.ones(2, 2000, dtype=torch.long)),
    lambda: ForcedDepths(torch.ones(2, 2000, dtype=torch.long).index_fill(1, torch.tensor([1000]), 2)),
    lambda: Random(0.5),
    lambda: Random(0.25),
    lambda: Entropy(1.0),
    lambda: Entropy((1.0, 2.0)),
    lambda: Divergence(1.0),
    lambda: Divergence((1.0, 2.0)),
    lambda: Change(1.0),
    lambda: Confidence(1.0),
    lambda: Confidence((0.5, 1.0)),
    lambda: Similarity(1.0),
    lambda: SampledExit(),
    lambda: Uniform(keep=0.5),
    lambda: Uniform(keep=0.5, thresholds=(0.1, 0.2)),
    lambda: Uniform(keep=0.5, thresholds=(0.1, 0.2000000001)),
    lambda: Geometric(rate=0.5),
    lambda: Shares(shares=(0.5,)),
    lambda: Ranked(Uniform(keep=0.5)),
    lambda: Ranked(Geometric(rate=0.5)),
    lambda: Ranked(Uniform(keep=0.25)),
    lambda: RouterThreshold(),
    lambda: ExitThreshold(0.5),
    lambda: ExitThreshold(0.6),
    lambda: as_policy(_own),
    lambda: as_policy(_own_too),
]


def test_a_policy_is_spelled_as_it_is_typed_where_it_can_be():
    typed = {"fixed:2": FixedDepth(2), "gate:0.1,0.2": LearnedGate((0.1, 0.2)), "router": RouterThreshold()}
    typed |= {"uniform:0.5@0.1,0.2": Uniform((0.1, 0.2), keep=0.5), "ranked-uniform:0.5": Ranked(Uniform(keep=0.5))}
    for text, policy in typed.items():
        assert policy.spelling == text
        assert parse_policy(text) == policy
    own = ForcedDepths(torch.ones(1, 2, dtype=torch.long))
    assert own.spelling == own.fingerprint == "ForcedDepths([[1, 1]])"
    assert Uniform(keep=0.5).spelling == "uniform:0.5"


def test_the_fingerprints_of_equal_policies_are_equal_and_of_others_differ():
    first = [make().fingerprint for make in DISTINCT]
    assert first == [make().fingerprint for make in DISTINCT]
    assert len(set(first)) == len(DISTINCT)


@pytest.mark.parametrize(
    ("policy", "twin"),
    [
        (LearnedGate(1), LearnedGate(1.0)),
        (Random(0), Random(0.0)),
        (Uniform(keep=1), Uniform(keep=1.0)),
        (ExitThreshold(1), ExitThreshold(1.0)),
        (Shares(shares=[1, 0.5]), Shares(shares=(1.0, 0.5))),
    ],
    ids=repr,
)
def test_the_fingerprint_does_not_tell_a_whole_number_from_the_same_float(policy, twin):
    assert policy == twin
    assert policy.fingerprint == twin.fingerprint


def test_the_policy_object_is_its_own_policy_and_a_callable_becomes_one():
    policy = FixedDepth(2)
    assert as_policy(policy) is policy
    own = as_policy(_own)
    assert isinstance(own, Custom)
    assert own.causal
    assert as_policy(own) is own


# --- one line of text ---------------------------------------------------------------------------------------------

LINES = {
    "gate:0.01": LearnedGate(0.01),
    "gate:0.1,0.2,inf": LearnedGate((0.1, 0.2, math.inf)),
    "fixed:2": FixedDepth(2),
    "random:0.5": Random(0.5),
    "entropy:2.5": Entropy(2.5),
    "kl:0.01": Divergence(0.01),
    "change:0.1,0.2": Change((0.1, 0.2)),
    "confidence:0.9": Confidence(0.9),
    "similarity:0.5,0.99": Similarity((0.5, 0.99)),
    "sampled-exit": SampledExit(),
    "exit:0.9": ExitThreshold(0.9),
    "router": RouterThreshold(),
    "uniform:0.9@0.1,0.2": Uniform((0.1, 0.2), keep=0.9),
    "geometric:0.5@0.1,inf": Geometric((0.1, math.inf), rate=0.5),
    "shares:0.9,0.5@0.1,0.2": Shares((0.1, 0.2), shares=(0.9, 0.5)),
    "ranked-uniform:0.9": Ranked(Uniform(keep=0.9)),
    "ranked-geometric:0.95": Ranked(Geometric(rate=0.95)),
    "ranked-shares:0.9,0.5": Ranked(Shares(shares=(0.9, 0.5))),
}


@pytest.mark.parametrize("line", LINES)
def test_the_line_and_the_policy_are_each_other(line):
    assert parse_policy(line) == LINES[line]
    assert LINES[line].as_line() == line


def test_the_line_loses_no_digit():
    policy = LearnedGate((1 / 3, math.nextafter(1.0, 0.0), 6.90378840e-07))
    assert parse_policy(policy.as_line()) == policy


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("fast:1", "name one of .*gate.*ranked-shares.*, then a colon"),
        ("gate", "not a number"),
        ("gate:x", "not a number"),
        ("gate:0.1@0.2", "name one of"),
        ("gate:1.5", "tau"),
        ("fixed:2.5", "whole number"),
        ("fixed:nan", "whole number"),
        ("random:0.1,0.2", "one value"),
        ("uniform:0.9", "calibrate --rule uniform"),
        ("ranked-uniform:0.9@0.1", "name one of"),
        ("router:1", "name one of"),
        ("", "name one of"),
    ],
)
def test_the_wrong_line_is_refused_with_the_cure(line, says):
    with pytest.raises(AdaPonderError, match=says):
        parse_policy(line)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (LearnedGate, "tau"),
        (Entropy, "threshold"),
        (ExitThreshold, "q"),
        (Random, "keep"),
        (RandomRates, "prior"),
        (lambda value: Uniform(keep=value), "keep"),
        (lambda value: Geometric(rate=value), "rate"),
        (lambda value: Shares(shares=value), "shares"),
        (lambda value: Shares((value,), shares=(1.0,)), "thresholds"),
        (FixedDepth, "depth"),
        (ForcedDepths, "depths"),
    ],
)
@pytest.mark.parametrize("value", ["0.5", None, True, [None], math.nan])
def test_what_is_no_number_is_refused_by_the_name_of_its_field(make, field, value):
    with pytest.raises(InputError, match=f"{field}="):
        make(value)


def test_the_policy_that_no_line_can_say_is_refused():
    for policy in (as_policy(_own), ForcedDepths(torch.ones(1, 1, dtype=torch.long))):
        with pytest.raises(AdaPonderError, match="one line"):
            policy.as_line()
