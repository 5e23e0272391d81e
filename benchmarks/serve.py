"""Measures a server with all streams at once, then with rising request rates; compares it with its engine alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Annotated, Any

from adaponder.commands.shared import arg, listed, opt
from adaponder.devices import DTYPES, as_dtype
from adaponder.errors import EvaluationError, InputError
from adaponder.policies import parse_policy
from adaponder.terminal import console
from benchmarks import harness
from benchmarks.cli import tuples
from benchmarks.harness import SEVERAL, Recorded, Row, Run, number, print_table, versions
from benchmarks.serve_client import KEY, PERCENTILES, ServerLoad, get_json, poisson_times, started, steady_rate, summary

PACKAGES = ("fastapi", "starlette", "uvicorn", "httptools", "uvloop", "httpx")
# Shares of the server's maximum at which it is loaded where no rates are given.
USUAL_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.25)
# Streams and tokens of each with which the client is measured against a server that has nothing to do.
_CLIENT_STREAMS, _CLIENT_TOKENS = 64, 1500


@dataclass(frozen=True)
class ServeOptions(Recorded):
    """Options of ``benchmarks serve``; it measures a ``checkpoint``, a ``url`` or engines that sleep (``stand_in``)."""

    checkpoint: Annotated[str | None, arg("A checkpoint to serve; its engine is timed too.", "CKPT")] = None
    url: Annotated[str | None, opt(f"A running server; its key is read from {KEY}.", "ADDRESS")] = None
    stand_in: Annotated[list[str] | None, opt(f"An engine that sleeps MS ms for LANES tokens{SEVERAL}", "LANES,MS")] = (
        None
    )
    rates: Annotated[str | None, opt("Requests/s; default: 10 to 125 % of the maximum.", "1,…")] = None
    seconds: Annotated[float, opt("Duration of each rate.", "S", min=0.1, max=3600)] = 10.0
    context: Annotated[int, opt("Tokens of a random prompt.", "N", min=1, max=2**20)] = 32
    new: Annotated[int, opt("Tokens that each request generates.", "N", min=2, max=2**20)] = 64
    streams: Annotated[int, opt("Concurrent requests when measuring the maximum.", "N", min=1, max=4096)] = 64
    repeats: Annotated[int, opt("Repetitions of the maximum.", "N", min=1, max=1000)] = 3
    timeout: Annotated[float, opt("Requests that take longer count as failed.", "S", min=0.1, max=3600)] = 120.0
    policy: Annotated[str | None, opt("Such as fixed:2; default: the server's.", "RULE")] = None
    dtype: Annotated[str, opt(f"Precision of CKPT: {', '.join(DTYPES)}.", "NAME")] = "auto"

    @property
    def kind(self) -> str:
        """Returns the kind of server, which is part of the record's name."""
        return "stand-in" if self.stand_in else "checkpoint" if self.checkpoint is not None else "url"

    def load(self, url: str, key: str | None = None, **sizes: Any) -> ServerLoad:
        """Returns the load for the model that the server at ``url`` serves; ``sizes`` replace fields of the load."""
        try:
            model = get_json(url, "/v1/models", key)["data"][0]
        except (LookupError, TypeError):
            raise EvaluationError(f"{url}/v1/models is not a list of models") from None
        facts = model.get("adaponder") or {}
        extension = {"ignore_eos": True} | ({} if self.policy is None else {"policy": self.policy})
        fields = {name: getattr(self, name) for name in ("context", "new", "streams", "seconds", "timeout")} | sizes
        fields |= {"seed": self.seed or 0, "settings": {"adaponder": extension} if facts else {}}
        return ServerLoad(model["id"], int(facts.get("vocabulary", 256)), **fields, url=url, key=key)


