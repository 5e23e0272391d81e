"""Measures the cases of ``benchmarks decode`` in the engine, with our ``generate`` and with that of Hugging Face."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

from adaponder.backbones.shape import shape_of
from adaponder.config import AdaPonderConfig
from adaponder.inference.engine import Engine
from adaponder.inference.request import Request
from adaponder.methods import method_class
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import ForcedDepths
from benchmarks.decode_cases import DRAFTING, HF, HF_COMPILED, MEMORY, OUTSIDE, PLAIN_SIDES, STEADY, DecodeCase
from benchmarks.harness import Row, forget, measure, spread
from benchmarks.models import build, draw_depths, mean_depth, shape_config
from benchmarks.serve_client import Answer, percentiles

Numbers = Sequence[float]
# Seconds until every lane must decode.
_LONGEST_WAIT = 120.0
# Cycles, about 20 ms, for which the device waits before a launch that is timed alone.
_AHEAD = 40_000_000
# Fields of a row that a side may not know.
_UNKNOWN = ("limit_tokens_per_second", "limit_share", "resident_lanes", "waiting_requests", "kv_rows", "peak_bytes")
_UNKNOWN += ("idle_share", "accepted_share")


def as_row(rates: Numbers, *, shares: Numbers = (1.0,), first: Numbers = (), between: Numbers = (), **more: Any) -> Row:
    """Returns the measured fields of a record's row; ``rates`` are the tokens/s in each timed interval.

    ``shares`` are the shares of timed tokens with depth 1, 2, …; ``first`` has the seconds from each request to its
    first token, ``between`` the seconds between consecutive tokens of a sequence.
    """
    row = {"tokens_per_second": statistics.median(rates), "spread": spread(rates), "rates": list(rates)}
    row |= {"mean_depth": mean_depth(shares)} | dict.fromkeys(_UNKNOWN)
    row |= {"first_token_seconds": percentiles(first), "between_tokens_seconds": percentiles(between)}
    return row | more


Opened = tuple[AdaPonderForCausalLM, Sequence[int]]


def open_checkpoint(checkpoint: str, data: str, dtype: str, device: torch.device) -> Opened:
    """Loads a checkpoint, and the token ids of the text from which prompts are cut."""
    from adaponder.checkpoints.shipped import data_of
    from adaponder.conversion.open import load
    from adaponder.evaluation.text import open_text, open_vocabulary

    model, folder = load(checkpoint, dtype=dtype, device=str(device))
    text = open_text(data_of(data), open_vocabulary(str(folder)), whose=checkpoint, max_tokens=1_000_000)
    return model, text.stream.tolist()


@dataclass
class Sides:
    """Measures cases one after the other; a model stays in memory until a case needs another model.

    ``steps`` are the keyword arguments of :func:`steady`. ``opened``, if given, is a model that is measured in place of
    a random one, and the token ids of a text from which prompts are cut. ``copy_rate`` is in bytes per second.
    """

    device: torch.device
    dtype: torch.dtype
    seed: int
    copy_rate: float
    steps: dict[str, int]
    opened: Opened | None = None
    _cached_model: tuple[Any, Any] = field(init=False, default=(None, None))  # (key, model)

    def measure(self, case: DecodeCase) -> Row:
        """Returns the measured fields of a case's row."""
        try:
            row, shares, context = self._in_engine(case) if case.side not in OUTSIDE else self._outside(case)
        except BaseException:
            self._cached_model = None, None
            raise
        # With drafting, the limit depends on how many drafts are accepted.
        if case.kind == STEADY and case.side != DRAFTING:
            lanes = row["resident_lanes"] or case.lanes
            config = self._config(case)
            most = limit(config, shares, lanes=lanes, context=context, dtype=self.dtype, copy_rate=self.copy_rate)
            row |= {"limit_tokens_per_second": most, "limit_share": row["tokens_per_second"] / most}
        return row

    def _config(self, case: DecodeCase) -> AdaPonderConfig:
        return self.opened[0].config if self.opened else shape_config(case.shape, vanilla=case.side in PLAIN_SIDES)

    def _model(self, case: DecodeCase) -> Any:
        """Returns the case's model; frees the previous model if it differs."""
        if self.opened is not None:
            return self.opened[0]
        key = case.side in (HF, HF_COMPILED), case.shape, case.side in PLAIN_SIDES
        if self._cached_model[0] != key:
            self._cached_model = None, None
            forget(self.device)
            model = build(self._config(case), device=self.device, dtype=self.dtype, seed=self.seed, stock=key[0])
            self._cached_model = key, model
        return self._cached_model[1]

    def _in_engine(self, case: DecodeCase) -> tuple[Row, Sequence[float], float]:
        """Measures a case in the engine; returns its row, the share of tokens by depth, and the mean context length."""
        model, prompts = self._model(case), self.opened and self.opened[1]
        forget(self.device)
        most, iterations = model.config.max_position_embeddings, model.config.iterations
        # Enough for a sequence to decode until the last timed interval ends.
        long = (self.steps["warmup"] + self.steps["repeats"] + 2) * self.steps["part"] + 64
        new = {STEADY: long + case.lanes * case.context // 4096, MEMORY: 2 * case.new}.get(case.kind, case.new)
        settings: dict[str, Any] = {"lanes": case.lanes, "tokens": min(case.context + new, most or 2**31)}
        if case.kind == MEMORY:
            # Rows for `lanes` sequences of full depth and average length, and lanes enough for shallower ones.
            settings |= {"lanes": 3 * case.lanes, "rows": case.lanes * (case.context + case.new) * iterations}
        engine = Engine(model, **settings, drafts=iterations - 1 if case.side == DRAFTING else 0)
        # The first load captures graphs and compiles kernels.
        first, load = (DecodeLoad(engine, case, self.seed + more, prompts) for more in (1, 0))
        timed = {STEADY: partial(steady, **self.steps), MEMORY: through_memory}.get(case.kind, end_to_end)
        first.run({STEADY: DecodeLoad.settle, MEMORY: through_memory}.get(case.kind, partial(end_to_end, rounds=1)))
        return load.run(timed), load.shares(), case.context + load.total / max(1, len(load.arrived)) / 2

    def _outside(self, case: DecodeCase) -> tuple[Row, Sequence[float], float]:
        """Measures a case outside the engine, after the first new token; returns what :meth:`_in_engine` returns."""
        new, model = OUTSIDE[case.side], self._model(case)
        generator = torch.Generator().manual_seed(self.seed)
        shape = case.lanes, case.context
        ids = torch.randint(self._config(case).vocab_size, shape, generator=generator).to(self.device)
        fixed: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": True, "pad_token_id": 0}
        if case.shares is not None:
            depths = [draw_depths(case.shares, case.context + new, seed=self.seed + lane) for lane in range(case.lanes)]
            fixed["policy"] = ForcedDepths(torch.tensor(depths, device=self.device))

        compiled = case.side == HF_COMPILED  # transformers compiles the forward of a static cache on a GPU
        fixed |= {"cache_implementation": "static"} if compiled else {}

        @torch.no_grad()
        def generate(new: int) -> None:
            model.generate(ids, max_new_tokens=new, min_new_tokens=new, **fixed)

        first = measure(lambda: generate(1), self.device, warmup=1, repeats=1).median
        timing = measure(lambda: generate(new), self.device, warmup=int(compiled), repeats=2)
        shares, rates = case.shares or (1.0,), [case.lanes * (new - 1) / max(1e-9, t - first) for t in timing.seconds]
        more = {"resident_lanes": case.lanes, "peak_bytes": timing.peak_bytes, "shares": shares}
        row = as_row(rates, first=[first], between=[case.lanes / rate for rate in rates], **more)
        return row, shares, case.context + new / 2


@dataclass
class DecodeLoad:
    """Submits the requests of a case; records when their tokens arrive, and the number of tokens of each depth.

    Prompts are cut from the token ids ``prompts``; if these are ``None``, prompts are random. ``ended`` counts finished
    requests, ``total`` counts tokens, and ``resident`` lists the number of busy lanes after each timed step.
    """

    engine: Engine
    case: DecodeCase
    seed: int = 0
    prompts: Sequence[int] | None = None
    answers: dict[int, Answer] = field(default_factory=dict)
    depths: Counter[int] = field(default_factory=Counter)
    resident: list[int] = field(default_factory=list)
    ended: int = 0
    total: int = 0

    def run(self, measure: Callable[[DecodeLoad], Any]) -> Any:
        """Runs ``measure(self)``, cancels all requests and returns the result."""
        if self.engine.model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.engine.model.device)
        try:
            return measure(self)
        finally:
            for request_id in self.answers:
                self.engine.cancel(request_id)
            while self.engine.busy:
                self.engine.step()

    def submit(self, new: int) -> None:
        """Submits a request that generates ``new`` tokens."""
        count, context, shares = len(self.answers), self.case.context, self.case.shares
        draw = random.Random(self.seed * 1_000_003 + count)
        if self.prompts is None:
            prompt = [draw.randrange(self.engine.model.config.vocab_size) for _ in range(context)]
        else:
            start = draw.randrange(max(1, len(self.prompts) - context))
            prompt = list(self.prompts[start : start + context])
        depths = None if shares is None else draw_depths(shares, context + new - 1, seed=draw.randrange(2**31))
        request = Request(prompt=prompt, max_new_tokens=new, ignore_eos=True, seed=count, depths=depths)
        self.answers[self.engine.submit(request)] = Answer(due=time.perf_counter())

    def step(self, *, timed: bool = False) -> None:
        """Runs one step of the engine and records its tokens and, if it is timed, the number of busy lanes."""
        events = self.engine.step()
        now = time.perf_counter()
        tokens = Counter(event.request for event in events if event.token is not None)
        self.depths.update(event.token.depth for event in events if event.token is not None)
        for completion in (event.completion for event in events if event.completion is not None):
            self.ended += 1
            if completion.error is not None:
                raise RuntimeError(completion.error)
        for request, count in tokens.items():
            self.answers[request].arrivals.append((now, count))
        self.total += tokens.total()
        if timed:
            self.resident.append(self.engine.statistics["resident"])

    @property
    def arrived(self) -> list[Answer]:
        return [answer for answer in self.answers.values() if answer.arrivals]

    def settle(self, new: int = 64) -> None:
        """Submits a request of up to ``new`` tokens per lane; steps until all decode or the engine admits no more."""
        for _ in range(self.case.lanes):
            self.submit(min(self.engine.tokens - self.case.context, new))
        began = time.perf_counter()
        while len(arrived := self.arrived) < self.case.lanes:
            self.step()
            counts = self.engine.statistics
            stuck = counts["waiting"] and all(sum(n for _, n in answer.arrivals) >= 16 for answer in arrived)
            if stuck and len(arrived) >= counts["resident"]:
                return
            if time.perf_counter() - began > _LONGEST_WAIT:
                lanes = f"{len(arrived)} of {self.case.lanes} lanes"
                raise RuntimeError(f"only {lanes} decode after {_LONGEST_WAIT:.0f} s")

    def shares(self) -> list[float]:
        """Returns the share of recorded tokens of depth 1, 2, …"""
        depths = range(1, max(self.depths, default=1) + 1)
        return [self.depths[depth] / max(1, self.depths.total()) for depth in depths]

    def row(self, rates: Sequence[float], *, since: float) -> Row:
        """Returns the measured fields of the case's row, from the tokens/s ``rates`` and token gaps after ``since``."""
        counts, device = self.engine.statistics, self.engine.model.device
        return as_row(
            rates,
            shares=self.shares(),
            first=[answer.arrivals[0][0] - answer.due for answer in self.arrived],
            between=[gap for answer in self.arrived for gap in answer.gaps(since)],
            resident_lanes=sum(self.resident) / max(1, len(self.resident)),
            waiting_requests=counts["waiting"],
            kv_rows=counts["pages_held"] * self.engine.pages.size,
            peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            accepted_share=counts["accepted"] / counts["drafted"] if counts["drafted"] else None,
        )


