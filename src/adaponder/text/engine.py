"""Runs an engine with text in and out: encodes prompts, decodes each token, and stops at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from adaponder.errors import EvaluationError
from adaponder.inference.outputs import Completion, Event, FinishReason, PromptToken, Token
from adaponder.inference.request import Request
from adaponder.text.prompts import encode
from adaponder.text.stream import Piece, TextStream, check_stops

if TYPE_CHECKING:
    from adaponder.inference.engine import Engine


@dataclass
class Writing:
    """The text of one sample (completion) of a request, as generated so far.

    Attributes:
        stream: decodes the tokens and finds stop strings.
        tokens: the generated tokens, up to the one that completed a stop string.
        pieces: the text of each token.
        finish_reason: ``stop`` at a stop string, else the engine's reason; ``None`` until the sample has ended.
        error: why the sample failed, in one line; ``None`` if it did not.

    When the sample ends, the other fields except ``request`` are copied from the engine's :class:`Completion`.
    """

    request: Request
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
        """The depths of prompt and generated tokens; 0 for the last generated token, which the model has not read."""
        # Token.depth is that of the preceding token, whose last iteration predicted this one.
        after = [token.depth for token in self.tokens[1:]] + [0] * bool(self.tokens)
        return self.prompt_depths + after

    def take(self, event: Event) -> TextEvent | None:
        """Adds an event of the engine and returns the new text; ``None`` for a token after a stop string."""
        if event.completion is not None:
            new = self.stream.finish()
            self._end(event.completion)
        elif event.token is None or self.stream.stop is not None:
            return None
        else:
            self.tokens.append(event.token)
            self.pieces.append("")
            new = self.stream.add(event.token.id)
        for piece in new:
            self.pieces[piece.token] += piece.text
        return TextEvent(self, new, done=event.completion is not None)

    def _end(self, completion: Completion) -> None:
        stopped = self.stream.stop is not None
        self.finish_reason = "stop" if stopped else completion.finish_reason or "error"
        self.error = None if stopped else completion.error
        self.prompt_depths = list(completion.prompt_depths)
        self.prompt_log_probabilities = completion.prompt_log_probabilities
        self.dropped_rows = completion.dropped_rows
        self.cached_tokens = completion.cached_tokens


class TextEvent(NamedTuple):
    """New text of a sample (``pieces``, possibly empty), and whether the sample has ended."""

    writing: Writing
    pieces: list[Piece]
    done: bool


def start_writings(
    tokenizer: PreTrainedTokenizerBase, request: Request, *, stops: Sequence[str], eos_ids: Collection[int]
) -> list[Writing]:
    """Returns an empty ``Writing`` per sample; its text omits stop ids and, unless ``ignore_eos``, ``eos_ids``."""
    silent = set(request.stop_ids) | (set() if request.ignore_eos else set(eos_ids))
    return [
        Writing(request, TextStream(tokenizer, request.prompt, stops=stops, silent=silent))
        for _ in range(request.samples)
    ]


class TextEngine:
    """Generates text for many prompts at once with an :class:`adaponder.inference.engine.Engine`.

    A sample that reaches a stop string is cancelled; tokens generated beyond it are left out of its text.
    """

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase):
        self.engine, self.tokenizer = engine, tokenizer
        self._writings: dict[int, list[Writing]] = {}

    @property
    def busy(self) -> bool:
        """Whether any text is unfinished."""
        return bool(self._writings)

    def submit(self, prompt: str | Sequence[int], *, stops: Sequence[str] = (), **settings: Any) -> list[Writing]:
        """Submits a prompt and returns a ``Writing`` per sample, to which :meth:`step` adds text.

        ``settings`` are fields of :class:`Request`. Raises :class:`InputError` if the engine refuses the request.
        """
        stops = check_stops(stops)
        request = Request(prompt=encode(self.tokenizer, prompt), **settings)
        number = self.engine.submit(request)
        self._writings[number] = start_writings(self.tokenizer, request, stops=stops, eos_ids=self.engine.eos_ids)
        return self._writings[number]

    def cancel_all(self) -> None:
        """Cancels every unfinished request; their last events come with the next step."""
        for number in self._writings:
            self.engine.cancel(number)

    def step(self) -> list[TextEvent]:
        """Runs one step of the engine and returns its events as text."""
        events = []
        for event in self.engine.step():
            writings = self._writings.get(event.request)
            text_event = None if writings is None else writings[event.sample].take(event)
            if writings is None or text_event is None:
                continue
            events.append(text_event)
            if all(writing.finish_reason is not None for writing in writings):
                del self._writings[event.request]
            elif not text_event.done and text_event.writing.stream.stop is not None:
                self.engine.cancel(event.request, event.sample)
        return events

    def finish(self, on_event: Callable[[TextEvent], object], *, until: Callable[[], bool] = lambda: False) -> None:
        """Steps until all texts are finished; cancels all requests once ``until`` returns true or a request fails.

        If a request failed, raises :class:`EvaluationError` with the first error once all requests have ended.
        """
        errors: list[str] = []
        while self.busy:
            if until() or errors:
                self.cancel_all()
            for event in self.step():
                on_event(event)
                if event.done and event.writing.error is not None:
                    errors.append(event.writing.error)
        if errors:
            raise EvaluationError(errors[0])
