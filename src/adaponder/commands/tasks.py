"""adaponder eval --tasks: runs tasks of lm-eval at adaptive depth, and reports the cost of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaponder.commands import shared
from adaponder.errors import InputError
from adaponder.terminal import console, counting, table, write_json

if TYPE_CHECKING:
    from adaponder.evaluation.tasks.lm_tasks import TaskScore
    from adaponder.evaluation.tasks.suites import Comparison, Reference, Suite
    from adaponder.evaluation.tasks.task_data import TaskData

HEAD = ("task", "shots", "split", "items", "metric", "value")


@shared.command
def run_tasks(
    checkpoint: str,
    tasks: Sequence[str] = (),
    *,
    suite: str | None = None,
    fewshot: Sequence[int] = (),
    task_data: Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    json: Path | None = None,
    depth: shared.Depth,
    opening: shared.NarrowOpening,
) -> dict[str, Any]:
    """Runs each task at each number of few-shot examples (default: the suite's); returns the result for ``--json``."""
    if find_spec("lm_eval") is None:
        raise InputError("--tasks needs lm-eval, which is not installed: pip install 'adaponder[eval]'")
    from adaponder.evaluation.scoring import ScoringOptions
    from adaponder.evaluation.tasks.harness import HarnessLM
    from adaponder.evaluation.tasks.lm_tasks import quiet
    from adaponder.evaluation.tasks.suites import PAPER
    from adaponder.evaluation.tasks.task_data import TaskData

    reference = None if suite is None else PAPER
    tasks, fewshot = plan(tasks, fewshot, reference)
    data = None if task_data is None else TaskData(task_data)
    model, folder, tokenizer = opening.generator(checkpoint)
    policy: Any = depth.choose(model, folder)
    how = ScoringOptions(policy=policy, max_iterations=depth.max_iterations, seed=seed)
    harness = HarnessLM(model, tokenizer, batch_size=batch_size, how=how, counting=counting)
    with quiet():
        scores = list(scored(harness, tasks, fewshot, data, limit=limit, seed=seed))
    show(checkpoint, scores, limit)
    result = shared.facts_of(checkpoint, model) | {
        "policy": None if policy is None else policy.spelling,
        "max_iterations": depth.max_iterations or model.config.iterations,
        "task_data": None if task_data is None else str(task_data),
        "limit": limit,
        "batch_size": batch_size,
        "seed": seed,
        "tasks": [score.as_dict() for score in scores],
    }
    if reference is not None:
        matched = reference.matched(model.config)
        compared = compare(reference, scores, matched)
        show_suite(reference, compared, matched)
        result["suite"] = {
            "name": reference.name,
            "metric": reference.metric,
            "reference": None if matched is None else {"name": matched.name, "source": matched.source},
            "results": [comparison.as_dict() for comparison in compared],
        }
    write_json(json, result)
    return result


def plan(tasks: Sequence[str], fewshot: Sequence[int], suite: Suite | None) -> tuple[list[str], list[int]]:
    """Returns the tasks and numbers of few-shot examples, without duplicates; default: the suite's, or 0 examples."""
    if not tasks and suite is None:
        raise InputError("--tasks: name at least one task of lm-eval, or a --suite")
    if suite is not None and (unknown := [task for task in tasks if task not in suite.tasks]):
        known = ", ".join(suite.tasks)
        raise InputError(f"--tasks {','.join(unknown)}: not in --suite {suite.name}, which has {known}")
    tasks = tasks or (list(suite.tasks) if suite else [])
    fewshot = fewshot or (list(suite.shots) if suite else [0])
    return list(dict.fromkeys(tasks)), list(dict.fromkeys(fewshot))


def scored(
    harness: Any, tasks: list[str], fewshot: list[int], data: TaskData | None, *, limit: int | None, seed: int
) -> Iterator[TaskScore]:
    """Opens all tasks, so that a missing file raises first; then yields a score per task and number of shots."""
    from adaponder.evaluation.tasks.lm_tasks import find_tasks, open_task, run_task

    with console.status("looking up tasks …"):
        manager = find_tasks(tasks)
    opened = []
    for shots in fewshot:
        for name in tasks:
            with console.status(f"reading {name} …"):
                opened.append(open_task(manager, name, shots, data, limit=limit, seed=seed))
    for task in opened:
        split = f"split {task.split}" + ("" if task.file is None else f" of {task.file}")
        examples = f", examples from {task.examples or 'the task itself'}" if task.shots else ""
        console.print(f"{task.name}, {task.shots}-shot: {split}{examples}", soft_wrap=True)
    while opened:
        yield run_task(harness, opened.pop(0), limit=limit)


def show(checkpoint: str, scores: list[TaskScore], limit: int | None) -> None:
    """Prints a table of metrics and a table of costs."""
    rows = []
    for score in scores:
        opened = score.opened
        cells = (opened.name, opened.shots, opened.split, f"{score.items:,}")
        for metric in score.metrics:
            form = ".4f" if abs(metric.value) < 100 else ".4g"
            error = "" if metric.stderr is None else f" ± {metric.stderr:{form}}"
            rows.append((*cells, metric.name, f"{metric.value:{form}}{error}"))
            cells = ("",) * len(cells)
    title = checkpoint if limit is None else f"{checkpoint}, the first {limit:,} items of each task"
    console.print(table(title, HEAD, rows))
    from adaponder.evaluation.meter import COLUMNS

    several = len({score.opened.shots for score in scores}) > 1
    costs = [
        (score.opened.name + (f", {score.opened.shots}-shot" if several else ""), *score.spent.cells())
        for score in scores
    ]
    console.print(table("\nWhat it cost, prompts included", ("task", *COLUMNS), costs))


def compare(suite: Suite, scores: list[TaskScore], matched: Reference | None) -> list[Comparison]:
    """Compares the suite's metric (percent) with that of ``matched``, if any, for each number of few-shot examples."""
    by_shots: dict[int, dict[str, float]] = {score.opened.shots: {} for score in scores}
    for score in scores:
        if (value := score.value(suite.metric)) is not None:
            by_shots[score.opened.shots][score.opened.name] = 100 * value
    return [suite.compare(values, shots, matched) for shots, values in by_shots.items()]


def show_suite(suite: Suite, compared: list[Comparison], matched: Reference | None) -> None:
    """Prints a table per number of few-shot examples: this checkpoint, its reference and their difference."""
    name, gap = (matched.name, "difference") if matched else ("", "")
    for comparison in compared:
        rows = []
        for task, ours in [*comparison.ours.items(), ("average", comparison.average)]:
            theirs = comparison.reference_average if task == "average" else comparison.theirs.get(task)
            compared_cells = ("", "") if theirs is None else (f"{theirs:.1f}", f"{ours - theirs:+.1f}")
            rows.append((task, f"{ours:.1f}", *compared_cells))
        title = f"\n{suite.name}, {comparison.shots}-shot"
        console.print(table(title, (f"{suite.metric}, %", "here", name, gap), rows))
    if matched is None:
        console.print("No Pythia of the paper's table has this backbone's shape: no difference is given.")
    else:
        console.print(f"{matched.name}: {matched.source}", soft_wrap=True)
