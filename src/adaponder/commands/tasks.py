"""adaponder eval --tasks: downstream scores through lm-eval at adaptive depth, each with what it cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaponder.commands.shared import choose_policy, open_tokenizer
from adaponder.errors import InputError
from adaponder.terminal import console, counting, table, write_json

if TYPE_CHECKING:
    from adaponder.evaluation.tasks.lm_tasks import TaskScore
    from adaponder.evaluation.tasks.suites import Comparison, Reference, Suite
    from adaponder.evaluation.tasks.task_data import TaskData
    from adaponder.policies import Policy

HEAD = ("task", "shots", "split", "items", "metric", "value")


def run_tasks(
    checkpoint: str,
    tasks: Sequence[str] = (),
    *,
    suite: str | None = None,
    fewshot: Sequence[int] = (),
    task_data: Path | None = None,
    limit: int | None = None,
    policy: Policy | str | None = None,
    tau: float | None = None,
    profile: str | None = None,
    max_iterations: int | None = None,
    batch_size: int = 8,
    weights: str | None = None,
    tokenizer: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "auto",
    json: Path | None = None,
) -> dict[str, Any]:
    """Runs each task at each number of examples, and returns what ``--json`` writes.

    Tasks and numbers of examples that are left out are those of the suite.
    """
    if find_spec("lm_eval") is None:
        raise InputError("--tasks needs lm-eval, which is not installed: pip install 'adaponder[eval]'")
    from adaponder.conversion.open import load
    from adaponder.evaluation.scoring import ScoringOptions
    from adaponder.evaluation.tasks.harness import HarnessLM
    from adaponder.evaluation.tasks.lm_tasks import quiet
    from adaponder.evaluation.tasks.suites import suite_of
    from adaponder.evaluation.tasks.task_data import TaskData

    chosen = None if suite is None else suite_of(suite)
    tasks, fewshot = plan(tasks, fewshot, chosen)
    data = None if task_data is None else TaskData(task_data)
    with console.status(f"loading {checkpoint} …"):
        model, folder = load(checkpoint, dtype=dtype, device=device, weights=weights)
        words = open_tokenizer(model, folder, tokenizer)
    rule = choose_policy(model, folder, policy=policy, tau=tau, profile=profile, max_iterations=max_iterations)
    how = ScoringOptions(policy=rule, max_iterations=max_iterations, seed=seed)
    harness = HarnessLM(model, words, batch_size=batch_size, how=how, counting=counting)
    with quiet():
        scores = list(scored(harness, tasks, fewshot, data, limit=limit, seed=seed))
    show(checkpoint, scores, limit)
    result: dict[str, Any] = {
        "checkpoint": checkpoint,
        "method": model.config.method,
        "policy": None if rule is None else rule.spelling,
        "max_iterations": max_iterations or model.config.iterations,
        "task_data": None if task_data is None else str(task_data),
        "limit": limit,
        "batch_size": batch_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "seed": seed,
        "tasks": [score.as_dict() for score in scores],
    }
    if chosen is not None:
        matched = chosen.matched(model.config)
        compared = compare(chosen, scores, matched)
        show_suite(chosen, compared, matched)
        result["suite"] = {
            "name": chosen.name,
            "metric": chosen.metric,
            "reference": None if matched is None else {"name": matched.name, "source": matched.source},
            "results": [comparison.as_dict() for comparison in compared],
        }
    write_json(json, result)
    return result


def plan(tasks: Sequence[str], fewshot: Sequence[int], suite: Suite | None) -> tuple[list[str], list[int]]:
    """Tasks and numbers of examples without repetitions; those left out are the suite's, or 0 examples without one."""
    if not tasks and suite is None:
        raise InputError("--tasks: name at least one task of lm-eval, or a --suite")
    if suite is not None and (foreign := [task for task in tasks if task not in suite.tasks]):
        raise InputError(
            f"--tasks {','.join(foreign)}: not in --suite {suite.name}, which has {', '.join(suite.tasks)}"
        )
    tasks = tasks or (list(suite.tasks) if suite else [])
    fewshot = fewshot or (list(suite.shots) if suite else [0])
    return list(dict.fromkeys(tasks)), list(dict.fromkeys(fewshot))


