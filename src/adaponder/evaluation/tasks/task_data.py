"""Reads task records from local files, with the fields of the public datasets.

A folder of task data holds one file of JSON lines per task and split, plain or compressed (``.gz``, ``.xz``, …)::

    DIR/arc_easy/test.jsonl.xz
    DIR/arc_easy/train.jsonl.xz         needed for few-shot examples only
    DIR/sciq_validation.jsonl.xz        or flat: <task>_<split>; ``val``, ``valid`` and ``dev`` also mean validation
    DIR/lambada_test_openai.jsonl.xz    or under a name of ``PUBLISHED``

A ``map.yaml`` in it (or named instead of the folder) maps tasks and splits to files with other names. Paths are
relative to it, and it takes precedence over file names::

    arc_easy: {test: elsewhere/easy.jsonl}
    lambada_openai:
      test: lambada_test_openai.jsonl.xz
      fewshot: test                     # draw examples from this split; an item is never its own example

Records have the fields that lm-eval's task reads, as the hub dataset has them. Three datasets are also published in
another layout, which is brought into that one: ARC's first release (``question.stem`` and ``question.choices``), RACE's
first release (``questions``, ``options``, ``answers`` of an article) and RACE with one question per record (records of
one article are put together, as the dataset that lm-eval reads was made).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from adaponder.data.readers import COMPRESSIONS, decompressed
from adaponder.errors import InputError
from adaponder.files import parse_json, read_yaml

TaskRecord = dict[str, Any]

SPLITS = ("train", "validation", "test")
_ALIASES = {"validation": ("val", "valid", "dev")}
_ENDINGS = tuple(f".jsonl{compression}" for compression in ("", *COMPRESSIONS))
# The longest record of the known tasks has some 10 KB.
_LONGEST = 2**26
# Names that authors gave their files, where neither task nor split can be guessed from them.
PUBLISHED = {("lambada_openai", "test"): ("lambada_test_openai", "lambada_test")}

FIELDS = {
    "lambada_openai": ("text",),
    "lambada_standard": ("text",),
    "arc_easy": ("question", "choices", "answerKey"),
    "arc_challenge": ("question", "choices", "answerKey"),
    "winogrande": ("sentence", "option1", "option2", "answer"),
    "piqa": ("goal", "sol1", "sol2", "label"),
    "hellaswag": ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    "sciq": ("question", "support", "distractor1", "distractor2", "distractor3", "correct_answer"),
    "race": ("article", "problems"),
}


class TaskData:
    """A folder of task data, or its ``map.yaml``; see the top of this module."""

    def __init__(self, path: Path):
        self.folder, self._map = path, {}
        if path.is_file():
            self.folder, self._map = path.parent, _read_map(path)
        elif not path.is_dir():
            raise InputError(f"--task-data {path} must be a folder or a map.yaml")
        elif (path / "map.yaml").is_file():
            self._map = _read_map(path / "map.yaml")

    def find(self, task: str, split: str) -> Path | None:
        """Returns the file with that split of a task, if there is one."""
        if named := self._map.get(task, {}).get(split):
            path = self.folder / named
            if not path.is_file():
                raise InputError(f"map.yaml: {task}.{split} names {path}, which is not a file")
            return path
        return next((path for path in self._candidates(task, split) if path.is_file()), None)

    def fewshot(self, task: str) -> str | None:
        """Returns the split that map.yaml names for few-shot examples."""
        return self._map.get(task, {}).get("fewshot")

    def looked_for(self, task: str, split: str) -> str:
        """Returns where a split is looked for, for error messages."""
        first = self._candidates(task, split)[0]
        return f"{first}[{'|'.join(COMPRESSIONS)}] (or a {split} file of {task} named in map.yaml)"

    def read(self, task: str, split: str) -> list[TaskRecord]:
        """Reads the records of a split, in the layout that lm-eval's task expects."""
        path = self.find(task, split)
        if path is None:
            raise InputError(f"--task-data: {task} has no {split} split; looked for {self.looked_for(task, split)}")
        records = list(_lines(path))
        if not records:
            raise InputError(f"{path} has no records")
        records = _in_known_layout(task, records)
        for number, record in enumerate(records, 1):
            require_fields(record, FIELDS.get(task, ()), f"{path}: record {number}", task)
        return records

    def _candidates(self, task: str, split: str) -> list[Path]:
        stems = [f"{task}/{name}" for name in (split, *_ALIASES.get(split, ()))]
        stems += [f"{task}_{name}" for name in (split, *_ALIASES.get(split, ()))]
        stems += PUBLISHED.get((task, split), ())
        return [self.folder / (stem + ending) for stem in stems for ending in _ENDINGS]


