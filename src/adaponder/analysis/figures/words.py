"""Turns text from data into labels and HTML: control characters are spelled out, markup is escaped."""

from __future__ import annotations

import re
from functools import cache
from html import escape
from unicodedata import category

from matplotlib.font_manager import FontProperties, findfont, get_font

_SPACES = {" ": "␣", "\n": "↵", "\t": "⇥"}
# Unicode categories: control, format, surrogate, private use, line separator, paragraph separator.
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def visible(text: str, *, keep: str = "\n") -> str:
    """Escapes every invisible character of ``text`` (ESC becomes ``\\x1b``), except those in ``keep``.

    Thus no token can move the cursor, change the direction of writing or be invisible.
    """
    return "".join(
        _number(letter) if category(letter) in _INVISIBLE and letter not in keep else letter for letter in text
    )


def _number(letter: str) -> str:
    return letter.encode("unicode_escape").decode()


def for_html(text: str) -> str:
    """Escapes ``text`` for HTML, with a visible mark at line ends."""
    return escape(visible(text)).replace("\n", "↵\n")


def on_one_line(text: str) -> str:
    """Returns ``text`` escaped by :func:`visible`, with a mark instead of each line end; markup is not escaped."""
    return visible(text).replace("\n", "↵")


def for_figure(text: str, limit: int = 10) -> str:
    """Returns a token as an axis label of at most ``limit`` characters, with visible spaces (8 as ``␣×8``)."""
    text = re.sub(r" {3,}|\t{3,}|\n{3,}", lambda run: f"{run[0][0]}×{len(run[0])}", text)
    return drawable("".join(_SPACES.get(letter, letter) for letter in text), limit)


def drawable(text: str, limit: int) -> str:
    """Returns ``text``, cut at ``limit`` characters; invisible ones and those not in the figures' font are escaped."""
    spelled = visible(text, keep="")
    shown = "".join(letter if _has_glyph(letter) else _number(letter) for letter in spelled)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


@cache
def _has_glyph(letter: str) -> bool:
    font = get_font(findfont(FontProperties(family="DejaVu Sans")))
    return font.get_char_index(ord(letter)) != 0