def steady(load: DecodeLoad, *, warmup: int, repeats: int, part: int) -> Row:
    """Times ``repeats`` intervals, after ``warmup`` untimed ones, with an average of ``part`` tokens per lane."""
    engine = load.engine
    load.settle(engine.tokens)
    engine.warm_up()
    interval = part * len(load.arrived)
    target = load.total + warmup * interval
    while load.total < target:
        load.step()
    load.depths.clear()
    began, ticks = time.perf_counter(), engine.statistics["ticks"]
    rates = []
    while len(rates) < repeats and not load.ended:
        tokens, since = load.total, time.perf_counter()
        while load.total - tokens < interval and engine.busy and not load.ended:
            load.step(timed=True)
        if not load.ended:
            rates.append((load.total - tokens) / (time.perf_counter() - since))
    if not rates:
        raise RuntimeError(f"--tokens {part} is too large: a sequence ended before an interval was timed")
    seconds = (time.perf_counter() - began) / max(1, engine.statistics["ticks"] - ticks)
    return load.row(rates, since=began) | {"idle_share": idle_share(load, seconds)}


def idle_share(load: DecodeLoad, seconds: float, launches: int = 4) -> float | None:
    """Returns the share of a tick's wall time, ``seconds``, in which the GPU was idle; ``None`` without a GPU.

    Times ``launches`` further calls of ``runner.launch``; the GPU sleeps first, so that it never waits for the host.
    """
    engine = load.engine
    if engine.model.device.type != "cuda" or not engine.busy:
        return None
    launch, timed = engine.runner.launch, []

    def launch_timed(plan: Any) -> Any:
        torch.cuda._sleep(_AHEAD)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launched = launch(plan)
        end.record()
        timed.append((start, end, launched.ticks))
        return launched

    with patch.object(engine.runner, "launch", launch_timed):
        for _ in range(launches):
            load.step()
    torch.cuda.synchronize(engine.model.device)
    busy = sum(start.elapsed_time(end) for start, end, _ in timed) / 1e3
    return max(0.0, 1.0 - busy / max(1, sum(ticks for _, _, ticks in timed)) / seconds)


