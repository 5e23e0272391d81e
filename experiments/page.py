"""Writes the results page, its figures and tables, and README's table from templates, records and claims."""

from __future__ import annotations

import hashlib
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from adaponder.analysis.style import MARKERS, PAGE, PALETTE, house, new_figure, series
from adaponder.errors import InputError
from adaponder.files import write_whole
from adaponder.terminal import console, line
from experiments import demand, tables
from experiments.evidence import ONE_DEPTH, Evidence, read_claims
from experiments.judging import NONE, Finding, find, judge
from experiments.queue import read_queue
from experiments.runner import read_records
from experiments.statistics import FAILS, HOLDS, MARGIN, NOT_RUN, POWER, VERDICTS
from experiments.tables import markdown

BEGIN, END = "<!-- made by python -m experiments results -->", "<!-- end -->"
# Claims whose runs fill separate sections of the template.
_OWN_SECTION = ("lr", "table1", "frontier", demand.CLAIM)
_FRONTIER = ("passes", "x vanilla", "loss by seed", "minus the curve at equal iterations")
_FRONTIER += ("minus the curve at equal FLOPs",)
# The field of PNG metadata that holds the fingerprint of the drawn points.
POINTS = "Description"
# Characters of a line of the legend: three columns must fit on the page.
_WIDEST = 40
# The alias of the setting whose losses by step are drawn.
_ANALYSED = "ada"
_COLUMNS = {"nll": "as it came out", "nll_at_depth_1": "every token at depth 1", "nll_at_full_depth": "at full depth"}
Spot = tuple[float, float, float]
Statement = Mapping[str, Any]
# A statement, the verdict on it, and the findings of its tests.
Judged = tuple[Statement, tuple[str, list[Finding]]]


def write(experiments: Path) -> None:
    """Writes all pages, tables and figures into the checkout that contains the folder ``experiments``."""
    root, evidence = experiments.parent, read_evidence(experiments)
    pages = {path: with_table(path, lines) for path, lines in tables_within(evidence, root).items()}
    for name, values in (points := all_points(evidence)).items():
        with house():
            about = {"Software": None, POINTS: fingerprint(values)}
            FIGURES[name][1](*values).savefig(root / "docs" / "figures" / f"{name}.png", dpi=150, metadata=about)
    pages[root / "docs" / "results.md"] = results_page(evidence)
    pages[experiments / "tables.md"] = tables_page(evidence, experiments / "records")
    for path, text in pages.items():
        write_whole(path, text.encode())
    console.print(line("→ ", (", ".join(map(str, pages)), "bold"), f", and {len(points)} figures"), soft_wrap=True)


def read_evidence(experiments: Path) -> Evidence:
    """Reads the queue, the records and the claims from the folder ``experiments``."""
    claims = read_claims(experiments / "claims.yaml")
    return Evidence(read_queue(experiments / "queue.yaml"), read_records(experiments / "records"), claims)


def results_page(evidence: Evidence) -> str:
    """Returns the text of ``docs/results.md``."""
    queue, judged = evidence.queue, _judged(evidence)
    done, runs = len(evidence.done), len({run.label for run in queue.experiments})
    parts = {
        "corpus": f"{queue.main.says} (data hash `{queue.main.hash}`), unless a claim says otherwise",
        "margin": f"{MARGIN}",
        "power": f"{POWER}",
        "noise": [row for row in tables.noise_table(evidence) if ", with them" not in row],
        "in short": _in_short(judged),
        "done": f"{done} of {runs} runs in the queue are done, with all that they measure.",
        "paper claims": _statements(judged, ours=False),
        "prepare": queue.main.prepare,
        "prepare open": queue.corpora["open"].prepare if "open" in queue.corpora else "",
    }
    return _filled("results.template.md", parts)


def tables_page(evidence: Evidence, records: Path) -> str:
    """Returns the text of ``experiments/tables.md``; ``records`` is the folder of the records."""
    claims = evidence.claims
    # Settings with two seeds or more on the main corpus whose noise is not pooled.
    left_out = [name for name in evidence.pools[""]["stable"][1] if len(evidence.points(name)) > 1]
    parts = {
        "our claims": _statements(_judged(evidence), ours=True),
        "questions": _questions(evidence),
        "noise": tables.noise_table(evidence),
        "one depth": f"{100 * ONE_DEPTH:g} %",
        "left out": "; ".join(sorted(map(evidence.title, left_out))) or "none",
        "analyses": tables.analyses_table(evidence),
        "learning rates": tables.lr_table(evidence),
        **{name: tables.settings_table(evidence, **table) for name, table in claims["tables"].items()},
        "frontier": tables.settings_table(evidence, [*claims["curve"], *claims["frontier"]], _FRONTIER),
        "dial": tables.dial_table(evidence) or NOT_RUN,
        "demand": demand.tables(demand.subjects(evidence)) or NOT_RUN,
        "claims": _claims(evidence),
        "reruns": tables.reruns(evidence) or NOT_RUN,
        "apart": [f"- `{name}`" for name in records_apart(evidence, records)],
    }
    return _filled("tables.template.md", parts)


