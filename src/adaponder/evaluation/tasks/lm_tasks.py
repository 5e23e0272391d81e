"""Runs lm-eval's tasks unchanged, with their data from the hub or from local files."""

from __future__ import annotations

import difflib
import functools
import logging
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import jinja2
import lm_eval
import lm_eval.api.task
from jinja2.meta import find_undeclared_variables
from lm_eval.api.metrics import mean, mean_stderr, perplexity
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from adaponder.errors import AdaPonderError, InputError
from adaponder.evaluation.meter import Spent
from adaponder.evaluation.tasks.harness import HarnessLM
from adaponder.evaluation.tasks.task_data import FIELDS, TaskData

_UNREADABLE = (KeyError, ValueError, TypeError, IndexError, jinja2.TemplateError)


@dataclass(frozen=True)
class OpenedTask:
    """A task with its data: items from ``split``, few-shot examples from the split ``examples`` (``None``: no split).

    ``file`` is the file of the items; ``None`` if they come from the hub.
    """

    task: Any
    name: str
    shots: int
    split: str
    examples: str | None
    file: Path | None


class Metric(NamedTuple):
    """One metric of a task; ``stderr`` is ``None`` if it has no known closed form or is not finite."""

    name: str
    value: float
    stderr: float | None


@dataclass(frozen=True)
class TaskScore:
    """Metrics and cost of a task; ``samples`` are lm-eval's records of answers, one per item and filter."""

    opened: OpenedTask
    items: int
    metrics: tuple[Metric, ...]
    spent: Spent
    samples: list[dict[str, Any]]

    def value(self, metric: str) -> float | None:
        return next((entry.value for entry in self.metrics if entry.name == metric), None)

    def as_dict(self) -> dict[str, Any]:
        opened = self.opened
        return {
            "task": opened.name,
            "shots": opened.shots,
            "split": opened.split,
            "examples": opened.examples,
            "file": None if opened.file is None else str(opened.file),
            "version": opened.task.VERSION,
            "items": self.items,
            "metrics": {metric.name: {"value": metric.value, "stderr": metric.stderr} for metric in self.metrics},
            "cost": self.spent.as_dict(),
        }


def find_tasks(names: Sequence[str]) -> TaskManager:
    """Returns lm-eval's ``TaskManager`` with these tasks; raises for a name that is not a task.

    It indexes only the folders of these tasks; the slow index of all tasks is built only if a name is not found there.
    """
    folders = {folder for name, folder in _folders().items() if name in names}
    manager = TaskManager(include_defaults=False, include_path=sorted(folders))
    if any(name not in manager.all_subtasks for name in names):
        manager = TaskManager()
    for name in names:
        if name not in manager.all_subtasks:
            group = ", but a group or a tag: name its tasks" if name in manager.all_tasks else ""
            near = " or ".join(difflib.get_close_matches(name, manager.all_subtasks, n=3))
            raise InputError(f"--tasks {name} is not a task of lm-eval{group}" + (near and f"; did you mean {near}?"))
    return manager


