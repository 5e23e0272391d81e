"""Defines the engine's results: tokens with their depths, completions and events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from adaponder.inference.request import Request

FinishReason = Literal["stop", "length", "cancelled", "error"]
# Token ids with their log-probabilities, likeliest first.
TopTokens = tuple[tuple[int, float], ...]


class PromptToken(NamedTuple):
    """A prompt token, with its log-probability and the likeliest tokens given the tokens before it.

    The first token has no log-probability (``None``) and no likeliest tokens.
    """

    id: int
    log_probability: float | None = None
    top: TopTokens = ()


class Token(NamedTuple):
    """A generated token.

    Attributes:
        depth: the depth of the preceding token, whose last iteration predicted this token.
        log_probability: this token's log-probability under the model's distribution, before biases, penalties and
            temperature; ``None`` unless requested.
        top: the likeliest tokens of that distribution.
        gates: the gate values of the preceding token, by iteration.
        iteration_top: the likeliest next tokens after each iteration of the preceding token.
    """

    id: int
    depth: int
    log_probability: float | None = None
    top: TopTokens = ()
    gates: tuple[float, ...] = ()
    iteration_top: tuple[TopTokens, ...] = ()


@dataclass
class Completion:
    """One sample of a request; ``sample`` is its number, from 0.

    Attributes:
        tokens: the generated tokens, including the stop token if there is one.
        prompt_log_probabilities: one entry per prompt token; ``None`` unless requested.
        finish_reason: ``stop`` (at ``stop_id``: an end-of-text or stop id), ``length``, ``cancelled`` or ``error``;
            ``None`` until the sample finishes.
        error: the error in one line, if ``finish_reason`` is ``error``.
        dropped_rows: the number of rows computed for wrong drafts, which are not part of any depth.
        cached_tokens: the number of leading prompt tokens found in the prefix cache.
    """

    request: Request
    sample: int
    prompt: list[int]
    tokens: list[Token] = field(default_factory=list)
    prompt_depths: list[int] = field(default_factory=list)
    prompt_log_probabilities: list[PromptToken] | None = None
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    error: str | None = None
    dropped_rows: int = 0
    cached_tokens: int = 0

    @property
    def ids(self) -> list[int]:
        """The ids of the generated tokens."""
        return [token.id for token in self.tokens]

    @property
    def depths(self) -> list[int]:
        """The depths of all prompt tokens and of all generated tokens but the last, which the model has not read."""
        # Token.depth is that of the preceding token: tokens[0] has the depth of the last prompt token.
        return self.prompt_depths + [token.depth for token in self.tokens[1:]]

    @property
    def mean_depth(self) -> float:
        """The mean of :attr:`depths`; 0 if it is empty."""
        return sum(self.depths) / len(self.depths) if self.depths else 0.0


class Event(NamedTuple):
    """A new ``token`` of one sample of a request, or the ``completion`` of a sample that has finished."""

    request: int
    sample: int
    token: Token | None = None
    completion: Completion | None = None
