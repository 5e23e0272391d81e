"""Defines the engine's results: tokens with their depths, completions and events."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

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

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        id: the token id.
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

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return dataclasses.asdict(self)


@dataclass
class Completion:
    """One sample of a request.

    Attributes:
        request: the request.
        sample: the number of the sample, from 0.
        prompt: token ids of the prompt.
        tokens: the generated tokens; a stop token is the last.
        prompt_depths: depths of the prompt's tokens.
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

    def as_dict(self) -> dict[str, Any]:
        """Returns the results for JSON; of the request only prompt and seed."""
        prompt = self.prompt_log_probabilities
        return {
            "prompt": self.prompt,
            "seed": int(self.request.seed),
            "sample": self.sample,
            "tokens": [token.as_dict() for token in self.tokens],
            "prompt_depths": self.prompt_depths,
            "prompt_log_probabilities": None if prompt is None else [token.as_dict() for token in prompt],
            "mean_depth": self.mean_depth,
            "finish_reason": self.finish_reason,
            "stop_id": self.stop_id,
            "error": self.error,
            "dropped_rows": self.dropped_rows,
            "cached_tokens": self.cached_tokens,
        }


@dataclass(frozen=True)
class Event:
    """A new ``token``, or the ``completion``, of one sample of a request."""

    request: int
    sample: int
    token: Token | None = None
    completion: Completion | None = None
