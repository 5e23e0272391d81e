"""A running server under load: rates that rise, all streams at once, and what it adds to the engine behind it."""

from __future__ import annotations

import http.client
import json
import ssl
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from adaponder.bench.serve_client import Target, run_client
from adaponder.bench.serve_load import Ask, poisson_times, steady_rate, summary
from adaponder.bench.serve_process import started
from adaponder.errors import EvaluationError

# Shares of what the server can do at most, at which it is loaded where no rates are given.
USUAL_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.25)
# Streams and tokens of each with which the client is measured against a server that has nothing to do.
_CLIENT_STREAMS, _CLIENT_TOKENS = 64, 1500


@dataclass(frozen=True)
class Load:
    """How a server is loaded.

    Attributes:
        ask: what each request asks.
        streams: requests under way at once where the most that a server can do is measured.
        seconds: how long requests arrive at each rate.
        timeout: seconds after which a request that is not complete has failed.
        seed: of arrivals and prompts.
    """

    ask: Ask
    streams: int = 64
    seconds: float = 10.0
    timeout: float = 120.0
    seed: int = 0

    def bodies(self, count: int, *, part: int) -> list[dict[str, Any]]:
        """Bodies of a part of the measurement; no prompt is that of another part."""
        return [self.ask.body(self.seed * 1_000_003 + part * 100_003 + number) for number in range(count)]


@dataclass(frozen=True)
class Burst:
    """All streams at once: tokens/s of each repetition, waiting times of the last."""

    rates: list[float]
    last: dict[str, Any] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Median tokens/s."""
        return statistics.median(self.rates) if self.rates else 0.0


def about_model(url: str, key: str | None, *, timeout: float = 30.0) -> dict[str, Any]:
    """The server's model, as ``GET /v1/models`` describes it."""
    status, body = _get(url, "/v1/models", key, timeout)
    if status != 200:
        cure = "; give its key in ADAPONDER_API_KEY" if status in (401, 403) else ""
        raise EvaluationError(f"{url}/v1/models: status {status}{cure}")
    try:
        return json.loads(body)["data"][0]
    except (ValueError, LookupError, TypeError):
        raise EvaluationError(f"{url}/v1/models: not a list of models") from None


def wait_until_ready(url: str, key: str | None, *, patience: float) -> None:
    """Returns once the server takes requests: it listens before its engine is open."""
    until = time.monotonic() + patience
    while (status := _get(url, "/ready", key, 30.0)[0]) != 200:
        if time.monotonic() > until:
            raise EvaluationError(f"{url}/ready: status {status} after {patience:g} s")
        time.sleep(0.05)


def _get(url: str, path: str, key: str | None, timeout: float) -> tuple[int, bytes]:
    """Status and body."""
    target = Target.of(url, key)
    kind = http.client.HTTPSConnection if target.secure else http.client.HTTPConnection
    settings: dict[str, Any] = {"context": ssl.create_default_context()} if target.secure else {}
    connection = kind(target.host, target.port, timeout=timeout, **settings)
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request("GET", f"{target.prefix}{path}", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except OSError as problem:
        raise EvaluationError(f"{url}: no server answers there ({type(problem).__name__})") from None
    finally:
        connection.close()


def all_at_once(url: str, load: Load, *, key: str | None, repeats: int) -> Burst:
    """Every stream begins at once; tokens/s while all of them run. One repetition before is not counted."""
    rates: list[float] = []
    found: dict[str, Any] = {}
    for part in range(repeats + 1):
        answers = run_client(
            url, load.bodies(load.streams, part=part), [0.0] * load.streams, key=key, timeout=load.timeout
        )
        found = summary(answers, max((one.ended for one in answers), default=0.0))
        if found["answered"] != load.streams:
            why = next(iter(found["failures"]), "status 429: its queue is full")
            raise EvaluationError(f"{load.streams - found['answered']} of {load.streams} streams failed: {why}")
        if part:
            rates.append(steady_rate(answers))
    return Burst(rates, found)


def at_rates(url: str, load: Load, rates: Sequence[float], *, key: str | None) -> Iterator[dict[str, Any]]:
    """A row per rate: what requests saw that arrived at that many per second."""
    for step, rate in enumerate(rates):
        due = poisson_times(rate, load.seconds, seed=load.seed * 7919 + step)
        answers = run_client(url, load.bodies(len(due), part=100 + step), due, key=key, timeout=load.timeout)
        yield {"rate": rate, "offered_tokens_per_second": rate * load.ask.new} | summary(answers, load.seconds)


def client_limit() -> float:
    """Tokens per second that the client takes from a server which has nothing to do."""
    with started(["-m", "adaponder.bench.serve_echo", "0", "0"]) as echo:
        load = Load(Ask("echo", 100, context=1, new=_CLIENT_TOKENS), streams=_CLIENT_STREAMS)
        answers = run_client(
            echo.url, load.bodies(load.streams, part=0), [0.0] * load.streams, key=None, timeout=load.timeout
        )
    whole = max(one.ended for one in answers) - min(one.sent for one in answers)
    return sum(one.tokens for one in answers) / whole


def overhead(server: float, engine: float) -> float:
    """Share of the engine's tokens/s that is lost on the way through the server."""
    return 1.0 - server / engine
