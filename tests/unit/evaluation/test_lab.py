"""The policy lab: halves that share nothing, dials that point where they say, and policies at one price."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex

import support
from adaponder import AdaPonderError, FixedDepth, LearnedGate
from adaponder.analysis import policies_figure as figures
from adaponder.commands import policies as command
from adaponder.evaluation.lab import dials
from adaponder.evaluation.lab.dials import CLOSE, REACHED, Dial, Setting
from adaponder.evaluation.lab.halves import halve
from adaponder.evaluation.lab.lab import LEARNED, TRAINED, Lab, require_halting
from adaponder.evaluation.scoring import ScoringOptions, score
from adaponder.evaluation.text import Windows
from adaponder.policies import parse_policy
from lab_support import K, made_up, opinionated

WINDOWS = Windows(64)
BUDGET = 2.5


@pytest.fixture(scope="module")
def model():
    return opinionated()


@pytest.fixture(scope="module")
def halves():
    return halve(made_up([32] * 24), WINDOWS)


@pytest.fixture(scope="module")
def lab(model, halves):
    return Lab(model, halves, batch_size=8)


@pytest.fixture(scope="module")
def rows(lab):
    return [lab.trained(lab.own_depth()), *lab.compare([BUDGET], rates=())]


def test_many_documents_are_dealt_out_whole_and_each_once(halves):
    assert halves.drawn == "documents"
    text = made_up([32] * 24)
    documents = {tuple(text.stream[1:][text.document == i]) for i in range(24)}
    outcome = [tuple(half.text.stream[1:][half.text.document == i]) for half in halves[:2] for i in range(12)]
    assert set(outcome) == documents
    assert len(outcome) == 24
    # The token before each document is still an end token.
    assert all((half.text.stream[half.text.starts] == 0).all() for half in halves[:2])
    with pytest.raises(AdaPonderError, match="--data"):
        halve(made_up([20]), Windows(32))  # a single window


@pytest.mark.parametrize("stride", [None, 10])
@pytest.mark.parametrize("lengths", [[300], [10, 700, 5, 90], [400] + [3] * 20], ids=str)
def test_few_or_unequal_documents_are_halved_by_windows_and_every_prediction_is_in_one_half(lengths, stride):
    text = made_up(lengths)
    outcome = halve(text, Windows(32, stride))
    assert outcome.drawn == "windows"
    first, second = (half.mask for half in outcome[:2])
    assert (first ^ second).all()
    assert abs(int(first.sum()) - int(second.sum())) <= 42
    for half in outcome[:2]:
        assert half.tokens == half.mask.sum() == half.own_text.predictions
        assert half.own_text.stream[1:].tolist() == text.stream[1:][half.mask].tolist()
        counts = np.diff(half.own_text.starts, append=half.own_text.predictions)
        assert counts.sum() == half.tokens
        assert counts.max() <= 32
        assert counts.min() > 0


@pytest.mark.parametrize("stride", [None, 10])
def test_both_halves_together_score_what_the_whole_text_scores(model, stride):
    text, windows = made_up([150, 170]), Windows(32, stride)
    full = score(model, text, windows)
    for half in halve(text, windows)[:2]:
        outcome = half.score(model, ScoringOptions(), batch_size=3, detail=True)
        np.testing.assert_allclose(outcome.nll, full.nll[half.mask], atol=1e-5)
        assert outcome.depth.tolist() == full.depth[half.mask].tolist()
        assert outcome.gates.shape == (half.tokens, K - 1)
        values = np.arange(half.tokens)
        assert half.everywhere(values, -1)[half.mask].tolist() == values.tolist()
        assert (half.everywhere(values, -1)[~half.mask] == -1).all()


def test_the_trace_is_what_the_policies_see(model, halves):
    half = halves.tuning
    seen = dials.at_full_depth(model, half, batch_size=3, seed=5)
    scores = half.score(model, ScoringOptions(policy=FixedDepth(K)), batch_size=8, detail=True)
    np.testing.assert_allclose(seen.signals["gate"], scores.gates, atol=1e-5)
    np.testing.assert_allclose(seen.signals["entropy"], scores.entropy[:, :-1], atol=1e-4)
    np.testing.assert_allclose(seen.nll, scores.nll_by_iteration, atol=1e-4)
    for name in ("kl", "change"):
        assert np.isinf(seen.signals[name][:, 0]).all()
        assert (seen.signals[name][:, 1:] > -1e-6).all()
        assert np.isfinite(seen.signals[name][:, 1:]).all()


@given(seed=st.integers(0, 100), depth=st.floats(1.0, K), decimals=st.sampled_from([1, 2, 9]))
def test_the_threshold_gives_the_depth_asked_for_up_to_ties(seed, depth, decimals):
    signal = np.round(np.random.default_rng(seed).random((200, K - 1)), decimals)
    threshold = dials.threshold_at(signal, depth)

    def count(at: float) -> int:
        return int(np.cumprod(signal >= at, axis=1).sum())

    wanted = round((depth - 1.0) * 200)
    assert count(threshold) >= wanted
    # Above it, too few: nothing that is nearer from above exists.
    assert wanted == 0 or count(math.nextafter(threshold, math.inf)) < wanted
    if decimals == 9:
        # One token may pass several gates by the same lowest value.
        assert count(threshold) < wanted + K - 1


@given(depth=st.floats(0.0, 3.0), rate=st.floats(0.05, 1.0))
def test_scaled_shares_add_up_and_never_rise(depth, rate):
    shares = dials.scaled_shares((1.0, rate, rate**2), depth)
    assert sum(shares) == pytest.approx(depth, abs=1e-6)
    assert all(1.0 >= a >= b >= 0.0 for a, b in itertools.pairwise(shares))
    # Shares of zero grow once the others are full.
    halves = (min(depth / 2, 1), max(depth / 2 - 1, 0))
    assert dials.scaled_shares((1.0, 0.0), depth / 2) == pytest.approx(halves, abs=1e-6)


def test_a_given_rate_is_the_ratio_of_the_shares(lab):
    for ranked in (False, True):
        dial = dials.decaying_dial(lab.full_depth, 0.5, ranked=ranked)
        policy = dial.at(1.875).policy
        shares = (policy.schedule if ranked else policy).shares
        assert shares == pytest.approx((0.5, 0.25, 0.125), abs=1e-6)
        assert dial.causal == (not ranked)
    assert len(lab.dials((0.9, 0.5))) == len(lab.dials(())) + 4


@given(seed=st.integers(0, 100), price=st.floats(-0.5, 0.5))
def test_the_oracle_is_the_best_that_any_depths_can_do_at_their_price(seed, price):
    generator = np.random.default_rng(seed)
    nll = generator.random((50, K))
    chosen = dials.priced_depths(nll, price)
    other = generator.integers(1, K + 1, 50)

    def cost(depth):
        return nll[np.arange(50), depth - 1].sum() + price * depth.sum()

    assert cost(chosen) <= cost(other) + 1e-12


@pytest.mark.parametrize("rule", ["gate", "entropy", "random", "uniform"])
def test_a_dial_reaches_both_ends_exactly(lab, rule):
    full = lab.full_depth
    dial = dials.uniform_dial(full) if rule == "uniform" else dials.threshold_dial(full, rule)
    for depth in (1.0, float(K)):
        assert lab.tune(dial, depth).depth == depth
        assert lab.tune(dial, depth).missed is None


def fake_scores(depth: float):
    """Scores that have this mean depth."""
    return type("Fake", (), {"depth": np.full(10_000, depth)})()


@pytest.mark.parametrize("budget", [1.2, 2.0, 3.4])
@pytest.mark.parametrize("bend", [0.5, 1.0, 1.7])
def test_tuning_follows_what_real_runs_say_however_it_bends(budget, bend):
    runs = []

    def measure(setting):
        aim = float(setting.words)
        runs.append(aim)
        return fake_scores(1.0 + 3.0 * ((aim - 1.0) / 3.0) ** bend)

    dial = Dial("fake", lambda depth: Setting(f"{depth!r}", LearnedGate(0.5)))
    outcome = dials.tune(dial, budget, measure, iterations=K)
    assert outcome.missed is None
    assert abs(outcome.depth - budget) <= REACHED
    assert len(runs) == outcome.runs <= 6
    if bend == 1.0:
        assert outcome.runs == 1
        assert abs(outcome.depth - budget) <= CLOSE


def test_what_ties_leave_out_of_reach_is_reported_and_not_run_again():
    steps = Dial("steps", lambda depth: Setting("high" if depth > 2.5 else "low", LearnedGate(0.5)))
    outcome = dials.tune(steps, 2.2, lambda setting: fake_scores(3.0 if setting.words == "high" else 2.0), iterations=K)
    assert outcome.depth == 2.0
    assert "nearest depth 2.000" in outcome.missed
    assert outcome.runs == 2


def test_every_policy_meets_the_budget_or_says_that_it_did_not(rows):
    assert [row.policy for row in rows[:2]] == [TRAINED, LEARNED]
    for row in rows[1:]:
        gap = abs(row.tuning_depth - BUDGET)
        assert (row.missed is None) == (gap <= REACHED)
        # By rank or by position in a window of 64 tokens, shares come in whole tokens.
        coarse = "ranked" in row.policy or row.policy == "random"
        assert gap <= (0.1 if coarse else REACHED), row.policy
        # A text this short has other depths in its other half, but not wildly so.
        assert row.depth == pytest.approx(BUDGET, abs=0.6)
        assert row.depth == pytest.approx(sum(row.active))
        assert row.active[0] == 1.0
        assert (row.difference is None) == (row.policy == LEARNED)
        assert row.difference is None or row.difference.mean == pytest.approx(row.loss - rows[1].loss)
    assert min(rows, key=lambda row: row.loss).policy == "oracle by NLL"
    ahead = {row.policy for row in rows if not row.causal}
    assert ahead == {"uniform, ranked", "geometric, ranked", "oracle by NLL"}
    assert all(command.cells(row)[1] == ("yes" if row.causal else "NO") for row in rows)


def test_what_cannot_meet_a_budget_has_a_row_that_says_why(lab, monkeypatch):
    late = [dials.threshold_dial(lab.full_depth, rule) for rule in ("kl", "change")]
    monkeypatch.setattr(lab, "dials", lambda rates: late)
    rows = list(lab.compare([1.5]))
    assert len(rows) == 2
    for row in rows:
        assert row.loss is None
        assert row.active == ()
        assert "at least 2" in row.missed
        assert any("cannot: has a mean depth of at least 2" in cell for cell in command.cells(row))


@pytest.mark.parametrize("method", ["mor", "ouro", "act"])
def test_every_method_that_halts_has_a_lab(method):
    lab = Lab(opinionated(method, iterations=3), halve(made_up([32] * 24), WINDOWS))
    threshold = [dials.threshold_dial(lab.full_depth, rule) for rule in ("gate", "change")]
    for dial in (*threshold, dials.oracle_dial(lab.full_depth)):
        outcome = lab.tune(dial, 2.25)
        assert outcome.missed is None
        assert outcome.depth == pytest.approx(2.25, abs=REACHED)


@pytest.mark.parametrize("method", [name for name in support.METHODS if name not in support.HALTING])
def test_methods_that_never_halt_are_refused_and_the_cure_is_named(method):
    cure = "one iteration" if method == "vanilla" else "--depths"
    with pytest.raises(AdaPonderError, match=cure):
        require_halting(support.tiny(method))


def test_nonsense_budgets_and_rates_are_refused(lab):
    for options, own in (([0.5], 2.0), ([4.5], 2.0), ([math.nan], 2.0), (None, 4.0), (None, 1.0)):
        with pytest.raises(AdaPonderError, match="--budgets"):
            lab.budgets(options, own)
    assert lab.budgets(None, 2.5) == (2.5,)
    for rate in (0.0, 1.5, -1.0, math.nan):
        with pytest.raises(AdaPonderError, match="--rates"):
            lab.dials([rate])


@pytest.mark.parametrize("name", ["entropy", "uniform, ranked"])
def test_a_row_equals_a_plain_scoring_with_its_policy(model, halves, rows, name):
    row = next(row for row in rows if row.policy == name)
    half = halves.held_out
    scores = score(model, half.text, half.windows, how=ScoringOptions(policy=parse_policy(row.spec)))
    assert scores.loss == pytest.approx(row.loss)
    assert scores.depth.mean() == row.depth
    head = 2 * support.VOCABULARY * model.config.hidden_size if name == "entropy" else 0
    assert row.deciding_mflops * 1e6 == pytest.approx(head * sum(row.active[: K - 1]))
    assert row.mflops * 1e6 == pytest.approx(scores.spent.cost.flops / scores.spent.cost.tokens)


@pytest.fixture(scope="module")
def result(rows):
    absent = replace(rows[2], policy="unable", loss=None, depth=None, active=(), difference=None, missed="cannot")
    further = [replace(row, budget=3.0) for row in rows[1:]]
    return json.loads(json.dumps([row.as_dict() for row in [*rows, absent, *further]]))


def test_loss_against_compute_has_a_panel_for_each_rule_and_a_colour_for_each_line(result):
    drawn = figures.loss_against_compute(result)
    names = {row["policy"] for row in result if row["loss"] is not None} - {figures.ORACLE, TRAINED}
    shown = [axis for axis in drawn.axes if axis.get_visible()]
    # Against iterations, then against FLOPs.
    kinds = {name.split(",")[0] for name in names - {LEARNED}}
    assert sorted(axis.get_title() for axis in shown) == sorted(2 * [*kinds])
    for axis in shown:
        of_rule = {name for name in names if name.split(",")[0] == axis.get_title()}
        lines = [line for line in axis.lines if line.get_label() != "the other policies" and line.get_marker() != "*"]
        assert len({to_hex(line.get_color()) for line in lines}) == len(lines) == 1 + len(of_rule)
        losses = {row["loss"] for row in result if row["policy"] in of_rule and row["loss"] is not None}
        assert losses <= {loss for line in lines for loss in line.get_ydata()}
    assert figures.ORACLE in drawn.get_suptitle()


def test_a_line_is_promised_where_one_is_drawn(result):
    here = [row for row in result if row["budget"] == BUDGET and row["difference"] is not None]
    axis = figures.differences(result, BUDGET).axes[0]
    low, high = axis.get_xlim()
    inside = [row for row in here if low <= row["difference"]["mean"] <= high]
    intervals = [list(line.get_xdata()) for line in axis.lines if line.get_linestyle() == "-"]
    assert all(row["difference"]["interval"] in intervals for row in inside)
    assert "line: 95 %" in axis.get_xlabel()
    assert ("arrow" in axis.get_xlabel()) == (len(inside) < len(here))
    few = [row | {"difference": row["difference"] and row["difference"] | {"interval": None}} for row in here]
    label = figures.differences(few, BUDGET).axes[0].get_xlabel()
    assert "line:" not in label
    assert "too few documents or windows for a 95 % interval" in label
