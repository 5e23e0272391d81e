"""The load on a server: requests at times of their own, whether or not earlier ones have been answered (open loop)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from adaponder.errors import InputError, shown


@dataclass(frozen=True)
class Ask:
    """What every request of a load has in common.

    Attributes:
        model: the name that the server answers to.
        vocabulary: token ids are drawn below it.
        context: tokens of a prompt.
        new: tokens to generate.
        settings: further fields of the request's body, such as ``{"adaponder": {"policy": "fixed:2"}}``.
    """

    model: str
    vocabulary: int
    context: int = 32
    new: int = 64
    settings: dict[str, Any] = field(default_factory=dict)

    def body(self, seed: int) -> dict[str, Any]:
        """The body of one streaming completion; equal seeds give equal bodies, other seeds other prompts."""
        draw = random.Random(seed)
        prompt = [draw.randrange(1, self.vocabulary) for _ in range(self.context)]
        common = {"model": self.model, "max_tokens": self.new, "stream": True, "temperature": 0}
        return common | {"prompt": prompt, "stream_options": {"include_usage": True}} | self.settings


def poisson_times(rate: float, seconds: float, *, seed: int) -> list[float]:
    """Times from 0 to ``seconds`` at which requests are due: ``rate`` per second on average, independent gaps."""
    draw, now, times = random.Random(seed), 0.0, []
    while (now := now + draw.expovariate(rate)) < seconds:
        times.append(now)
    return times


def check_rates(flag: str, rates: Sequence[float]) -> list[float]:
    """The rates as they were given; raises unless they rise."""
    if any(not math.isfinite(rate) or rate <= 0 for rate in rates):
        raise InputError(f"{flag} {shown(list(rates))}: requests per second, above 0, are needed")
    if any(after <= before for before, after in pairwise(rates)):
        raise InputError(f"{flag} {shown(list(rates))}: the rates must rise; sort them")
    return list(rates)


@dataclass
class Answer:
    """What one request of a load came to; times are seconds since the load began.

    Attributes:
        due: when it was to be sent.
        sent: when it was.
        status: the HTTP status; 0 where none came.
        arrivals: when text came, and how many tokens each time.
        tokens: generated tokens, as the server counts them in ``usage``.
        mean_depth: mean depth of the tokens read, as ``usage`` says; ``None`` where it does not.
        ended: when the answer was complete.
        error: why it is no complete answer, in one line.
        served_by: what the header ``x-served-by`` says, where a server tells its processes apart.
    """

    due: float
    sent: float = 0.0
    status: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    tokens: int = 0
    mean_depth: float | None = None
    ended: float = 0.0
    error: str | None = None
    served_by: str | None = None

    @property
    def works(self) -> bool:
        return self.status == 200 and self.error is None

    @property
    def refused(self) -> bool:
        """Whether the server said that its queue is full."""
        return self.status == 429

    def scaled(self) -> list[tuple[float, float]]:
        """Arrivals whose tokens sum to ``tokens``: text comes only when a character is whole, tokens were counted."""
        counted = sum(count for _, count in self.arrivals)
        share = self.tokens / counted if counted and self.tokens else 1.0
        return [(when, count * share) for when, count in self.arrivals]

    def gaps(self) -> list[float]:
        """Seconds between tokens; tokens that came together share the time before them."""
        found: list[float] = []
        arrivals = self.scaled()
        for (before, _), (now, count) in pairwise(arrivals):
            found += [(now - before) / max(count, 1e-9)] * max(1, round(count))
        return found


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least ``share`` of the values do not exceed; ``None`` of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Median, 95th and 99th percentile."""
    return {f"p{round(100 * share)}": percentile(values, share) for share in (0.5, 0.95, 0.99)}


def summary(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """What a load of ``seconds`` showed: tokens/s of its second half, waiting times in seconds, failures, mean depth.

    The time to the first token counts from when the request was due, so that a client or server that falls behind is
    not flattered.
    """
    done = [one for one in answers if one.works]
    first = [one.arrivals[0][0] - one.due for one in done if one.arrivals]
    gaps = [gap for one in done for gap in one.gaps()]
    within = sum(count for one in done for when, count in one.scaled() if seconds / 2 < when <= seconds)
    failures = _failures(answers)
    return {
        "requests": len(answers),
        "answered": len(done),
        "refused": sum(one.refused for one in answers),
        "failed": sum(failures.values()),
        "failures": failures,
        "tokens": sum(one.tokens for one in done),
        "tokens_per_second": within / (seconds / 2) if seconds else 0.0,
        "first_token": spread(first),
        "between_tokens": spread(gaps),
        "mean_depth": _mean_depth(done),
        "client_late": percentile([one.sent - one.due for one in answers], 0.99),
    }


def _failures(answers: Sequence[Answer]) -> dict[str, int]:
    """How many answers failed for each reason; a full queue is none."""
    failures: dict[str, int] = {}
    for one in answers:
        if not one.works and not one.refused:
            reason = one.error or f"status {one.status}"
            failures[reason] = failures.get(reason, 0) + 1
    return failures


def _mean_depth(done: Sequence[Answer]) -> float | None:
    """Mean depth of all answers, each weighted by its tokens; ``None`` where no answer says its own."""
    depths = [(one.mean_depth, one.tokens) for one in done if one.mean_depth is not None]
    total = sum(tokens for _, tokens in depths)
    return sum(depth * tokens for depth, tokens in depths) / total if total else None


def steady_rate(answers: Sequence[Answer]) -> float:
    """Tokens per second of all answers together, from when each of them had begun until the first one ended."""
    arrivals = [one.scaled() for one in answers if one.works and one.arrivals]
    if not arrivals:
        return 0.0
    begin, end = max(one[0][0] for one in arrivals), min(one[-1][0] for one in arrivals)
    came = sum(count for one in arrivals for when, count in one if begin < when <= end)
    return came / (end - begin) if end > begin else 0.0
