"""Runs the engine for minutes: thousands of mixed requests, failures, cancellations; each result equals a solo run.

``make test-engine`` runs it with ``--record``, which writes what was run to ``engine_soak.json`` beside this file.
"""

import argparse
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder) for folder in ("src", "", "tests")]

import torch
from engine_support import SETTINGS, Ended, assert_all_as_alone, draw_engine, draw_requests, run_all

from adaponder import Policy, PolicyInput
from adaponder import Random as RandomDepth
from adaponder.inference import Engine, Request
from adaponder.inference.scheduler import Scheduler
from soak_support import run_parts
from support import FAMILIES, METHODS, VOCABULARY, tiny

# An engine whose pool is small for its lanes.
CROWDED: dict[str, Any] = {"lanes": 8, "rows": 400, "chunk": 16, "tokens": 40, "late": True, "burst": 2}
CROWDED |= {"prefix_block": 4}


def mixed(asked: argparse.Namespace) -> dict[str, Any]:
    """Runs requests of every kind in one engine that expects too few rows, so that sequences are preempted."""
    model = tiny("adaponder", iterations=3, **SETTINGS["adaponder"]).eval()
    requests = draw_requests(asked.requests, 1, halts=True, iterations=3, sampled=0.25, extras=0.3)
    engine = Engine(model, **CROWDED | {"lanes": 16, "chunk": 48})
    expected_rows = Scheduler.expected_rows
    with mock.patch.object(Scheduler, "expected_rows", lambda *arguments: expected_rows(*arguments) // 2):
        ended = run_all(engine, requests, 1, rush=0.6)
    assert engine.statistics["preemptions"]
    assert_all_as_alone(model, requests, ended, tokens=40)
    return _counts(engine, ended) | {"requests": len(requests)}


@dataclass(frozen=True)
class DeepFrom(Policy):
    """Halts tokens before ``slot`` at once and none from there on, so that short requests mislead the scheduler."""

    slot: int
    reads_seed: ClassVar[bool] = False

    def __call__(self, rows: PolicyInput) -> torch.Tensor:
        return rows.slot >= self.slot


def preempted(asked: argparse.Namespace) -> dict[str, Any]:
    """Runs out of pages without help: the measured depths are too small, and drafts hold rows for all passes."""
    model = tiny("adaponder", iterations=3, **SETTINGS["adaponder"]).eval()
    total: Counter[str] = Counter()
    for share, drafts, late in itertools.product((False, True), (0, 2), (False, True)):
        draw = random.Random(4)
        options = {"share_prefixes": share, "drafts": drafts, "late": late}
        engine = Engine(model, lanes=6, rows=300, tokens=40, chunk=16, prefix_block=4, **options)
        policy = RandomDepth(0.2) if drafts else DeepFrom(8)  # a policy in Python is not drafted
        common = [draw.randrange(VOCABULARY) for _ in range(6)]
        engine.generate([Request(common, max_new_tokens=2, policy=policy) for _ in range(60)])
        requests = [
            Request(
                common + [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 4))],
                max_new_tokens=draw.randrange(18, 26),
                samples=draw.choice([1, 1, 2, 3]),
                policy=policy,
                temperature=draw.choice([0.0, 1.0]),
                frequency_penalty=draw.choice([0.0, 0.0, 0.5]),
                client=draw.choice("aab"),
            )
            for _ in range(12)
        ]
        ended = run_all(engine, requests, rush=0.9)
        assert engine.statistics["preemptions"], (share, drafts, late)
        assert bool(engine.statistics["accepted"]) == bool(drafts)
        assert_all_as_alone(model, requests, ended, tokens=40)
        total += Counter(_counts(engine, ended))
    assert total["preemptions"] >= 20
    return dict(total)


