"""The engine for minutes: thousands of mixed requests, random failures and cancellations; each says what it says alone.

``python tests/laws/engine_soak.py`` runs it; ``--record`` writes down in ``engine_soak.json`` beside this file what was
run. ``make test-engine`` does that.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
from engine_support import SETTINGS, Ended, assert_all_as_alone, assert_empty, draw_engine, draw_requests, run_all

from adaponder.inference import Engine
from adaponder.inference.scheduler import Scheduler
from benchmarks.record import device_name, versions
from support import FAMILIES, METHODS, tiny

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORD = HERE / "engine_soak.json"


def main() -> int:
    asked = _arguments()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "mixed requests": mixed,
        "cancelled at random": cancelled,
        "failing requests": failing,
        "random engines": random_engines,
    }
    record: dict[str, Any] = {}
    for name, part in parts.items():
        began = time.monotonic()
        print(f"{name} …", flush=True)
        record[name] = part(asked) | {"seconds": round(time.monotonic() - began, 1)}
        print(f"{name}: {json.dumps(record[name])}", flush=True)
    if asked.record:
        head = {
            "date": datetime.date.today().isoformat(),
            "commit": _commit(),
            "hardware": device_name(torch.device("cpu")),
            "versions": versions(),
        }
        RECORD.write_text(json.dumps(head | record, indent=1) + "\n")
        print(f"written to {RECORD.relative_to(ROOT)}")
    return 0


def mixed(asked: argparse.Namespace) -> dict[str, Any]:
    """Requests of every kind in one engine that expects too little of them, so that some are preempted."""
    model = tiny("adaponder", iterations=3, **SETTINGS["adaponder"]).eval()
    requests = draw_requests(asked.requests, 1, halts=True, iterations=3, sampled=0.25, extras=0.3)
    engine = Engine(model, lanes=16, rows=400, chunk=48, tokens=40, late=True, burst=2, prefix_block=4)
    whole = Scheduler.expected_rows
    with mock.patch.object(Scheduler, "expected_rows", lambda *asked: whole(*asked) // 2):
        ended = run_all(engine, requests, 1, rush=0.6)
    assert engine.statistics["preemptions"]
    _say("all have finished; each is compared with a solo run")
    for start in range(0, len(requests), 100):
        part = requests[start : start + 100]
        of_part = replace(
            ended,
            completions={
                (place - start, sample): done
                for (place, sample), done in ended.completions.items()
                if 0 <= place - start < len(part)
            },
        )
        assert_all_as_alone(model, part, of_part, tokens=40)
        _say(f"{start + len(part)} of {len(requests)}")
    return _counts(engine, ended.completions.values()) | {"requests": len(requests)}


def cancelled(asked: argparse.Namespace) -> dict[str, Any]:
    model = tiny("adaponder", "llama", iterations=3).eval()
    requests = draw_requests(asked.requests // 4, 2, halts=True, iterations=3, sampled=0.4, extras=0.2)
    engine = Engine(model, lanes=8, rows=400, chunk=16, tokens=40, late=True, burst=3, prefix_block=4)
    ended = run_all(engine, requests, 2, rush=0.6, cancel=0.5)
    keep = random.Random(2).sample(range(len(requests)), len(requests) // 4)
    ended.cancelled |= set(range(len(requests))) - set(keep)
    assert_all_as_alone(model, requests, ended, tokens=40)
    return _counts(engine, ended.completions.values()) | {"requests": len(requests)}


def failing(asked: argparse.Namespace) -> dict[str, Any]:
    """A third has a policy or a callback that raises at some token; the others do not notice."""
    model = tiny("adaponder", iterations=3).eval()
    draw = random.Random(3)
    requests = draw_requests(asked.requests // 5, 3, halts=True, iterations=3, sampled=0.3)
    bad_policy = {place for place in range(len(requests)) if draw.random() < 0.2}
    bad_callback = {place for place in range(len(requests)) if draw.random() < 0.15} - bad_policy
    requests = [
        replace(one, policy=_raising(draw.randint(0, 12)), depths=None, max_iterations=None)
        if place in bad_policy
        else one
        for place, one in enumerate(requests)
    ]
    engine = Engine(model, lanes=8, rows=400, chunk=16, tokens=40, late=True, burst=2, prefix_block=4)
    completions: dict[tuple[int, int], Any] = {}
    numbers: dict[int, int] = {}
    waiting = list(enumerate(requests))
    while waiting or engine.busy:
        while waiting and draw.random() < 0.6:
            place, request = waiting.pop(0)
            numbers[engine.submit(request, _fails if place in bad_callback else None)] = place
        for event in engine.step():
            if event.completion is not None:
                completions[numbers[event.request], event.sample] = event.completion
    assert_empty(engine)
    reached = set()
    for (place, _), done in completions.items():
        if place in bad_callback or (place in bad_policy and done.finish_reason == "error"):
            reached.add(place)
            assert done.finish_reason in ("error", "length"), done
    assert len(reached) > len(requests) // 5
    good = [place for place in range(len(requests)) if place not in bad_policy | bad_callback]
    assert_all_as_alone(model, requests, Ended(completions, set(range(len(requests))) - set(good)), tokens=40)
    return _counts(engine, completions.values()) | {"requests": len(requests), "that failed": len(reached)}


def _raising(slot: int) -> Callable[[Any], torch.Tensor]:
    def policy(rows: Any) -> torch.Tensor:
        if bool((rows.slot >= slot).any()):
            raise ArithmeticError(f"at slot {slot}")
        return rows.gate > 0.5

    return policy


def _fails(event: Any) -> None:
    raise OSError("nobody listens")


def random_engines(asked: argparse.Namespace) -> dict[str, Any]:
    """Every method and family, engines opened in every way; half of them admit more than fits."""
    total: Counter[str] = Counter()
    for seed in range(asked.engines):
        draw = random.Random(1000 + seed)
        method, family = draw.choice(METHODS), draw.choice(list(FAMILIES))
        iterations = 1 if method == "vanilla" else draw.choice([2, 3, 4])
        model = tiny(method, family, iterations=iterations, **SETTINGS.get(method, {})).eval()
        requests = draw_requests(
            10, seed, halts=model.method.halts, iterations=iterations, sampled=0.4, extras=0.5, longest=12
        )
        options = draw_engine(draw, model.method.slots_per_token(iterations))
        engine = Engine(model, tokens=40, body=draw.choice([None, "stock"]), **options)
        crowded = draw.random() < 0.5
        with mock.patch.object(Scheduler, "expected_rows", _nothing if crowded else Scheduler.expected_rows):
            ended = run_all(engine, requests, seed, rush=draw.choice([0.3, 0.9]), cancel=draw.choice([0.0, 0.05]))
        assert_all_as_alone(model, requests, ended, tokens=40)
        total += Counter(_counts(engine, ended.completions.values()))
        _say(f"{seed + 1} of {asked.engines}: {method}, {family}")
    return {"engines": asked.engines, **total}


def _nothing(scheduler: Scheduler, sequence: Any) -> int:
    return 0


def _counts(engine: Engine, completions: Any) -> dict[str, int]:
    said = engine.statistics
    counts = Counter(f"ended: {done.finish_reason}" for done in completions)
    return {name: said[name] for name in ("ticks", "rows", "tokens", "preemptions", "prefix_tokens_reused")} | counts


def _say(line: str) -> None:
    print(f"  {line}", flush=True)


def _commit() -> str:
    head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return head.stdout.strip()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="how many in the first part")
    parser.add_argument("--engines", type=int, default=60, help="how many in the last part")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
