"""Runs the sides of ``benchmarks decode``: our engine, our ``generate``, and Hugging Face's on the plain decoder."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from transformers import GenerationConfig

from adaponder.backbones.shape import shape_of
from adaponder.config import AdaPonderConfig
from adaponder.inference.engine import Engine
from adaponder.inference.request import Request
from adaponder.methods import method_class
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import ForcedDepths
from benchmarks.decode import DRAFTING, HF, HF_BATCH, IN_ENGINE, MEMORY, PLAIN_SIDES, PORTABLE, STEADY, DecodeCase
from benchmarks.harness import Row, forget
from benchmarks.models import build, build_stock, draw_depths, mean_depth, shape_config

# New tokens of a side outside the engine; the slow one makes fewer.
_NEW = {PORTABLE: 12, HF: 48, HF_BATCH: 48}
# Seconds until every lane must decode.
_LONGEST_WAIT = 120.0
# Cycles, about 20 ms, for which the device waits before a launch that is timed alone.
_AHEAD = 40_000_000


def as_row(
    rates: Sequence[float],
    *,
    shares: Sequence[float] = (1.0,),
    first: Sequence[float] = (),
    between: Sequence[float] = (),
    **more: Any,
) -> Row:
    """Returns the measured fields of a record's row.

    Args:
        rates: tokens per second in each timed part.
        shares: share of the timed tokens of depth 1, 2, …
        first: seconds from each request to its first token.
        between: seconds between two tokens of a sequence, of each token.
        more: further fields; those that are left out are unknown.
    """
    speed = statistics.median(rates)
    unknown = ("limit_tokens_per_second", "limit_share", "resident_lanes", "waiting_requests", "kv_rows", "idle_share")
    return {
        "tokens_per_second": speed,
        "spread": (max(rates) - min(rates)) / speed,
        "rates": list(rates),
        "mean_depth": mean_depth(shares),
        "first_token_seconds": _quantiles(first),
        "between_tokens_seconds": _quantiles(between),
        **dict.fromkeys((*unknown, "peak_bytes", "accepted_share")),
        **more,
    }


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Returns the median and the 99th percentile."""
    if not values:
        return None
    tensor = torch.tensor(values, dtype=torch.float64)
    return {"p50": float(tensor.quantile(0.5)), "p99": float(tensor.quantile(0.99))}


class Opened(NamedTuple):
    """A checkpoint, and token ids that its prompts are cut from."""

    model: AdaPonderForCausalLM
    prompts: Sequence[int]


def open_checkpoint(checkpoint: str, data: str, dtype: str, device: torch.device) -> Opened:
    """Loads a checkpoint and the text that its prompts are cut from."""
    from adaponder.checkpoints.shipped import data_of
    from adaponder.conversion.open import load
    from adaponder.evaluation.text import open_text, open_vocabulary

    model, folder = load(checkpoint, dtype=dtype, device=str(device))
    text = open_text(data_of(data), open_vocabulary(str(folder)), whose=checkpoint, max_tokens=1_000_000)
    return Opened(model, text.stream.tolist())


