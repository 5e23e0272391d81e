"""The results page: the committed pages are those of the records, and verdicts and costs are computed right."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from PIL import Image

from adaponder.errors import InputError
from experiments import page
from experiments.evidence import Evidence, read_claims
from experiments.judging import KINDS, find, kind_of, shown
from experiments.page import records_apart
from experiments.queue import identity
from experiments.statistics import FAILS, HOLDS, NOT_RUN, UNAFFORDABLE, UNRESOLVED, UNTESTABLE
from experiments.tables import claim_table, leaderboard, settings_table

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


def test_committed_pages_and_figures_are_those_of_the_records(evidence):
    """`python -m experiments results` writes them again."""
    results, tables = page.results_page(evidence), page.tables_page(evidence, EXPERIMENTS / "records")
    assert (ROOT / "docs" / "results.md").read_text() == results
    assert (EXPERIMENTS / "tables.md").read_text() == tables
    for path, table in page.tables_within(evidence, ROOT).items():
        assert path.read_text() == page.with_table(path, table)
    with pytest.raises(InputError, match="mark where its table goes"):
        page.with_table(ROOT / "CHANGELOG.md", [])
    for name, points in page.all_points(evidence).items():
        with Image.open(ROOT / "docs" / "figures" / f"{name}.png") as image:
            assert image.info[page.POINTS] == page.fingerprint(points), name
    width = None
    for line in (results + tables).splitlines():
        cells = len(line.replace("\\|", "").split("|")) if line.startswith("|") else None
        assert None in (width, cells) or cells == width, line
        width = cells


def test_every_figure_is_drawn(evidence):
    for name, points in page.all_points(evidence).items():
        assert page.FIGURES[name][1](*points).axes


def test_claims_name_runs_of_the_queue(evidence):
    assert set(evidence.aliases.values()) <= evidence.settings.keys()
    statements = evidence.claims["statements"]
    assert all(statement["tests"] and evidence.queue.of_claim(statement["claim"]) for statement in statements)
    places = {statement["where"].partition(",")[0] for statement in statements}
    assert {"Table 1", "Table 2", "Table 3", "Figure 3", "Figure 4", "Figure 5", "Figure 6"} <= places
    tests = [test for one in (*statements, *evidence.claims["questions"]) for test in one.get("tests", ())]
    assert {kind for test in tests for kind in test if kind in KINDS} == set(KINDS)


def test_wrong_claims_are_refused(evidence, tmp_path):
    raw = yaml.safe_load((EXPERIMENTS / "claims.yaml").read_text())
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump(raw | {"statements": [{"claim": "lr"}]}))
    with pytest.raises(InputError, match="fixed is missing"):
        read_claims(tmp_path / "claims.yaml")
    with pytest.raises(InputError, match="a test has one of"):
        kind_of({"higher": "x"})
    with pytest.raises(InputError, match="nobody"):
        settings_table(evidence, ["nobody"], ["loss"])


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
    assert "has 53.8 / 54.0 (zero-shot / five-shot), where Pythia has 54.1" in convert, "the paper's commented row"
    assert f"lies {gap(below_curve='pondernet')} nats below the line" in readme
    assert f"12 plain layers are {gap(lower=['open-vanilla-12-layers', 'open-recall-k2'])} below two passes" in readme
    assert f"20 plain layers are {gap(lower=['open-vanilla-20-layers', 'open-k2'])} below PonderLM K = 2" in readme
    assert f"training for longer is {gap(lower=['open-vanilla-4800', 'open-recall-k2'])} below two passes" in readme
    assert (
        f"on a mixed corpus {find(evidence, {'lower': ['ada', 'k4']}).words.rpartition(': ')[2].split()[0]}," in readme
    )
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
def test_tables_of_documents_have_losses_intervals_and_costs_of_the_records(evidence, name, settings):
    lines = (ROOT / "docs" / f"{name}.md").read_text().splitlines()
    for setting in settings:
        points = evidence.points(setting).sort_index()
        seeds, losses = ", ".join(map(str, points.index)), ", ".join(f"{loss:.4f}" for loss in points.loss)
        (row,) = (line for line in lines if f"| {seeds} | {losses} |" in line)
        assert f" | {points.ratio.mean():.2f} | " in row
        if len(points) > 1 and setting != CONVERTED[0]:
            curve = evidence.over_curve(setting, evidence.claims["curve"])
            gap = curve if name == "related-work" else evidence.minus(setting, CONVERTED[0])
            assert shown(gap).partition(" (")[0] in row


def test_what_is_not_affordable_states_the_runs_that_it_needs(evidence):
    """Runs in two settings, so that an effect of 0.003 is found four times out of five: (t + t') 0.0063 sqrt(2 / n)."""
    found = find(evidence, {"unaffordable": "an effect of 0.003 nats", "effect": 0.003})
    assert found.verdict == UNAFFORDABLE
    runs = int(found.words.rpartition(": ")[2].split()[0])
    deviation = evidence.noise("vanilla").deviation
    assert runs == pytest.approx(2 * 2 * (2.88 * deviation / 0.003) ** 2, rel=0.03)
    assert find(evidence, {"unaffordable": "more layers", "runs": 5}).words == "more layers: 5 runs"


def test_the_leaderboard_ranks_entries_within_the_compute_of_their_track(evidence):
    names = ["vanilla", "recall-k2", "k2", "pondernet", "ada"]
    claims = {**evidence.claims, "leaderboard": dict.fromkeys(names, "new")}
    rows = [line.split(" | ") for line in leaderboard(replace(evidence, claims=claims))[2:]]
    places = {row[2]: (row[0].strip("| "), row[1]) for row in rows}
    assert next(iter(places)) == "PonderNet, K = 4", "the lowest loss first"
    ranks = {"PonderNet, K = 4": ("–", "1"), "PonderNet, no exits, K = 2": ("1", "2"), "AdaPonder, K = 4": ("–", "–")}
    assert places == ranks | {"PonderLM, K = 2": ("–", "3"), "vanilla": ("2", "4")}


def test_a_run_is_done_when_its_measurements_are_there(evidence):
    label = "mini-pondernet-lr-0.004-seed-0"
    assert {"mini-ponder-k2-lr-0.004-seed-0", label} <= evidence.done
    records = [record | {"measured": {}} for record in evidence.records if record["file"].startswith(label)]
    assert label not in Evidence(evidence.queue, records, evidence.claims).done, "its dial is not there"


def test_only_runs_on_the_same_data_are_compared(evidence):
    assert {0, 1, 2} <= set(evidence.values("k2").index)
    other = edited(evidence, {"mini-ponder-k2-lr-0.004-seed-1": ELSEWHERE})
    assert 1 not in other.values("k2").index
    assert "seeds 0, 2" in find(other, {"lower": ["k2", "vanilla"]}).words
    apart = (set(records_apart(found, EXPERIMENTS / "records")) for found in (other, evidence))
    (name,) = set.difference(*apart)
    assert name.startswith("mini-ponder-k2-lr-0.004-seed-1")


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

    near, far, unsure = with_gaps(0.001, 0.0, 0.001), with_gaps(0.06, 0.061, 0.062), with_gaps(-0.01, 0.0, 0.01)
    verdicts = [find(made, {"equal": ["ada", "k4"]}).verdict for made in (near, far, unsure)]
    assert verdicts == [UNRESOLVED, FAILS, UNRESOLVED], "three seeds never show that two settings are equal"
    assert find(replace(near, noise_of="pair"), {"equal": ["ada", "k4"]}).verdict == HOLDS
    for test, verdict in (
        ({"lower": ["k4", "ada"]}, HOLDS),
        ({"lower": ["ada", "k4"]}, FAILS),
        ({"lower": ["ada", "k4"], "of": "depth"}, HOLDS),
        ({"saved": ["ada", "k4"], "of": "depth", "low": 0.04, "high": 0.06}, HOLDS),
        ({"saved": ["ada", "k4"], "of": "depth", "low": 0.06, "high": 0.1}, FAILS),
        ({"collapse": "ada"}, UNRESOLVED),
    ):
        assert find(far, test).verdict == verdict, test
    one_depth = {f"{ADA}{seed}": {"validation_halted": [0.0, 0.995, 0.999]} for seed in range(2)}
    assert find(edited(far, one_depth), {"collapse": "ada"}).verdict == HOLDS


def test_measurements_decide_analysis_claims(evidence):
    steps = {"tokens": [10, 20, 30, 40], "nll": [2.0, 1.0, 1.5, 2.5], "nll_at_full_depth": [2.0, 1.0, 1.5, 2.5]}
    compared = {name: {"loss": loss} for name, loss in (("learned gate", 3.0), ("geometric, ranked", 3.1))}
    other = edited(evidence, {f"{ADA}0": {"measured": {"steps": steps, "policies": {"compared": compared}}}})
    verdict, words = find(other, {"check_mark": "ada"})
    assert verdict == UNRESOLVED, "one seed"
    assert "2.00, 1.00, 1.50, 2.50" in words
    assert "a check mark in 1 of the 1 seeds" in words
    for losses, count in (([3.0, 1.0, 1.5, 2.5], 0), ([2.0, 1.6, 1.5, 2.5], 0), ([2.0, None, 1.5, 2.5], None)):
        another = edited(evidence, {f"{ADA}0": {"measured": {"steps": steps | {"nll": losses}}}})
        verdict, words = find(another, {"check_mark": "ada"})
        seen = "0 of the 0" if count is None else f"{count} of the 1"
        assert f"a check mark in {seen} seeds" in words, "lowest at the second step and highest at the last"
        assert verdict == (UNTESTABLE if count is None else UNRESOLVED), "without tokens at a step there is no curve"
    assert "-0.1000" in find(other, {"policy": ["learned gate", "geometric, ranked"], "run": "ada"}).words
    early = (10 * 2.0 + 20 * 1.0 + 30 * 1.5) / 60
    assert f"{early - 2.5:+.2f}" in find(other, {"easier": "ada", "at": "nll"}).words
    assert find(other, {"gap": "no-reuse"}).verdict == NOT_RUN


def test_a_model_is_compared_with_the_curve_of_its_own_seed(evidence):
    curve, point = evidence.claims["curve"], evidence.points("ada").loc[0]
    three, four = evidence.values("k3")[0], evidence.values("k4")[0]
    expected = point.loss - (three + (point.depth - 3) * (four - three))
    assert evidence.over_curve("ada", curve).values[0] == pytest.approx(expected)
    gone = edited(evidence, {"mini-ponder-k3-lr-0.004-seed-0": ELSEWHERE})
    assert 0 not in gone.over_curve("ada", curve).values, "no line from K = 2 to 4 where K = 3 lies between"
    other = edited(evidence, {}, {f"{ADA}9.json": (f"{ADA}0", 9)})
    assert 9 not in other.over_curve("ada", curve).values, "no seed 9 on the curve"
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
    assert other.over_curve("ada", curve, "depth", 1.5).values == {0: pytest.approx(expected)}
    assert other.over_curve("ada", curve, "ratio", 1.5).values == {0: pytest.approx(expected, abs=1e-3)}
    assert other.over_curve("ada", curve, "depth", 3.5) is None, "the dial was not turned so far"
    assert other.over_curve("ada", curve, "depth", 2.5) is None, "it jumps from 2 to 3: a line is no measurement"
    assert f"{expected:+.4f}" in find(other, {"dial_below_curve": "ada", "depth": 1.5, "by": 0.01}).words
    again = {"again": 1, "validation_loss": 2.5, "measured": dial(own=3.0, losses={1.0: 3.2})}
    second = edited(evidence, {"trained-again": again}, {"trained-again.json": (f"{ADA}0", 0)})
    assert second.dialled("ada") == {0: [(1.0, 1.0, pytest.approx(2.5 + 0.2))]}, "by the loss of the run it is of"


def test_shares_by_depth_are_of_each_seed(evidence):
    halves = {"validation_halted": [0.0, 0.25, 0.5]}, {"validation_halted": [1.0, 1.0, 1.0]}
    changes = {f"ablation-shared-gate-lr-0.004-seed-{seed}": halves[seed % 2] for seed in range(3)}
    rows = claim_table(edited(evidence, changes), "gates")
    (row,) = (row for row in rows if row.startswith("| AdaPonder, one gate for all iterations |"))
    assert " | 0/25/25/50, 100/0/0/0, 0/25/25/50 | " in row


def test_costs_are_those_of_the_depths(evidence):
    full, halting = evidence.points("k4").loc[0], evidence.points("ada").loc[0]
    assert full.ratio == pytest.approx(5.2, abs=0.01)
    assert halting.training > full.training, "training is dense, and gates cost too"
    assert halting.halted == pytest.approx(1 - halting.shares[3])
    assert halting.gates_closed == pytest.approx((4 - halting.depth) / 3, abs=1e-6)
    # A pass of the body with its attention, the head, two heads for each expectation, three gates: from the shape.
    body, head, gate = 2 * 6 * 12 * 256**2 + 4 * 6 * 256 * 512.5, 2 * 256 * 16384, 2 * (256 * 1024 + 1024)
    for name in ("ada", "ada-k-0.3"):
        for _, point in evidence.points(name).iterrows():
            flops = point.depth * body + head + (point.depth - 1) * 2 * head + gate * (point.depth - point.shares[3])
            assert point.mflops == pytest.approx(flops / 1e6, rel=1e-4)
    # PonderNet's step with closed exits: two passes and the logits of the last, forward and backward.
    recall = 3 * (2 * body + head) * 3000 * 32 * 1024 / 1e15
    assert evidence.points("recall-k2").training[0] == pytest.approx(recall, rel=1e-3)
    assert "| vanilla, 20 layers | 2.40 |" in settings_table(evidence, ["vanilla-20-layers"], ["x vanilla"])


# 0.975 quantiles of Student's t for 6, 7, … and for 30, 31, … degrees of freedom, from a printed table.
T_TABLE = dict(enumerate((2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199), 6))
T_TABLE |= enumerate((2.0423, 2.0395, 2.0369, 2.0345, 2.0322, 2.0301, 2.0281, 2.0262, 2.0244, 2.0227, 2.0211), 30)
OPEN = "min_lr_ratio-0-"


def in_any_order(label: str) -> tuple[str, ...]:
    """Returns the words of a label, which names the changed fields in the order in which the queue had them."""
    return tuple(sorted(label.split("-")))


@pytest.mark.parametrize(
    ("data", "vanilla", "methods", "place"),
    [
        (
            "f0a9b810fd131080",
            f"mini-vanilla-{OPEN}lr-0.004-on-open",
            {
                "vanilla, 12 layers": f"mini-vanilla-{OPEN}num_hidden_layers-12-lr-0.004-on-open",
                "PonderNet, no exits, K = 2": f"mini-recall-{OPEN}iterations-2-lr-0.004-on-open",
            },
            0,
        ),
        (
            "f6d48f6c07616ae2",
            "mini-vanilla-lr-0.004",
            {
                "PonderLM, K = 2": "mini-ponder-k2-lr-0.004",
                "PonderNet, K = 4": "mini-pondernet-lr-0.004",
                "AdaPonder, K = 4": "mini-adaponder-lr-0.004",
            },
            -3,
        ),
    ],
    ids=["open", "mixed"],
)
def test_readmes_intervals_are_found_again_from_the_files_by_another_formula(data, vanilla, methods, place, evidence):
    """From the records' own fields: settings by recipe hash without the seed, noise by alternating means."""
    losses, shares = {}, {}
    for path in sorted((EXPERIMENTS / "records").glob("*.json")):
        record = json.loads(path.read_text())
        if record.get("data") == data and not record.get("again") and "experiment" in record:
            label, _, seed = record["experiment"].partition("-again-")[0].rpartition("-seed-")
            setting = in_any_order(label)
            last = record["validation"][-1]
            loss = record["final"]["report"] if label.endswith("-on-open") else last["validation_loss"]
            losses.setdefault(setting, {})[int(seed)] = loss
            ends = [0.0, *last["validation_halted"], 1.0]
            largest = max(after - before for before, after in pairwise(ends))
            shares.setdefault(setting, []).append(largest)
    pool = {name: dict(by_seed) for name, by_seed in losses.items() if len(by_seed) > 1}
    pool = {name: by_seed for name, by_seed in pool.items() if max(shares[name]) <= 0.95 or min(shares[name]) == 1.0}
    runs, seeds = sum(map(len, pool.values())), {seed for by_seed in pool.values() for seed in by_seed}
    for _ in range(500):
        for by_seed in pool.values():
            mean = sum(by_seed.values()) / len(by_seed)
            by_seed |= {seed: value - mean for seed, value in by_seed.items()}
        for seed in seeds:
            column = [by_seed[seed] for by_seed in pool.values() if seed in by_seed]
            for by_seed in (by_seed for by_seed in pool.values() if seed in by_seed):
                by_seed[seed] -= sum(column) / len(column)
    freedom = runs - len(pool) - len(seeds) + 1
    squares = sum(value**2 for by_seed in pool.values() for value in by_seed.values())
    deviation = (squares / freedom) ** 0.5
    rows = settings_table(evidence, **evidence.claims["tables"]["readme"])
    for title, label in methods.items():
        gaps = [losses[in_any_order(label)][seed] - losses[in_any_order(vanilla)][seed] for seed in range(3)]
        mean, half = sum(gaps) / 3, T_TABLE[freedom] * deviation * (2 / 3) ** 0.5
        (row,) = (line for line in rows if line.startswith(f"| {title} |"))
        numbers = [float(word) for word in re.findall(r"[+-]\d\.\d{4}", row)][place:][:3]
        assert numbers == pytest.approx([mean, mean - half, mean + half], abs=2e-4), title
