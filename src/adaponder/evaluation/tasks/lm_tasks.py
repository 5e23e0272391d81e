"""lm-eval's own tasks, unchanged, with records from the hub or from files here; no split is read unsaid."""

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
from adaponder.evaluation.tasks.task_data import Record, TaskData, require_fields

_UNREADABLE = (KeyError, ValueError, TypeError, IndexError, jinja2.TemplateError)


@dataclass(frozen=True)
class Opened:
    """A task ready to run: the split it is evaluated on, and the one its examples come from (``None``: no examples)."""

    task: Any
    name: str
    shots: int
    split: str
    examples: str | None
    file: Path | None


class Metric(NamedTuple):
    """One number of a task; ``stderr`` is ``None`` where no formula gives it."""

    name: str
    value: float
    stderr: float | None


@dataclass(frozen=True)
class TaskScore:
    """What a task gave and what it cost; ``samples`` are lm-eval's, one per item and filter."""

    opened: Opened
    items: int
    metrics: tuple[Metric, ...]
    spent: Spent
    samples: list[dict[str, Any]]

    def value(self, metric: str) -> float | None:
        return next((found.value for found in self.metrics if found.name == metric), None)

    def as_dict(self) -> dict[str, Any]:
        found = self.opened
        return {
            "task": found.name,
            "shots": found.shots,
            "split": found.split,
            "examples": found.examples,
            "file": None if found.file is None else str(found.file),
            "version": found.task.VERSION,
            "items": self.items,
            "metrics": {metric.name: {"value": metric.value, "stderr": metric.stderr} for metric in self.metrics},
            "cost": self.spent.as_dict(),
        }


# --- finding tasks -----------------------------------------------------------------------------------------------


def find_tasks(names: Sequence[str]) -> TaskManager:
    """lm-eval's index of these tasks. One of all its thirteen thousand takes long, and is made if a name is missing."""
    folders = {folder for name, folder in _folders().items() if name in names}
    manager = TaskManager(include_defaults=False, include_path=sorted(folders))
    if any(name not in manager.all_subtasks for name in names):
        manager = TaskManager()
    for name in names:
        if name not in manager.all_subtasks:
            near = difflib.get_close_matches(name, manager.all_subtasks, n=3)
            group = ", which is a group or a tag: name its tasks" if name in manager.all_tasks else ""
            raise InputError(
                f"--tasks {name}: no task of lm-eval{group}" + (f"; did you mean {' or '.join(near)}?" if near else "")
            )
    return manager


@functools.cache
def _folders() -> dict[str, Path]:
    """Where lm-eval keeps each task, told by the first line that names one: no file is parsed."""
    pattern = re.compile(rb"^task:[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE)
    files = sorted((Path(lm_eval.__file__).parent / "tasks").rglob("*.yaml"), reverse=True)
    named = ((pattern.search(path.read_bytes()), path.parent) for path in files)
    return {found[1].decode(): folder for found, folder in named if found}


# --- opening tasks -----------------------------------------------------------------------------------------------


def open_task(
    manager: TaskManager, name: str, shots: int, data: TaskData | None, *, limit: int | None = None, seed: int = 0
) -> Opened:
    """The task with its records, or the first ``limit`` ones. Examples are drawn as lm-eval does; seed 0 is its own."""
    if shots < 0:
        raise InputError(f"--fewshot {shots}: 0 or more examples")
    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}: at least one item")
    opened = _from_hub(manager, name, shots) if data is None else _from_files(manager, name, shots, data, limit)
    if shots and opened.task.get_config("num_fewshot") == 0:
        raise InputError(f"--fewshot {shots}: lm-eval asks {name} without examples; say --fewshot 0")
    opened.task.set_config("num_fewshot", shots)
    opened.task.set_fewshot_seed(DEFAULT_OTHER_SEED + seed)
    return opened


