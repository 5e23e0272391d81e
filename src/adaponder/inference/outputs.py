"""Defines the engine's results: tokens with their depths, completions and events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from adaponder.inference.request import Request

FinishReason = Literal["stop", "length", "cancelled", "error"]
# Token ids with their log-probabilities, likeliest first.
TopTokens = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of the prompt as the tokens before it predicted it; the first one has no ``log_probability``."""

    id: int
    log_probability: float | None = None
    top: TopTokens = ()


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        depth: the depth of the token before it, whose row predicted this one.
        log_probability: by the model's own distribution, before biases, penalties and temperature; ``None`` unless the
            request asks for it.
        top: the likeliest tokens of the same distribution.
        gates: the gates of the predicting row, by iteration.
        iteration_top: the likeliest tokens after each iteration of the predicting row.
    """

    id: int
    depth: int
    log_probability: float | None = None
    top: TopTokens = ()
    gates: tuple[float, ...] = ()
    iteration_top: tuple[TopTokens, ...] = ()


@dataclass
class Completion:
    """One sample of a request.

    Attributes:
        sample: the number of the sample, from 0.
        tokens: the generated tokens; a stop token is the last.
        prompt_log_probabilities: one entry per token of the prompt, if the request asks for them.
        finish_reason: ``stop`` (an end-of-text or stop id), ``length``, ``cancelled`` or ``error``; ``None`` until it
            finishes.
        stop_id: the token id that stopped it.
        error: the error in one line.
        dropped_rows: rows computed for drafts that were wrong; no depth counts them.
        cached_tokens: leading tokens of the prompt found in the prefix cache, which were not computed again.
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
        """Token ids of the generated tokens."""
        return [token.id for token in self.tokens]

    @property
    def depths(self) -> list[int]:
        """Depths of every computed token: the prompt's, and all generated ones but the last, which is not computed."""
        # The depth of a generated token is known from the token it predicted; the prompt's last predicted the first.
        return self.prompt_depths + [token.depth for token in self.tokens[1:]]

    @property
    def mean_depth(self) -> float:
        """Mean depth of the computed tokens; 0 without any."""
        return sum(self.depths) / len(self.depths) if self.depths else 0.0


@dataclass(frozen=True)
class Event:
    """A new ``token``, or the ``completion``, of one sample of a request."""

    request: int
    sample: int
    token: Token | None = None
    completion: Completion | None = None