@dataclass
class Sides:
    """Measures cases, with one model in memory at a time, kept while the next case needs the same.

    Attributes:
        seed: of weights, prompts and depths.
        copy_rate: bytes per second that a large copy reads and writes.
        opened: a checkpoint that takes the place of a shape; without it prompts are random.
        warmup: parts that are not timed.
        repeats: timed parts.
        part: tokens of each lane in a part.
    """

    device: torch.device
    dtype: torch.dtype
    seed: int
    copy_rate: float
    opened: Opened | None = None
    warmup: int = 3
    repeats: int = 10
    part: int = 16
    _kept: tuple[Any, Any] = field(init=False, default=(None, None))

    def measure(self, case: DecodeCase) -> Row:
        """Returns the measured fields of a case's row."""
        try:
            row, shares, context = self._in_engine(case) if case.side in IN_ENGINE else self._outside(case)
        except BaseException:
            self._kept = None, None
            raise
        # With drafting a tick holds several tokens of each lane, and the limit depends on how many are accepted.
        if case.kind == STEADY and case.side != DRAFTING:
            where: dict[str, Any] = {"lanes": row["resident_lanes"] or case.lanes, "context": context}
            most = limit(self._config(case), shares, **where, dtype=self.dtype, copy_rate=self.copy_rate)
            row |= {"limit_tokens_per_second": most, "limit_share": row["tokens_per_second"] / most}
        return row

    def _config(self, case: DecodeCase) -> AdaPonderConfig:
        if self.opened is not None:
            return self.opened.model.config
        return shape_config(case.shape, vanilla=case.side in PLAIN_SIDES)

    def _model(self, case: DecodeCase, build: Callable[..., Any] = build) -> Any:
        """Returns the case's model, after freeing another one."""
        if self.opened is not None:
            return self.opened.model
        key = build, case.shape, case.side in PLAIN_SIDES
        if self._kept[0] != key:
            self._kept = None, None
            forget(self.device)
            model = build(self._config(case), device=self.device, dtype=self.dtype, seed=self.seed)
            self._kept = key, model
        return self._kept[1]

    def _in_engine(self, case: DecodeCase) -> tuple[Row, Sequence[float], float]:
        """Returns a row, the shares of its tokens by depth, and the mean number of tokens that a row attends to."""
        model, prompts = self._model(case), None if self.opened is None else self.opened.prompts
        forget(self.device)
        most, iterations = model.config.max_position_embeddings, model.config.iterations
        steps = {"warmup": self.warmup, "repeats": self.repeats, "part": self.part}
        new = {STEADY: steady_length(case, **steps), MEMORY: 2 * case.new}.get(case.kind, case.new)
        settings: dict[str, Any] = {"lanes": case.lanes, "tokens": min(case.context + new, most or 2**31)}
        if case.kind == MEMORY:
            # Rows for `lanes` sequences of full depth and average length, and lanes enough for shallower ones.
            settings |= {"lanes": 3 * case.lanes, "rows": case.lanes * (case.context + case.new) * iterations}
        engine = Engine(model, **settings, drafts=iterations - 1 if case.side == DRAFTING else 0)
        # The first load captures graphs and compiles kernels.
        first, load = (DecodeLoad(engine, case, self.seed + more, prompts) for more in (1, 0))
        if case.kind == STEADY:
            first.run(first_tokens)
            row = load.run(steady, **steps)
        elif case.kind == MEMORY:
            first.run(through_memory)
            row = load.run(through_memory)
        else:
            first.run(end_to_end, rounds=1)
            row = load.run(end_to_end)
        return row, load.shares(), case.context + load.total / max(1, len(load.arrived)) / 2

    def _outside(self, case: DecodeCase) -> tuple[Row, Sequence[float], float]:
        """Returns the same of a side outside of the engine: the time of all new tokens after the first."""
        new, device = _NEW[case.side], self.device
        model = self._model(case, build if case.side == PORTABLE else build_stock)
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(self._config(case).vocab_size, (case.lanes, case.context), generator=generator).to(device)
        if case.side == HF_BATCH:
            return _continuous(model, ids.tolist(), new=new, device=device), (1.0,), 0.0
        fixed: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": True, "pad_token_id": 0}
        if case.shares is not None:
            depths = [draw_depths(case.shares, case.context + new, seed=self.seed + lane) for lane in range(case.lanes)]
            fixed["policy"] = ForcedDepths(torch.tensor(depths, device=device))

        @torch.no_grad()
        def seconds(new: int) -> float:
            return _seconds(lambda: model.generate(ids, max_new_tokens=new, min_new_tokens=new, **fixed), device)

        seconds(2)
        reset_peak(device)
        first, shares = seconds(1), case.shares or (1.0,)
        rates = [case.lanes * (new - 1) / max(1e-9, seconds(new) - first) for _ in range(2)]
        more = {"resident_lanes": case.lanes, "peak_bytes": peak(device)}
        row = as_row(rates, shares=shares, first=[first], between=[case.lanes / rate for rate in rates], **more)
        return row, shares, case.context + new / 2