def _judged(evidence: Evidence) -> list[Judged]:
    return [(statement, judge(evidence, statement["tests"])) for statement in evidence.claims["statements"]]


def tables_within(evidence: Evidence, root: Path) -> dict[Path, list[str]]:
    """Returns ``{page: generated table}`` for the README and the leaderboard, whose other text is written by hand."""
    readme = tables.settings_table(evidence, **evidence.claims["tables"]["readme"])
    return {root / "README.md": readme, root / "experiments" / "README.md": tables.leaderboard(evidence)}


def with_table(path: Path, table: Sequence[str]) -> str:
    """Returns the text of a page with ``table`` in place of the text between ``BEGIN`` and ``END``."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(f"{path}: the lines {BEGIN} and {END} mark where its table goes; one of them is missing")
    return before + "\n".join([BEGIN, *table, END]) + after


def _filled(template: str, parts: Mapping[str, str | Sequence[str]]) -> str:
    """Reads a template and replaces each ``{{name}}`` by ``parts[name]``: text, or lines."""
    text = Path(__file__).with_name(template).read_text(encoding="utf-8")

    def part(match: re.Match[str]) -> str:
        value = parts[match[1]]
        return value if isinstance(value, str) else "\n".join(value).strip()

    return re.sub(r"\n{3,}", "\n\n", re.sub(r"\{\{([^}]+)\}\}", part, text))


def _is_ours(statement: Statement) -> bool:
    return statement["where"].startswith(("not in the paper", "what Table 1"))


def _in_short(judged: Sequence[Judged]) -> list[str]:
    """Counts the statements by verdict, and lists those that hold and those that fail."""
    lines: list[str] = []
    for title, ours in (("The paper's claims", False), ("Ours", True)):
        counts = Counter(verdict for statement, (verdict, _) in judged if _is_ours(statement) == ours)
        listed = ", ".join(f"{verdict} {counts[verdict]}" for verdict in VERDICTS if counts[verdict])
        lines.append(f"- {title}: {counts.total()} statements; {listed}.")
    for listed_verdict in (HOLDS, FAILS):
        if statements := [statement for statement, (verdict, _) in judged if verdict == listed_verdict]:
            lines += ["", f"**{listed_verdict[0].upper()}{listed_verdict[1:]}:**", ""]
            lines += [f"- {statement['says'].rstrip('.')} ({statement['where']})." for statement in statements]
    return lines


def _statements(judged: Sequence[Judged], *, ours: bool) -> list[str]:
    """Returns a table of the paper's statements or, with ``ours``, of ours, numbered by their order in claims.yaml."""
    rows = []
    for number, (statement, (verdict, findings)) in enumerate(judged, 1):
        if _is_ours(statement) != ours:
            continue
        words = []
        for finding in findings:
            text = finding.words.removesuffix(f": {NONE}")
            words.append(f"{text}: {finding.verdict}" if len(findings) > 1 and text != NONE else text)
        when = statement["fixed"]["when"]
        note = "" if when == "before any of its runs" else f" (chosen after looking: {when})"
        cells = [statement[field] for field in ("where", "says", "paper")]
        rows.append([f"{number}", *cells, "<br>".join(words), f"**{verdict}**{note}", f"`{statement['claim']}`"])
    head = ["", "where", "statement", "the paper's numbers", "ours: difference [95 %] (seeds)", "verdict", "claim"]
    return markdown(head, rows)


def _questions(evidence: Evidence) -> list[str]:
    """Returns the questions of ``claims.yaml`` about the paper, each with its answer, table and test results."""
    lines: list[str] = []
    for question in evidence.claims["questions"]:
        lines += ["", f"**{question['asks']}**", ""]
        lines += [*textwrap.wrap(question.get("answer", ""), 120, break_on_hyphens=False), ""]
        if "show" in question:
            show = question["show"]
            lines += tables.noise_table(evidence) if show == "noise" else tables.settings_table(evidence, **show)
        findings = [find(evidence, test) for test in question.get("tests", ())]
        if findings and all(finding.verdict == NOT_RUN for finding in findings):
            lines.append(f"Here: {NOT_RUN}.")
        else:
            lines += [f"- {finding.words}: **{finding.verdict}**" for finding in findings]
    return lines


def _claims(evidence: Evidence) -> list[str]:
    """Returns the tables of each claim that is not in ``_OWN_SECTION``, then lists claims without a finished run."""
    lines, waiting = [], []
    for claim, sentence in evidence.queue.claims.items():
        if claim in _OWN_SECTION:
            continue
        if table := tables.claim_table(evidence, claim):
            lines += ["", f"### {claim}", "", sentence, "", *table, *tables.measured_tables(evidence, claim)]
        else:
            count = len({run.label for run in evidence.queue.of_claim(claim)})
            waiting.append(f"`{claim}` ({count} runs)")
    return [*lines, *(["", f"Not run yet: {', '.join(waiting)}."] if waiting else [])]


