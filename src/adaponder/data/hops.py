"""p-hop induction: a letter leads to the one that follows its latest earlier occurrence, p times over.

A document is a context of lower-case letters, ``|``, and questions ``p X Y``. Begin at the latest x of the context that
has a successor and step to that successor: one hop. For each further hop find the latest earlier occurrence of the
letter arrived at and step to its successor. Y is the letter after p hops. In ``c a b a c b | 1 A C 2 A A`` the latest a
leads to c, and from that c the earlier c leads to a. Every hop needs the result of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from adaponder.data.symbols import LETTERS, MOST_LETTERS
from adaponder.errors import InputError

BAR = "|"
_MOST_HOPS = 16
_ATTEMPTS = 1000

# A function that gives the next random number from 0 up to, but not, 1.
Draw = Callable[[], float]
Entry = TypeVar("Entry")


class Question(NamedTuple):
    """A question of a document: the place of its answer among the words, the depth it needs, and the right answer."""

    place: int
    needed: int
    answer: str


@dataclass(frozen=True)
class Hops:
    """How p-hop documents are made. Neighbours in a context differ; a document asks nothing twice.

    Attributes:
        documents: how many.
        length: tokens of each document, its end token included; the context is what the questions leave.
        nodes: number of different letters.
        most: the largest p; all from 1 on are asked equally often, up to one.
        questions: of each document.
    """

    seed: int = 0
    documents: int = 50_000
    length: int = 129
    nodes: int = 8
    most: int = 4
    questions: int = 24

    @property
    def context(self) -> int:
        return self.length - len(BAR) - 1 - 3 * self.questions

    def check(self) -> None:
        if not 3 <= self.nodes <= MOST_LETTERS:
            raise InputError(f"hops: nodes={self.nodes}: from 3 to {MOST_LETTERS} letters")
        if not 1 <= self.most <= _MOST_HOPS:
            raise InputError(f"hops: most={self.most}: from 1 to {_MOST_HOPS} hops")
        if not 1 <= self.questions <= self.nodes * self.most:
            raise InputError(
                f"hops: questions={self.questions}: from 1 to nodes * most = {self.nodes * self.most}, "
                "as nothing is asked twice"
            )
        if self.context < self.nodes + self.most:
            raise InputError(
                f"hops: length={self.length}: {self.questions} questions take {3 * self.questions + 2} tokens, and "
                f"the context needs nodes + most = {self.nodes + self.most}: give a larger length or fewer questions"
            )

    def document(self, draw: Draw) -> list[str]:
        """The words of one document, without its end."""
        for _ in range(_ATTEMPTS):
            context = self._context(draw)
            asked = self._asked(chains(context, self.most), draw)
            if asked is not None:
                spelled = [word for p, x, y in asked for word in (str(p), LETTERS[x].upper(), LETTERS[y].upper())]
                return [*(LETTERS[letter] for letter in context), BAR, *spelled]
        raise InputError(
            f"hops: length={self.length}: in a context of {self.context} letters too few chains have {self.most} hops: "
            "give a larger length, or lower questions or most"
        )

    def _context(self, draw: Draw) -> list[int]:
        context = [int(draw() * self.nodes)]
        while len(context) < self.context:
            context.append((context[-1] + 1 + int(draw() * (self.nodes - 1))) % self.nodes)
        return context

    def _asked(self, chain_of: dict[int, list[int]], draw: Draw) -> list[tuple[int, int, int]] | None:
        """(p, first letter, last letter) of every question, shuffled; ``None`` where chains are too short."""
        asked = []
        for p in range(1, self.most + 1):
            count = (self.questions + self.most - p) // self.most
            starts = [letter for letter in range(self.nodes) if len(chain_of.get(letter, ())) >= p]
            if len(starts) < count:
                return None
            asked += [(p, letter, chain_of[letter][p - 1]) for letter in shuffled(starts, draw)[:count]]
        return shuffled(asked, draw)


def chains(context: Sequence[int], most: int) -> dict[int, list[int]]:
    """For each letter of the context, the letters met on up to ``most`` hops from it."""
    earlier: list[int | None] = []
    latest: dict[int, int] = {}
    for place, letter in enumerate(context):
        earlier.append(latest.get(letter))
        if place + 1 < len(context):
            latest[letter] = place
    found = {}
    for letter, last in latest.items():
        place, met = last + 1, [context[last + 1]]
        while len(met) < most and (back := earlier[place]) is not None:
            place = back + 1
            met.append(context[place])
        found[letter] = met
    return found


def shuffled(entries: Sequence[Entry], draw: Draw) -> list[Entry]:
    """``entries`` in random order; ``draw`` alone decides, so every Python version gives the same."""
    order = list(entries)
    for last in range(len(order) - 1, 0, -1):
        other = int(draw() * (last + 1))
        order[last], order[other] = order[other], order[last]
    return order


def questions(words: Sequence[str]) -> Iterator[Question]:
    """Reads a document as a person would, hop by hop; questions that have no answer are left out."""
    bar = words.index(BAR)
    context = words[:bar]
    for place in range(bar + 3, len(words), 3):
        p, x = words[place - 2], words[place - 1]
        if not (p.isdecimal() and x.isalpha() and x.isupper()):
            return
        letter, before = x.lower(), len(context) - 1
        for _ in range(int(p)):
            occurrences = [j for j in range(before) if context[j] == letter]
            if not occurrences:
                break
            before = occurrences[-1] + 1
            letter = context[before]
        else:
            if int(p):
                yield Question(place, int(p), letter.upper())
