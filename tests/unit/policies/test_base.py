"""Tests what a policy is shown, refusals, fingerprints and lines of text."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import support
from adaponder.errors import AdaPonderError, InputError
from adaponder.policies.base import Policy, PolicyInput, as_policy, parse_policy
from adaponder.policies.depth import FixedDepth, ForcedDepths, Random, RandomRates, SampledExit
from adaponder.policies.gate import ExitThreshold, LearnedGate, RouterThreshold
from adaponder.policies.measures import Change, Confidence, Divergence, Entropy, Similarity
from adaponder.policies.schedules import Geometric, Ranked, Shares, Uniform
from policy_support import EXECUTIONS, K, padded


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


def test_the_policies_that_look_ahead_are_refused_with_a_cache_and_in_generation(model):
    ids, policy = support.ids(), Ranked(Uniform(keep=0.5))
    assert model(ids, policy=policy).depth.shape == ids.shape
    with pytest.raises(AdaPonderError, match="policy"):
        model(ids, policy=policy, use_cache=True)
    ledger = model(ids, use_cache=True).past_key_values
    with pytest.raises(AdaPonderError, match="policy"):
        model(ids[:, :1], policy=policy, past_key_values=ledger)
    for use_cache in (True, False):
        with pytest.raises(AdaPonderError, match="policy"):
            model.generate(ids, policy=policy, max_new_tokens=2, do_sample=False, use_cache=use_cache)


UNFIT: list[tuple[str, str, Policy]] = [
    ("adaponder", "policy=fixed:9", FixedDepth(9)),
    ("mor", f"policy=fixed:{K + 1}", FixedDepth(K + 1)),
    ("ouro", "ForcedDepths", ForcedDepths(torch.full((2, 9), K + 1))),
    ("adaponder", "policy=gate:.*tau", LearnedGate((0.1,) * K)),
    ("adaponder", "policy=entropy:.*threshold", Entropy((0.1,) * K)),
    ("adaponder", "policy=uniform:0.5@.*thresholds", Uniform(keep=0.5, thresholds=(0.1,) * K)),
    ("mor", "policy=shares:.*shares", Ranked(Shares(shares=(0.9,) * K))),
    ("adaponder", "policy=router", RouterThreshold()),
    ("adaponder", "depths", ForcedDepths(torch.full((2, 5), K))),
    ("adaponder", "depths", ForcedDepths(torch.full((1, 9), K))),
    ("ouro", "policy=router", RouterThreshold()),
    ("adaponder", "policy=exit:0.9", ExitThreshold(0.9)),
    ("mor", "policy=exit:0.9", ExitThreshold(0.9)),
    *(("ponder", "policy.*max_iterations", policy) for policy in (FixedDepth(1), lambda seen: seen.active)),
    ("pause", "policy.*max_iterations", FixedDepth(1)),
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
def test_the_users_callable_must_answer_with_one_bool_per_token(model, answer):
    with pytest.raises(AdaPonderError, match="policy"):
        model(support.ids(), policy=WRONG_ANSWERS[answer])


def test_the_fingerprints_of_equal_policies_are_equal_and_of_others_differ():
    depths = torch.ones(2, 2000, dtype=torch.long)  # printed, a tensor of this size would leave the middle out
    other = depths.index_fill(1, torch.tensor([1000]), 2)
    policies = [*LINES.values(), ForcedDepths(depths), ForcedDepths(other), as_policy(support.ids), as_policy(padded)]
    assert len({policy.fingerprint for policy in policies}) == len(policies)
    twins = [(LearnedGate(1), LearnedGate(1.0)), (Shares(shares=[1, 0.5]), Shares(shares=(1.0, 0.5)))]
    for policy, twin in twins:
        assert policy == twin
        assert policy.fingerprint == twin.fingerprint == repr(twin)
    for policy in policies[-4:]:
        assert policy.spelling == policy.fingerprint
        with pytest.raises(AdaPonderError, match="one line"):
            policy.as_line()


LINES = {
    "gate:0.01": LearnedGate(0.01),
    "gate:0.1,0.2,inf": LearnedGate((0.1, 0.2, math.inf)),
    "gate:0.3333333333333333,0.9999999999999999,6.9037884e-07": LearnedGate((1 / 3, 1 - 2**-53, 6.90378840e-07)),
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
def test_a_policy_and_its_line_convert_into_each_other(line):
    assert parse_policy(line) == LINES[line]
    assert LINES[line].as_line() == line


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("fast:1", "name one of .*gate.*ranked-shares.*, then a colon"),
        *((line, "name one of") for line in ("gate:0.1@0.2", "ranked-uniform:0.9@0.1", "router:1", "")),
        ("gate:x", "not a number"),
        *((line, "value is needed.*fixed:2") for line in ("fixed", "gate:")),
        ("gate:1.5", "tau"),
        ("fixed:nan", "whole number"),
        ("random:0.1,0.2", "one value"),
        ("uniform:0.9", "calibrate --rule uniform"),
    ],
)
def test_the_wrong_line_is_refused_with_the_cure(line, says):
    with pytest.raises(AdaPonderError, match=says):
        parse_policy(line)


NO_NUMBERS = ["0.5", None, True, [None], math.nan]


@pytest.mark.parametrize(
    ("field", "make", "wrong"),
    [
        ("tau", LearnedGate, [1.5, -0.1, (0.5, 2.0)]),
        ("threshold", Entropy, [(1.0, math.nan)]),
        ("q", ExitThreshold, [0.0, 1.1]),
        ("keep", Random, [1.5]),
        ("prior", RandomRates, [0.0, 1e7]),
        ("keep", lambda value: Uniform(keep=value), [2.0]),
        ("thresholds", lambda value: Uniform(keep=0.5, thresholds=value), [(0.1, math.nan)]),
        ("thresholds", lambda value: Shares((value,), shares=(1.0,)), []),
        ("rate", lambda value: Geometric(rate=value), [-1.0]),
        ("shares", lambda value: Shares(shares=value), [(0.5, 1.2)]),
        ("depth", FixedDepth, [0, 2.5]),
        ("depths", ForcedDepths, [torch.tensor([1, 2, 3]), torch.ones(2, 3)]),
        ("schedule", Ranked, [FixedDepth(2)]),
        ("policy", as_policy, ["fixed:2"]),
    ],
)
def test_invalid_values_are_refused_by_the_name_of_their_field(field, make, wrong):
    for value in [*wrong, *NO_NUMBERS]:
        with pytest.raises(InputError, match=f"{field}="):
            make(value)
