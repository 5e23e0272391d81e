"""Text that grows on a terminal, each token coloured by its depth, with its speed below it."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Group
from rich.live import Live
from rich.text import Text

from adaponder.inference.outputs import Token
from adaponder.terminal import console, counted, depth_style
from adaponder.text.engine import TextEvent, Writing

# Seconds between two pictures.
_REFRESH = 0.08


class LiveText:
    """Shows one writing while it grows; finished lines stay, and the line with the speed goes when it is left.

    A token's colour is its depth, which the token after it tells; so text is shown one token late.
    """

    def __init__(self, deepest: int, *, colours: bool = True):
        self.deepest, self.colours = deepest, colours
        self.line = Text()
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._began = self._shown = time.perf_counter()
        self._writing: Writing | None = None
        # Text of tokens whose depth is not known yet.
        self._waiting: list[tuple[int, str]] = []

    def __enter__(self) -> LiveText:
        self._began = time.perf_counter()
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._writing is not None:
            self._move(self._writing.tokens, everything=True)
        self._live.update(Text(), refresh=True)
        self._live.stop()
        console.print(self.line)

    def say(self, text: str, style: str = "") -> None:
        """Adds text that is no token's: the prompt."""
        self.line.append(text, style=style)
        self._print_full_lines()

    def show(self, event: TextEvent) -> None:
        """Takes in what happened to the writing."""
        self._writing = event.writing
        self._waiting += event.pieces
        self._move(event.writing.tokens)
        if (now := time.perf_counter()) - self._shown > _REFRESH:
            self._shown = now
            self._print_full_lines()
            self._live.update(Group(self.line, Text(self.speed(), style="dim")), refresh=True)

    def speed(self) -> str:
        """Tokens per second since the beginning, and the mean depth of the tokens since."""
        tokens = [] if self._writing is None else self._writing.tokens
        seconds = time.perf_counter() - self._began
        depth = sum(token.depth for token in tokens) / max(1, len(tokens))
        return f"{counted(len(tokens), 'token')}, {len(tokens) / seconds:,.1f} tokens/s, mean depth {depth:.2f}"

    def _move(self, tokens: list[Token], *, everything: bool = False) -> None:
        """Moves text from the waiting to the line: that of tokens whose depth is known, or all."""
        while self._waiting and (everything or self._waiting[0][0] + 1 < len(tokens)):
            number, text = self._waiting.pop(0)
            depth = tokens[number + 1].depth if number + 1 < len(tokens) else 0
            self.line.append(text, style=depth_style(depth, self.deepest) if self.colours else "")

    def _print_full_lines(self) -> None:
        """Prints all lines but the last, as broken at the width of the window."""
        lines = self.line.wrap(console, console.width)
        if len(lines) > 1:
            for line in lines[:-1]:
                console.print(line)
            self.line = lines[-1]
