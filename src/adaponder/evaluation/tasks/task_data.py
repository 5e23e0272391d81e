"""Reads the data of tasks from local files, with the fields of the public datasets.

A folder of task data contains a JSON lines file per task and split, plain or compressed (``.gz``, ``.xz``, …)::

    DIR/arc_easy/test.jsonl.xz
    DIR/arc_easy/train.jsonl.xz         needed for few-shot examples only
    DIR/sciq_validation.jsonl.xz        or <task>_<split>; ``val``, ``valid``, ``dev`` mean validation
    DIR/lambada_test_openai.jsonl.xz    or a name in ``PUBLISHED``

A ``map.yaml`` in the folder, or passed instead of the folder, takes precedence. It names files relative to itself::

    arc_easy: {test: elsewhere/easy.jsonl}
    lambada_openai:
      test: lambada_test_openai.jsonl.xz
      fewshot: test                     # draw examples from this split; an item is never its own example

Records have the fields of the hub dataset that lm-eval's task reads. Three other published layouts are converted:
ARC's first release (``question.stem`` and ``question.choices``), RACE's first release (``questions``, ``options`` and
``answers`` of an article) and RACE with one question per record (records of one article are merged).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaponder.data.readers import COMPRESSIONS, decompressed
from adaponder.errors import InputError
from adaponder.files import parse_json, read_yaml

TaskRecord = dict[str, Any]

SPLITS = ("train", "validation", "test")
_ALIASES = {"validation": ("val", "valid", "dev")}
_ENDINGS = tuple(f".jsonl{compression}" for compression in ("", *COMPRESSIONS))
# File names used by a dataset's authors that do not follow <task>_<split>.
PUBLISHED = {("lambada_openai", "test"): ("lambada_test_openai", "lambada_test")}
# Fields read by a task's Python code; the fields of other tasks are found in their templates.
FIELDS = {
    "winogrande": ("sentence", "option1", "option2", "answer"),
    "piqa": ("goal", "sol1", "sol2", "label"),
    "hellaswag": ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    "race": ("article", "problems"),
}


class TaskData:
    """Finds and reads files of task data: in a folder laid out as the top of this module says, or by a ``map.yaml``."""

    def __init__(self, path: Path):
        self.folder, map_file = (path.parent, path) if path.is_file() else (path, path / "map.yaml")
        if not self.folder.is_dir():
            raise InputError(f"--task-data {path} must be a folder or a map.yaml")
        self._map = _read_map(map_file) if map_file.is_file() else {}

    def find(self, task: str, split: str) -> Path | None:
        """Returns the file of a task's split; ``None`` if there is none. Raises if map.yaml names a missing file."""
        if named := self._map.get(task, {}).get(split):
            path = self.folder / named
            if not path.is_file():
                raise InputError(f"map.yaml: {task}.{split} names {path}, which is not a file")
            return path
        return next((path for path in self._candidates(task, split) if path.is_file()), None)

    def fewshot(self, task: str) -> str | None:
        """Returns the split that map.yaml names for few-shot examples; ``None`` if it names none."""
        return self._map.get(task, {}).get("fewshot")

    def looked_for(self, task: str, split: str) -> str:
        """Returns the expected file of a split, for error messages."""
        first = self._candidates(task, split)[0]
        return f"{first}[{'|'.join(COMPRESSIONS)}] (or a {split} file of {task} named in map.yaml)"

    def read(self, task: str, split: str, fields: Sequence[str] = ()) -> list[TaskRecord]:
        """Reads the records of a split in the layout of lm-eval's task.

        Raises if there are no records, or if a record lacks one of ``fields``.
        """
        path = self.find(task, split)
        if path is None:
            raise InputError(f"--task-data: {task} has no {split} split; looked for {self.looked_for(task, split)}")
        with decompressed(path, InputError) as (_, stream):
            lines = ((line, f"{path}: line {number}") for number, line in enumerate(stream, 1) if line.strip())
            records = [parse_json(line, origin, InputError) for line, origin in lines]
        if not records:
            raise InputError(f"{path} has no records")
        try:
            records = _as_on_the_hub(task, records)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: records of {task} with different layouts ({error!r})") from None
        for number, record in enumerate(records, 1):
            if missing := [name for name in fields if record.get(name) is None]:
                raise InputError(
                    f"{path}: record {number} has no {', '.join(missing)}, which {task} needs; "
                    f"it has {', '.join(record) or 'no field'}"
                )
        return records

    def _candidates(self, task: str, split: str) -> list[Path]:
        names = (split, *_ALIASES.get(split, ()))
        stems = [f"{task}{mark}{name}" for mark in "/_" for name in names]
        stems += PUBLISHED.get((task, split), ())
        return [self.folder / (stem + ending) for stem in stems for ending in _ENDINGS]


def _read_map(path: Path) -> dict[str, dict[str, str]]:
    tasks = read_yaml(path, InputError) or {}
    if not isinstance(tasks, dict):
        raise InputError(f"{path} must map tasks to their splits")
    for task, splits in tasks.items():
        if not isinstance(splits, dict) or not all(isinstance(value, str) for value in splits.values()):
            raise InputError(f"{path}: {task} must be an object of splits and file names, e.g. {{test: easy.jsonl}}")
        fewshot = splits.get("fewshot")
        if fewshot is not None and fewshot not in (*SPLITS, *splits):
            raise InputError(f"{path}: {task}.fewshot is {fewshot!r}, which is not one of its splits")
    return tasks


def _as_on_the_hub(task: str, records: list[TaskRecord]) -> list[TaskRecord]:
    """Converts ARC and RACE from their other published layouts, recognised by the first record, to the hub's layout."""
    first = records[0]
    if task in ("arc_easy", "arc_challenge") and isinstance(first.get("question"), dict):
        return [_arc(record) for record in records]
    if task != "race" or isinstance(first.get("problems"), str):
        return records
    if "problems" in first:  # on the hub, problems are text of a Python list, which lm-eval parses
        return [record | {"problems": repr(record["problems"])} for record in records]
    if "questions" in first:
        names = ("questions", "answers", "options")
        articles = [(record["article"], zip(*map(record.__getitem__, names), strict=True)) for record in records]
    else:
        by_article: dict[str, list[Any]] = {}
        for record in records:
            problem = (record["question"], record["answer"], record["options"])
            by_article.setdefault(record["article"], []).append(problem)
        articles = by_article.items()
    keys = ("question", "answer", "options")
    return [
        {"article": article, "problems": repr([dict(zip(keys, problem, strict=True)) for problem in problems])}
        for article, problems in articles
    ]


def _arc(record: TaskRecord) -> TaskRecord:
    """Converts a record of ARC's first release, where the choices are a list of objects inside the question."""
    question = record["question"]
    choices = {key: [choice[key] for choice in question["choices"]] for key in ("text", "label")}
    return record | {"question": question["stem"], "choices": choices}