def _continuous(model: Any, prompts: list[list[int]], *, new: int, device: torch.device) -> Row:
    """Times Hugging Face's continuous batching, prompts included: it does not report when each token came."""
    settings = GenerationConfig(max_new_tokens=new, do_sample=True, eos_token_id=-1, pad_token_id=0)
    outputs: dict[Any, Any] = {}

    def run() -> None:
        outputs.clear()
        outputs.update(model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False))

    run()
    seconds = _seconds(run, device)
    tokens = sum(len(output.generated_tokens) for output in outputs.values())
    if not tokens:
        raise RuntimeError("generate_batch made no token")
    return as_row([tokens / seconds], resident_lanes=len(prompts))


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    """Times a function, with what it leaves queued on a GPU."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


def reset_peak(device: torch.device) -> None:
    """Resets the peak of allocated memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int | None:
    """Returns the peak of allocated memory since."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


# --- loads of the engine -------------------------------------------------------------------------------------------


@dataclass
class DecodeLoad:
    """Submits requests of one case and notes when their tokens come.

    Attributes:
        prompts: token ids that prompts are cut from; without them prompts are random.
        submitted: when each request was submitted.
        arrived: for each request, (time, tokens) of each step that brought tokens.
        depths: tokens of each depth.
        ended: finished requests.
        total: tokens so far.
    """

    engine: Engine
    case: DecodeCase
    seed: int = 0
    prompts: Sequence[int] | None = None
    submitted: dict[int, float] = field(default_factory=dict)
    arrived: dict[int, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    depths: Counter[int] = field(default_factory=Counter)
    ended: int = 0
    total: int = 0

    def run(self, measure: Callable[..., Any], **how: Any) -> Any:
        """Returns ``measure(self)``, and leaves the engine empty."""
        reset_peak(self.engine.model.device)
        try:
            return measure(self, **how)
        finally:
            for request_id in self.submitted:
                self.engine.cancel(request_id)
            while self.engine.busy:
                self.engine.step()

    def submit(self, new: int) -> None:
        """Submits one more request of ``new`` tokens."""
        count, context, shares = len(self.submitted), self.case.context, self.case.shares
        draw = random.Random(self.seed * 1_000_003 + count)
        if self.prompts is None:
            prompt = [draw.randrange(self.engine.model.config.vocab_size) for _ in range(context)]
        else:
            start = draw.randrange(max(1, len(self.prompts) - context))
            prompt = list(self.prompts[start : start + context])
        depths = None if shares is None else draw_depths(shares, context + new - 1, seed=draw.randrange(2**31))
        settings: dict[str, Any] = {"max_new_tokens": new, "ignore_eos": True, "seed": count, "depths": depths}
        self.submitted[self.engine.submit(Request(prompt=prompt, **settings))] = time.perf_counter()

    def step(self) -> None:
        """Runs one step of the engine and notes its tokens."""
        events = self.engine.step()
        now = time.perf_counter()
        tokens = Counter(event.request for event in events if event.token is not None)
        self.depths.update(event.token.depth for event in events if event.token is not None)
        for completion in (event.completion for event in events if event.completion is not None):
            self.ended += 1
            if completion.error is not None:
                raise RuntimeError(completion.error)
        for request, count in tokens.items():
            self.arrived[request].append((now, count))
        self.total += tokens.total()

    def settle(self) -> None:
        """Steps until every lane decodes, or no further request can be admitted."""
        began = time.perf_counter()
        while len(self.arrived) < self.case.lanes:
            self.step()
            counts = self.engine.statistics
            stuck = counts["waiting"] and all(sum(n for _, n in times) >= 16 for times in self.arrived.values())
            if stuck and len(self.arrived) >= counts["resident"]:
                return
            if time.perf_counter() - began > _LONGEST_WAIT:
                lanes = f"{len(self.arrived)} of {self.case.lanes} lanes"
                raise RuntimeError(f"only {lanes} decode after {_LONGEST_WAIT:.0f} s")

    def first(self) -> list[float]:
        """Returns the seconds from each request to its first token."""
        return [times[0][0] - self.submitted[request] for request, times in self.arrived.items()]

    def between(self, since: float) -> list[float]:
        """Returns the seconds per token since then; tokens that came together share the time before them."""
        seconds = []
        for times in self.arrived.values():
            for (before, _), (now, count) in pairwise(times):
                if before >= since:
                    seconds += [(now - before) / count] * count
        return seconds

    def shares(self) -> list[float]:
        """Returns the share of the noted tokens of depth 1, 2, …"""
        depths = range(1, max(self.depths, default=1) + 1)
        return [self.depths[depth] / max(1, self.depths.total()) for depth in depths]

    def row(self, rates: Sequence[float], resident: Sequence[int], *, since: float, **more: Any) -> Row:
        """Returns the measured fields of the case's row; ``resident`` are the lanes that decoded in each step."""
        counts = self.engine.statistics
        return as_row(
            rates,
            shares=self.shares(),
            first=self.first(),
            between=self.between(since),
            resident_lanes=sum(resident) / max(1, len(resident)),
            waiting_requests=counts["waiting"],
            kv_rows=counts["pages_held"] * self.engine.pages.size,
            peak_bytes=peak(self.engine.model.device),
            accepted_share=counts["accepted"] / counts["drafted"] if counts["drafted"] else None,
            **more,
        )