def require_fields(record: TaskRecord, fields: tuple[str, ...], where: str, task: str) -> None:
    """Raises if a record lacks one of ``fields``."""
    if missing := [name for name in fields if record.get(name) is None]:
        raise InputError(
            f"{where} has no {', '.join(missing)}, which {task} needs; it has {', '.join(record) or 'no field'}"
        )


def _read_map(path: Path) -> dict[str, dict[str, str]]:
    tasks = read_yaml(path, InputError) or {}
    if not isinstance(tasks, dict):
        raise InputError(f"{path} must map tasks to their splits")
    for task, splits in tasks.items():
        if not isinstance(splits, dict) or not all(isinstance(value, str) for value in splits.values()):
            raise InputError(f"{path}: {task} must be an object of splits and file names, e.g. {{test: easy.jsonl}}")
        wanted = splits.get("fewshot")
        if wanted is not None and wanted not in (*SPLITS, *splits):
            raise InputError(f"{path}: {task}.fewshot is {wanted!r}, which is not one of its splits")
    return tasks


def _lines(path: Path) -> Iterator[TaskRecord]:
    number = 0
    with decompressed(path, InputError) as (_, stream):
        while line := stream.readline(_LONGEST + 1):
            number += 1
            where = f"{path}: line {number}"
            if len(line) > _LONGEST:
                raise InputError(f"{where} has more than {_LONGEST:,} bytes, too long for a task record")
            if line.strip():
                yield _text_only(parse_json(line, where, InputError), where)


def _text_only(record: TaskRecord, where: str) -> TaskRecord:
    """Returns ``record``; raises if it has half a surrogate pair, which no tokenizer can encode."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where} has half a surrogate pair ({error.object[error.start]!a}), which is not text"
        ) from None
    return record


class _Layout(NamedTuple):
    """Another published layout: how its first record is recognised, and how all are rearranged."""

    known: Callable[[TaskRecord], bool]
    rearrange: Callable[[list[TaskRecord]], list[TaskRecord]]


def _in_known_layout(task: str, records: list[TaskRecord]) -> list[TaskRecord]:
    for layout in _LAYOUTS.get(task, ()):
        if layout.known(records[0]):
            try:
                return layout.rearrange(records)
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(f"{task}: records with different layouts ({error!r})") from None
    return records


def _arc(records: list[TaskRecord]) -> list[TaskRecord]:
    """Converts ARC as first released: the choices are a list of objects inside the question."""
    return [
        record
        | {
            "question": record["question"]["stem"],
            "choices": {key: [choice[key] for choice in record["question"]["choices"]] for key in ("text", "label")},
        }
        for record in records
    ]


def _race_articles(records: list[TaskRecord]) -> list[TaskRecord]:
    """Converts RACE as first released: an article with parallel lists of questions, options and answers."""
    return [
        {
            "article": record["article"],
            "problems": _problems(zip(record["questions"], record["answers"], record["options"], strict=True)),
        }
        for record in records
    ]


def _race_questions(records: list[TaskRecord]) -> list[TaskRecord]:
    """Converts RACE with one question per record: groups them by article, in order of appearance."""
    articles: dict[str, list[tuple[Any, Any, Any]]] = {}
    for record in records:
        articles.setdefault(record["article"], []).append((record["question"], record["answer"], record["options"]))
    return [{"article": article, "problems": _problems(iter(parts))} for article, parts in articles.items()]


def _race_lists(records: list[TaskRecord]) -> list[TaskRecord]:
    """Converts RACE's problems from JSON to Python text, as on the hub, which lm-eval parses."""
    return [record | {"problems": repr(record["problems"])} for record in records]


def _problems(parts: Iterator[tuple[Any, Any, Any]]) -> str:
    return repr([{"question": question, "answer": answer, "options": options} for question, answer, options in parts])


_ARC = (_Layout(lambda record: isinstance(record.get("question"), dict), _arc),)
_LAYOUTS: dict[str, tuple[_Layout, ...]] = {
    "arc_easy": _ARC,
    "arc_challenge": _ARC,
    "race": (
        _Layout(lambda record: isinstance(record.get("problems"), list), _race_lists),
        _Layout(lambda record: "questions" in record, _race_articles),
        _Layout(lambda record: "question" in record and "problems" not in record, _race_questions),
    ),
}