def scored(
    harness: Any, tasks: list[str], fewshot: list[int], data: TaskData | None, *, limit: int | None, seed: int
) -> Iterator[TaskScore]:
    """Yields the score of each task at each number of examples.

    All tasks are opened before the first is run, so that a missing file is an error at once.
    """
    from adaponder.evaluation.tasks.lm_tasks import find_tasks, open_task, run_task

    with console.status("looking up tasks …"):
        manager = find_tasks(tasks)
    opened = []
    for shots in fewshot:
        for name in tasks:
            with console.status(f"reading {name} …"):
                opened.append(open_task(manager, name, shots, data, limit=limit, seed=seed))
    for one in opened:
        where = f"split {one.split}" + ("" if one.file is None else f" of {one.file}")
        drawn = f", examples from {one.examples or 'the task itself'}" if one.shots else ""
        console.print(f"{one.name}, {one.shots}-shot: {where}{drawn}", soft_wrap=True)
    while opened:
        yield run_task(harness, opened.pop(0), limit=limit)


def show(checkpoint: str, scores: list[TaskScore], limit: int | None) -> None:
    """Prints a table of metrics and a table of costs."""
    rows = []
    for score in scores:
        opened = score.opened
        cells = (opened.name, opened.shots, opened.split, f"{score.items:,}")
        for metric in score.metrics:
            rows.append((*cells, metric.name, _with_error(metric.value, metric.stderr)))
            cells = ("",) * len(cells)
    title = checkpoint if limit is None else f"{checkpoint}, the first {limit:,} items of each task"
    console.print(table(title, HEAD, rows))
    from adaponder.evaluation.meter import COLUMNS

    several = len({score.opened.shots for score in scores}) > 1
    costs = [
        (f"{score.opened.name}, {score.opened.shots}-shot" if several else score.opened.name, *score.spent.cells())
        for score in scores
    ]
    console.print(table("\nWhat it cost, prompts included", ("task", *COLUMNS), costs))


def _with_error(value: float, stderr: float | None) -> str:
    """``value ± stderr``, or the value alone."""
    form = ".4f" if abs(value) < 100 else ".4g"
    return f"{value:{form}}" if stderr is None else f"{value:{form}} ± {stderr:{form}}"


def compare(suite: Suite, scores: list[TaskScore], matched: Reference | None) -> list[Comparison]:
    """For each number of examples, the suite's metric of this checkpoint, in percent, beside its reference's."""
    compared = []
    for shots in dict.fromkeys(score.opened.shots for score in scores):
        at_shots = [score for score in scores if score.opened.shots == shots]
        by_task = {score.opened.name: score.value(suite.metric) for score in at_shots}
        compared.append(
            suite.compare({task: 100 * value for task, value in by_task.items() if value is not None}, shots, matched)
        )
    return compared


def show_suite(suite: Suite, compared: list[Comparison], matched: Reference | None) -> None:
    """Prints a table per number of examples: this checkpoint, its reference and their difference."""
    for one in compared:
        rows = [(task, f"{value:.1f}", *_beside(value, one.theirs.get(task))) for task, value in one.ours.items()]
        rows.append(("average", f"{one.average:.1f}", *_beside(one.average, one.reference_average)))
        columns = (f"{suite.metric}, %", "here", matched.name if matched else "", "difference" if matched else "")
        console.print(table(f"\n{suite.name}, {one.shots}-shot", columns, rows))
    if matched is None:
        console.print("No Pythia of the paper's table has this backbone's shape: no difference is given.")
    else:
        console.print(f"{matched.name}: {matched.source}", soft_wrap=True)


def _beside(ours: float, theirs: float | None) -> tuple[str, str]:
    """The reference's value and the difference to it, as text; both empty without a reference."""
    return ("", "") if theirs is None else (f"{theirs:.1f}", f"{ours - theirs:+.1f}")