def first_tokens(load: DecodeLoad) -> None:
    """Lets every lane make some tokens, untimed."""
    for _ in range(load.case.lanes):
        load.submit(min(load.engine.tokens - load.case.context, 64))
    load.settle()


def steady_length(case: DecodeCase, *, warmup: int, repeats: int, part: int) -> int:
    """Returns the new tokens of a sequence that decodes from before the last lane begins until the last timed part."""
    return (warmup + repeats + 2) * part + 64 + case.lanes * case.context // 4096


def steady(load: DecodeLoad, *, warmup: int, repeats: int, part: int) -> Row:
    """Times ``repeats`` parts in which every lane decodes, each of at least ``part`` tokens per lane."""
    engine, case = load.engine, load.case
    # A launch's answers come while the next one runs, and bring several tokens of each lane.
    new = min(engine.tokens - case.context, steady_length(case, warmup=warmup, repeats=repeats, part=part))
    for _ in range(case.lanes):
        load.submit(new)
    load.settle()
    engine.warm_up()
    target = load.total + warmup * part * len(load.arrived)
    while load.total < target:
        load.step()
    load.depths.clear()
    began, ticks = time.perf_counter(), engine.statistics["ticks"]
    rates, resident = [], []
    while len(rates) < repeats and not load.ended:
        tokens, since = load.total, time.perf_counter()
        while load.total - tokens < part * len(load.arrived) and engine.busy and not load.ended:
            load.step()
            resident.append(engine.statistics["resident"])
        if not load.ended:
            rates.append((load.total - tokens) / (time.perf_counter() - since))
    if not rates:
        raise RuntimeError(f"--tokens {part} is too large: a sequence ended before a part was timed")
    seconds = (time.perf_counter() - began) / max(1, engine.statistics["ticks"] - ticks)
    row = load.row(rates, resident, since=began)
    return row | {"idle_share": idle_share(load, seconds)}