def through_memory(load: DecodeLoad) -> Row:
    """Runs more requests than the KV cache holds; times the middle three fifths of their tokens."""
    case, marks = load.case, []
    # Lengths from half to one and a half times, so that sequences do not begin and end together.
    lengths = [max(1, case.new // 2 + case.new * (index % 9) // 8) for index in range(6 * case.lanes)]
    for length in lengths:
        load.submit(length)
    while load.engine.busy and load.total < 0.8 * sum(lengths):
        load.step(timed=bool(marks))
        if load.total >= 0.2 * sum(lengths):
            marks.append((time.perf_counter(), load.total))
    if len(marks) <= 3:
        raise RuntimeError("too few steps to time: use more lanes")
    # Three intervals of about equal time show how steady the speed was.
    bounds = [marks[round(third * (len(marks) - 1) / 3)] for third in range(4)]
    rates = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(bounds)]
    return load.row(rates, since=marks[0][0])


def end_to_end(load: DecodeLoad, *, rounds: int = 2) -> Row:
    """Keeps ``lanes`` requests running until ``rounds * lanes`` have finished; times all of it, prefill included."""
    case, began = load.case, time.perf_counter()
    while load.ended < rounds * case.lanes:
        while len(load.answers) < min(rounds * case.lanes, load.ended + case.lanes):
            load.submit(case.new)
        load.step(timed=True)
    return load.row([load.total / (time.perf_counter() - began)], since=began)


def tick_bytes(
    config: AdaPonderConfig, shares: Sequence[float], *, lanes: float, context: float, dtype: torch.dtype
) -> dict[str, float]:
    """Returns the bytes that a tick reads and writes, by kind; ``shares[d - 1]`` is the share of tokens with depth d.

    A tick has one row in each of ``lanes`` sequences of ``context`` tokens. It reads the layers' weights once; the head
    if the method mixes the vocabulary or some row is its token's last; the embedding table, unless tied to the head, if
    the method mixes the vocabulary and some row is not its token's last; and the gates of its rows. Each row reads the
    keys and values before it and writes its own. Activations and indices, some thousandths, are left out.
    """
    method, shape, width = method_class(config.method), shape_of(config), dtype.itemsize
    slots = method.slots_per_token(config.iterations)
    reach = [sum(shares[i:]) for i in range(len(shares))]  # the share of tokens that iteration i reads
    depth = sum(reach)
    table = shape.vocabulary * shape.hidden * width

    def any_of(share: float) -> float:
        """Returns the probability that at least one of the rows has a property that a ``share`` of all rows has."""
        return 1 - (1 - min(1.0, share)) ** lanes

    gates = sum(any_of(share / depth) for share in reach[: method.gates_asked(config.iterations)])
    tied = bool(getattr(config.backbone_config, "tie_word_embeddings", False))
    # A window hides what is further away.
    seen = sum(min(context, window or context) for window in shape.windows) / shape.layers
    return {
        "body": shape.body * width,
        "head": table * (1.0 if method.mixes_vocabulary else any_of(1 / depth)),
        "table": table * any_of((depth - 1) / depth) if method.mixes_vocabulary and not tied else 0.0,
        "gates": gates * method.gate_flops(config) / 2 * width,
        "rows": lanes * slots * (seen + 1) * shape.kv * width,
    }


def limit(config: AdaPonderConfig, shares: Sequence[float], *, lanes: float, copy_rate: float, **how: Any) -> float:
    """Returns the tokens/s of decoding if a tick took only the time to copy its bytes at ``copy_rate``."""
    depth = 1.0 if method_class(config.method).slots_per_token(config.iterations) > 1 else mean_depth(shares)
    return copy_rate * lanes / depth / sum(tick_bytes(config, shares, lanes=lanes, **how).values())
