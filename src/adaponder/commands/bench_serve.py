"""adaponder bench serve: a server under a load that rises; prints tables, writes a record and a plot."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from adaponder.bench import serve as bench
from adaponder.bench.record import checkout, commit_of, conditions, record_path
from adaponder.bench.serve_load import Ask, check_rates
from adaponder.bench.serve_process import Running, started
from adaponder.commands.options import ServeBenchOptions, values
from adaponder.devices import as_device
from adaponder.errors import InputError
from adaponder.terminal import console, line, table, write_json

KEY = "ADAPONDER_API_KEY"
_PACKAGES = ("fastapi", "starlette", "uvicorn", "httptools", "uvloop")
_HEAD = (
    "requests/s",
    "tokens/s",
    "answered",
    "refused",
    "failed",
    "first ms p50",
    "p95",
    "p99",
    "between ms p50",
    "p95",
    "p99",
    "depth",
)
_ALONE_HEAD = ("what", "streams", "engine tokens/s", "through the server", "overhead", "between ms p50", "p99")


def run(options: ServeBenchOptions) -> dict[str, Any]:
    """Loads the server that the options name and returns the record."""
    _check(options)
    device = as_device(options.device)
    path = record_path("-".join(["serve", _kind(options)]), device) if options.record else None
    known = _known(options, device)
    metrics: dict[str, Any] = {"client_tokens_per_second": bench.client_limit()}
    console.print(f"the client takes up to {metrics['client_tokens_per_second']:,.0f} tokens/s from an idle server")
    if options.stand_in:
        metrics |= _stand_ins(options)
    elif options.checkpoint is not None:
        alone = _engine_alone(options, device)
        with started(_serve_command(options), patience=600.0) as server:
            bench.wait_until_ready(server.url, None, patience=600.0)
            metrics |= _loaded(options, server.url, None, alone, server)
    else:
        assert options.url is not None
        metrics |= _loaded(options, options.url, os.environ.get(KEY), None, None)
    record = known | {"complete": True, "metrics": metrics}
    if path is not None:
        write_json(path, record)
        console.print(line("the record is ", (path.relative_to(checkout()), "bold")))
        _plot(path, metrics, known["hardware"]["device"])
    write_json(options.json, record)
    return record


def _check(options: ServeBenchOptions) -> None:
    if sum((options.checkpoint is not None, options.url is not None, bool(options.stand_in))) != 1:
        raise InputError("bench serve: give one of CKPT, --url URL and --stand-in LANES,MS")
    if options.rates:
        check_rates("--rates", options.rates)
    if options.policy is not None:
        values.policy("--policy", options.policy)


def _kind(options: ServeBenchOptions) -> str:
    return "stand-in" if options.stand_in else "checkpoint" if options.checkpoint is not None else "url"


def _known(options: ServeBenchOptions, device: torch.device) -> dict[str, Any]:
    """What a record says before the first figure."""
    from importlib.metadata import PackageNotFoundError, version

    known = conditions(device, commit=commit_of(options.commit, needed=options.record))
    for package in _PACKAGES:
        try:
            known["versions"][package] = version(package)
        except PackageNotFoundError:
            known["versions"][package] = None
    known["hardware"]["cores"] = os.cpu_count()
    names = ("checkpoint", "url", "rates", "seconds", "context", "new", "streams", "timeout", "repeats", "policy")
    settings = {name: getattr(options, name) for name in names}
    settings |= {"stand_in": [list(one) for one in options.stand_in], "rates": list(options.rates)}
    return {"command": "bench serve", **known, "seed": options.seed, "settings": settings}


def _ask(options: ServeBenchOptions, url: str, key: str | None) -> Ask:
    about = bench.about_model(url, key)
    facts = about.get("adaponder") or {}
    extension: dict[str, Any] = {"ignore_eos": True}
    if options.policy is not None:
        extension["policy"] = options.policy
    return Ask(
        model=about["id"],
        vocabulary=int(facts.get("vocabulary", 256)),
        context=options.context,
        new=options.new,
        settings={"adaponder": extension} if facts else {},
    )


def _load(options: ServeBenchOptions, ask: Ask, streams: int | None = None) -> bench.Load:
    return bench.Load(
        ask, streams=streams or options.streams, seconds=options.seconds, timeout=options.timeout, seed=options.seed
    )


def _loaded(
    options: ServeBenchOptions, url: str, key: str | None, alone: float | None, server: Running | None
) -> dict[str, Any]:
    """All streams at once, then rates that rise."""
    load = _load(options, _ask(options, url, key))
    burst = bench.all_at_once(url, load, key=key, repeats=options.repeats)
    found = _compared(_kind(options), load.streams, alone, burst)
    _show_compared([found])
    rates = options.rates or [share * burst.rate / options.new for share in bench.USUAL_SHARES]
    rows = []
    for row in bench.at_rates(url, load, rates, key=key):
        rows.append(row | {"server_rss": None if server is None else server.rss()})
        _show(rows[-1:] if len(rows) > 1 else rows, head=len(rows) == 1)
    return {"all_at_once": [found], "rates": rows}


def _stand_ins(options: ServeBenchOptions) -> dict[str, Any]:
    """Each stand-in alone and through the server, in turn; the first one under rates that rise, too."""
    from adaponder.bench.serve_standin import SleepingEngine, engine_rate, stand_in_model
    from adaponder.inference import Request

    found, rows = [], []
    for number, (lanes, tick) in enumerate(options.stand_in):
        arguments = ["-m", "adaponder.bench.serve_standin_server", str(lanes), str(tick)]
        model = stand_in_model()
        with started(arguments) as server:
            load = _load(options, _ask(options, server.url, None), streams=lanes)
            asked = [
                Request(prompt=body["prompt"], max_new_tokens=load.ask.new, ignore_eos=True, seed=0)
                for body in load.bodies(lanes, part=0)
            ]
            # Half of the engine's own repetitions before and half after, so that both meet the same machine.
            alone = [engine_rate(SleepingEngine(model, lanes=lanes, tick=tick / 1e3), asked) for _ in range(2)]
            before = server.cpu_seconds()
            burst = bench.all_at_once(server.url, load, key=None, repeats=options.repeats)
            after = server.cpu_seconds()
            alone += [engine_rate(SleepingEngine(model, lanes=lanes, tick=tick / 1e3), asked) for _ in range(2)]
            row = _compared(f"{lanes} tokens per {tick:g} ms", lanes, median(alone), burst)
            row |= {"lanes": lanes, "tick_ms": tick, "engine_repetitions": alone}
            if before is not None and after is not None:
                row["cpu_us_per_token"] = 1e6 * (after - before) / (lanes * load.ask.new * (options.repeats + 1))
            found.append(row)
            _show_compared(found[-1:], head=not number)
            if number == 0 and options.seconds > 0:
                rates = options.rates or [share * burst.rate / options.new for share in bench.USUAL_SHARES]
                rows = list(bench.at_rates(server.url, load, rates, key=None))
    if rows:
        _show(rows)
    return {"all_at_once": found, "rates": rows}


def _compared(what: str, streams: int, alone: float | None, burst: bench.Burst) -> dict[str, Any]:
    return {
        "what": what,
        "streams": streams,
        "engine_tokens_per_second": alone,
        "server_tokens_per_second": burst.rate,
        "repetitions": burst.rates,
        "overhead": None if not alone else bench.overhead(burst.rate, alone),
        "first_token": burst.last["first_token"],
        "between_tokens": burst.last["between_tokens"],
    }


def _engine_alone(options: ServeBenchOptions, device: torch.device) -> float:
    """Tokens per second of the checkpoint's engine without a server, on requests like the load's."""
    from adaponder.bench.serve_standin import engine_rate
    from adaponder.conversion.open import load
    from adaponder.inference import Engine, Request
    from adaponder.policies import parse_policy

    assert options.checkpoint is not None
    model, _ = load(options.checkpoint, dtype=options.dtype, device=options.device)
    engine = Engine(model.eval(), lanes=options.streams)
    ask = Ask("alone", model.config.vocab_size, options.context, options.new)
    policy = None if options.policy is None else parse_policy(options.policy)
    rates = []
    for part in range(options.repeats + 1):
        bodies = _load(options, ask).bodies(options.streams, part=part)
        one = Request(prompt=[0], max_new_tokens=options.new, ignore_eos=True, temperature=0.0, policy=policy, seed=0)
        rate = engine_rate(engine, [replace(one, prompt=body["prompt"]) for body in bodies])
        rates += [rate] if part else []
    del engine, model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return sorted(rates)[len(rates) // 2]


def _serve_command(options: ServeBenchOptions) -> list[str]:
    assert options.checkpoint is not None
    arguments = ["-m", "adaponder", "serve", options.checkpoint, "--port", "0", "--device", options.device]
    return [*arguments, "--dtype", options.dtype, "--lanes", str(options.streams)]


def _show_compared(rows: Sequence[dict[str, Any]], *, head: bool = True) -> None:
    cells = [
        (
            row["what"],
            f"{row['streams']:,}",
            _number(row["engine_tokens_per_second"], ",.0f"),
            f"{row['server_tokens_per_second']:,.0f}",
            "" if row["overhead"] is None else f"{row['overhead']:.1%}",
            _ms(row["between_tokens"]["p50"]),
            _ms(row["between_tokens"]["p99"]),
        )
        for row in rows
    ]
    console.print(table("\nAll streams at once" if head else "", _ALONE_HEAD, cells))


def _show(rows: Sequence[dict[str, Any]], *, head: bool = True) -> None:
    cells = [
        (
            f"{row['rate']:.3g}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['answered']:,}",
            f"{row['refused']:,}",
            f"{row['failed']:,}",
            *(_ms(row["first_token"][share]) for share in ("p50", "p95", "p99")),
            *(_ms(row["between_tokens"][share]) for share in ("p50", "p95", "p99")),
            _number(row["mean_depth"], ".2f"),
        )
        for row in rows
    ]
    console.print(table("\nRequests that arrive at random times" if head else "", _HEAD, cells))


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.1f}"


def _plot(path: Path, metrics: dict[str, Any], device: str) -> None:
    if not metrics["rates"]:
        return
    from adaponder.analysis.serve_figure import draw

    most = metrics["all_at_once"][0]["server_tokens_per_second"]
    for drawn in draw(metrics["rates"], checkout() / "benchmarks" / path.stem, device, most=most):
        console.print(line("the plot is ", (drawn.relative_to(checkout()), "bold")))