def run(options: ServeOptions) -> dict[str, Any]:
    """Measure a server under requests that arrive at random times, at rising rates: tokens/s, latencies, failures.

    [dim]python -m benchmarks serve runs/demo --new 32[/]

    [dim]python -m benchmarks serve --url http://127.0.0.1:8000 --rates 1,2,4,8[/]

    [dim]python -m benchmarks serve --stand-in 64,8 --stand-in 256,8[/]
    """
    as_dtype(options.dtype)
    stand_ins = tuples("--stand-in", options.stand_in, 2, float, "[0.05, 10000]")
    rates = listed("--rates", options.rates, float, "[0.001, 100000]")
    if (options.checkpoint is not None) + (options.url is not None) + bool(options.stand_in) != 1:
        raise InputError("give exactly one of CKPT, --url URL and --stand-in LANES,MS")
    if any(after <= before for before, after in pairwise(rates)):
        raise InputError(f"--rates {options.rates} must rise: sort them")
    if options.policy is not None:
        parse_policy(options.policy)
    names = ("checkpoint", "url", "seconds", "context", "new", "streams", "timeout", "repeats", "policy")
    settings = {name: getattr(options, name) for name in names} | {"rates": rates, "stand_in": stand_ins}
    bench = Run(options, f"serve-{options.kind}", settings, versions=versions(*PACKAGES))
    bench.hardware["cores"] = os.cpu_count()
    bench.keep(client_tokens_per_second=client_limit())
    bursts, rows = _load_stand_ins(options, stand_ins, rates) if stand_ins else _load_server(options, rates)
    bench.keep(all_at_once=bursts, rates=rows)
    limit = bench.metrics["client_tokens_per_second"]
    console.print(f"the client takes up to {limit:,.0f} tokens/s from an idle server")
    print_table("\nAll streams at once", _BURST, bursts)
    print_table("\nRequests that arrive at random times", _RATES, rows)
    return bench.finish()


def _load_server(options: ServeOptions, rates: Sequence[float]) -> tuple[list[Row], list[Row]]:
    """Returns [the row of :func:`all_at_once`] and the rows of :func:`at_rates`; starts a server for a checkpoint."""
    with ExitStack() as stack:
        server, engine_speed, url, key = None, None, str(options.url), os.environ.get(KEY)
        if options.checkpoint is not None:
            engine_speed = _engine_alone(options)
            arguments = ["-m", "adaponder", "serve", options.checkpoint, "--port", "0", "--device", options.device]
            arguments += ["--dtype", options.dtype, "--lanes", str(options.streams)]
            server = stack.enter_context(started(arguments, patience=600.0))
            url, key = server.url, None
            get_json(url, "/ready", patience=600.0)  # it listens before its engine is loaded
        load = options.load(url, key)
        burst = all_at_once(load, repeats=options.repeats, what=options.kind)
        burst |= against_engine(burst["server_tokens_per_second"], engine_speed)
        return [burst], [row | {"server_rss": server and server.rss()} for row in at_rates(load, rates, burst)]


def _load_stand_ins(
    options: ServeOptions, stand_ins: Sequence[Sequence[float]], rates: Sequence[float]
) -> tuple[list[Row], list[Row]]:
    """Returns a row of :func:`all_at_once` per sleeping engine, and rows of :func:`at_rates` for the first engine."""
    from benchmarks.stand_in import SleepingEngine, engine_rate, stand_in_model

    bursts, rows, model = [], [], stand_in_model()
    for lanes, tick in ((int(lanes), tick) for lanes, tick in stand_ins):
        with started(["-m", "benchmarks.stand_in", str(lanes), str(tick)]) as server:
            load = options.load(server.url, streams=lanes)
            engine, bodies = SleepingEngine(model, lanes=lanes, tick=tick / 1e3), load.bodies(lanes, part=0)
            # Half of the engine's repetitions before and half after, so that both meet the same machine.
            speeds, before = [engine_rate(engine, bodies) for _ in range(2)], sum(server.usage.cpu_times()[:2])
            burst = all_at_once(load, repeats=options.repeats, what=f"{lanes} tokens per {tick:g} ms")
            after = sum(server.usage.cpu_times()[:2])
            speeds += [engine_rate(engine, bodies) for _ in range(2)]
            burst |= against_engine(burst["server_tokens_per_second"], median(speeds))
            burst |= {"lanes": lanes, "tick_ms": tick, "engine_repetitions": speeds}
            burst["cpu_us_per_token"] = 1e6 * (after - before) / (lanes * load.new * (options.repeats + 1))
            bursts.append(burst)
            rows = rows or list(at_rates(load, rates, burst))
    return bursts, rows