def records_apart(evidence: Evidence, folder: Path) -> list[str]:
    """Returns the record files in ``folder`` that belong to no run of the queue."""
    used = {record["file"] for record in evidence.runs.record}
    return [path.name for path in sorted(folder.glob("*.json")) if path.name not in used]


def _spots(evidence: Evidence, names: Sequence[str], column: str, vanilla: str) -> dict[str, Spot]:
    """Returns ``{title: (mean of the column, loss minus vanilla's, half the width of its interval)}``."""
    spots = {}
    for name in names:
        if (gap := evidence.minus(name, vanilla)) is not None:
            half = gap.half if gap.freedom and evidence.setting(name) != evidence.setting(vanilla) else 0.0
            spots[evidence.title(name)] = (evidence.mean(name, column), gap.mean, half)
    return spots


def cost_points(evidence: Evidence) -> tuple[Any, ...]:
    """Returns the arguments of :func:`draw_line`: vanilla models and the leaderboard by inference FLOPs."""
    line = evidence.claims["line"]
    others = [name for name in evidence.claims["leaderboard"] if name not in line]
    return _spots(evidence, line, "mflops", line[0]), _spots(evidence, others, "mflops", line[0]), "MFLOP per token"


def frontier_points(evidence: Evidence) -> tuple[Any, ...]:
    """Returns the arguments of :func:`draw_line`: the curve and the settings compared with it by mean iterations."""
    curve, others = evidence.claims["curve"], evidence.claims["frontier"]
    return _spots(evidence, curve, "depth", curve[0]), _spots(evidence, others, "depth", curve[0]), "mean iterations"


def draw_line(line: Mapping[str, Spot], others: Mapping[str, Spot], label: str, highest: float = 0.04) -> Figure:
    """Draws losses minus vanilla's: ``line`` as a line, and as separate points the ``others`` below ``highest``."""
    with house() as theme:
        figure = new_figure(width=PAGE, height=3.2 + 0.06 * len(others))
        axes = figure.subplots()
        xs, ys, halves = zip(*line.values(), strict=True)
        look: dict[str, Any] = {"color": theme.ink, "marker": "o", "capsize": 2, "elinewidth": 0.7}
        axes.errorbar(xs, ys, halves, **look, label=textwrap.fill("; ".join(line), _WIDEST))
        for index, (name, (x, y, half)) in enumerate(others.items()):
            if y < highest:
                look |= {"marker": MARKERS[(index + 1) % len(MARKERS)], "color": PALETTE[index % len(PALETTE)]}
                axes.errorbar([x], [y], [half], **look, linestyle="none", label=name)
        axes.set(xlabel=label, ylabel="loss minus vanilla's (nats)")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def step_points(evidence: Evidence) -> tuple[Any, ...]:
    """Returns the arguments of :func:`draw_steps`, with a point per seed and step; empty without measurements."""
    if not (results := list(evidence.measured(_ANALYSED, "steps").values())):
        return ()
    spots = {
        name: [(i, loss) for result in results for i, loss in enumerate(result[column], 1) if loss is not None]
        for column, name in _COLUMNS.items()
    }
    tokens = [sum(counts) for counts in zip(*(result["tokens"] for result in results), strict=True)]
    return spots, {step: count / sum(tokens) for step, count in enumerate(tokens, 1)}


def draw_steps(spots: Mapping[str, Sequence[tuple[int, float]]], shares: Mapping[int, float]) -> Figure:
    """Draws the mean loss by halting step, a point per seed; tick labels show the ``shares`` of tokens by step."""
    with house():
        figure = new_figure(width=PAGE, height=3.0)
        axes = figure.subplots()
        for index, (name, points) in enumerate(spots.items()):
            look: dict[str, Any] = dict(series(index))
            steps = sorted({step for step, _ in points})
            axes.plot(steps, [fmean(y for x, y in points if x == step) for step in steps], **look, label=name)
            axes.scatter(*zip(*points, strict=True), s=9, color=look["color"], alpha=0.5, linewidths=0)
        names = [f"{step}\n{100 * share:.1f} %" for step, share in sorted(shares.items())]
        axes.set_xticks(sorted(shares), names)
        axes.set_xlim(min(shares) - 0.3, max(shares) + 0.3)
        axes.set(xlabel="halted at step, and share of the tokens", ylabel="mean loss (nats)")
        axes.legend(loc="best")
    return figure


# Two functions of each figure: the first returns the drawn values (none without records), the second draws them.
FIGURES: Mapping[str, tuple[Callable[[Evidence], tuple[Any, ...]], Callable[..., Figure]]] = {
    "loss-against-flops": (cost_points, draw_line),
    "loss-against-iterations": (frontier_points, draw_line),
    "loss-by-halting-step": (step_points, draw_steps),
}


def all_points(evidence: Evidence) -> dict[str, tuple[Any, ...]]:
    """Maps the name of each figure that can be drawn to the arguments of its drawing function."""
    return {name: values for name, (points, _) in FIGURES.items() if (values := points(evidence))}


def fingerprint(points: Any) -> str:
    """Returns a hash of the arguments of a drawing function."""
    return hashlib.sha256(json.dumps(points, sort_keys=True).encode()).hexdigest()[:16]
