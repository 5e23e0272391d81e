"""The results page, its tables and README's table: templates filled from the records alone."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from experiments import demand
from experiments.claims import Question, Statement
from experiments.evidence import costs
from experiments.judging import Finding, Judge, shown
from experiments.statistics import FAILS, HOLDS, MARGIN, NOT_RUN, VERDICTS, paired
from experiments.tables import (
    NONE,
    apart,
    claim_table,
    dial_table,
    four_numbers,
    frontier_table,
    learning_rates,
    lr_table,
    main_table,
    markdown,
    measured_tables,
    prose,
    spread_of_seeds,
    twice,
)

COMMAND = "python -m experiments results"
BEGIN, END = f"<!-- made by {COMMAND} -->", "<!-- end -->"
# Claims whose runs stand in sections of their own.
_OWN_SECTION = ("lr", "table1", "frontier", demand.CLAIM, *demand.OTHERS)


def results_page(judge: Judge, *, figures: Mapping[str, str]) -> str:
    """Returns ``docs/results.md``; ``figures`` are captions by file name."""
    queue = judge.evidence.queue
    verdicts = [(statement, judge.verdict(statement.tests)[0]) for statement in judge.claims.statements]
    done, runs = len(judge.evidence.done), len({experiment.label for experiment in queue.experiments})
    counts = [_counted("The paper's claims", verdicts, ours=False), _counted("Further claims", verdicts, ours=True)]
    parts = {
        "corpus": f"{queue.main.says} (data hash `{queue.data_hash}`), unless a claim says otherwise",
        "margin": f"{MARGIN}",
        "counts": [*counts, f"- {done} of {runs} runs in the queue are done, with all that they measure."],
        "in short": _in_short(verdicts),
        "paper claims": _statements(judge, ours=False),
        "our claims": _statements(judge, ours=True),
        "questions": answers(judge),
        "figures": [line for name in figures for line in (*_figure(figures, name), "")],
        "prepare": queue.main.prepare,
        "prepare open": queue.corpora["open"].prepare if "open" in queue.corpora else "",
    }
    return _filled("results.template.md", parts)


def tables_page(judge: Judge, *, others: Mapping[str, str]) -> str:
    """Returns ``experiments/tables.md``; ``others`` are records that are not compared, and why."""
    rows = judge.claims.rows
    section = demand.section(judge, f"python -m experiments claim {demand.CLAIM} --device cuda")
    parts = {
        "learning rates": lr_table(judge),
        "table 1": main_table(judge, rows["table1"]),
        "paper table 1": _paper(judge, "table1", ["", "size", "iterations", "loss", "PPL"]),
        "equal FLOPs": main_table(judge, rows["equal-flops"]),
        "frontier": frontier_table(judge),
        "dial": dial_table(judge) or [NOT_RUN],
        "demand": section,
        "claims": _claims(judge),
        "paper table 3": _paper(judge, "table3", ["", "tokens", "0 shots", "5 shots"]),
        "reruns": twice(judge) or [NOT_RUN],
        "apart": apart(others),
    }
    return _filled("tables.template.md", parts)


def _filled(template: str, parts: Mapping[str, str | Sequence[str]]) -> str:
    """Replaces each ``{{name}}`` of a template by its part: text, or lines."""
    text = Path(__file__).with_name(template).read_text(encoding="utf-8")

    def part(match: re.Match[str]) -> str:
        value = parts[match[1]]
        return value if isinstance(value, str) else "\n".join(value).strip()

    return re.sub(r"\n{3,}", "\n\n", re.sub(r"\{\{([^}]+)\}\}", part, text))


def _is_ours(statement: Statement) -> bool:
    """Returns whether a statement is ours rather than the paper's."""
    return statement.where.startswith(("not in the paper", "what Table 1"))


def _counted(title: str, verdicts: Sequence[tuple[Statement, str]], *, ours: bool) -> str:
    counts = Counter(verdict for statement, verdict in verdicts if _is_ours(statement) == ours)
    listed = ", ".join(f"{verdict} {counts[verdict]}" for verdict in VERDICTS if counts[verdict])
    return f"- {title}: {sum(counts.values())} statements; {listed}."


def _in_short(verdicts: Sequence[tuple[Statement, str]]) -> list[str]:
    """Lists the statements that hold and those that do not, without their numbers."""
    lines: list[str] = []
    for wanted in (HOLDS, FAILS):
        chosen = [statement for statement, verdict in verdicts if verdict == wanted]
        if chosen:
            lines += ["", f"**{wanted[0].upper()}{wanted[1:]}:**", ""]
            lines += [f"- {statement.says.rstrip('.')} ({statement.where})." for statement in chosen]
    return lines


def _statements(judge: Judge, *, ours: bool) -> list[str]:
    rows = []
    for statement in judge.claims.statements:
        if _is_ours(statement) != ours:
            continue
        verdict, findings = judge.verdict(statement.tests)
        found = "<br>".join(_finding(finding, many=len(findings) > 1) for finding in findings)
        noted = f"**{verdict}**" + (f" ({statement.fixed.note})" if statement.fixed.note else "")
        rows.append([statement.where, statement.says, statement.paper, found, noted, f"`{statement.claim}`"])
    head = ["where", "statement", "the paper's numbers", "ours: difference [95 %] (seeds)", "verdict", "claim"]
    return markdown(head, rows)


def _finding(finding: Finding, *, many: bool) -> str:
    words = finding.words.removesuffix(f": {NONE}")
    return f"{words}: {finding.verdict}" if many and words != NONE else words


def _figure(figures: Mapping[str, str], name: str) -> list[str]:
    return [f"![{figures[name]}](figures/{name}.png)", "", *prose(f"*{figures[name]}*")]