def _from_hub(manager: TaskManager, name: str, shots: int) -> Opened:
    try:
        task = manager.load([name])["tasks"][name]
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(
            f"--tasks {name}: its records did not come from the hub ({error}); --task-data DIR reads them from files"
        ) from error
    config: Any = task.config
    split = config.test_split or config.validation_split
    examples = config.fewshot_config.split or config.training_split or config.validation_split or config.test_split
    return Opened(task, name, shots, split, examples if shots else None, None)


def _from_files(manager: TaskManager, name: str, shots: int, data: TaskData, limit: int | None) -> Opened:
    config = manager.task_index[name].cfg or {}
    if "class" in config:
        raise InputError(f"--task-data: {name} is a Python task that fetches its own records; leave it out")
    split = _evaluated(name, config, data)
    examples = _examples(name, config, data, split) if shots else None
    # Working over ten thousand records takes seconds: no more than are asked about, unless examples come from them.
    loaded = {split: _dataset(name, config, data, split, None if examples == split else limit)}
    if examples is not None and examples != split:
        loaded[examples] = _dataset(name, config, data, examples, None)
    # As one member of an unnamed group: so lm-eval lays changes over a registered task.
    asked = {"task": name, "custom_dataset": lambda **_: loaded} | _splits(config, split, examples, loaded)
    file = data.find(name, split)
    try:
        task: Any = manager.load([{"group": "records", "task": [asked]}])["tasks"][name]
    except AdaPonderError:
        raise
    except _UNREADABLE as error:
        raise InputError(f"{file}: {name} cannot be made of its records ({type(error).__name__}: {error})") from error
    return Opened(task, name, shots, split, examples, file)


def _evaluated(name: str, config: dict[str, Any], data: TaskData) -> str:
    """The split to evaluate on: lm-eval's, or the other one that is here; never the training split."""
    wanted = config.get("test_split") or config.get("validation_split") or "test"
    for split in (wanted, "test", "validation"):
        if data.find(name, split):
            return split
    raise InputError(f"--task-data: no records of {name}; looked for {data.looked_for(name, wanted)}")


def _examples(name: str, config: dict[str, Any], data: TaskData, split: str) -> str | None:
    """The split to draw examples from: what map.yaml says, else lm-eval's, but not the evaluated one unasked.

    ``None`` for a task that carries its examples itself.
    """
    shown = config.get("fewshot_config") or {}
    if shown.get("samples"):
        return None
    own = config.get("fewshot_split") or shown.get("split") or config.get("training_split")
    own = own or config.get("validation_split")
    asked = data.fewshot(name)
    wanted = asked or (own if own and own != split else "train")
    if data.find(name, wanted):
        return wanted
    raise InputError(
        f"--fewshot: {name} draws its examples from {wanted}, which is not here; looked for "
        f"{data.looked_for(name, wanted)}" + ("" if asked else f"; `fewshot: {split}` there draws from {split} instead")
    )


def _splits(config: dict[str, Any], split: str, examples: str | None, loaded: dict[str, Any]) -> dict[str, Any]:
    """What is to change in a task's config so that it evaluates ``split`` and draws from ``examples``."""
    kinds = ("training_split", "validation_split", "test_split", "fewshot_split")
    found = {kind: config.get(kind) if config.get(kind) in loaded else None for kind in kinds}
    found["test_split" if config.get("test_split") or not config.get("validation_split") else "validation_split"] = (
        split
    )
    if examples == split:
        # lm-eval leaves the item out of its own examples where these two are the same.
        found["test_split"] = found["fewshot_split"] = split
    elif examples not in (None, found["training_split"] or found["validation_split"]):
        found["fewshot_split"] = examples
    shown = config.get("fewshot_config")
    if isinstance(shown, dict) and shown.get("split") not in (None, examples):
        found["fewshot_config"] = {key: value for key, value in shown.items() if key != "split"}
    return found