def idle_share(load: DecodeLoad, seconds: float, launches: int = 4) -> float | None:
    """Returns the share of a tick's ``seconds`` in which the device was idle; ``None`` without a GPU.

    A few more launches are timed on the device alone, which is kept busy until the host has queued all of one.
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
    """Runs many requests through a KV cache that holds only some; times the middle three fifths of their tokens."""
    engine, case = load.engine, load.case
    # Lengths from half to one and a half times, so that sequences do not begin and end together.
    lengths = [max(1, case.new // 2 + case.new * (index % 9) // 8) for index in range(6 * case.lanes)]
    for length in lengths:
        load.submit(length)
    marks, resident = [], []
    while engine.busy and load.total < 0.8 * sum(lengths):
        load.step()
        if load.total >= 0.2 * sum(lengths):
            marks.append((time.perf_counter(), load.total))
            resident.append(engine.statistics["resident"])
    # Three parts of about equal time show how steady it was.
    parts = [marks[round(third * (len(marks) - 1) / 3)] for third in range(4)] if len(marks) > 3 else []
    if not parts:
        raise RuntimeError("too few steps to time: use more lanes")
    rates = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(parts)]
    return load.row(rates, resident, since=marks[0][0])


def end_to_end(load: DecodeLoad, *, rounds: int = 2) -> Row:
    """Keeps ``lanes`` requests under way until ``rounds`` times as many are done; times all their new tokens."""
    case, began, resident = load.case, time.perf_counter(), []
    for _ in range(case.lanes):
        load.submit(case.new)
    while load.ended < rounds * case.lanes:
        load.step()
        resident.append(load.engine.statistics["resident"])
        while len(load.submitted) < min(rounds * case.lanes, load.ended + case.lanes):
            load.submit(case.new)
    return load.row([load.total / (time.perf_counter() - began)], resident, since=began)


# --- the limit -----------------------------------------------------------------------------------------------------


class TickBytes(NamedTuple):
    """Bytes that an average tick moves, by what they belong to."""

    body: float
    head: float
    table: float
    gates: float
    rows: float


def tick_bytes(
    config: AdaPonderConfig, shares: Sequence[float], *, lanes: float, context: float, dtype: torch.dtype
) -> TickBytes:
    """Returns the bytes of a tick over one row of each of ``lanes`` sequences of ``context`` tokens.

    A tick reads every weight of the body once. It reads the head if a row mixes the vocabulary or ends a token, the
    embedding table if a row continues and the method mixes its rows, and the gate of each iteration of a row. Each row
    reads the keys and values before it and writes its own. Activations and indices are left out: thousandths.
    ``shares[d - 1]`` is the share of tokens of depth d.
    """
    method, shape, width = method_class(config.method), shape_of(config), dtype.itemsize
    slots = method.slots_per_token(config.iterations)
    reach = [sum(shares[i:]) for i in range(len(shares))]  # the share of tokens that iteration i reads
    depth = sum(reach)
    table = shape.vocabulary * shape.hidden * width
    continues = _any((depth - 1) / depth, lanes)
    asked = method.gates_asked(config.iterations)
    gates = sum(_any(share / depth, lanes) for share in reach[:asked])
    tied = bool(getattr(config.backbone_config, "tie_word_embeddings", False))
    # A window hides what is further away.
    seen = sum(min(context, window or context) for window in shape.windows) / shape.layers
    return TickBytes(
        body=shape.body * width,
        head=table * (1.0 if method.mixes_vocabulary else _any(1 / depth, lanes)),
        table=table * continues if method.mixes_vocabulary and not tied else 0.0,
        gates=gates * method.gate_flops(config) / 2 * width,
        rows=lanes * slots * (seen + 1) * shape.kv * width,
    )


def limit(config: AdaPonderConfig, shares: Sequence[float], *, lanes: float, copy_rate: float, **how: Any) -> float:
    """Returns the tokens per second if bytes moved at the rate of a large copy and nothing else took time."""
    depth = 1.0 if method_class(config.method).slots_per_token(config.iterations) > 1 else mean_depth(shares)
    return copy_rate * lanes / depth / sum(tick_bytes(config, shares, lanes=lanes, **how))


def _any(share: float, lanes: float) -> float:
    """Returns the probability that one of ``lanes`` rows is among a share of them."""
    return 1 - (1 - min(1.0, share)) ** lanes