def _paper(judge: Judge, table: str, head: Sequence[str]) -> list[str]:
    return markdown(head, [[str(cell) for cell in row] for row in judge.claims.paper[table]])


def _claims(judge: Judge) -> list[str]:
    """Returns tables of all claims without their own section."""
    lines, waiting = [], []
    for claim, says in judge.evidence.queue.claims.items():
        if claim in _OWN_SECTION:
            continue
        table = claim_table(judge, claim)
        if table:
            lines += ["", f"### {claim}", "", says, "", *table, *measured_tables(judge, claim)]
        else:
            count = len({experiment.label for experiment in judge.evidence.queue.of_claim(claim)})
            waiting.append(f"`{claim}` ({count} runs)")
    return [*lines, *(["", f"Not run yet: {', '.join(waiting)}."] if waiting else [])]


def answers(judge: Judge) -> list[str]:
    """Returns every question with its answer."""
    lines: list[str] = []
    for each in judge.claims.questions:
        lines += ["", f"**{each.asks}**", ""]
        if each.answer:
            lines += [*prose(each.answer), ""]
        if each.show is not None:
            lines += SHOWN[each.show](judge) or [f"{NOT_RUN.capitalize()}."]
        lines += _tested(judge, each)
    return lines


def _tested(judge: Judge, question: Question) -> list[str]:
    findings = [judge.find(test) for test in question.tests]
    if findings and all(finding.verdict == NOT_RUN for finding in findings):
        return [f"Here: {NOT_RUN}."]
    return [f"- {finding.words}: **{finding.verdict}**" for finding in findings]


def _four(judge: Judge) -> list[str]:
    *halting, base = judge.claims.rows["savings"]
    table = four_numbers(judge, halting, base)
    words = f"Saved are iterations and FLOPs of {judge.title(base)}; the gates' own FLOPs count."
    return [*table, "", words] if table else []


def _true_cost(judge: Judge) -> list[str]:
    rows = []
    for alias in judge.claims.rows["true-cost"]:
        recipe = judge.evidence.settings[judge.claims.runs[alias]].resolved()
        iterations = recipe.model.iterations or 1
        cost = costs(recipe, [0.0] * (iterations - 1) + [1.0])
        rows.append([judge.title(alias), f"{iterations}x", f"{cost.ratio:.2f}x", f"{cost.training:.1f}"])
    words = prose(
        "No. Iterations are equal; but an expectation over the vocabulary costs two heads, and attention",
        "over pauses four",
        "times the keys. At this size, by formula:",
    )
    return [*words, "", *markdown(["every token at full depth", "iterations", "FLOPs", "training PFLOP"], rows)]


def _resolution(judge: Judge) -> list[str]:
    table, smallest = spread_of_seeds(judge, judge.claims.rows["seeds"])
    if not table:
        return []
    words = "Three paired seeds tell apart, half of the time or more, what exceeds the last column"
    effect = 0.003
    said = (
        "so an effect of 0.003 cannot be told from chance here"
        if smallest > effect
        else "so an effect of 0.003 can be seen"
    )
    return [*table, "", f"{words}, {smallest:.4f} at the least: {said}."]


def _tuning(judge: Judge) -> list[str]:
    plain, second = judge.claims.rows["curve"][:2]
    lines = []
    for title, tried in learning_rates(judge)[1].items():
        first = {rate: points[0].loss for rate, points in tried.items() if 0 in points}
        if 0.001 in first and len(first) > 1:
            worth = first[0.001] - min(first.values())
            lines.append(f"- {title}: the best rate is worth {worth:.3f} over 0.001 (seed 0)")
    scaled = paired(judge.values(plain), judge.values("vanilla-unscaled"))
    iterated = paired(judge.values(second), judge.values(plain))
    if scaled is not None:
        lines.append(f"- embedding scale 16 instead of 1, {judge.title(plain)} at 0.004: {shown(scaled)}")
    if iterated is not None:
        lines.append(f"- a second iteration, both tuned: {shown(iterated)}")
    return lines


SHOWN: Mapping[str, Callable[[Judge], list[str]]] = {
    "four-numbers": _four,
    "true-cost": _true_cost,
    "resolution": _resolution,
    "tuning": _tuning,
}


def readme_part(judge: Judge) -> str:
    """README's table of results, with the markers around it."""
    aliases = [alias for alias in judge.claims.rows["readme"] if judge.values(alias)]
    rows = []
    for alias in aliases:
        points = judge.evidence.points(judge.claims.runs[alias])
        losses = ", ".join(f"{points[seed].loss:.4f}" for seed in sorted(points))
        difference = NONE if alias == aliases[0] else _brief(judge, alias, aliases[0])
        depth, ratio = (statistics.fmean(getattr(p, of) for p in points.values()) for of in ("depth", "ratio"))
        rows.append([judge.title(alias), f"{depth:.2f}", f"{ratio:.2f}x", losses, difference])
    missing = [judge.title(alias) for alias in judge.claims.rows["readme"] if alias not in aliases]
    head = ["", "mean depth", "FLOPs", "validation loss, seeds 0, 1, …", "minus vanilla [95 % over seeds]"]
    lines = [BEGIN, *markdown(head, rows)]
    if missing:
        lines += ["", f"Not run yet: {'; '.join(missing)}."]
    return "\n".join([*lines, END])


def _brief(judge: Judge, alias: str, base: str) -> str:
    difference = paired(judge.values(alias), judge.values(base))
    if difference is None:
        return NONE
    if math.isinf(difference.low):
        return f"{difference.mean:+.4f} (one seed)"
    return f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"