def _engine_alone(options: ServeOptions) -> float:
    """Returns the tokens/s of the checkpoint's engine without a server, on the same kind of requests."""
    from adaponder.conversion.open import load
    from adaponder.inference import Engine
    from benchmarks.stand_in import engine_rate

    model, _ = load(str(options.checkpoint), dtype=options.dtype, device=options.device)
    engine = Engine(model.eval(), lanes=options.streams)
    prompts = ServerLoad("alone", model.config.vocab_size, options.context, options.new, seed=options.seed or 0)
    policy = {} if options.policy is None else {"policy": parse_policy(options.policy)}
    bodies = [prompts.bodies(options.streams, part=part) for part in range(options.repeats + 1)]
    rates = [engine_rate(engine, part, temperature=0.0, **policy) for part in bodies]
    del engine, model
    harness.forget(options.target)
    return median(rates[1:])  # the first is a warm-up


def all_at_once(load: ServerLoad, *, repeats: int, what: str) -> Row:
    """Starts every stream at once and measures tokens/s while all of them run; the first repetition is a warm-up."""
    console.print(f"{what}: {load.streams} streams at once …")
    rates: list[float] = []
    last: Row = {}
    for part in range(repeats + 1):
        answers = load.send([0.0] * load.streams, part=part)
        last = summary(answers, max((answer.ended for answer in answers), default=0.0))
        if last["answered"] != load.streams:
            reason = next(iter(last["failures"]), "status 429: its queue is full")
            raise EvaluationError(f"{load.streams - last['answered']} of {load.streams} streams failed: {reason}")
        rates.append(steady_rate(answers))
    row = {"what": what, "streams": load.streams, "server_tokens_per_second": median(rates[1:])}
    row |= {name: last[name] for name in ("first_token", "between_tokens", "tokens", "mean_depth")}
    return row | {"repetitions": rates[1:]}


def against_engine(speed: float, engine_speed: float | None) -> Row:
    """Returns the engine's tokens/s without the server, and ``overhead``, the share that the server loses."""
    overhead = 1.0 - speed / engine_speed if engine_speed else None
    return {"engine_tokens_per_second": engine_speed, "overhead": overhead}


def at_rates(load: ServerLoad, rates: Sequence[float], burst: Row) -> Iterator[Row]:
    """Yields the summary of a load at each rate, in requests per second; by default at ``USUAL_SHARES`` of the maximum.

    ``burst`` is the row of all streams at once, whose tokens/s are the server's maximum.
    """
    defaults = [share * burst["server_tokens_per_second"] / load.new for share in USUAL_SHARES]
    for step, rate in enumerate(rates or defaults):
        console.print(f"{rate:.3g} requests per second for {load.seconds:g} s …")
        due = poisson_times(rate, load.seconds, seed=load.seed * 7919 + step)
        answers = load.send(due, part=100 + step)
        yield {"rate": rate, "offered_tokens_per_second": rate * load.new} | summary(answers, load.seconds)


def client_limit() -> float:
    """Returns the tokens/s that the client reads from a server that only sends prepared events."""
    with started(["-m", "benchmarks.serve_client", "echo", "0"]) as server:
        load = ServerLoad("echo", 100, context=1, new=_CLIENT_TOKENS, url=server.url)
        answers = load.send([0.0] * _CLIENT_STREAMS, part=0)
    seconds = max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
    return sum(answer.tokens for answer in answers) / seconds


_BURST = {
    "what": lambda row: row["what"],
    "streams": number("streams", ",.0f"),
    "engine tokens/s": number("engine_tokens_per_second", ",.0f"),
    "through the server": number("server_tokens_per_second", ",.0f"),
    "overhead": number("overhead", ".1%"),
    **{f"between ms {share}": number(f"between_tokens.{share}", ",.1f", 1e3) for share in ("p50", "p99")},
}
_RATES = {
    "requests/s": number("rate", ".3g"),
    "tokens/s": number("tokens_per_second", ",.0f"),
    **{name: number(name, ",.0f") for name in ("answered", "refused", "failed")},
    **{f"first ms {share}": number(f"first_token.{share}", ",.1f", 1e3) for share in PERCENTILES},
    **{f"between ms {share}": number(f"between_tokens.{share}", ",.1f", 1e3) for share in PERCENTILES},
    "depth": number("mean_depth", ".2f"),
}
