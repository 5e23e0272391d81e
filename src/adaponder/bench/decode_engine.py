"""Drives an engine for a benchmark: submits requests, notes when each token came, and times parts of equal length."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

from adaponder.bench.decode import Case, Measured
from adaponder.bench.decode_depths import drawn
from adaponder.inference.engine import Engine
from adaponder.inference.request import Request
from adaponder.inference.runner import Launch
from adaponder.inference.scheduler import Plan

# Seconds until every lane must decode.
_LONGEST_WAIT = 120.0
# Cycles of the device, some 20 ms, for which it waits before a launch that is timed alone.
_AHEAD = 40_000_000


@dataclass
class Clock:
    """When tokens came: of each sequence, and how many until when.

    Attributes:
        submitted: when each request was.
        arrived: of each request, (when, how many tokens) of each step that brought some.
        depths: how many tokens of each depth.
        total: tokens so far.
    """

    submitted: dict[int, float] = field(default_factory=dict)
    arrived: dict[int, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    depths: Counter[int] = field(default_factory=Counter)
    ended: int = 0
    total: int = 0

    def step(self, engine: Engine) -> None:
        """One step of the engine, noted."""
        events = engine.step()
        now = time.perf_counter()
        came: Counter[int] = Counter()
        for event in events:
            if event.token is not None:
                came[event.request] += 1
                self.depths[event.token.depth] += 1
            if event.completion is not None:
                self.ended += 1
                if event.completion.error is not None:
                    raise RuntimeError(event.completion.error)
        for request, count in came.items():
            self.arrived[request].append((now, count))
        self.total += came.total()

    def first(self) -> list[float]:
        """Seconds from each request to its first token."""
        return [times[0][0] - self.submitted[request] for request, times in self.arrived.items()]

    def between(self, since: float) -> list[float]:
        """Seconds per token of each sequence since then; tokens that came together share the time before them."""
        found = []
        for times in self.arrived.values():
            for (before, _), (now, count) in pairwise(times):
                if before >= since:
                    found += [(now - before) / count] * count
        return found


class Load:
    """Requests for one case: random prompts, and depths forced in the given shares or left to the model."""

    def __init__(
        self,
        engine: Engine,
        case: Case,
        *,
        shares: Sequence[float] | None,
        seed: int,
        prompts: Sequence[int] | None = None,
    ):
        self.engine, self.case, self.shares, self.seed, self.prompts = engine, case, shares, seed, prompts
        self.clock, self.count = Clock(), 0

    def submit(self, new: int) -> int:
        """One more request of ``new`` tokens."""
        draw, context = random.Random(self.seed * 1_000_003 + self.count), self.case.context
        if self.prompts is None:
            prompt = [draw.randrange(self.engine.model.config.vocab_size) for _ in range(context)]
        else:
            start = draw.randrange(max(1, len(self.prompts) - context))
            prompt = list(self.prompts[start : start + context])
        depths = None if self.shares is None else drawn(self.shares, context + new - 1, seed=draw.randrange(2**31))
        settings: dict[str, Any] = {"max_new_tokens": new, "ignore_eos": True, "seed": self.count, "depths": depths}
        number = self.engine.submit(Request(prompt=prompt, **settings))
        self.clock.submitted[number] = time.perf_counter()
        self.count += 1
        return number

    def settle(self) -> None:
        """Steps until every lane decodes, or nobody can be let in any more."""
        engine, clock, began = self.engine, self.clock, time.perf_counter()
        while len(clock.arrived) < self.case.lanes:
            clock.step(engine)
            counts = engine.statistics
            stuck = counts["waiting"] and all(sum(n for _, n in times) >= 16 for times in clock.arrived.values())
            if stuck and len(clock.arrived) >= counts["resident"]:
                return
            if time.perf_counter() - began > _LONGEST_WAIT:
                raise RuntimeError(
                    f"after {_LONGEST_WAIT:.0f} s {len(clock.arrived)} of {self.case.lanes} lanes decode"
                )

    def drain(self) -> None:
        """Cancels what is left, so that the engine is empty again."""
        for number in self.clock.submitted:
            self.engine.cancel(number)
        while self.engine.busy:
            self.engine.step()


def first_tokens(load: Load) -> None:
    """Every lane makes some tokens, nothing is timed, and the engine is empty again."""
    try:
        for _ in range(load.case.lanes):
            load.submit(min(load.engine.tokens - load.case.context, 64))
        load.settle()
    finally:
        load.drain()


def steady_length(case: Case, *, warmup: int, repeats: int, part: int) -> int:
    """New tokens of a sequence that decodes from before the last lane begins until after the last timed part."""
    return (warmup + repeats + 2) * part + 64 + case.lanes * case.context // 4096


def steady(load: Load, *, warmup: int, repeats: int, part: int) -> Measured:
    """Times ``repeats`` parts in which every lane decodes, of ``part`` tokens per lane or a little more."""
    engine, case, clock = load.engine, load.case, load.clock
    # A launch's answers come while the next one runs, and bring several tokens of each lane.
    new = min(engine.tokens - case.context, steady_length(case, warmup=warmup, repeats=repeats, part=part))
    reset_peak(engine)
    try:
        for _ in range(case.lanes):
            load.submit(new)
        load.settle()
        engine.warm_up()
        target = clock.total + warmup * part * len(clock.arrived)
        while clock.total < target:
            clock.step(engine)
        clock.depths.clear()
        began, ticks = time.perf_counter(), engine.statistics["ticks"]
        rates, resident = [], []
        while len(rates) < repeats and not clock.ended:
            tokens, since = clock.total, time.perf_counter()
            while clock.total - tokens < part * len(clock.arrived) and engine.busy and not clock.ended:
                clock.step(engine)
                resident.append(engine.statistics["resident"])
            if not clock.ended:
                rates.append((clock.total - tokens) / (time.perf_counter() - since))
        if not rates:
            raise RuntimeError(f"--tokens {part}: a sequence ended before a part was timed; make it smaller")
        seconds = (time.perf_counter() - began) / max(1, engine.statistics["ticks"] - ticks)
        measured = _measured(load, rates, resident, since=began)
        return replace(measured, idle=idle_share(load, seconds))
    finally:
        load.drain()


def idle_share(load: Load, seconds: float, launches: int = 4) -> float | None:
    """Share of a tick's ``seconds`` in which the device had nothing to do; ``None`` off a GPU.

    A few more launches are timed on the device alone, which is kept busy until the host has given it all of one.
    """
    engine = load.engine
    if engine.model.device.type != "cuda" or not engine.busy:
        return None
    launch, timed = engine.runner.launch, []

    def launch_timed(plan: Plan) -> Launch:
        torch.cuda._sleep(_AHEAD)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launched = launch(plan)
        end.record()
        timed.append((start, end, launched.ticks))
        return launched

    with patch.object(engine.runner, "launch", launch_timed):
        for _ in range(launches):
            load.clock.step(engine)
    torch.cuda.synchronize(engine.model.device)
    needed = sum(start.elapsed_time(end) for start, end, _ in timed) / 1e3
    return idle_of(needed / max(1, sum(ticks for _, _, ticks in timed)), seconds)


def idle_of(needed: float, took: float) -> float:
    """The share of the time it took that was not needed."""
    return max(0.0, 1.0 - needed / took)


def through_memory(load: Load, *, requests: int) -> Measured:
    """Runs many requests to their ends through pools that hold only some; times the middle three fifths of them."""
    engine, case, clock = load.engine, load.case, load.clock
    reset_peak(engine)
    # Half as long to half as long again, so that sequences do not begin and end together.
    lengths = [case.new // 2 + case.new * (number % 9) // 8 for number in range(requests)]
    total, marks, resident = sum(lengths), [], []
    try:
        for length in lengths:
            load.submit(max(1, length))
        began = None
        while engine.busy and clock.total < 0.8 * total:
            clock.step(engine)
            if clock.total >= 0.2 * total:
                began = time.perf_counter() if began is None else began
                marks.append((time.perf_counter(), clock.total))
                resident.append(engine.statistics["resident"])
        if began is None or len(marks) < 2:
            raise RuntimeError("too few steps to time; use more lanes")
        # Three parts of equal time say how steady it was.
        rates = [_rate(marks, begin / 3, (begin + 1) / 3) for begin in range(3)]
        return _measured(load, [rate for rate in rates if rate > 0], resident, since=began)
    finally:
        load.drain()


def end_to_end(load: Load, *, rounds: int = 2) -> Measured:
    """Keeps ``lanes`` requests under way until ``rounds`` times as many are done; their new tokens over all seconds."""
    engine, case, clock = load.engine, load.case, load.clock
    total = rounds * case.lanes
    reset_peak(engine)
    resident = []
    try:
        began = time.perf_counter()
        for _ in range(case.lanes):
            load.submit(case.new)
        while clock.ended < total:
            clock.step(engine)
            resident.append(engine.statistics["resident"])
            while load.count < total and load.count - clock.ended < case.lanes:
                load.submit(case.new)
        seconds = time.perf_counter() - began
        return _measured(load, [clock.total / seconds], resident, since=began)
    finally:
        load.drain()


def _rate(marks: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Tokens per second between two shares of the marked time."""
    start, span = marks[0][0], marks[-1][0] - marks[0][0]
    inside = [mark for mark in marks if begin * span <= mark[0] - start <= end * span]
    if len(inside) < 2 or inside[-1][0] == inside[0][0]:
        return 0.0
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


def _measured(load: Load, rates: list[float], resident: Sequence[int], *, since: float) -> Measured:
    engine, clock, counts = load.engine, load.clock, load.engine.statistics
    made = [sum(count for _, count in times) for times in clock.arrived.values()]
    depths = range(1, max(clock.depths, default=1) + 1)
    return Measured(
        rates=rates,
        first=clock.first(),
        between=clock.between(since),
        shares=tuple(clock.depths[depth] / max(1, clock.depths.total()) for depth in depths),
        context=load.case.context + sum(made) / max(1, len(made)) / 2,
        resident=sum(resident) / max(1, len(resident)),
        waiting=counts["waiting"],
        rows=counts["pages_held"] * engine.pages.size,
        peak_bytes=peak(engine),
        accepted=counts["accepted"] / counts["drafted"] if counts["drafted"] else None,
    )


def reset_peak(engine: Engine) -> None:
    """Begins to count memory."""
    if engine.model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(engine.model.device)


def peak(engine: Engine) -> int | None:
    """Most memory allocated since."""
    device = engine.model.device
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
