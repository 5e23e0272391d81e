"""Runs hundreds of streams at once, each equal to its solo run, and a thousand clients that hang up.

``python tests/serving/soak.py`` runs it; ``--record`` writes ``soak.json`` beside this file.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder) for folder in ("src", "", "tests")]

from adaponder.inference import Engine
from harness_support import reader
from soak_support import at_rest, draw_body, ready, run_parts, serving, solo, steady_memory, stream, wait_for

RECORD = Path(__file__).with_suffix(".json")


def same_as_alone(url: str, count: int, seed: int, *, over: Callable = bool, key: str | None = None) -> dict:
    """Sends ``count`` streams at once and checks that each equals its solo run.

    ``over`` waits for the end of other work; then no row may be in use.
    """
    draw = random.Random(seed)
    bodies = [draw_body(draw) for _ in range(count)]

    async def ask_all() -> list[Any]:
        return await asyncio.gather(*(stream(url, body, key=key) for body in bodies))

    answers = asyncio.run(ask_all())
    engine = Engine(reader(), lanes=1)
    for body, answer in zip(bodies, answers, strict=True):
        assert (answer.status, answer.error, answer.done) == (200, None, True), (answer.status, answer.error, body)
        assert (answer.ids, answer.depths) == solo(engine, body), body
        assert answer.usage["completion_tokens"] == len(answer.ids)
    over()
    wait_for(lambda: at_rest(url, key=key), "every row is free", seconds=60)
    return {"streams": count, "tokens": sum(len(answer.ids) for answer in answers), "equal_to_solo": count}


def hang_up(url: str, count: int, seed: int, *, at_once: int = 50) -> dict[str, Any]:
    """Disconnects ``count`` clients at random moments, before, during and after the answer, and checks for leaks."""
    draw = random.Random(seed)
    cut = 0

    async def leave(gate: asyncio.Semaphore) -> None:
        nonlocal cut
        async with gate:
            answer = await stream(url, draw_body(draw), leave_after=draw.choice([0.0, 0.01, 0.05, 0.2, 0.5]))
            cut += not answer.done

    async def leave_all() -> None:
        gate = asyncio.Semaphore(at_once)
        await asyncio.gather(*(leave(gate) for _ in range(count)))

    asyncio.run(leave_all())
    seconds = wait_for(lambda: at_rest(url), "nothing is left of those who hung up")
    assert cut > count // 4, f"only {cut} of {count} were cut"
    return {"clients": count, "cut_before_the_end": cut, "at_rest_after_seconds": round(seconds, 2)}


def streams(settings: argparse.Namespace) -> dict[str, Any]:
    with serving() as server:
        same_as_alone(server.url, 20, settings.seed + 1)
        before = server.rss()
        found = same_as_alone(server.url, settings.streams, settings.seed)
        return found | {"rss_before": before, "rss_after": server.rss(), "ready": ready(server.url)}


def disconnects(settings: argparse.Namespace) -> dict[str, Any]:
    with serving() as server:
        hang_up(server.url, 100, settings.seed + 1)
        with steady_memory(server, 32) as memory:
            found = hang_up(server.url, settings.clients, settings.seed)
        return found | same_as_alone(server.url, 50, settings.seed + 2) | memory


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--clients", type=int, default=1000)


if __name__ == "__main__":
    sys.exit(run_parts({"streams": streams, "disconnects": disconnects}, RECORD, options, __doc__ or ""))
