"""Hops: a letter leads to the one written after it, again and again, until one that leads nowhere.

A document is a list of steps ``x y .``, then ``|``, then questions ``x y``: y is where x ends. In
``a b . c d . b e . | a e c d`` the first question takes two hops and the second one. Every hop needs the result of the
one before, and nothing in a question says how many there are. Each question has steps of its own, whose order in the
document is the order in which they are taken; steps of different questions are mixed. Every letter that a chain begins
with is asked for once, so the last answer can be told by elimination.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from adaponder.data.symbols import LETTERS, MOST_LETTERS
from adaponder.errors import InputError

BAR, STOP = "|", "."
_MOST_HOPS = 16

# A function that gives the next random number from 0 up to, but not, 1.
Draw = Callable[[], float]
Entry = TypeVar("Entry")


class Question(NamedTuple):
    """A question of a document: the place of its answer among the words, the depth it needs, and the right answer.

    ``forced`` says that it can be told by elimination: one end alone has been answered less often than it is written.
    """

    place: int
    needed: int
    answer: str
    forced: bool = False


@dataclass(frozen=True)
class Hops:
    """How documents of hops are made. No letter leads to two others; only a last one may be reached twice.

    Attributes:
        documents: how many.
        most: hops of the longest question; all numbers from 1 on are asked equally often, up to one.
        questions: of each document.
        letters: to choose from.
        ends: different last letters of a document; several questions may have the same answer.
        capitals: 1 writes last letters as capitals, so that they can be told from others; 0 does not.
        answers: 1 says that the answers (and the end) alone are learned; 0, every token.
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
        """What the questions of a document need, unordered."""
        counts = [(self.questions + self.most - p) // self.most for p in range(1, self.most + 1)]
        return [p for p, count in enumerate(counts, 1) for _ in range(count)]

    @property
    def length(self) -> int:
        """Tokens of each document, its end token included."""
        return 3 * sum(self.hops) + 1 + 2 * self.questions + 1

    def check(self) -> None:
        if not 1 <= self.most <= _MOST_HOPS:
            raise InputError(f"hops: most={self.most}: from 1 to {_MOST_HOPS} hops")
        if self.questions < 1:
            raise InputError(f"hops: questions={self.questions}: at least one")
        for name in ("capitals", "answers"):
            if getattr(self, name) not in (0, 1):
                raise InputError(f"hops: {name}={getattr(self, name)}: 0 or 1")
        taken = sum(self.hops) + (0 if self.capitals else self.ends)
        if not 2 <= self.ends <= self.letters:
            raise InputError(f"hops: ends={self.ends}: from 2 to letters={self.letters}")
        if not taken <= self.letters <= MOST_LETTERS:
            raise InputError(
                f"hops: letters={self.letters}: questions={self.questions} of up to most={self.most} hops take "
                f"{taken}, and there are {MOST_LETTERS}: lower questions, most or ends"
            )

    def document(self, draw: Draw) -> list[str]:
        """The words of one document, without its end."""
        names = shuffled(LETTERS[: self.letters], draw)
        ends = names[sum(self.hops) : sum(self.hops) + self.ends]
        if self.capitals:
            ends = [name.upper() for name in shuffled(LETTERS[: self.letters], draw)[: self.ends]]
        chains, start = [], 0
        for p in shuffled(self.hops, draw):
            chains.append([*names[start : start + p], ends[int(draw() * len(ends))]])
            start += p
        taken = [0] * len(chains)
        words = []
        for number in shuffled([number for number, chain in enumerate(chains) for _ in chain[1:]], draw):
            chain, place = chains[number], taken[number]
            words += [chain[place], chain[place + 1], STOP]
            taken[number] += 1
        return [*words, BAR, *(word for chain in shuffled(chains, draw) for word in (chain[0], chain[-1]))]


def shuffled(entries: Sequence[Entry], draw: Draw) -> list[Entry]:
    """``entries`` in random order; ``draw`` alone decides, so every Python version gives the same."""
    order = list(entries)
    for last in range(len(order) - 1, 0, -1):
        other = int(draw() * (last + 1))
        order[last], order[other] = order[other], order[last]
    return order


def questions(words: Sequence[str]) -> Iterator[Question]:
    """Reads a document as a person would, hop by hop; letters that lead nowhere, or round and round, ask nothing."""
    bar = words.index(BAR)
    leads = {words[place]: words[place + 1] for place in range(0, bar - 2, 3) if words[place + 2] == STOP}
    unasked = set(leads) - set(leads.values())
    for place in range(bar + 2, len(words), 2):
        word, hops = words[place - 1], 0
        unasked.discard(word)
        while word in leads and hops < len(leads):
            word, hops = leads[word], hops + 1
        if hops and word not in leads:
            yield Question(place, hops, word, forced=not unasked)
