"""The results page (``docs/results.md``) and README's table, made from the records alone."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from experiments import demand
from experiments.answers import answers
from experiments.claims import Statement
from experiments.judging import Finding, Judge
from experiments.statistics import FAILS, HOLDS, MARGIN, NOT_RUN, VERDICTS, paired
from experiments.tables import (
    NONE,
    apart,
    claim_table,
    dial_table,
    frontier_table,
    learning_rates,
    lr_table,
    main_table,
    markdown,
    measured_tables,
    prose,
    twice,
)

COMMAND = "python -m experiments results"
BEGIN, END = f"<!-- made by {COMMAND} -->", "<!-- end -->"
# Claims that have a section of their own.
_OWN_SECTION = ("lr", "table1", "frontier", demand.CLAIM, *demand.OTHERS)
# Figures of other claims.
_DRAWN = {"nll-by-step": "loss-by-halting-step", "policies": "policies-at-equal-depth"}


def results_page(judge: Judge, *, figures: Mapping[str, str], others: Mapping[str, str]) -> str:
    """The whole page. ``figures`` are captions by file, ``others`` records that are not compared and why."""
    parts = [_opening(judge), _statements(judge), _lr(judge, figures), _table1(judge), _frontier(judge, figures)]
    parts += [
        _demand(judge, figures),
        _claims(judge, figures),
        _table3(judge),
        answers(judge),
        _noise(judge),
        _rerun(judge),
        _apart(others),
    ]
    parts += [_pile()]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _opening(judge: Judge) -> list[str]:
    queue = judge.evidence.queue
    judged = [(each, judge.verdict(each.tests)[0]) for each in judge.claims.statements]
    verdicts = Counter(verdict for _, verdict in judged)
    counted = ", ".join(f"{verdict} {verdicts[verdict]}" for verdict in VERDICTS if verdicts[verdict])
    runs, done = {each.label for each in queue.experiments}, judge.evidence.done
    return [
        "# Results",
        "",
        *prose(
            f"Made by `{COMMAND}` from `experiments/records/`, `experiments/claims.yaml` and `experiments/queue.yaml`;",
            "edits by hand would be lost.",
        ),
        "",
        *prose(
            "The paper trains 70M to 2.8B parameters on 26B tokens and more. Here its claims are tested in miniature:",
            "13M parameters (d 256, 6 layers, vocabulary 16,384), 3,000 steps of 32 x 1,024 tokens (98M) unless a row",
            f"says otherwise, one NVIDIA H200, bf16. Text: {queue.main.says} (data hash",
            f"`{queue.data_hash}`); only runs",
            "on that hash are compared. Losses are of 393,216 validation tokens, in nats. A seed draws",
            "the weights and the order",
            "of the data, so runs of one seed read the same batches, and every difference is of pairs of equal seeds.",
        ),
        "",
        *prose(
            "**Verdicts.** Intervals are two-sided 95 % t intervals over seeds. A difference *holds* if its interval",
            "excludes 0 on the side that is claimed; equality holds if the whole interval lies within",
            f"{MARGIN} nats, fixed after seed 0. *Does not hold here*: the interval lies wholly on the other side, or",
            "wholly outside of the margin. Else it is *not resolvable here*; one seed resolves nothing,",
            "and two and three give wide",
            "intervals (t = 12.7 and 4.30). Each statement is judged by itself, without a correction for their number.",
            "What looked best with seed 0 was given further seeds, and seed 0 still counts among them. What is true at",
            "13M parameters need not be at 70M, nor the other way round.",
        ),
        "",
        *prose(
            f"{len(judge.claims.statements)} statements: {counted}.",
            f"{len(done)} of {len(runs)} runs in the queue are done, with all that they measure.",
        ),
        *_in_short(judged),
    ]


def _in_short(judged: Sequence[tuple[Statement, str]]) -> list[str]:
    """The statements that hold and those that do not, without their numbers."""
    lines: list[str] = []
    for verdict in (HOLDS, FAILS):
        found = [each for each, said in judged if said == verdict]
        if found:
            lines += ["", f"**{verdict[0].upper()}{verdict[1:]}:**", ""]
            lines += [f"- {each.says.rstrip('.')} ({each.where})." for each in found]
    return lines


def _statements(judge: Judge) -> list[str]:
    rows = []
    for each in judge.claims.statements:
        verdict, findings = judge.verdict(each.tests)
        ours = "<br>".join(_said(finding, many=len(findings) > 1) for finding in findings)
        noted = f"**{verdict}**" + (f" ({each.fixed.note})" if each.fixed.note else "")
        rows.append([each.where, each.says, each.paper, ours, noted, f"`{command(each.claim)}`"])
    head = ["where", "the paper says", "its numbers", "ours: difference [95 %] (seeds)", "verdict", "command"]
    return ["## The paper's claims, one by one", "", *markdown(head, rows)]


def command(claim: str) -> str:
    """The command that runs what is missing of a claim."""
    return f"python -m experiments claim {claim} --device cuda"


def _said(finding: Finding, *, many: bool) -> str:
    words = finding.words.removesuffix(f": {NONE}")
    return f"{words}: {finding.verdict}" if many and words != NONE else words


def _figure(figures: Mapping[str, str], name: str) -> list[str]:
    return [f"![{figures[name]}](figures/{name}.png)", "", f"*{figures[name]}*"] if name in figures else []


def _lr(judge: Judge, figures: Mapping[str, str]) -> list[str]:
    best = []
    for title, tried in learning_rates(judge)[1].items():
        first = {rate: points[0].loss for rate, points in tried.items() if 0 in points}
        if len(first) > 1:
            rate = min(first, key=first.__getitem__)
            near = [f"{other:g}" for other in first if other != rate and first[other] - first[rate] < MARGIN]
            edge = " (at the edge of what was tried)" if rate in (min(first), max(first)) else ""
            best.append(f"{title} {rate:g}{edge}" + (f", with {', '.join(near)} within {MARGIN}" if near else ""))
    return [
        "## Learning rate and embedding scale, before anything is compared",
        "",
        *prose(
            f"`{command('lr')}`. Validation loss of seed 0 (mean depth in parentheses where tokens halt), embedding",
            "scale sqrt(d) = 16 (Loop sqrt(2.5 d) = 25.3, as its release) unless a row says otherwise.",
            "The best of a row",
            "is bold; empty cells have not been run, a dash is not in the queue.",
        ),
        "",
        *lr_table(judge),
        "",
        *prose(
            f"Best: {'; '.join(best)}. Other tables have 0.004, chosen from these, unless a row says otherwise.",
            "One seed tells no two rates apart (below, on what seeds can tell apart): those that are close may change",
            "places.",
        ),
        "",
        *_figure(figures, "loss-by-learning-rate"),
    ]


def _paper(judge: Judge, table: str, head: Sequence[str]) -> list[str]:
    return markdown(head, [[str(cell) for cell in row] for row in judge.claims.paper[table]])


def _table3(judge: Judge) -> list[str]:
    return [
        "## Table 3: the paper's downstream averages",
        "",
        *prose(
            "Mean accuracy (%) of nine sets, as printed; by its own row AdaPonder-2.8B has 59.7 at 0 shots and",
            "OPT-1.3B 53.9 at 5. Ours, on four sets, is in the first table (claim `downstream`).",
        ),
        "",
        *_paper(judge, "table3", ["", "tokens", "0 shots", "5 shots"]),
    ]


def _table1(judge: Judge) -> list[str]:
    longer = judge.claims.rows["equal-flops"]
    return [
        "## Table 1: every method on the same tokens",
        "",
        *prose(
            f"`{command('table1')}`. Inference MFLOP per token count every product: layers, attention, head,",
            "expectations over the vocabulary and gates, in windows of 1,024, halted tokens skipped; the",
            "paper's x is the",
            "column *iterations*. Training PFLOP are forward and backward, dense. Tokens/s are of",
            "training, where a run",
            "had the device to itself.",
        ),
        "",
        *main_table(judge, judge.claims.rows["table1"]),
        "",
        "The paper's rows:",
        "",
        *_paper(judge, "table1", ["", "size", "iterations", "loss", "PPL"]),
        "",
        "### At equal training FLOPs",
        "",
        *prose(
            "A plain model that trains as long as K = 2 costs (7,200 steps, 4.6 epochs), or that has as many layers as",
            "make it cost what K = 2 (20) or K = 4 (48) costs.",
        ),
        "",
        *main_table(judge, longer),
    ]


def _frontier(judge: Judge, figures: Mapping[str, str]) -> list[str]:
    dials = [*table, ""] if (table := dial_table(judge)) else []
    return [
        "## The frontier: AdaPonder against separately trained depths",
        "",
        *prose(
            f"`{command('frontier')}`. The curve is the lines between models trained for K = 1 (the plain model), 2,",
            "3, …; a model below it is worth more than choosing a smaller K, or a mixture of two. Where",
            "a seed is missing",
            "on one side of a model's depth, that seed is not compared. The dial's thresholds are set on one half of",
            "262,144 validation tokens and measured on the other; shown is the validation loss plus how far that lies",
            "from the model's own depths there, at depths that it was really turned to.",
        ),
        "",
        *frontier_table(judge),
        "",
        *dials,
        *_figure(figures, "loss-against-iterations"),
    ]


def _demand(judge: Judge, figures: Mapping[str, str]) -> list[str]:
    said = demand.section(judge, command(demand.CLAIM), _figure(figures, "depth-on-demand"))
    return said or ["## Depth on demand: puzzles whose needed depth is known", "", f"{NOT_RUN.capitalize()}."]


def _claims(judge: Judge, figures: Mapping[str, str]) -> list[str]:
    lines = ["## Every other run"]
    waiting = []
    for claim, says in judge.evidence.queue.claims.items():
        if claim in _OWN_SECTION:
            continue
        table = claim_table(judge, claim)
        if not table:
            count = len({each.label for each in judge.evidence.queue.of_claim(claim)})
            waiting.append(f"`{claim}` ({count} runs)" if count else f"`{claim}` (no runs declared)")
            continue
        lines += ["", f"### {claim}", "", f"{says} `{command(claim)}`", "", *table]
        lines += measured_tables(judge, claim)
        if drawn := _figure(figures, _DRAWN.get(claim, "")):
            lines += ["", *drawn]
    if waiting:
        lines += ["", f"Not run yet: {', '.join(waiting)}."]
    return lines


def _noise(judge: Judge) -> list[str]:
    table = twice(judge)
    said = ["Runs of one recipe and one seed, trained twice: what the machine alone turns.", "", *table]
    return ["## The same run twice", "", *(said if table else [f"{NOT_RUN.capitalize()}."])]


def _rerun(judge: Judge) -> list[str]:
    return [
        "## Running a row again",
        "",
        *prose(
            f"`{judge.evidence.queue.main.prepare}` prepares the text (CORPUS: a folder). Ours cannot be",
            "distributed, so",
            "a rerun has another hash and its records stand apart: what can be compared are differences. Then the",
            "command of the row, or:",
        ),
        "",
        "```",
        "python -m experiments list                                  # every run: done or waiting, what came of it",
        "python -m experiments claim table1 --seeds 0,1,2 --device cuda      # one claim; what has a record is skipped",
        "python -m experiments next --minutes 25 --jobs 3 --device cuda",
        f"{COMMAND:<59} # this page, its figures and README's table",
        "```",
    ]


def _apart(others: Mapping[str, str]) -> list[str]:
    return ["## Records that stand apart", "", "Nothing above is compared with these.", "", *apart(others)]


def _pile() -> list[str]:
    return [
        "## How to prepare the Pile for the full recipes",
        "",
        *prose(
            "The `paper/` recipes read `data/pile`: GPT-NeoX's tokens, in windows of 2,048. Their 50,000 steps of 256",
            "windows read 26.2B tokens, two bytes each. Either of these commands makes the folder; an",
            "interrupted one goes",
            "on where it stopped.",
        ),
        "",
        *prose(
            "From Pythia's own tokens (on the hub as `EleutherAI/pile-standard-pythia-preshuffled`:",
            "twenty `.bin` parts",
            "and one `.idx`, 600 GB; join the parts, in order, to one `document.bin` beside `document.idx`):",
        ),
        "",
        "```",
        "adaponder prepare pile/document --tokenizer EleutherAI/gpt-neox-20b --validation 0.001 --out data/pile",
        "```",
        "",
        *prose(
            "From text (`.jsonl.zst` with a field `text`, as the Pile was released; `pip install -e '.[data]'` reads",
            "`.zst`), and then a run:",
        ),
        "",
        "```",
        "adaponder prepare pile/train --tokenizer EleutherAI/gpt-neox-20b --validation 0.001 --out data/pile",
        "torchrun --nproc-per-node 8 -m adaponder train paper/adaponder-70m --device cuda --out runs/ada-70m",
        "```",
        "",
        *prose(
            "`adaponder recipes` lists all of the paper's runs, `adaponder recipes paper/adaponder-70m` says of every",
            "value whether the paper states it, and [scaling.md](scaling.md) has many GPUs.",
        ),
    ]


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
