"""Puzzles that are made, not read: each question's needed depth is known again from its text alone.

``hops`` and ``mano`` are inputs of ``adaponder prepare``; ``hops:seed=1,most=3`` changes settings. A document depends
on the settings and its number alone, all have the same number of tokens, and their tokenizer is ``symbols``. With
``data.sequence`` = ``length`` - 1 a window of training is one document. The answers alone are learned (``answers=0``:
every token), as the prompts of conversations are not.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace

import numpy as np

from adaponder.data import hops, mano
from adaponder.data.formats import Conversation, Counts, Document, InputPart
from adaponder.data.hops import Hops, Question
from adaponder.data.mano import Mano
from adaponder.data.symbols import END_ID, words_of
from adaponder.errors import InputError

PUZZLES = {"hops": Hops(), "mano": Mano()}
# Raised with every change of what a seed gives: folders made before are then not continued.
_VERSION = 4
_LARGEST = 2**31


def is_generated(argument: str) -> bool:
    """Whether an input names a puzzle, with or without settings."""
    return argument.partition(":")[0] in PUZZLES


def settings_of(argument: str) -> Hops | Mano:
    """The checked settings of ``NAME[:FIELD=NUMBER,…]``."""
    name, _, changes = argument.partition(":")
    settings = PUZZLES[name]
    known = [field.name for field in fields(settings)]
    values: dict[str, int] = {}
    for change in changes.split(",") if changes else []:
        field, _, value = change.partition("=")
        if field not in known or field in values:
            raise InputError(f"input {argument}: {change!r}: FIELD=NUMBER, each once, of {', '.join(known)}")
        if not value.isascii() or not value.isdecimal() or not int(value[:12]) < _LARGEST:
            raise InputError(f"input {argument}: {field}={value}: a whole number from 0 to {_LARGEST - 1}")
        values[field] = int(value)
    settings = replace(settings, **values)
    if settings.documents < 1:
        raise InputError(f"input {argument}: documents=0: at least one")
    settings.check()
    return settings


def documents(settings: Hops | Mano) -> Iterator[list[str]]:
    """The words of every document, in order."""
    made_from = {name: value for name, value in asdict(settings).items() if name not in ("documents", "answers")}
    name = type(settings).__name__
    for number in range(settings.documents):
        # Python promises the same numbers for a seed of ``random()`` alone, not of what is built on it.
        yield settings.document(random.Random(f"{name} {json.dumps(made_from)} {number}").random)


def learns_answers(argument: str) -> bool:
    """Whether an input is a puzzle of which the answers alone are learned."""
    return is_generated(argument) and bool(settings_of(argument).answers)


def read(part: InputPart, counts: Counts) -> Iterator[Document | Conversation]:
    """The documents of an input that :func:`is_generated`; its size in bytes is not known beforehand."""
    name, settings = part.argument.partition(":")[0], settings_of(part.argument)
    for words in documents(settings):
        text = " ".join(words)
        if not settings.answers:
            yield Document(text, name)
            continue
        starts = np.cumsum([0, *(len(word) + 1 for word in words)]).tolist()
        learned = tuple((starts[each.place], starts[each.place] + len(each.answer)) for each in questions(words))
        yield Conversation(text, name, learned, part.argument)


def version(part: InputPart) -> str:
    """What decides every byte of the input."""
    return json.dumps({"version": _VERSION} | asdict(settings_of(part.argument)))


def questions(words: Sequence[str]) -> Iterator[Question]:
    """The questions of one document, answered by plain interpretation of its text, whatever answers it gives."""
    return hops.questions(words) if hops.BAR in words else mano.questions(words)


def needed(ids: np.ndarray) -> np.ndarray:
    """``int64[ids]``: for the answer of each question the hops or the height it needs.

    0 where nothing is asked, and where the answer is forced: told by elimination it needs none of its hops.
    ``ids`` are documents in tokens of ``symbols``, the first from its beginning, end tokens between them.
    """
    found = np.zeros(len(ids), np.int64)
    start = 0
    for end in [*np.flatnonzero(ids == END_ID).tolist(), len(ids)]:
        for question in questions(words_of(ids[start:end])):
            found[start + question.place] = 0 if question.forced else question.needed
        start = end + 1
    return found