@functools.cache
def _folders() -> dict[str, Path]:
    """Returns the folder of each lm-eval task by name, from the first ``task:`` line of each YAML file."""
    pattern = re.compile(rb"^task:[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE)
    files = sorted((Path(lm_eval.__file__).parent / "tasks").rglob("*.yaml"), reverse=True)
    named = ((pattern.search(path.read_bytes()), path.parent) for path in files)
    return {match[1].decode(): folder for match, folder in named if match}


def open_task(
    manager: TaskManager, name: str, shots: int, data: TaskData | None, *, limit: int | None = None, seed: int = 0
) -> OpenedTask:
    """Opens a task with its data: from ``data`` or, if ``None``, from the hub.

    Items after ``limit`` may be left out. Few-shot examples are drawn with lm-eval's default seed plus ``seed``.
    """
    opened = _from_hub(manager, name, shots) if data is None else _from_files(manager, name, shots, data, limit)
    if shots and opened.task.get_config("num_fewshot") == 0:
        raise InputError(f"--fewshot {shots}: lm-eval defines {name} without examples; use --fewshot 0")
    opened.task.set_config("num_fewshot", shots)
    opened.task.set_fewshot_seed(DEFAULT_OTHER_SEED + seed)
    return opened


def _from_hub(manager: TaskManager, name: str, shots: int) -> OpenedTask:
    try:
        task = manager.load([name])["tasks"][name]
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        cure = "--task-data DIR reads them from files"
        raise InputError(f"--tasks {name}: downloading its records failed ({error}); {cure}") from error
    config: Any = task.config
    split = config.test_split or config.validation_split
    examples = config.fewshot_config.split or config.training_split or config.validation_split or config.test_split
    return OpenedTask(task, name, shots, split, examples if shots else None, None)


def _from_files(manager: TaskManager, name: str, shots: int, data: TaskData, limit: int | None) -> OpenedTask:
    config = manager.task_index[name].cfg or {}
    if "class" in config:
        raise InputError(f"--task-data: {name} is a Python task that fetches its own records; leave it out")
    # lm-eval's split is evaluated, or the first of test and validation that is in ``data``.
    preferred = config.get("test_split") or config.get("validation_split") or "test"
    split = next((split for split in (preferred, "test", "validation") if data.find(name, split)), None)
    if split is None:
        raise InputError(f"--task-data: no records of {name}; looked for {data.looked_for(name, preferred)}")
    examples = _examples(name, config, data, split) if shots else None
    # Preparing many records takes seconds, so only ``limit`` are prepared, unless examples come from the same split.
    loaded = {split: _dataset(name, config, data, split, None if examples == split else limit)}
    if examples is not None and examples != split:
        loaded[examples] = _dataset(name, config, data, examples, None)
    # lm-eval applies changes to a registered task only as a member of a group that is defined inline. If the test and
    # few-shot splits are the same, it never uses an item as its own example.
    changed: dict[str, Any] = {"task": name, "custom_dataset": lambda **_: loaded}
    changed |= {"training_split": None, "validation_split": None, "test_split": split, "fewshot_split": examples}
    if isinstance(fewshot := config.get("fewshot_config"), dict):
        changed["fewshot_config"] = {key: value for key, value in fewshot.items() if key != "split"}
    file = data.find(name, split)
    try:
        task: Any = manager.load([{"group": "records", "task": [changed]}])["tasks"][name]
    except AdaPonderError:
        raise
    except _UNREADABLE as error:
        raise InputError(f"{file}: cannot build {name} from these records ({type(error).__name__}: {error})") from error
    return OpenedTask(task, name, shots, split, examples, file)


def _examples(name: str, config: dict[str, Any], data: TaskData, split: str) -> str | None:
    """Returns the split of few-shot examples; ``None`` for a task that defines its own examples.

    If map.yaml names no split, it is lm-eval's or, if that is the evaluated ``split`` or missing, ``train``. Raises if
    ``data`` does not have the split.
    """
    fewshot = config.get("fewshot_config") or {}
    if fewshot.get("samples"):
        return None
    preferred = config.get("fewshot_split") or fewshot.get("split") or config.get("training_split")
    preferred = preferred or config.get("validation_split")
    mapped = data.fewshot(name)
    source = mapped or (preferred if preferred and preferred != split else "train")
    if data.find(name, source):
        return source
    raise InputError(
        f"--fewshot: {name} draws its examples from {source}, which is missing; looked for "
        f"{data.looked_for(name, source)}"
        + ("" if mapped else f"; `fewshot: {split}` there draws from {split} instead")
    )


def _dataset(name: str, config: dict[str, Any], data: TaskData, split: str, limit: int | None) -> datasets.Dataset:
    records = data.read(name, split, FIELDS.get(name) or _template_fields(config))
    try:
        return datasets.Dataset.from_list(records[:limit])
    except _UNREADABLE as error:
        file = data.find(name, split)
        raise InputError(f"{file}: a field has different types in different records ({error})") from None


def _template_fields(config: dict[str, Any]) -> tuple[str, ...]:
    """Returns the fields that a task's templates use; empty if the task preprocesses its records."""
    if config.get("process_docs"):
        return ()
    texts = [config.get(key) for key in ("doc_to_text", "doc_to_target", "doc_to_choice")]
    templates = [text for text in texts if isinstance(text, str) and "{{" in text]
    environment = jinja2.Environment()
    return tuple(sorted({field for text in templates for field in find_undeclared_variables(environment.parse(text))}))


def run_task(model: HarnessLM, opened: OpenedTask, *, limit: int | None = None) -> TaskScore:
    """Scores the model on a task, or on the first ``limit`` items."""
    task = opened.task
    # If examples come from the evaluated split, one more is drawn, because the item itself may be among them.
    needed = opened.shots + (task.fewshot_cfg.split == task.config.test_split)
    if opened.examples and len(task.sampler.df) < needed:
        raise InputError(
            f"--fewshot {opened.shots}: {opened.name} has {len(task.sampler.df)} records in {opened.examples}: too few"
        )
    model.meters.pop(opened.name, None)
    try:
        results: Any = evaluate(
            model, {"tasks": {opened.name: task}, "groups": {}}, limit=limit, bootstrap_iters=0, log_samples=True
        )
    except AdaPonderError:
        raise
    except _UNREADABLE:
        _blame_record(opened, limit)
        raise
    samples = results["samples"][opened.name]
    return TaskScore(
        opened,
        items=results["n-samples"][opened.name]["effective"],
        metrics=tuple(_metrics(task, results["results"][opened.name], samples)),
        spent=model.meters[opened.name].spent(),
        samples=samples,
    )


def _blame_record(opened: OpenedTask, limit: int | None) -> None:
    """Raises an error that names the first record that the task's templates fail on, if there is one."""
    task = opened.task
    for number, record in enumerate(islice(task.task_docs, limit), 1):
        try:
            task.doc_to_text(record)
            task.doc_to_target(record)
            if task.config.doc_to_choice is not None:
                task.doc_to_choice(record)
        except _UNREADABLE as error:
            source = opened.file or f"{opened.name} on the hub"
            raise InputError(
                f"{source}: record {number} is not an item of {opened.name} ({type(error).__name__}: {error})"
            ) from error


def _metrics(task: Any, results: dict[str, Any], samples: list[dict[str, Any]]) -> Iterator[Metric]:
    """Yields each metric; means and perplexities get a closed-form standard error instead of lm-eval's bootstrap."""
    for key, value in results.items():
        name, _, filtered = key.partition(",")
        if not filtered or name.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        values = [sample[name] for sample in samples if sample["filter"] == filtered and name in sample]
        aggregation, stderr = task.aggregation().get(name), None
        if aggregation in (mean, perplexity) and len(values) > 1:
            # Delta method for perplexity: the derivative of exp(-mean) is -exp(-mean).
            error = mean_stderr(values) * (value if aggregation is perplexity else 1)
            stderr = error if math.isfinite(error) else None
        yield Metric(name if filtered == "none" else f"{name} ({filtered})", float(value), stderr)


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager that silences lm-eval, datasets and the hub except for errors, and hides their progress bars."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    bars, tqdm = datasets.are_progress_bars_disabled(), lm_eval.api.task.tqdm
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        datasets.disable_progress_bars()
        lm_eval.api.task.tqdm = functools.partial(tqdm, disable=True)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        lm_eval.api.task.tqdm = tqdm
        if not bars:
            datasets.enable_progress_bars()
