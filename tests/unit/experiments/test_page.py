"""The results page: the committed pages are those of the records, and verdicts and costs are computed right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from adaponder.errors import InputError
from experiments import figures, page
from experiments.evidence import Evidence, read_claims
from experiments.judging import KINDS, check_tests, find, judge, shown
from experiments.page import BEGIN, END, records_apart
from experiments.queue import identity
from experiments.statistics import FAILS, HOLDS, NOT_RUN, UNRESOLVED, Estimate
from experiments.tables import claim_table, learning_rates, main_table, measured_tables, speed

ROOT = Path(__file__).parents[3]
EXPERIMENTS = ROOT / "experiments"
ADA = "mini-adaponder-lr-0.004-seed-"
ELSEWHERE = {"data": "0123456789abcdef"}


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return page.read_evidence(EXPERIMENTS)


def edited(evidence: Evidence, changes: dict[str, dict], copies: dict[str, tuple[str, int]] | None = None) -> Evidence:
    """Returns other evidence: ``copies`` adds records of further seeds, ``changes`` sets fields by the file's start.

    Nothing is measured in the records unless ``changes`` says so.
    """
    by_name = {
        record["file"]: {**record, "measured": {}, "validation": [dict(record["validation"][-1])]}
        for record in evidence.records
    }
    for name, (source, seed) in (copies or {}).items():
        found = next(record for file, record in by_name.items() if file.startswith(source))
        recipe = found["recipe"] | {"train": found["recipe"]["train"] | {"seed": seed}}
        by_name[name] = found | {"file": name, "seed": seed, "recipe": recipe, "identity": identity(recipe)}
        by_name[name]["validation"] = [dict(found["validation"][-1])]
    for start, fields in changes.items():
        for record in (record for file, record in by_name.items() if file.startswith(start)):
            record["validation"][-1] |= {k: v for k, v in fields.items() if k.startswith("validation")}
            record |= {k: v for k, v in fields.items() if not k.startswith("validation")}
    return Evidence(evidence.queue, list(by_name.values()), evidence.claims)


# --- the committed pages --------------------------------------------------------------------------------------------


def test_committed_pages_and_figures_are_those_of_the_records(evidence):
    """`python -m experiments results` writes them again."""
    results, tables = page.results_page(evidence), page.tables_page(evidence, EXPERIMENTS / "records")
    assert (ROOT / "docs" / "results.md").read_text() == results
    assert (EXPERIMENTS / "tables.md").read_text() == tables
    readme = (ROOT / "README.md").read_text()
    assert readme == page.readme_page(evidence, readme)
    with pytest.raises(InputError, match="mark where its table goes"):
        page.readme_page(evidence, "nothing")
    for name, points in figures.all_points(evidence).items():
        assert figures.shown_by(ROOT / "docs" / "figures" / f"{name}.png") == figures.fingerprint(points), name
    width = None
    for line in (results + tables).splitlines():
        cells = len(line.replace("\\|", "").split("|")) if line.startswith("|") else None
        assert None in (width, cells) or cells == width, line
        width = cells


def test_readme_begins_with_a_tuned_plain_model(evidence):
    first = (ROOT / "README.md").read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2]
    plain = evidence.values("vanilla")
    assert first.startswith("| vanilla | 1.00 | 1.00x | " + ", ".join(f"{plain[seed]:.4f}" for seed in sorted(plain)))
    rates = {rate: points[0].loss for rate, points in learning_rates(evidence)["vanilla"].items()}
    assert min(rates, key=rates.__getitem__) == 0.004


def test_claims_name_runs_of_the_queue(evidence):
    assert set(evidence.aliases.values()) <= evidence.settings.keys()
    statements = evidence.claims["statements"]
    assert all(statement["tests"] and evidence.queue.of_claim(statement["claim"]) for statement in statements)
    places = {statement["where"].partition(",")[0] for statement in statements}
    assert {"Table 1", "Table 2", "Table 3", "Figure 3", "Figure 4", "Figure 5", "Figure 6"} <= places
    kinds = {kind for statement in statements for test in statement["tests"] for kind in test if kind in KINDS}
    assert kinds | {"below_curve", "same_order"} == set(KINDS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table1": ["nobody"]}, "nobody: no such alias"),
        ({"statements": [{"claim": "lr"}]}, "fixed is missing"),
        ({"questions": [{"asks": "?", "tests": [{"higher": "x"}]}]}, "a test has one of"),
    ],
)
def test_wrong_claims_are_refused(tmp_path, change, message):
    raw = yaml.safe_load((EXPERIMENTS / "claims.yaml").read_text())
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump(raw | change))
    with pytest.raises(InputError, match=message):
        check_tests(read_claims(tmp_path / "claims.yaml"))


def test_rows_of_a_claim_have_different_titles(evidence):
    """A table shows title, learning rate and seed: what else differs between two rows must be in their titles."""
    for claim in evidence.queue.claims:
        rows = {}
        for run in evidence.queue.of_claim(claim):
            row = (evidence.title(run.setting), run.shaped.train.lr, run.seed, run.again, run.corpus)
            assert rows.setdefault(row, run.label) == run.label, row


def test_documents_quote_the_records(evidence):
    """By hand: a new record of one of these runs wants its sentence written again."""

    def gap(**test) -> str:
        return f"{abs(float(find(evidence, test).words.rpartition(': ')[2].split()[0])):.3f}"

    readme, convert = (" ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/convert.md"))
    assert f"lies {gap(below_curve='pondernet')} nats below the line" in readme
    assert f"plain training for longer is {gap(lower=['vanilla-long', 'k2'])} below it" in readme
    assert f"20 plain layers instead of 6 are {gap(lower=['vanilla-20-layers', 'k2'])} below" in readme
    converted = gap(lower=["pondernet-from-vanilla", "on-vanilla-4e-3"])
    assert f"by {converted} with PonderNet's recurrence" in convert


LATE = "gate_start-600-ponder_start-900-ponder_full-1050"
CONVERTED = [
    f"mini-{words}-from-mini-vanilla-lr-0.004"
    for words in (
        "vanilla-steps-1500-lr-0.004",
        f"adaponder-steps-1500-lr-0.002-iterations-2-{LATE}",
        f"adaponder-steps-1500-lr-0.002-{LATE}",
        "pondernet-steps-1500-lr-0.004-iterations-2-gate_bias-0-exit_prior-0.5-exit_prior_weight-0.1",
        "pondernet-steps-1500-lr-0.004",
    )
]


@pytest.mark.parametrize(("name", "settings"), [("related-work", ["act", "pondernet"]), ("convert", CONVERTED)])
def test_tables_of_documents_have_losses_and_costs_of_the_records(evidence, name, settings):
    lines = (ROOT / "docs" / f"{name}.md").read_text().splitlines()
    for setting in settings:
        points = dict(sorted(evidence.points(setting).items()))
        seeds, losses = ", ".join(map(str, points)), ", ".join(f"{point.loss:.4f}" for point in points.values())
        (row,) = (line for line in lines if f"| {seeds} | {losses} |" in line)
        assert f" | {sum(point.ratio for point in points.values()) / len(points):.2f} | " in row


# --- records and verdicts -------------------------------------------------------------------------------------------


def test_a_run_is_done_when_its_measurements_are_there(evidence):
    label = "mini-pondernet-lr-0.004-seed-0"
    assert {"mini-ponder-k2-lr-0.004-seed-0", label} <= evidence.done
    records = [record | {"measured": {}} for record in evidence.records if record["file"].startswith(label)]
    assert label not in Evidence(evidence.queue, records, evidence.claims).done, "its dial is not there"


def test_only_runs_on_the_same_data_are_compared(evidence):
    assert {0, 1, 2} <= evidence.values("k2").keys()
    other = edited(evidence, {"mini-ponder-k2-lr-0.004-seed-1": ELSEWHERE})
    assert 1 not in other.values("k2")
    assert "seeds 0, 2" in find(other, {"lower": ["k2", "vanilla"]}).words
    apart = records_apart(other, EXPERIMENTS / "records")
    assert any(name.startswith("mini-ponder-k2-lr-0.004-seed-1") and "other data" in why for name, why in apart.items())


def test_verdicts_follow_paired_differences(evidence):
    copies = {
        f"mini-{name}-lr-0.004-seed-{seed}.json": (f"mini-{name}-lr-0.004-seed-0", seed)
        for name in ("ponder", "adaponder")
        for seed in (1, 2)
    }
    base = {f"mini-ponder-lr-0.004-seed-{seed}": {"validation_loss": 3.5 + 0.02 * seed} for seed in range(3)}

    def with_gaps(*gaps: float) -> Evidence:
        halting = {"validation_depth": 3.79 + 0.001 * len(gaps), "validation_halted": [0.0, 0.0, 0.21]}
        ours = {f"{ADA}{s}": halting | {"validation_loss": 3.5 + 0.02 * s + gap} for s, gap in enumerate(gaps)}
        return edited(evidence, base | ours, copies)

    near, far, unsure = with_gaps(0.001, 0.0, 0.001), with_gaps(0.02, 0.021, 0.022), with_gaps(-0.01, 0.0, 0.01)
    assert [find(made, {"equal": ["ada", "k4"]}).verdict for made in (near, far, unsure)] == [HOLDS, FAILS, UNRESOLVED]
    for test, verdict in (
        ({"lower": ["k4", "ada"]}, HOLDS),
        ({"lower": ["ada", "k4"]}, FAILS),
        ({"lower": ["ada", "k4"], "of": "depth"}, HOLDS),
        ({"saved": ["ada", "k4"], "of": "depth", "low": 0.04, "high": 0.06}, HOLDS),
        ({"saved": ["ada", "k4"], "of": "depth", "low": 0.06, "high": 0.1}, FAILS),
        ({"collapse": "ada"}, FAILS),
    ):
        assert find(far, test).verdict == verdict, test
    one_depth = {f"{ADA}{seed}": {"validation_halted": [0.0, 0.995, 0.999]} for seed in range(2)}
    assert find(edited(far, one_depth), {"collapse": "ada"}).verdict == HOLDS


def test_same_order_after_half_of_the_training(evidence):
    def order(*pairs: tuple[str, str], by: float = 0.01, within: Evidence = evidence):
        return find(within, {"same_order": pairs, "by": by, "what": "rates"})

    # Vanilla is above K = 3 by 0.04 in full; "half" of them are vanilla and K = 2, or the other way round.
    kept = order(("vanilla", "vanilla"), ("k3", "k2"))
    assert kept == (HOLDS, "rates: 1 of 1 pairs that differ by more than 0.01 do so in the same direction")
    turned = order(("vanilla", "k2"), ("k3", "vanilla"))
    assert turned.verdict == FAILS
    assert "0 of 1 pairs" in turned.words
    assert "vanilla minus k3 is +0.04" in turned.words
    assert order(("vanilla", "k2"), ("k3", "vanilla"), by=0.5).verdict == UNRESOLVED
    # Of K = 3 and 4 the second is above with two seeds of three, which does not tell them apart.
    assert order(("k4", "vanilla"), ("k3", "k2"), by=0.001).verdict == UNRESOLVED
    alone = order(("vanilla-0.008", "vanilla-0.002"), ("vanilla", "k2"))
    assert alone.verdict == UNRESOLVED
    assert "(one seed)" in alone.words
    gone = edited(evidence, {"mini-ponder-k2-lr-0.004": ELSEWHERE})
    assert order(("vanilla-0.008", "k2"), ("vanilla", "vanilla-0.002"), within=gone).verdict == NOT_RUN


def test_measurements_decide_analysis_claims(evidence):
    steps = {"tokens": [10, 20, 30, 40], "nll": [2.0, 1.0, 1.5, 2.5], "nll_at_full_depth": [2.0, 1.0, 1.5, 2.5]}
    compared = {name: {"loss": loss} for name, loss in (("learned gate", 3.0), ("geometric, ranked", 3.1))}
    measured = {"steps": steps, "policies": {"compared": compared}, "tasks": {"missing": "no sets"}}
    other = edited(evidence, {f"{ADA}0": {"measured": measured}})
    verdict, words = find(other, {"check_mark": "ada"})
    assert verdict == UNRESOLVED, "one seed"
    assert "2.00, 1.00, 1.50, 2.50" in words
    assert "a check mark in 1 of the 1 seeds" in words
    assert "-0.1000" in find(other, {"policy": ["learned gate", "geometric, ranked"], "run": "ada"}).words
    early = (10 * 2.0 + 20 * 1.0 + 30 * 1.5) / 60
    assert f"{early - 2.5:+.2f}" in find(other, {"easier": "ada", "at": "nll"}).words
    assert find(other, {"above_chance": "ada"}) == (NOT_RUN, "could not be measured: no sets")
    assert find(other, {"right": ["ada", "k4"]}).verdict == find(other, {"gap": "no-reuse"}).verdict == NOT_RUN


@pytest.mark.parametrize(
    ("accuracy", "verdicts"),
    [(0.28, [HOLDS, FAILS, FAILS]), (0.36, [HOLDS, HOLDS, FAILS]), (0.395, [HOLDS, HOLDS, HOLDS])],
)
def test_answers_are_compared_with_the_models_of_table_3(evidence, accuracy, verdicts):
    """The accuracy of every model grows a little with its seed."""
    shares = {"mini-vanilla-lr-0.004-seed": 0.3, "mini-ponder-lr-0.004-seed": 0.4, ADA: accuracy}
    records = [
        record | {"measured": {"tasks": {"tasks": [{"task": "sciq", "metrics": {"acc": {"value": value}}}]}}}
        for start, share in shares.items()
        for record in evidence.records
        if record["file"].startswith(start) and (value := share + 0.001 * record["seed"])
    ]
    (statement,) = (each for each in evidence.claims["statements"] if each["where"] == "Table 3")
    _, findings = judge(Evidence(evidence.queue, records, evidence.claims), statement["tests"])
    assert [finding.verdict for finding in findings] == verdicts


# --- curves and the dial --------------------------------------------------------------------------------------------


def test_a_model_is_compared_with_the_curve_of_its_own_seed(evidence):
    curve, point = evidence.claims["curve"], evidence.points("ada")[0]
    three, four = evidence.values("k3")[0], evidence.values("k4")[0]
    expected = point.loss - (three + (point.depth - 3) * (four - three))
    assert evidence.over_curve("ada", curve)[0] == pytest.approx(expected)
    gone = edited(evidence, {"mini-ponder-k3-lr-0.004-seed-0": ELSEWHERE})
    assert 0 not in gone.over_curve("ada", curve), "no line from K = 2 to 4 where K = 3 lies between"
    other = edited(evidence, {}, {f"{ADA}9.json": (f"{ADA}0", 9)})
    assert 9 not in other.over_curve("ada", curve), "no seed 9 on the curve"
    plain, second, own = (evidence.values(name) for name in ("vanilla", "recall-k2", "pondernet-k2"))
    depth = evidence.values("pondernet-k2", "depth")[0]
    expected = own[0] - (plain[0] + (depth - 1) * (second[0] - plain[0]))
    words = find(evidence, {"below_curve": "pondernet-k2", "against": ["vanilla", "recall-k2"]}).words
    line = "minus the lines between vanilla; PonderNet, no exits, K = 2, at equal iterations"
    assert f"{line}: {expected:+.4f}" in words


def dial(*, own: float, losses: dict[float, float]) -> dict:
    rows = [{"budget": d, "depth": d, "flops_ratio": 1 + 1.4 * (d - 1), "loss": loss} for d, loss in losses.items()]
    fixed = [{"budget": None, "depth": 1.0, "flops_ratio": 1.0, "loss": 9.0}]
    return {"dial": {"rows": [*rows, *fixed], "own": {"loss": own}}}


def test_a_dialled_checkpoint_is_compared_with_the_curve_of_its_seed(evidence):
    measured = dial(own=3.0, losses={1.0: 3.2, 1.4: 3.16, 2.0: 3.1, 3.0: 3.02})
    other = edited(evidence, {f"{ADA}0": {"measured": measured}})
    # Half way between 3.2 and 3.1, and 3.0 is where the model is by itself.
    expected = evidence.values("ada")[0] + 0.15 - (evidence.values("vanilla")[0] + evidence.values("k2")[0]) / 2
    curve = evidence.claims["curve"]
    assert other.dial_over_curve("ada", curve, 1.5) == {0: pytest.approx(expected)}
    assert other.dial_over_curve("ada", curve, 1.5, "ratio") == {0: pytest.approx(expected, abs=1e-3)}
    assert other.dial_over_curve("ada", curve, 3.5) == {}, "the dial was not turned so far"
    assert other.dial_over_curve("ada", curve, 2.5) == {}, "it jumps from 2 to 3: a line is no measurement"
    assert f"{expected:+.4f}" in find(other, {"dial_below_curve": "ada", "depth": 1.5, "by": 0.01}).words
    assert len(figures.frontier_points(other)[2]) == 1
    again = {"again": 1, "validation_loss": 2.5, "measured": dial(own=3.0, losses={1.0: 3.2})}
    second = edited(evidence, {"trained-again": again}, {"trained-again.json": (f"{ADA}0", 0)})
    assert second.dialled("ada") == {0: [(1.0, 1.0, pytest.approx(2.5 + 0.2))]}, "by the loss of the run it is of"


def test_an_aim_needs_the_whole_interval(evidence):
    measured = dial(own=2.9, losses={1.0: 3.0, 2.0: 2.9})
    losses = {seed: evidence.values("k2")[seed] - 0.02 - 0.001 * seed for seed in range(3)}
    changes = {f"{ADA}{seed}": {"validation_loss": loss, "measured": measured} for seed, loss in losses.items()}
    other = edited(evidence, changes, {f"{ADA}{seed}.json": (f"{ADA}0", seed) for seed in (1, 2)})
    verdicts = [find(other, {"dial_below_curve": "ada", "depth": 2.0, "by": by}).verdict for by in (0.0, 0.01, 0.03)]
    assert verdicts == [HOLDS, HOLDS, FAILS]


# --- tables ---------------------------------------------------------------------------------------------------------


def gates_rows(evidence: Evidence, changes: dict[str, dict]) -> list[list[str]]:
    return [row.split(" | ") for row in claim_table(edited(evidence, changes), "gates")[2:]]


def test_a_setting_has_one_row_for_all_seeds(evidence):
    shut = {"validation_loss": 3.75, "validation_depth": 1.0, "validation_halted": [1.0, 1.0, 1.0]}
    rows = gates_rows(evidence, {ADA: {"validation_loss": 3.5}, "ablation-shared-gate": shut})
    (shared,) = (row for row in rows if row[0] == "| AdaPonder, one gate for all iterations")
    assert shared[2:5] == ["0, 1, 2", "3.7500, 3.7500, 3.7500", "1.00, 1.00, 1.00"]
    assert shared[5] == ", ".join(["100/0/0/0"] * 3)
    assert shared[6:] == ["+0.2500 [+0.2500, +0.2500] (seeds 0, 1, 2)", "3 of 3 |"]
    assert next(row for row in rows if row[0] == "| AdaPonder, K = 4")[6:] == ["–", "0 of 3 |"]
    assert {row[6] for row in rows if row[1] == "0.001"} == {"–"}, "only runs at the same rate are compared"
    assert "minus" not in claim_table(evidence, "kv-reuse")[0]


def test_shares_by_depth_are_of_each_seed(evidence):
    halves = {"validation_halted": [0.0, 0.25, 0.5]}, {"validation_halted": [1.0, 1.0, 1.0]}
    changes = {f"ablation-shared-gate-lr-0.004-seed-{seed}": halves[seed % 2] for seed in range(3)}
    (row,) = (row for row in gates_rows(evidence, changes) if row[0] == "| AdaPonder, one gate for all iterations")
    assert row[5] == "0/25/25/50, 100/0/0/0, 0/25/25/50"


def test_costs_are_relative_to_the_first_row(evidence):
    rows = [row.split(" | ") for row in main_table(evidence, ["vanilla", "vanilla-20-layers", "k2"])]
    column = rows[0].index("x plain")
    plain, deeper, twice = ([float(row[column - 1]), float(row[column])] for row in rows[2:])
    assert plain[1] == 1.0
    assert deeper[1] == pytest.approx(deeper[0] / plain[0], abs=0.01)
    assert deeper == twice  # 20 layers were chosen so


def test_measurements_are_shown_and_drawn(evidence):
    losses = {"learned gate": 3.0, "oracle": 2.9, "uniform": 3.0, "geometric": 3.0, "kl": None, "change": None}
    compared = {name: {"loss": loss, "causal": name != "geometric"} for name, loss in losses.items()}
    steps = {key: [2.0, None, 1.5, 2.5] for key in ("nll", "nll_at_depth_1", "nll_at_full_depth")}
    reused = {rule: {"loss": loss} for rule, loss in (("state", 3.51), ("kv", 3.5), ("none", 3.4))}
    measured = {
        "steps": {"tokens": [10, 0, 30, 40]} | steps,
        "policies": {"depth": 1.5, "compared": compared},
        "reuse": {"trained": "none", "as": reused, "gap": 0.11},
    }
    other = edited(evidence, {f"{ADA}0": {"measured": measured}})
    claims = {run.claim for run in other.queue.experiments if {"steps", "policies", "reuse"} & set(run.measures)}
    text = "\n".join(line for claim in claims for line in measured_tables(other, claim))
    for row in (
        "2 | 0 | – | – | – |",
        "oracle | yes | 1.500 | 2.9000 | -0.1000 |",
        "learned gate; uniform | yes | 1.500 | 3.0000 | +0.0000 |",
        "geometric | no | 1.500 | 3.0000 | +0.0000 |",
        "kl; change | yes | 1.500 | – | – |",
        "none | 3.5100 | 3.5000 | 3.4000 | +0.1100 |",
    ):
        assert f"| AdaPonder, K = 4 | 0 | {row}" in text, row
    curves, shares = figures.step_points(other)
    assert shares == {1: 0.125, 2: 0.0, 3: 0.375, 4: 0.5}
    assert curves[0].points == {1: {0: 2.0}, 3: {0: 1.5}, 4: {0: 2.5}}
    assert figures.policy_points(other) == ({"uniform": {0: 0.0}, "geometric": {0: 0.0}},)
    figures.draw_steps(curves, shares)
    figures.draw_policies(*figures.policy_points(other))


def test_costs_are_those_of_the_depths(evidence):
    full, halting = evidence.points("k4")[0], evidence.points("ada")[0]
    assert full.ratio == pytest.approx(5.2, abs=0.01)
    assert halting.training > full.training, "training is dense, and gates cost too"
    assert halting.halted == pytest.approx(1 - halting.shares[3])
    assert halting.gates_closed == pytest.approx((4 - halting.depth) / 3, abs=1e-6)
    # A pass of the body with its attention, the head, two heads for each expectation, three gates: from the shape.
    body, head, gate = 2 * 6 * 12 * 256**2 + 4 * 6 * 256 * 512.5, 2 * 256 * 16384, 2 * (256 * 1024 + 1024)
    for point in (p for name in ("ada", "ada-k-0.3") for p in evidence.points(name).values()):
        flops = point.depth * body + head + (point.depth - 1) * 2 * head + gate * (point.depth - point.shares[3])
        assert point.mflops == pytest.approx(flops / 1e6, rel=1e-4)
    assert speed([full]) == "shared"
    assert speed([replace(full, record={"tokens_per_second": 1000.0, "shared_device_with": 0})]) == "1,000"


def test_numbers_are_shown_with_their_seeds():
    assert shown(Estimate(-0.01, -0.02, 0.0, {0: 1.0, 2: 1.0})) == "-0.0100 [-0.0200, +0.0000] (seeds 0, 2)"
    assert shown(Estimate(0.05, -float("inf"), float("inf"), {1: 0.05}), percent=True) == "+5.0 % (seed 1 alone)"
    assert shown(None) == "–"
