"""Text in, text out, over an engine that knows token ids: prompts, stop strings, and the text of each token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from adaponder.errors import EvaluationError, InputError
from adaponder.inference.outputs import Completion, Event, FinishReason, PromptToken, Token
from adaponder.inference.request import Request
from adaponder.text.stops import check_stops
from adaponder.text.stream import Piece, TextStream

if TYPE_CHECKING:
    from adaponder.inference.engine import Engine


@dataclass
class Writing:
    """One sample of a request as text, as far as it has come.

    Attributes:
        request: what was asked of the engine.
        number: of the request.
        sample: which of the request's samples, from 0.
        stream: turns the tokens into text.
        tokens: the tokens of the text; the last one completed the stop string, where there is one.
        pieces: the text of each token.
        prompt_depths: depths of the prompt's tokens; empty before they are known.
        prompt_log_probabilities: of the prompt's tokens, where they were asked for; known at the end.
        finish_reason: ``stop`` at a stop string or id; ``None`` while it goes on.
        error: what went wrong, in one line.
        dropped_rows, cached_tokens: see :class:`Completion`.
    """

    request: Request
    number: int
    sample: int
    stream: TextStream
    tokens: list[Token] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    prompt_depths: list[int] = field(default_factory=list)
    prompt_log_probabilities: list[PromptToken] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    dropped_rows: int = 0
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def depths(self) -> list[int]:
        """Depth of each token of prompt and text; 0 for the last, of which no row is known."""
        # A token's row predicted the next one, which says its depth; the prompt's last row predicted the first.
        after = [token.depth for token in self.tokens[1:]] + [0] * bool(self.tokens)
        return self.prompt_depths + after

    def add(self, token: Token) -> list[Piece]:
        """Takes a token in; returns the text that can be shown now."""
        self.tokens.append(token)
        self.pieces.append("")
        return self.keep(self.stream.add(token.id))

    def keep(self, pieces: list[Piece]) -> list[Piece]:
        """The same pieces, written down."""
        for piece in pieces:
            self.pieces[piece.token] += piece.text
        return pieces


class TextEvent(NamedTuple):
    """Text that a sample has grown by, possibly empty; or its end."""

    writing: Writing
    pieces: list[Piece]
    done: bool = False


class Writings:
    """The samples of one request as text; it is told the engine's events, and knows no engine.

    Args:
        tokenizer: any tokenizer of transformers.
        request: what was asked of the engine.
        number: of the request.
        stops: strings that end a sample.
        include_stop: whether the stop string is a part of the text.
        eos_ids: the model's end-of-text ids, which have no text where they end a sample.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        request: Request,
        number: int = 0,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        eos_ids: Collection[int] = (),
    ):
        silent = set(request.stop_ids) | (set() if request.ignore_eos else set(eos_ids))
        ids = list(request.prompt)
        self.samples = [
            Writing(
                request,
                number,
                sample,
                TextStream(tokenizer, ids, stops=stops, include_stop=include_stop, silent=silent),
            )
            for sample in range(request.samples)
        ]

    @property
    def over(self) -> bool:
        """Whether every sample has ended."""
        return all(one.finish_reason is not None for one in self.samples)

    def add(self, event: Event) -> TextEvent | None:
        """The event as text; ``None`` for tokens after a stop string."""
        writing = self.samples[event.sample]
        if event.completion is not None:
            return _end(writing, event.completion)
        if event.token is None or writing.stream.stop is not None:
            return None
        return TextEvent(writing, writing.add(event.token))


def _end(writing: Writing, completion: Completion) -> TextEvent:
    pieces = writing.keep(writing.stream.finish())
    stopped = writing.stream.stop is not None
    writing.finish_reason = "stop" if stopped else completion.finish_reason or "error"
    writing.error = None if stopped else completion.error
    writing.prompt_depths = list(completion.prompt_depths)
    writing.prompt_log_probabilities = completion.prompt_log_probabilities
    writing.dropped_rows = completion.dropped_rows
    writing.cached_tokens = completion.cached_tokens
    return TextEvent(writing, pieces, done=True)


class TextEngine:
    """Generates text for many prompts at once; see :class:`adaponder.inference.engine.Engine`, which it drives.

    A sample that has met its stop string is cancelled; tokens that came beyond it are left out of its text.
    """

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase):
        self.engine, self.tokenizer = engine, tokenizer
        self._writings: dict[int, Writings] = {}

    @property
    def busy(self) -> bool:
        """Whether any text is not finished."""
        return bool(self._writings)

    def submit(
        self, prompt: str | Sequence[int], *, stops: Sequence[str] = (), include_stop: bool = False, **settings: Any
    ) -> list[Writing]:
        """Takes a prompt in and returns its samples; ``settings`` are fields of :class:`Request`.

        Raises :class:`InputError` if it cannot be honoured.
        """
        stops = check_stops(stops)
        request = Request(prompt=encode(self.tokenizer, prompt), **settings)
        number = self.engine.submit(request)
        writings = self._writings[number] = Writings(
            self.tokenizer, request, number, stops=stops, include_stop=include_stop, eos_ids=self.engine.eos_ids
        )
        return list(writings.samples)

    def cancel(self, number: int) -> None:
        """Ends a request; the ends of its samples are among the next step's events."""
        self.engine.cancel(number)

    def cancel_all(self) -> None:
        """Ends every request that is not finished."""
        for number in self._writings:
            self.cancel(number)

    def step(self) -> list[TextEvent]:
        """One step of the engine, as text."""
        events = []
        for event in self.engine.step():
            writings = self._writings.get(event.request)
            told = None if writings is None else writings.add(event)
            if writings is None or told is None:
                continue
            events.append(told)
            if writings.over:
                del self._writings[event.request]
            elif not told.done and told.writing.stream.stop is not None:
                self.engine.cancel(event.request, event.sample)
        return events

    def finish(self, each: Callable[[TextEvent], object], *, until: Callable[[], bool] = lambda: False) -> None:
        """Steps until nothing is left to do, or ``until`` says so and the rest is cancelled; events go to ``each``.

        Raises the first error of a request.
        """
        wrong: list[str] = []
        while self.busy:
            if until() or wrong:
                self.cancel_all()
            for event in self.step():
                each(event)
                if event.done and event.writing.error is not None:
                    wrong.append(event.writing.error)
        if wrong:
            raise EvaluationError(wrong[0])


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[int], *, special: bool = True) -> list[int]:
    """The prompt's token ids, of a text with the tokenizer's ``special`` tokens; raises if there are none."""
    ids = list(tokenizer(prompt, add_special_tokens=special).input_ids) if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise InputError("prompt: it is empty; give at least one token")
    return ids
