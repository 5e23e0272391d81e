"""Modular arithmetic on prefix trees: the height of a tree is the depth that its value needs.

A document is its modulus and a row of questions, each a tree in prefix notation, ``=`` and its value; ``.`` fills what
is left. In ``7 + 3 * 4 5 = 2 - 1 2 = 6 .`` heights are 2 and 1.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from adaponder.data.hops import Draw, Question
from adaponder.data.symbols import MOST_NUMBERS
from adaponder.errors import InputError

EQUALS, FILL = "=", "."
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_SIGNS = tuple(OPERATIONS)
_MOST_HEIGHT = 8


@dataclass(frozen=True)
class Mano:
    """How documents of prefix trees are made. Heights are drawn alike; one side of a node may be lower than the other.

    Attributes:
        documents: how many.
        length: tokens of each document, its end token included.
        modulus: of every sum, difference and product.
        most: height of the tallest tree; a number has height 0, and none is asked alone.
        answers: 1 says that the answers alone are learned; 0, every token.
    """

    seed: int = 0
    documents: int = 50_000
    length: int = 129
    modulus: int = 7
    most: int = 4
    answers: int = 1

    def check(self) -> None:
        if not 2 <= self.modulus < MOST_NUMBERS:
            raise InputError(f"mano: modulus={self.modulus}: from 2 to {MOST_NUMBERS - 1}")
        if self.answers not in (0, 1):
            raise InputError(f"mano: answers={self.answers}: 0 or 1")
        if not 1 <= self.most <= _MOST_HEIGHT:
            raise InputError(f"mano: most={self.most}: a height from 1 to {_MOST_HEIGHT}")
        # A full tree has 2 ** (height + 1) - 1 words; then there are modulus, sign of equality, value and end.
        if self.length < (shortest := 2 ** (self.most + 1) + 3):
            raise InputError(
                f"mano: length={self.length}: a question of height {self.most} may need {shortest}: "
                "give a larger length or a smaller most"
            )

    def document(self, draw: Draw) -> list[str]:
        """The words of one document, without its end."""
        words = [str(self.modulus)]
        while True:
            tree, value = self._tree(1 + int(draw() * self.most), draw)
            if len(words) + len(tree) + 2 > self.length - 1:
                return [*words, *[FILL] * (self.length - 1 - len(words))]
            words += [*tree, EQUALS, str(value)]

    def _tree(self, height: int, draw: Draw) -> tuple[list[str], int]:
        """A tree of exactly this height, and its value."""
        if height == 0:
            value = int(draw() * self.modulus)
            return [str(value)], value
        heights = [height - 1, int(draw() * height)]
        if draw() < 0.5:
            heights.reverse()
        sign = _SIGNS[int(draw() * len(_SIGNS))]
        (left, first), (right, second) = (self._tree(one, draw) for one in heights)
        return [sign, *left, *right], OPERATIONS[sign](first, second) % self.modulus


def questions(words: Sequence[str]) -> Iterator[Question]:
    """Reads a document from its first word on and works its trees out, up to the first word that belongs to none."""
    if not words or not words[0].isdecimal() or int(words[0]) < 2:
        return
    start, modulus = 1, int(words[0])
    while start < (after := _end_of_tree(words, start)):
        if words[after : after + 1] != [EQUALS] or after + 1 >= len(words) or words[start] not in OPERATIONS:
            return
        height, value = _worked_out(words[start:after], modulus)
        yield Question(after + 1, height, str(value))
        start = after + 2


def _end_of_tree(words: Sequence[str], start: int) -> int:
    """The place after the tree that begins at ``start``; ``start`` itself where no whole tree does."""
    missing = 1
    for place in range(start, len(words)):
        if words[place] in OPERATIONS:
            missing += 1
        elif words[place].isdecimal():
            missing -= 1
        else:
            return start
        if not missing:
            return place + 1
    return start


def _worked_out(tree: Sequence[str], modulus: int) -> tuple[int, int]:
    """(height, value) of a tree, read from its last word to its first: a sign comes after both of its sides."""
    known: list[tuple[int, int]] = []
    for word in reversed(tree):
        if word in OPERATIONS:
            (left, first), (right, second) = known.pop(), known.pop()
            known.append((1 + max(left, right), OPERATIONS[word](first, second) % modulus))
        else:
            known.append((0, int(word)))
    return known[0]
