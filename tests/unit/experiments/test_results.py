"""The results page: what is committed is what the records say, and what the records say is computed right."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from adaponder.errors import InputError
from experiments import figures as results_figures
from experiments import results
from experiments.claims import title_of
from experiments.evidence import Evidence
from experiments.identity import identity
from experiments.judging import KINDS, Judge, read_judge, shown
from experiments.page import BEGIN, END
from experiments.queue import read_queue
from experiments.records import read_records
from experiments.statistics import FAILS, HOLDS, NOT_RUN, UNRESOLVED, Estimate
from experiments.tables import claim_table, learning_rates, main_table, speed

ROOT = Path(__file__).parents[3]
EXPERIMENTS = ROOT / "experiments"


@pytest.fixture(scope="module")
def judge() -> Judge:
    queue = read_queue(EXPERIMENTS / "queue.yaml")
    return results.judge_of(queue, read_records(EXPERIMENTS / "records"), EXPERIMENTS)


def pages(judge: Judge) -> str:
    """The results page and the tables."""
    return results.page_of(judge) + results.tables_of(judge, EXPERIMENTS)


def edited(judge: Judge, changes: dict[str, dict], *, copies: dict[str, tuple[str, int]] | None = None) -> Judge:
    """Judges other records: ``copies`` makes records of further seeds, ``changes`` what they say.

    Nothing is measured in them unless ``changes`` says so.
    """
    records = [record | {"measured": {}} for record in copy.deepcopy(list(judge.evidence.records))]
    by_name = {record["file"]: record for record in records}
    for name, (source, seed) in (copies or {}).items():
        found = next(record for file, record in by_name.items() if file.startswith(source))
        record = copy.deepcopy(found) | {"file": name, "seed": seed}
        record["recipe"]["train"]["seed"] = seed
        by_name[name] = record | {"identity": identity(record["recipe"])}
    for start, what in changes.items():
        for file, record in by_name.items():
            if file.startswith(start):
                record["validation"][-1] |= {k: v for k, v in what.items() if k.startswith("validation")}
                record |= {k: v for k, v in what.items() if not k.startswith("validation")}
    return Judge(judge.claims, Evidence(judge.evidence.queue, list(by_name.values())))


def test_the_page_the_readme_and_the_figures_are_what_the_records_make(judge):
    """`python -m experiments results` writes them again."""
    assert (ROOT / "docs" / "results.md").read_text() == results.page_of(judge)
    assert (EXPERIMENTS / "tables.md").read_text() == results.tables_of(judge, EXPERIMENTS)
    readme = (ROOT / "README.md").read_text()
    assert readme == results.readme_of(judge, readme)
    for name, points in results.figure_points(judge).items():
        path = ROOT / "docs" / "figures" / f"{name}.png"
        assert results_figures.shown_by(path) == results_figures.fingerprint(points), name


def test_every_row_of_a_table_has_as_many_cells_as_its_heading(judge):
    width = None
    for line in pages(judge).splitlines():
        cells = len(line.replace("\\|", "").split("|")) if line.startswith("|") else None
        assert None in (width, cells) or cells == width, line
        width = cells


def test_a_tuned_plain_model_stands_in_the_readme(judge):
    part = (ROOT / "README.md").read_text().partition(BEGIN)[2].partition(END)[0]
    first = part.strip().splitlines()[2]
    plain = judge.values("vanilla")
    assert first.startswith("| vanilla | 1.00 | 1.00x | " + ", ".join(f"{plain[seed]:.4f}" for seed in sorted(plain)))
    rates = {rate: points[0].loss for rate, points in _tried(judge, "vanilla").items()}
    assert min(rates, key=rates.__getitem__) == 0.004


def _tried(judge, title):
    return learning_rates(judge)[1][title]


def test_a_changed_loss_changes_the_page_and_the_figures(judge):
    other = edited(judge, {"mini-ponder-k2-lr-0.004-seed-1": {"validation_loss": 3.4}})
    assert pages(other) != pages(judge)
    before, after = results.figure_points(judge), results.figure_points(other)
    assert results_figures.fingerprint(before[results.FRONTIER]) != results_figures.fingerprint(after[results.FRONTIER])


def test_every_run_that_a_claim_names_is_in_the_queue_and_every_statement_has_a_test(judge):
    for alias, setting in judge.claims.runs.items():
        assert setting in judge.evidence.settings, alias
    for each in judge.claims.statements:
        assert each.tests, each.says
        assert each.claim in judge.evidence.queue.claims
        assert judge.evidence.queue.of_claim(each.claim)
    assert {"Table 1", "Table 2", "Table 3", "Figure 3", "Figure 4", "Figure 5", "Figure 6"} <= {
        each.where.partition(",")[0] for each in judge.claims.statements
    }
    kinds = {kind for each in judge.claims.statements for test in each.tests for kind in test if kind in KINDS}
    assert kinds | {"below_curve", "same_order"} == set(KINDS)


def test_a_run_is_done_if_all_that_it_measures_is_there(judge):
    done = judge.evidence.done
    assert "mini-ponder-k2-lr-0.004-seed-0" in done
    runs = len({each.label for each in judge.evidence.queue.experiments})
    assert f"{len(done)} of {runs} runs" in results.page_of(judge)
    label = "mini-pondernet-lr-0.004-seed-0"
    records = [record | {"measured": {}} for record in judge.evidence.records if record["file"].startswith(label)]
    assert label in done - Evidence(judge.evidence.queue, records).done, "its dial is not there"


def test_only_runs_on_the_same_data_are_compared(judge):
    assert {0, 1, 2} <= judge.values("k2").keys()
    other = edited(judge, {"mini-ponder-k2-lr-0.004-seed-1": {"data": "0123456789abcdef"}})
    assert 1 not in other.values("k2")
    words = other.find({"lower": ["k2", "vanilla"]}).words
    assert "seeds 0, 2" in words
    folder = EXPERIMENTS / "records"
    apart = results._apart(other, folder)
    assert any(name.startswith("mini-ponder-k2-lr-0.004-seed-1") and "other data" in apart[name] for name in apart)


def test_equality_and_difference_follow_the_pairs(judge):
    third = {"mini-ponder-lr-0.004-seed-1.json": ("mini-ponder-lr-0.004-seed-0", 1)}
    third |= {"mini-ponder-lr-0.004-seed-2.json": ("mini-ponder-lr-0.004-seed-0", 2)}
    third |= {f"mini-adaponder-lr-0.004-seed-{s}.json": ("mini-adaponder-lr-0.004-seed-0", s) for s in (1, 2)}
    base = {f"mini-ponder-lr-0.004-seed-{s}": {"validation_loss": 3.5 + 0.02 * s} for s in range(3)}

    def with_gaps(*gaps: float) -> Judge:
        halting = {"validation_depth": 3.79 + 0.001 * len(gaps), "validation_halted": [0.0, 0.0, 0.21]}
        ours = {
            f"mini-adaponder-lr-0.004-seed-{s}": halting | {"validation_loss": 3.5 + 0.02 * s + gap}
            for s, gap in enumerate(gaps)
        }
        return edited(judge, base | ours, copies=third)

    near, far, unsure = with_gaps(0.001, 0.0, 0.001), with_gaps(0.02, 0.021, 0.022), with_gaps(-0.01, 0.0, 0.01)
    test = {"equal": ["ada", "k4"]}
    assert [each.find(test).verdict for each in (near, far, unsure)] == [HOLDS, FAILS, UNRESOLVED]
    assert far.find({"lower": ["k4", "ada"]}).verdict == HOLDS
    assert far.find({"lower": ["ada", "k4"]}).verdict == FAILS
    assert far.find({"lower": ["ada", "k4"], "of": "depth"}).verdict == HOLDS
    assert far.find({"saved": ["ada", "k4"], "of": "depth", "low": 0.04, "high": 0.06}).verdict == HOLDS
    assert far.find({"saved": ["ada", "k4"], "of": "depth", "low": 0.06, "high": 0.1}).verdict == FAILS
    assert far.find({"collapse": "ada"}).verdict == FAILS
    one_depth = {f"mini-adaponder-lr-0.004-seed-{s}": {"validation_halted": [0.0, 0.995, 0.999]} for s in range(2)}
    assert edited(far, one_depth).find({"collapse": "ada"}).verdict == HOLDS


def test_order_after_half_of_the_training_is_that_of_runs_that_differ(judge):
    def found(*pairs: tuple[str, str], by: float = 0.01):
        return judge.find({"same_order": pairs, "by": by, "what": "rates"})

    # Vanilla is above K = 3 by 0.04 in full; "half" of them are vanilla and K = 2, or the other way round.
    kept = found(("vanilla", "vanilla"), ("k3", "k2"))
    assert kept == (HOLDS, "rates: 1 of 1 pairs that differ by more than 0.01 do so in the same direction")
    turned = found(("vanilla", "k2"), ("k3", "vanilla"))
    assert turned.verdict == FAILS
    assert "0 of 1 pairs" in turned.words
    assert "vanilla minus k3 is +0.04" in turned.words
    assert found(("vanilla", "k2"), ("k3", "vanilla"), by=0.5).verdict == UNRESOLVED
    # Of K = 3 and 4 the second is above with two seeds of three, which does not tell them apart.
    assert found(("k4", "vanilla"), ("k3", "k2"), by=0.001).verdict == UNRESOLVED
    alone = found(("vanilla-0.008", "vanilla-0.002"), ("vanilla", "k2"))
    assert alone.verdict == UNRESOLVED
    assert "(one seed)" in alone.words
    gone = edited(judge, {"mini-ponder-k2-lr-0.004": {"data": "0123456789abcdef"}})
    test = {"same_order": [("vanilla-0.008", "k2"), ("vanilla", "vanilla-0.002")], "by": 0.01, "what": "rates"}
    assert gone.find(test).verdict == NOT_RUN


def test_a_model_is_held_against_the_lines_between_depths_of_its_own_seed(judge):
    curve = [judge.claims.runs[alias] for alias in judge.claims.rows["curve"]]
    setting = judge.claims.runs["ada"]
    point = judge.evidence.points(setting)[0]
    three, four = judge.values("k3")[0], judge.values("k4")[0]
    expected = point.loss - (three + (point.depth - 3) * (four - three))
    assert judge.evidence.over_curve(setting, curve)[0] == pytest.approx(expected)
    gone = edited(judge, {"mini-ponder-k3-lr-0.004-seed-0": {"data": "0123456789abcdef"}})
    assert 0 not in gone.evidence.over_curve(setting, curve), "no line from K = 2 to 4 where K = 3 lies between"
    other = edited(judge, {}, copies={"mini-adaponder-lr-0.004-seed-9.json": ("mini-adaponder-lr-0.004-seed-0", 9)})
    assert 9 not in other.evidence.over_curve(setting, curve), "no seed 9 on the curve"


def test_measurements_decide_the_analysis_claims(judge):
    steps = {"tokens": [10, 20, 30, 40], "nll": [2.0, 1.0, 1.5, 2.5], "nll_at_full_depth": [2.0, 1.0, 1.5, 2.5]}
    compared = {name: {"loss": loss} for name, loss in (("learned gate", 3.0), ("geometric, ranked", 3.1))}
    measured = {"steps": steps, "policies": {"compared": compared}, "tasks": {"missing": "no sets"}}
    name = "mini-adaponder-lr-0.004-seed-0"
    found = edited(judge, {name: {"measured": measured}})
    assert "2.00, 1.00, 1.50, 2.50" in found.find({"check_mark": "ada"}).words
    assert found.find({"check_mark": "ada"}).verdict == UNRESOLVED, "one seed"
    assert "-0.1000" in found.find({"policy": ["learned gate", "geometric, ranked"], "run": "ada"}).words
    early = (10 * 2.0 + 20 * 1.0 + 30 * 1.5) / 60
    assert f"{early - 2.5:+.2f}" in found.find({"easier": "ada", "at": "nll"}).words
    assert "a check mark in 1 of the 1 seeds" in found.find({"check_mark": "ada"}).words
    assert found.find({"above_chance": "ada"}) == (NOT_RUN, "could not be measured: no sets")
    assert found.find({"right": ["ada", "k4"]}).verdict == NOT_RUN
    assert edited(judge, {}).find({"gap": "no-reuse"}).verdict == NOT_RUN


def test_answers_are_compared_with_those_of_the_models_that_the_statement_names(judge):
    accuracy = {"mini-vanilla-lr-0.004-seed": 0.3, "mini-ponder-lr-0.004-seed": 0.4}

    def scored(ours: float) -> Judge:
        """AdaPonder with this accuracy; that of every model grows a little with its seed."""
        records = [
            record | {"measured": {"tasks": {"tasks": [{"task": "sciq", "metrics": {"acc": {"value": value}}}]}}}
            for start, share in (accuracy | {"mini-adaponder-lr-0.004-seed": ours}).items()
            for record in judge.evidence.records
            if record["file"].startswith(start) and (value := share + 0.001 * record["seed"])
        ]
        return Judge(judge.claims, Evidence(judge.evidence.queue, records))

    (statement,) = (each for each in judge.claims.statements if each.where == "Table 3")
    verdicts = {
        ours: [finding.verdict for finding in scored(ours).verdict(statement.tests)[1]] for ours in (0.28, 0.36, 0.395)
    }
    assert verdicts == {0.28: [HOLDS, FAILS, FAILS], 0.36: [HOLDS, HOLDS, FAILS], 0.395: [HOLDS, HOLDS, HOLDS]}


def dial(*, own: float, losses: dict[float, float]) -> dict:
    rows = [{"budget": d, "depth": d, "flops_ratio": 1 + 1.4 * (d - 1), "loss": loss} for d, loss in losses.items()]
    fixed = [{"budget": None, "depth": 1.0, "flops_ratio": 1.0, "loss": 9.0}]
    return {"rows": [*rows, *fixed], "own": {"loss": own}}


def test_a_dialled_checkpoint_is_moved_to_its_validation_loss_and_held_against_its_seed_s_curve(judge):
    name, alias = "mini-adaponder-lr-0.004-seed-0", "ada"
    made = dial(own=3.0, losses={1.0: 3.2, 1.4: 3.16, 2.0: 3.1, 3.0: 3.02})
    found = edited(judge, {name: {"measured": {"dial": made}}})
    plain, second = judge.values("vanilla")[0], judge.values("k2")[0]
    loss = judge.values(alias)[0] + 0.15  # half way between 3.2 and 3.1, and 3.0 is where the model is by itself
    expected = loss - (plain + second) / 2
    setting, curve = judge.claims.runs[alias], [judge.claims.runs[each] for each in judge.claims.rows["curve"]]
    assert found.evidence.dial_over_curve(setting, curve, 1.5) == {0: pytest.approx(expected)}
    assert found.evidence.dial_over_curve(setting, curve, 1.5, "ratio") == {0: pytest.approx(expected, abs=1e-3)}
    assert found.evidence.dial_over_curve(setting, curve, 3.5) == {}, "the dial was not turned so far"
    assert found.evidence.dial_over_curve(setting, curve, 2.5) == {}, "it jumps from 2 to 3: a line is no measurement"
    finding = found.find({"dial_below_curve": alias, "depth": 1.5, "by": 0.01})
    assert f"{expected:+.4f}" in finding.words
    assert f"| 1.5 | {expected:+.4f} (seed 0 alone) |" in pages(found)
    assert len(results.figure_points(found)[results.FRONTIER][2]) == 1


def test_lines_can_be_drawn_between_other_runs_than_the_curve(judge):
    plain, second, own = (judge.values(alias) for alias in ("vanilla", "recall-k2", "pondernet-k2"))
    depth = judge.values("pondernet-k2", "depth")[0]
    expected = own[0] - (plain[0] + (depth - 1) * (second[0] - plain[0]))
    finding = judge.find({"below_curve": "pondernet-k2", "against": ["vanilla", "recall-k2"]})
    words = "minus the lines between vanilla; PonderNet, no exits, K = 2, at equal iterations"
    assert f"{words}: {expected:+.4f}" in finding.words
    assert finding.words != judge.find({"below_curve": "pondernet-k2"}).words


def test_a_dial_goes_with_the_loss_of_the_run_that_it_was_turned_on(judge):
    second = {"trained-again.json": ("mini-adaponder-lr-0.004-seed-0", 0)}
    made = {"again": 1, "validation_loss": 2.5, "measured": {"dial": dial(own=3.0, losses={1.0: 3.2})}}
    found = edited(judge, {"trained-again": made}, copies=second).evidence.dialled(judge.claims.runs["ada"])
    assert found == {0: [(1.0, 1.0, pytest.approx(2.5 + 0.2))]}


def test_an_aim_is_reached_if_the_whole_interval_lies_beyond_it(judge):
    near = {1.0: 3.0, 2.0: 2.9}
    copies = {f"mini-adaponder-lr-0.004-seed-{s}.json": ("mini-adaponder-lr-0.004-seed-0", s) for s in (1, 2)}
    changes = {
        f"mini-adaponder-lr-0.004-seed-{s}": {
            "validation_loss": judge.values("k2")[s] - 0.02 - 0.001 * s,
            "measured": {"dial": dial(own=2.9, losses=near)},
        }
        for s in range(3)
    }
    found = edited(judge, changes, copies=copies)
    verdicts = [found.find({"dial_below_curve": "ada", "depth": 2.0, "by": by}).verdict for by in (0.0, 0.01, 0.03)]
    assert verdicts == [HOLDS, HOLDS, FAILS]


def test_a_setting_has_one_row_for_all_its_seeds_and_is_held_against_its_base_at_the_same_rate(judge):
    shut = {"validation_loss": 3.75, "validation_depth": 1.0, "validation_halted": [1.0, 1.0, 1.0]}
    changes = {"mini-adaponder-lr-0.004-seed": {"validation_loss": 3.5}, "ablation-shared-gate": shut}
    rows = [row.split(" | ") for row in claim_table(edited(judge, changes), "gates")[2:]]
    (one,) = (row for row in rows if row[0] == "| AdaPonder, one gate for all iterations")
    assert one[2:5] == ["0, 1, 2", "3.7500, 3.7500, 3.7500", "1.00, 1.00, 1.00"]
    assert one[5] == ", ".join(["100/0/0/0"] * 3)
    assert one[6:] == ["+0.2500 [+0.2500, +0.2500] (seeds 0, 1, 2)", "3 of 3 |"]
    assert next(row for row in rows if row[0] == "| AdaPonder, K = 4")[6:] == ["–", "0 of 3 |"]
    assert {row[6] for row in rows if row[1] == "0.001"} == {"–"}
    assert "minus" not in claim_table(judge, "kv-reuse")[0]


def test_shares_of_tokens_by_depth_stand_by_seed_since_a_mean_of_seeds_that_differ_is_of_no_model(judge):
    half, shut = {"validation_halted": [0.0, 0.25, 0.5]}, {"validation_halted": [1.0, 1.0, 1.0]}
    changes = {f"ablation-shared-gate-lr-0.004-seed-{seed}": each for seed, each in enumerate((half, shut, half))}
    rows = [row.split(" | ") for row in claim_table(edited(judge, changes), "gates")[2:]]
    (one,) = (row for row in rows if row[0] == "| AdaPonder, one gate for all iterations")
    assert one[5] == "0/25/25/50, 100/0/0/0, 0/25/25/50"


def test_costs_are_of_the_first_row_whatever_shape_the_others_have(judge):
    rows = [row.split(" | ") for row in main_table(judge, ["vanilla", "vanilla-20-layers", "k2"])]
    column = rows[0].index("x plain")
    plain, deeper, twice = ([float(row[column - 1]), float(row[column])] for row in rows[2:])
    assert plain[1] == 1.0
    assert deeper[1] == pytest.approx(deeper[0] / plain[0], abs=0.01)
    assert deeper == twice  # 20 layers were chosen so


def test_policies_that_come_to_the_same_share_a_row(judge):
    losses = {"learned gate": 3.0, "oracle": 2.9, "uniform": 3.0, "geometric": 3.0, "kl": None, "change": None}
    made = {name: {"loss": loss, "causal": name != "geometric"} for name, loss in losses.items()}
    changes = {"mini-adaponder-lr-0.004-seed-1": {"measured": {"policies": {"depth": 1.5, "compared": made}}}}
    lines = pages(edited(judge, changes)).splitlines()
    rows = [
        line.split(" | ", 2)[2] for line in lines if line.startswith("| AdaPonder, K = 4 | 1 | ") and "1.500" in line
    ]
    assert rows == [
        "oracle | yes | 1.500 | 2.9000 | -0.1000 |",
        "learned gate; uniform | yes | 1.500 | 3.0000 | +0.0000 |",
        "geometric | no | 1.500 | 3.0000 | +0.0000 |",
        "kl; change | yes | 1.500 | – | – |",
    ]


def test_measurements_are_shown_where_their_claim_is(judge):
    compared = {
        name: {"loss": loss, "causal": True} for name, loss in (("learned gate", 3.0), ("random", 3.1), ("kl", None))
    }
    steps = {key: [2.0, None, 1.5, 2.5] for key in ("nll", "nll_at_depth_1", "nll_at_full_depth")}
    kept = {rule: {"loss": loss} for rule, loss in (("state", 3.51), ("kv", 3.5), ("none", 3.4))}
    measured = {
        "steps": {"tokens": [10, 0, 30, 40]} | steps,
        "policies": {"depth": 3.8, "compared": compared},
        "reuse": {"trained": "none", "as": kept, "gap": 0.11},
        "speed": {
            "prefill": {"tokens_per_second": 1e6, "depth": 3.8},
            "decode": {"tokens_per_second": 2e4, "depth": 3.7, "lanes": 64},
        },
    }
    other = edited(judge, {"mini-adaponder-lr-0.004-seed-0": {"measured": measured}})
    page, points = pages(other), results.figure_points(other)
    assert points[results.POLICIES] == ({"random": {0: pytest.approx(0.1)}},)
    lines, shares = points[results.STEPS]
    assert shares == {1: 0.125, 2: 0.0, 3: 0.375, 4: 0.5}
    assert lines[0].points == {1: {0: 2.0}, 3: {0: 1.5}, 4: {0: 2.5}}
    for name in (results.STEPS, results.POLICIES):
        assert f"(figures/{name}.png)" in page
        assert f"{name}.png" not in pages(judge) or (ROOT / f"docs/figures/{name}.png").exists()
    results_figures.steps(lines, shares)
    results_figures.policies(*points[results.POLICIES])
    for row in (
        "| AdaPonder, K = 4 | 0 | 2 | 0 | – | – | – |",
        "| AdaPonder, K = 4 | 0 | random | yes | 3.800 | 3.1000 | +0.1000 |",
        "| AdaPonder, K = 4 | 0 | kl | yes | 3.800 | – | – |",
        "| AdaPonder, K = 4 | 0 | none | 3.5100 | 3.5000 | 3.4000 | +0.1100 |",
    ):
        assert row in page, row


def test_costs_are_those_of_the_depths_and_speed_is_of_runs_alone(judge):
    full, halting = (
        judge.evidence.points(judge.claims.runs["k4"])[0],
        judge.evidence.points(judge.claims.runs["ada"])[0],
    )
    assert full.ratio == pytest.approx(5.2, abs=0.01)
    assert halting.mflops < full.mflops
    assert halting.training > full.training, "training is dense, and gates cost too"
    assert halting.halted == pytest.approx(1 - halting.shares[3])
    assert halting.gates_closed == pytest.approx((4 - halting.depth) / 3, abs=1e-6)
    # A pass of the body with its attention, the head, two heads for each expectation, three gates: from the shape.
    body, head, gate = 2 * 6 * 12 * 256**2 + 4 * 6 * 256 * 512.5, 2 * 256 * 16384, 2 * (256 * 1024 + 1024)
    for point in (
        p for alias in ("ada", "ada-k-0.3") for p in judge.evidence.points(judge.claims.runs[alias]).values()
    ):
        flops = point.depth * body + head + (point.depth - 1) * 2 * head + gate * (point.depth - point.shares[3])
        assert point.mflops == pytest.approx(flops / 1e6, rel=1e-4)
    assert speed([full]) == "shared"
    alone = full._replace(record={"tokens_per_second": 1000.0, "shared_device_with": 0})
    assert speed([alone]) == "1,000"


def test_numbers_are_shown_with_their_seeds():
    assert shown(Estimate(-0.01, -0.02, 0.0, {0: 1.0, 2: 1.0})) == "-0.0100 [-0.0200, +0.0000] (seeds 0, 2)"
    assert shown(Estimate(0.05, -float("inf"), float("inf"), {1: 0.05}), percent=True) == "+5.0 % (seed 1 alone)"
    assert shown(None) == "–"


WORDS = dict.fromkeys(("claim", "where", "says", "paper"), "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table1": ["nobody"]}, "nobody: no such alias"),
        ({"statements": [{"claim": "lr"}]}, "missing"),
        (
            {"statements": [WORDS | {"fixed": {"date": "2026-11-18", "when": "x"}, "tests": [{"higher": "x"}]}]},
            "a test has one of",
        ),
    ],
)
def test_claims_that_are_wrong_say_where(tmp_path, judge, change, message):
    raw = yaml.safe_load((EXPERIMENTS / "claims.yaml").read_text())
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump(raw | change))
    with pytest.raises(InputError, match=message):
        read_judge(tmp_path / "claims.yaml", judge.evidence)


def test_a_readme_without_its_marks_is_refused(judge):
    with pytest.raises(InputError, match="mark where its table goes"):
        results.readme_of(judge, "nothing")


def test_no_two_runs_of_a_claim_look_alike_in_its_table(judge):
    """A table shows title, learning rate and seed: what else differs between two rows must be in their titles."""
    for claim in judge.evidence.queue.claims:
        rows = {}
        for each in judge.evidence.queue.of_claim(claim):
            title = title_of(judge.claims, judge.evidence, each.setting)
            row = (title, each.resolved().train.lr, each.seed, each.again, each.corpus)
            assert rows.setdefault(row, each.label) == each.label, row


def test_numbers_that_the_documents_quote_are_those_of_the_records(judge):
    """By hand: a new record of one of these runs wants its sentence written again."""

    def gap(test: dict) -> str:
        return f"{abs(float(judge.find(test).words.rpartition(': ')[2].split()[0])):.3f}"

    longer = gap({"lower": ["vanilla-long", "k2"]})
    deeper = gap({"lower": ["vanilla-20-layers", "k2"]})
    converted = gap({"lower": ["pondernet-from-vanilla", "on-vanilla-4e-3"]})
    readme = _flat("README.md")
    for words in (
        f"lies {gap({'below_curve': 'pondernet'})} nats below the line",
        f"plain training for longer is {longer} below it",
        f"20 plain layers instead of 6 are {deeper} below",
    ):
        assert words in readme, words
    assert f"by {converted} with PonderNet's recurrence" in _flat("docs/convert.md")


@pytest.mark.parametrize(
    ("page", "settings"),
    [
        ("related-work", ["mini-act-lr-0.004", "mini-pondernet-lr-0.004"]),
        (
            "convert",
            [
                f"mini-{what}-from-mini-vanilla-lr-0.004"
                for what in (
                    "vanilla-steps-1500-lr-0.004",
                    "adaponder-steps-1500-lr-0.002-iterations-2-gate_start-600-ponder_start-900-ponder_full-1050",
                    "adaponder-steps-1500-lr-0.002-gate_start-600-ponder_start-900-ponder_full-1050",
                    "pondernet-steps-1500-lr-0.004-iterations-2-gate_bias-0-exit_prior-0.5-exit_prior_weight-0.1",
                    "pondernet-steps-1500-lr-0.004",
                )
            ],
        ),
    ],
)
def test_tables_of_the_documents_have_the_seeds_losses_and_costs_of_the_records(judge, page, settings):
    lines = (ROOT / "docs" / f"{page}.md").read_text().splitlines()
    for setting in settings:
        points = dict(sorted(judge.evidence.points(setting).items()))
        seeds, losses = (", ".join(cells) for cells in (map(str, points), (f"{p.loss:.4f}" for p in points.values())))
        (row,) = (line for line in lines if f"| {seeds} | {losses} |" in line)
        assert f" | {sum(point.ratio for point in points.values()) / len(points):.2f} | " in row


def _flat(path: str) -> str:
    return " ".join((ROOT / path).read_text().split())
