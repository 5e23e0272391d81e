"""Generates the puzzles hops and mano. The depth that a question needs can be recomputed from its text alone.

``hops`` and ``mano`` are inputs of ``adaponder prepare``; ``hops:seed=1,most=3`` changes settings. A document depends
only on the settings and its number. All documents of a puzzle have ``length`` tokens; their tokenizer is ``symbols``.
With ``data.sequence`` = ``length`` - 1 a training window is one document. Only the answers are learned, like the
assistant's turns of a conversation; with ``answers=0`` every token is learned.

**Hops**: a document is a list of steps ``x y .``, then ``|``, then questions ``x y``, where y is the end of the chain
that starts at x. In ``a b . c d . b e . | a e c d`` the first question takes two hops, the second takes one. Each
question has its own chain. The steps of a chain stand in order, with steps of other chains between them. Every chain
is asked about once, so the last answer can be inferred by elimination.

**Mano**, modular arithmetic on prefix trees: a document is its modulus, then questions. A question is a tree in prefix
notation, ``=`` and the value of the tree. ``.`` fills the rest of the document. In ``7 + 3 * 4 5 = 2 - 1 2 = 6 .`` the
trees have heights 2 and 1. The depth that a question needs is the height of its tree.
"""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice, pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from adaponder.errors import InputError

SYMBOLS = "symbols"
UNKNOWN = "<unknown>"
MOST_LETTERS, MOST_NUMBERS = 24, 40
LETTERS = tuple(chr(ord("a") + index) for index in range(MOST_LETTERS))
# The index of a word is its token id; the end token follows the last word.
WORDS = (
    *(UNKNOWN, "|", "=", ".", "+", "-", "*"),
    *LETTERS,
    *(letter.upper() for letter in LETTERS),
    *map(str, range(MOST_NUMBERS)),
)
END_ID = len(WORDS)
_ID_OF = {word: index for index, word in enumerate(WORDS)}
BAR, EQUALS, STOP = "|", "=", "."
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_MOST_HOPS, _MOST_HEIGHT = 16, 8
_LARGEST = 2**31
# Incremented when a change alters the documents of a seed, so that older folders are not continued.
_VERSION = 4

# A function that returns the next random number from 0 up to, but not including, 1.
Draw = Callable[[], float]
Entry = TypeVar("Entry")


