"""What the engine returns: each token with the depth that made it, and completions made of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from adaponder.inference.request import Request

FinishReason = Literal["stop", "length", "cancelled", "error"]
# Token ids with their log-probabilities, likeliest first.
TopTokens = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        id: the token id.
        depth: depth of the row that predicted it, which is that of the token before it.
        log_probability: in the model's own distribution, before biases, penalties and temperature; ``None`` where it
            was not asked for.
        top: the likeliest tokens of the same distribution.
        gates: what the predicting row's gates said, iteration by iteration.
        iteration_top: the likeliest tokens after each iteration of the predicting row.
    """

    id: int
    depth: int
    log_probability: float | None = None
    top: TopTokens = ()
    gates: tuple[float, ...] = ()
    iteration_top: tuple[TopTokens, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of the prompt as the tokens before it predicted it; the first one has no ``log_probability``."""

    id: int
    log_probability: float | None = None
    top: TopTokens = ()

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        return dataclasses.asdict(self)


@dataclass
class Completion:
    """One sample of a request.

    Attributes:
        request: what was asked.
        sample: which of the request's samples, from 0.
        prompt: token ids of the prompt.
        tokens: the generated tokens; the one that stopped is the last.
        prompt_depths: depths of the prompt's tokens.
        prompt_log_probabilities: one entry per token of the prompt, where they were asked for.
        finish_reason: ``stop`` (an end-of-text or stop id), ``length``, ``cancelled`` or ``error``; ``None`` while it
            goes on.
        stop_id: the token id that stopped it.
        error: what went wrong, in one line.
        dropped_rows: rows that were computed of drafts that did not follow; no depth counts them.
        cached_tokens: tokens of the prompt, from its first on, whose rows an earlier request had left: they were not
            computed for this one.
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
        """Depths of every token read: the prompt's and all generated ones but the last, which is not read."""
        # A generated token's row is known from the token it predicted; the prompt's last row predicted the first one.
        return self.prompt_depths + [token.depth for token in self.tokens[1:]]

    @property
    def mean_depth(self) -> float:
        """Mean depth of the tokens read; 0 where none was."""
        return sum(self.depths) / len(self.depths) if self.depths else 0.0

    def as_dict(self) -> dict[str, Any]:
        """What came out, as JSON can hold it; of the request only prompt and seed."""
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
    """One sample of a request got a ``token``, or has become a ``completion``."""

    request: int
    sample: int
    token: Token | None = None
    completion: Completion | None = None