def cancelled(asked: argparse.Namespace) -> dict[str, Any]:
    """Cancels at random, and compares a quarter of the others."""
    model = tiny("adaponder", "llama", iterations=3).eval()
    requests = draw_requests(asked.requests // 4, 2, halts=True, iterations=3, sampled=0.4, extras=0.2)
    engine = Engine(model, **CROWDED)
    ended = run_all(engine, requests, 2, rush=0.6, cancel=0.5)
    compared = random.Random(2).sample(range(len(requests)), len(requests) // 4)
    ended.cancelled |= set(range(len(requests))) - set(compared)
    assert_all_as_alone(model, requests, ended, tokens=40)
    return _counts(engine, ended) | {"requests": len(requests)}


def failing(asked: argparse.Namespace) -> dict[str, Any]:
    """Gives a third a policy or a callback that raises at some token; the results of the others are unchanged."""
    model = tiny("adaponder", iterations=3).eval()
    draw = random.Random(3)
    requests = draw_requests(asked.requests // 5, 3, halts=True, iterations=3, sampled=0.3)
    bad_policy = {place for place in range(len(requests)) if draw.random() < 0.2}
    bad_callback = {place for place in range(len(requests)) if draw.random() < 0.15} - bad_policy
    for place in bad_policy:
        policy = _raising(draw.randint(0, 12))
        requests[place] = replace(requests[place], policy=policy, depths=None, max_iterations=None)
    engine = Engine(model, **CROWDED)
    ended = run_all(engine, requests, 3, rush=0.6, callback=lambda place: _fails if place in bad_callback else None)
    failed = {place for (place, _), done in ended.completions.items() if done.finish_reason == "error"}
    assert len(requests) // 5 < len(failed)
    assert failed <= bad_policy | bad_callback
    ended.cancelled |= bad_policy | bad_callback
    assert_all_as_alone(model, requests, ended, tokens=40)
    return _counts(engine, ended) | {"requests": len(requests), "that failed": len(failed)}


def _raising(slot: int) -> Callable[[Any], torch.Tensor]:
    def policy(rows: Any) -> torch.Tensor:
        if bool((rows.slot >= slot).any()):
            raise ArithmeticError(f"at slot {slot}")
        return rows.gate > 0.5

    return policy


def _fails(event: Any) -> None:
    raise OSError("broken pipe")


def random_engines(asked: argparse.Namespace) -> dict[str, Any]:
    """Runs every method and family in engines with random options, half of which admit too many sequences."""
    total: Counter[str] = Counter()
    for seed in range(asked.engines):
        draw = random.Random(1000 + seed)
        method, family = draw.choice(METHODS), draw.choice(list(FAMILIES))
        iterations = 1 if method == "vanilla" else draw.choice([2, 3, 4])
        model = tiny(method, family, iterations=iterations, **SETTINGS.get(method, {})).eval()
        shares = {"sampled": 0.4, "extras": 0.5}
        requests = draw_requests(10, seed, halts=model.method.halts, iterations=iterations, longest=12, **shares)
        options = draw_engine(draw, model.method.slots_per_token(iterations))
        engine = Engine(model, tokens=40, body=draw.choice([None, "stock"]), **options)
        crowded = draw.random() < 0.5
        expected_rows = (lambda *arguments: 0) if crowded else Scheduler.expected_rows
        with mock.patch.object(Scheduler, "expected_rows", expected_rows):
            ended = run_all(engine, requests, seed, rush=draw.choice([0.3, 0.9]), cancel=draw.choice([0.0, 0.05]))
        assert_all_as_alone(model, requests, ended, tokens=40)
        total += Counter(_counts(engine, ended))
        print(f"  {seed + 1} of {asked.engines}: {method}, {family}", flush=True)
    return {"engines": asked.engines, **total}


def _counts(engine: Engine, ended: Ended) -> dict[str, int]:
    counts = Counter(f"ended: {done.finish_reason}" for done in ended.completions.values())
    names = ("ticks", "rows", "tokens", "preemptions", "prefix_tokens_reused")
    return {name: engine.statistics[name] for name in names} | counts


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=2000, help="number in the first part")
    parser.add_argument("--engines", type=int, default=60, help="number in the last part")


PARTS = {"mixed requests": mixed, "preempted without help": preempted, "cancelled at random": cancelled}
PARTS |= {"failing requests": failing, "random engines": random_engines}

if __name__ == "__main__":
    sys.exit(run_parts(PARTS, Path(__file__).with_suffix(".json"), _options, __doc__, packages=()))