def symbol_tokenizer(end_token: str) -> Tokenizer:
    """Returns a tokenizer that splits at white space and maps unknown words to ``<unknown>``."""
    tokenizer = Tokenizer(models.WordLevel(_ID_OF, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([end_token])
    return tokenizer


def ids_of(words: Iterable[str]) -> np.ndarray:
    """Returns the token id of each word, ``int64[len(words)]``."""
    return np.array([_ID_OF[word] for word in words], np.int64)


def words_of(ids: np.ndarray) -> list[str]:
    """Returns the word of each id; an id that has no word, such as the end token's, gives ``<unknown>``."""
    return [WORDS[index] if 0 <= index < END_ID else UNKNOWN for index in ids.tolist()]


class Question(NamedTuple):
    """A question of a document and its right answer.

    Attributes:
        place: index of the answer among the document's words.
        needed: the question's number of hops, or the height of its tree.
        by_elimination: whether the answer follows by elimination, because earlier questions cover all other chains.
    """

    place: int
    needed: int
    answer: str
    by_elimination: bool = False


@dataclass(frozen=True)
class Hops:
    """Settings of hops documents. A letter has at most one next letter; two chains can share only their last letter.

    Attributes:
        most: hops of the longest question; the counts of questions with 1, 2, … ``most`` hops differ by at most one.
        questions: number of questions of each document.
        letters: number of different letters that documents use: a, b, …
        ends: number of letters from which the last one of each chain is drawn; questions may have the same answer.
        capitals: 1: the last letter of each chain is a capital, so that answers can be told by sight; 0: it is not.
        answers: 1: only the answers (and the end token) are learned; 0: every token.
    """

    seed: int = 0
    documents: int = 50_000
    most: int = 4
    questions: int = 6
    letters: int = MOST_LETTERS
    ends: int = 11
    capitals: int = 0
    answers: int = 1

    @property
    def hops(self) -> list[int]:
        """Returns the number of hops of each question of a document, in ascending order."""
        return sorted(1 + number % self.most for number in range(self.questions))

    @property
    def length(self) -> int:
        """Returns the number of tokens of each document, including its end token."""
        return 3 * sum(self.hops) + 1 + 2 * self.questions + 1

    def check(self) -> None:
        """Raises for settings that are out of range or need more letters than there are."""
        _require(self, "most", 1, _MOST_HOPS)
        _require(self, "questions", 1, _LARGEST)
        _require(self, "capitals", 0, 1)
        _require(self, "ends", 2, self.letters)
        taken = sum(self.hops) + (0 if self.capitals else self.ends)
        if not taken <= self.letters <= MOST_LETTERS:
            raise InputError(
                f"hops: letters={self.letters} must be between {taken}, which questions={self.questions} of up to "
                f"most={self.most} hops need, and {MOST_LETTERS}: lower questions, most or ends"
            )

    def document(self, draw: Draw) -> list[str]:
        """Returns the words of one document, without its end token."""
        names = shuffled(LETTERS[: self.letters], draw)
        ends = names[sum(self.hops) : sum(self.hops) + self.ends]
        if self.capitals:
            ends = [name.upper() for name in shuffled(LETTERS[: self.letters], draw)[: self.ends]]
        starts = iter(names)
        chains = [[*islice(starts, hops), ends[int(draw() * len(ends))]] for hops in shuffled(self.hops, draw)]
        steps = [pairwise(chain) for chain in chains]
        words = []
        for number in shuffled([number for number, chain in enumerate(chains) for _ in chain[1:]], draw):
            words += [*next(steps[number]), STOP]
        return [*words, BAR, *(word for chain in shuffled(chains, draw) for word in (chain[0], chain[-1]))]


def shuffled(entries: Sequence[Entry], draw: Draw) -> list[Entry]:
    """Returns ``entries`` in an order that depends on ``draw`` alone, so that every Python version gives the same."""
    order = list(entries)
    for last in range(len(order) - 1, 0, -1):
        other = int(draw() * (last + 1))
        order[last], order[other] = order[other], order[last]
    return order


def _hops_questions(words: Sequence[str]) -> Iterator[Question]:
    """Yields the questions of a hops document, except those whose letter has no step or leads into a cycle."""
    bar = words.index(BAR)
    next_letter = {words[place]: words[place + 1] for place in range(0, bar - 2, 3) if words[place + 2] == STOP}
    unasked = set(next_letter) - set(next_letter.values())
    for place in range(bar + 2, len(words), 2):
        word, hops = words[place - 1], 0
        unasked.discard(word)
        while word in next_letter and hops < len(next_letter):
            word, hops = next_letter[word], hops + 1
        if hops and word not in next_letter:
            yield Question(place, hops, word, by_elimination=not unasked)


@dataclass(frozen=True)
class Mano:
    """Settings of mano documents. Heights of trees are drawn uniformly; a node's two subtrees may differ in height.

    Attributes:
        length: tokens of each document, including its end token.
        modulus: modulus of every sum, difference and product.
        most: height of the tallest tree; a single number has height 0 and is never a question.
        answers: 1: only the answers are learned; 0: every token.
    """

    seed: int = 0
    documents: int = 50_000
    length: int = 129
    modulus: int = 7
    most: int = 4
    answers: int = 1

    def check(self) -> None:
        """Raises for settings out of range, or if a full tree of height ``most`` does not fit into a document."""
        _require(self, "modulus", 2, MOST_NUMBERS - 1)
        _require(self, "most", 1, _MOST_HEIGHT)
        # A full tree has 2 ** (height + 1) - 1 words; modulus, equals sign, value and end token come on top.
        if self.length < (shortest := 2 ** (self.most + 1) + 3):
            raise InputError(
                f"mano: length={self.length} must be at least {shortest} for questions of height {self.most}: raise "
                "length or lower most"
            )

    def document(self, draw: Draw) -> list[str]:
        """Returns the words of one document, without its end token."""
        words = [str(self.modulus)]
        while True:
            tree, value = self._tree(1 + int(draw() * self.most), draw)
            if len(words) + len(tree) + 2 > self.length - 1:
                return [*words, *[STOP] * (self.length - 1 - len(words))]
            words += [*tree, EQUALS, str(value)]

    def _tree(self, height: int, draw: Draw) -> tuple[list[str], int]:
        """Draws an expression tree of exactly this height; returns its words in prefix order, and its value."""
        if height == 0:
            value = int(draw() * self.modulus)
            return [str(value)], value
        heights = [height - 1, int(draw() * height)]
        if draw() < 0.5:
            heights.reverse()
        sign = tuple(OPERATIONS)[int(draw() * len(OPERATIONS))]
        (left, first), (right, second) = (self._tree(subtree, draw) for subtree in heights)
        return [sign, *left, *right], OPERATIONS[sign](first, second) % self.modulus


def _mano_questions(words: Sequence[str]) -> Iterator[Question]:
    """Yields the questions of a mano document in order, up to the first word that does not belong to a question."""
    if not words or not words[0].isdecimal() or int(words[0]) < 2:
        return
    start, modulus = 1, int(words[0])
    while start < len(words) and words[start] in OPERATIONS:
        after, missing = start, 1
        while missing and after < len(words) and (words[after] in OPERATIONS or words[after].isdecimal()):
            missing += 1 if words[after] in OPERATIONS else -1
            after += 1
        if missing or words[after : after + 1] != [EQUALS] or after + 1 == len(words):
            return
        height, value = _evaluate(words[start:after], modulus)
        yield Question(after + 1, height, str(value))
        start = after + 2


def _evaluate(tree: Sequence[str], modulus: int) -> tuple[int, int]:
    """Returns (height, value) of a tree; reads its words backwards, so that each operator comes after its operands."""
    operands: list[tuple[int, int]] = []
    for word in reversed(tree):
        if word in OPERATIONS:
            (left, first), (right, second) = operands.pop(), operands.pop()
            operands.append((1 + max(left, right), OPERATIONS[word](first, second) % modulus))
        else:
            operands.append((0, int(word)))
    return operands[0]


def _require(settings: Hops | Mano, name: str, least: int, most: int) -> None:
    if not least <= (value := getattr(settings, name)) <= most:
        raise InputError(f"{type(settings).__name__.lower()}: {name}={value} must be between {least} and {most}")


PUZZLES = {"hops": Hops(), "mano": Mano()}


def is_generated(argument: str) -> bool:
    """Returns whether an input names a puzzle, with or without settings."""
    return argument.partition(":")[0] in PUZZLES


def settings_of(argument: str) -> Hops | Mano:
    """Returns the checked settings of ``NAME[:FIELD=NUMBER,…]``."""
    name, _, changes = argument.partition(":")
    names = [field.name for field in fields(PUZZLES[name])]
    values: dict[str, int] = {}
    for change in changes.split(",") if changes else []:
        field, _, value = change.partition("=")
        if field not in names or field in values:
            raise InputError(f"input {argument}: {change!r} must be FIELD=NUMBER, each once, of {', '.join(names)}")
        if not value.isascii() or not value.isdecimal() or not int(value[:12]) < _LARGEST:
            raise InputError(f"input {argument}: {field}={value} must be a whole number from 0 to {_LARGEST - 1}")
        values[field] = int(value)
    settings = replace(PUZZLES[name], **values)
    _require(settings, "documents", 1, _LARGEST)
    _require(settings, "answers", 0, 1)
    settings.check()
    return settings


def documents(settings: Hops | Mano) -> Iterator[list[str]]:
    """Yields the words of every document, in order."""
    recorded = {name: value for name, value in asdict(settings).items() if name not in ("documents", "answers")}
    name = type(settings).__name__
    for number in range(settings.documents):
        # Of the methods of a seeded generator only ``random()`` gives the same numbers in every Python version.
        yield settings.document(random.Random(f"{name} {json.dumps(recorded)} {number}").random)


def learns_answers(argument: str) -> bool:
    """Returns whether an input is a puzzle of which only the answers count in the training loss."""
    return is_generated(argument) and bool(settings_of(argument).answers)


def version(argument: str) -> str:
    """Returns text that identifies the documents of ``argument``: equal text means equal documents."""
    return json.dumps({"version": _VERSION} | asdict(settings_of(argument)))


def questions(words: Sequence[str]) -> Iterator[Question]:
    """Yields the questions of one document with the right answers; the answers in the text may be wrong."""
    return _hops_questions(words) if BAR in words else _mano_questions(words)


def needed(ids: np.ndarray) -> np.ndarray:
    """Returns ``int64[len(ids)]``: the number of hops or the tree height of a question at its answer, 0 elsewhere.

    An answer that follows by elimination also gets 0. ``ids`` are the tokens of whole documents, encoded by the
    tokenizer ``symbols``, with an end token between two documents.
    """
    depths = np.zeros(len(ids), np.int64)
    start = 0
    for end in [*np.flatnonzero(ids == END_ID).tolist(), len(ids)]:
        for question in questions(words_of(ids[start:end])):
            depths[start + question.place] = 0 if question.by_elimination else question.needed
        start = end + 1
    return depths