def _dataset(name: str, config: dict[str, Any], data: TaskData, split: str, limit: int | None) -> datasets.Dataset:
    records: list[Record] = data.read(name, split)[:limit]
    file = data.find(name, split)
    fields = _template_fields(config)
    for number, record in enumerate(records, 1):
        require_fields(record, fields, f"{file}: record {number}", name)
    try:
        return datasets.Dataset.from_list(records)
    except _UNREADABLE as error:
        raise InputError(f"{file}: its records do not have fields of one kind ({error})") from None


def _template_fields(config: dict[str, Any]) -> tuple[str, ...]:
    """The fields that a task's templates read; none where it works its records over first."""
    if config.get("process_docs"):
        return ()
    texts = [config.get(key) for key in ("doc_to_text", "doc_to_target", "doc_to_choice")]
    templates = [text for text in texts if isinstance(text, str) and "{{" in text]
    environment = jinja2.Environment()
    return tuple(sorted({field for text in templates for field in find_undeclared_variables(environment.parse(text))}))


# --- running tasks -----------------------------------------------------------------------------------------------


def run_task(model: HarnessLM, opened: Opened, *, limit: int | None = None) -> TaskScore:
    """Asks the model every item, or the first ``limit`` ones."""
    task = opened.task
    # One more is drawn where the item itself might be among them.
    needed = opened.shots + (task.fewshot_cfg.split == task.config.test_split)
    if opened.examples and len(task.sampler.df) < needed:
        raise InputError(
            f"--fewshot {opened.shots}: {opened.name} has {len(task.sampler.df)} records in {opened.examples}: too few"
        )
    model.meters.pop(opened.name, None)
    try:
        found: Any = evaluate(
            model, {"tasks": {opened.name: task}, "groups": {}}, limit=limit, bootstrap_iters=0, log_samples=True
        )
    except AdaPonderError:
        raise
    except _UNREADABLE:
        _blame_record(opened, limit)
        raise
    samples = found["samples"][opened.name]
    return TaskScore(
        opened,
        items=found["n-samples"][opened.name]["effective"],
        metrics=tuple(_metrics(task, found["results"][opened.name], samples)),
        spent=model.meters[opened.name].spent(),
        samples=samples,
    )


def _blame_record(opened: Opened, limit: int | None) -> None:
    """Names the record that the task cannot be asked about, if that is what went wrong."""
    task = opened.task
    for number, record in enumerate(islice(task.task_docs, limit), 1):
        try:
            task.doc_to_text(record)
            task.doc_to_target(record)
            if task.config.doc_to_choice is not None:
                task.doc_to_choice(record)
        except _UNREADABLE as error:
            where = opened.file or f"{opened.name} on the hub"
            raise InputError(
                f"{where}: record {number} is no item of {opened.name} ({type(error).__name__}: {error})"
            ) from error


def _metrics(task: Any, results: dict[str, Any], samples: list[dict[str, Any]]) -> Iterator[Metric]:
    """Each metric with its standard error in closed form; lm-eval would bootstrap perplexities, by other processes."""
    for key, value in results.items():
        name, _, filtered = key.partition(",")
        if not filtered or name.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        values = [sample[name] for sample in samples if sample["filter"] == filtered and name in sample]
        aggregation, stderr = task.aggregation().get(name), None
        if aggregation is mean and len(values) > 1:
            stderr = mean_stderr(values)
        elif aggregation is perplexity and len(values) > 1:
            # exp(-mean) moves by itself times what the mean moves by.
            stderr = value * mean_stderr(values)
        yield Metric(name if filtered == "none" else f"{name} ({filtered})", float(value), _finite(stderr))


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


@contextmanager
def quiet() -> Iterator[None]:
    """lm-eval and datasets say nothing inside: what matters comes back as a result or an error."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    bars, made = datasets.are_progress_bars_disabled(), lm_eval.api.task.tqdm
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        datasets.disable_progress_bars()
        lm_eval.api.task.tqdm = functools.partial(made, disable=True)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        lm_eval.api.task.tqdm = made
        if not bars:
            datasets.enable_progress_bars()
