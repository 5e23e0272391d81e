"""The budget dial: the depth asked for comes out, the better way is chosen, and a name stands for it ever after."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import support
from adaponder import AdaPonderError, AdaPonderForCausalLM, LearnedGate
from adaponder.analysis.policies_figure import flat
from adaponder.commands import calibrate as command
from adaponder.commands import policies as policies_command
from adaponder.evaluation.lab import dials
from adaponder.evaluation.lab.dials import REACHED, Dial, FullDepth, Setting, Tuned
from adaponder.evaluation.lab.halves import halve
from adaponder.evaluation.lab.lab import EACH, ONE, Lab, budgets_between, calibrate, frontier, meet, ordered, propose
from adaponder.evaluation.lab.profiles import load_profile
from adaponder.evaluation.scoring import ScoringOptions, score
from adaponder.evaluation.text import Windows, open_text, open_vocabulary
from adaponder.terminal import console
from lab_support import K, made_up, opinionated, saved, written


@pytest.fixture(scope="module")
def lab():
    return Lab(opinionated(), halve(made_up([32] * 24), Windows(64)))


@given(seed=st.integers(0, 50), budget=st.floats(1.1, K - 0.1))
def test_proposals_cost_the_budget_and_never_rise(seed, budget):
    generator = np.random.default_rng(seed)
    gates = generator.random((60, K - 1)).astype(np.float32)
    nll = generator.random((60, K))
    full = FullDepth(nll, {"gate": gates})
    assert propose(full, 1.0) == propose(full, float(K)) == [], "nothing to choose"
    assert propose(FullDepth(nll[:, :2], {"gate": gates[:, :1]}), 1.5) == [], "one gate"
    proposals = propose(full, budget)
    assert proposals
    for shares in proposals:
        assert sum(shares) == pytest.approx(budget - 1.0, abs=1e-5)
        assert all(1.0 + 1e-9 >= a >= b >= -1e-9 for a, b in itertools.pairwise(shares))


def way(gain: float, *, noise: float = 0.0, missed: str | None = None, run: bool = True) -> Tuned:
    """One way to meet a budget, whose loss is lower by ``gain`` on 400 tokens of ten documents."""
    nll = np.full(400, 3.0 - gain) + noise * np.random.default_rng(0).standard_normal(400)
    scores = type("Fake", (), {"nll": nll, "loss": float(nll.mean())})() if run else None
    return Tuned(Dial("it", lambda depth: Setting("so", None)), 2.0, Setting("so", None), scores, 1, missed)


def test_one_tau_gives_place_only_to_a_loss_told_apart_from_its_own():
    book = made_up([40] * 10)
    one, better, lucky, worse = way(0.0), way(0.02), way(0.001, noise=0.3), way(-0.1)
    assert ordered([one, worse, better], book) == [better, one, worse]
    assert lucky.scores.loss < one.scores.loss
    assert ordered([one, lucky], book) == [one, lucky]
    # Nothing is better than reaching the budget.
    off = way(0.5, missed="nearest depth 1")
    assert ordered([off, worse], book) == [worse, off]
    assert ordered([way(0.0, run=False, missed="cannot"), worse], book)[0] is worse


def test_gates_crowded_near_one_are_resolved_and_equal_gates_cannot_be_calibrated(lab):
    model = opinionated()
    for gate in model.method.gates:
        gate.out.bias.add_(9.0)
    crowded = Lab(model, lab.halves)
    assert np.quantile(crowded.full_depth.signals["gate"], 0.25) > 0.999
    assert meet(crowded, 2.5)[0].depth == pytest.approx(2.5, abs=REACHED)
    for gate in model.method.gates:
        gate.out.weight.zero_()
    equal = Lab(model, lab.halves)
    with pytest.raises(AdaPonderError, match=r"--budget 2\.5"):
        calibrate(equal, 2.5)
    row = next(iter(frontier(equal, [2.5])))
    assert "nearest depth" in row.missed
    assert abs(row.depth - 2.5) > REACHED


@pytest.mark.parametrize("rule", command.RULES)
def test_other_rules_can_be_calibrated_too(lab, rule):
    budget = 2.5
    if rule == "random":
        # Its numbers depend on the position alone, of which a window of 64 has few.
        budget = lab.tune(dials.threshold_dial(lab.full_depth, rule), 2.5).depth
    way = meet(lab, budget, rule=rule)[0]
    assert way.depth == pytest.approx(budget, abs=REACHED)
    assert way.setting.policy.causal


def test_what_cannot_be_is_refused_by_name(lab):
    for budget in (0.9, 4.1, math.nan):
        with pytest.raises(AdaPonderError, match="--budget"):
            meet(lab, budget)
    for rule in ("kl", "change", "similarity"):  # before anything is opened
        with pytest.raises(AdaPonderError, match=r"--budget 1\.5"):
            command.calibrate("no such folder", data="no such text", budget=1.5, rule=rule)


def test_budgets_go_from_one_to_all():
    assert budgets_between(4, 1.0) == [1.0, 2.0, 3.0, 4.0]
    assert budgets_between(2, 0.25) == [1.0, 1.25, 1.5, 1.75, 2.0]
    assert budgets_between(3, 0.8) == [1.0, 1.8, 2.6, 3.0]
    for step in (0.0, -1.0, 5.0, math.nan):
        with pytest.raises(AdaPonderError, match="--step"):
            budgets_between(4, step)


def test_the_frontier_ends_where_every_token_is_read_equally_often(lab):
    rows = list(frontier(lab, [1.0, 2.5, float(K)]))
    met, fixed = rows[:3], rows[3:]
    assert [row.policy for row in fixed] == ["fixed depth"] * K
    assert [row.depth for row in fixed] == [1.0, 2.0, 3.0, 4.0]
    assert met[0].loss == pytest.approx(fixed[0].loss, abs=1e-6)
    assert met[-1].loss == pytest.approx(fixed[-1].loss, abs=1e-6)
    assert 1.0 < met[1].depth < K
    assert met[0].mflops < met[1].mflops < met[2].mflops


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("calibration") / "ada", opinionated())


@pytest.fixture(scope="module")
def data(checkpoint):
    return written(checkpoint.parent / "text.jsonl")


def test_a_budget_becomes_a_profile_that_other_commands_can_name(checkpoint, data, tmp_path):
    options = {"data": str(data), "window": 64, "out": tmp_path / "out", "json": tmp_path / "result.json"}
    result = command.calibrate(checkpoint=str(checkpoint), budget=2.2, frontier=True, step=3.0, **options)
    choices = result["calibration"]["choices"]
    assert {way["policy"] for way in choices} == {ONE, EACH}
    assert [way["chosen"] for way in choices] == [True] + [False] * (len(choices) - 1)
    assert all(way["depth_interval"][0] <= way["depth"] <= way["depth_interval"][1] for way in choices)
    chosen = choices[0]
    assert chosen["tuning_depth"] == pytest.approx(2.2, abs=REACHED)
    policy = load_profile(checkpoint, "budget-2.2")
    assert isinstance(policy, LearnedGate)
    model = AdaPonderForCausalLM.from_pretrained(checkpoint).eval()
    text = open_text(str(data), open_vocabulary(str(checkpoint)), whose="it")
    half = halve(text, Windows(64)).held_out
    scores = score(model, half.text, half.windows, how=ScoringOptions(policy=policy))  # text that tuned nothing
    assert (scores.depth.mean(), scores.loss) == (chosen["depth"], pytest.approx(chosen["loss"]))
    stored = command.list_profiles(str(checkpoint))["budget-2.2"]
    assert stored["depth"] == chosen["depth"]
    assert stored["depth_interval"] == list(chosen["depth_interval"])
    assert json.loads((tmp_path / "result.json").read_text())["name"] == "budget-2.2"
    assert len(json.loads((tmp_path / "out" / "frontier.json").read_text())["rows"]) == 2 + 4
    kinds = ("csv", "json", "parquet", "png", "svg")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"frontier.{kind}" for kind in kinds]
    command.calibrate(str(tmp_path / "out" / "frontier.json"), out=tmp_path / "again")
    again, first = ((tmp_path / folder / "frontier.svg").read_bytes() for folder in ("again", "out"))
    assert again == first


def test_a_profile_is_replaced_only_when_told_to(checkpoint, data, monkeypatch):
    options = {"data": str(data), "window": 64, "budget": 2.5, "name": "mine"}
    command.calibrate(checkpoint=str(checkpoint), **options)
    before = command.list_profiles(str(checkpoint))["mine"]
    monkeypatch.setattr("adaponder.evaluation.lab.lab.Lab", None)  # refused before the work
    with pytest.raises(AdaPonderError, match="--name mine"):
        command.calibrate(checkpoint=str(checkpoint), **options | {"budget": 3.0})
    monkeypatch.undo()
    assert command.list_profiles(str(checkpoint))["mine"] == before
    command.calibrate(checkpoint=str(checkpoint), **options | {"budget": 3.0}, replace=True)
    assert command.list_profiles(str(checkpoint))["mine"]["budget"] == 3.0


def test_an_interrupted_frontier_keeps_its_rows_and_its_profile(checkpoint, data, tmp_path, monkeypatch, capsys):
    wanted = {"data": str(data), "window": 64, "budget": 2.6, "frontier": True, "step": 3.0, "out": tmp_path / "out"}
    seen = []

    def three(*args, **options):
        for row in frontier(*args, **options):
            seen.append(row.as_dict())
            if len(seen) == 3:
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr("adaponder.evaluation.lab.lab.frontier", three)
    with pytest.raises(KeyboardInterrupt):
        command.calibrate(checkpoint=str(checkpoint), **wanted)
    monkeypatch.undo()
    assert "3 finished rows are saved in" in capsys.readouterr().err
    assert "budget-2.6" in command.list_profiles(str(checkpoint))
    untuned, measured = Lab.untuned, []
    monkeypatch.setattr(Lab, "untuned", lambda *args, **options: measured.append(1) or untuned(*args, **options))
    assert command.calibrate(checkpoint=str(checkpoint), **wanted)["rows"][:3] == seen
    assert len(measured) == 4 - 1  # two rows by budget and one by depth were there
    assert not (tmp_path / "out" / "unfinished").exists()


def test_a_checkpoint_without_gates_and_wrong_options_are_refused(checkpoint, data, tmp_path):
    plain = saved(tmp_path / "plain", support.tiny("vanilla", dtype=torch.float32))
    for call in (policies_command.policies, lambda folder, data: command.calibrate(folder, data=data, budget=2.0)):
        with pytest.raises(AdaPonderError, match="vanilla"):
            call(str(plain), data=str(data))
    for options, field in (
        ({"frontier": True, "name": "x"}, "--name"),
        ({"budget": 2.0, "name": "no name"}, "--name"),
        ({"budget": 4.5}, r"--budget 4\.5"),
    ):
        with pytest.raises(AdaPonderError, match=field):
            command.calibrate(checkpoint=str(checkpoint), data=str(data), **options)


def test_the_lab_on_a_checkpoint_prints_every_policy_and_its_result_is_drawn_again_without_a_model(
    checkpoint, data, tmp_path, capsys, monkeypatch
):
    chosen = ("learned gate", "uniform, ranked", "oracle by NLL")
    full = Lab.dials
    monkeypatch.setattr(Lab, "dials", lambda lab, rates: [dial for dial in full(lab, rates) if dial.name in chosen])
    monkeypatch.setattr(console, "width", 200)
    options = {"window": 64, "budgets": [2.2], "rates": (), "json": tmp_path / "lab.json", "out": tmp_path / "first"}
    result = policies_command.policies(checkpoint=str(checkpoint), data=str(data), **options)
    shown = capsys.readouterr().out
    for words in ("Mean depth 2.200", "assigned whole", *chosen):
        assert words in shown
    rows = json.loads((tmp_path / "lab.json").read_text())["rows"]
    assert [row["policy"] for row in result["rows"][1:]] == list(chosen)
    for row, (_, line) in zip(rows[2:], flat(rows).iloc[2:].iterrows(), strict=True):
        assert [line["difference_low"], line["difference_high"]] == row["difference"]["interval"]
        assert [line[f"active_{i}"] for i in range(1, K + 1)] == row["active"]
    assert all((tmp_path / "first" / f"policies.{kind}").stat().st_size > 0 for kind in ("csv", "parquet"))
    policies_command.policies(str(tmp_path / "first" / policies_command.RESULT), out=tmp_path / "again")
    for kind, ending in itertools.product(("keep-probability", "loss-against-compute", "policies"), ("png", "svg")):
        first, again = ((tmp_path / out / f"{kind}.{ending}").read_bytes() for out in ("first", "again"))
        assert first == again, kind
