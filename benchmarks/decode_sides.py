"""Runs the sides of ``benchmarks decode``: our engine, our ``generate``, and Hugging Face's on the plain decoder."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from adaponder.backbones.shape import Shape, shape_of
from adaponder.config import AdaPonderConfig
from adaponder.inference.engine import Engine
from adaponder.inference.request import Request
from adaponder.methods import method_class
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import ForcedDepths
from benchmarks.decode import (
    DRAFTING,
    HF,
    HF_BATCH,
    IN_ENGINE,
    MEMORY,
    PLAIN_SIDES,
    PORTABLE,
    STEADY,
    VANILLA,
    DecodeCase,
    DecodeTiming,
)
from benchmarks.harness import forget
from benchmarks.models import build, build_stock, draw_depths, mean_depth, shape_config

# New tokens of a side outside the engine; the slow one makes fewer.
_NEW = {PORTABLE: 12, HF: 48, HF_BATCH: 48}
# Seconds until every lane must decode.
_LONGEST_WAIT = 120.0
# Cycles, about 20 ms, for which the device waits before a launch that is timed alone.
_AHEAD = 40_000_000


@dataclass
class Sides:
    """Measures cases, with one model and one engine in memory at a time, kept while the next case needs the same.

    Attributes:
        device: where to run.
        dtype: of weights, and of keys and values.
        seed: of weights, prompts and depths.
        warmup: parts that are not timed.
        repeats: timed parts.
        part: tokens of each lane in a part.
        all_cases: what will be measured, so that an engine is opened with room for all its cases.
        checkpoint: a model that takes the place of a shape.
        prompts: token ids that prompts are cut from; without them prompts are random.
    """

    device: torch.device
    dtype: torch.dtype
    seed: int
    warmup: int
    repeats: int
    part: int
    all_cases: Sequence[DecodeCase]
    checkpoint: AdaPonderForCausalLM | None = None
    prompts: Sequence[int] | None = None
    _held: dict[str, Any] = field(default_factory=dict)
    _shapes: dict[str, Shape] = field(default_factory=dict)

    def open(self, checkpoint: str, data: str) -> None:
        """Loads a checkpoint and the tokens that its prompts are cut from."""
        from adaponder.checkpoints.shipped import data_of
        from adaponder.conversion.open import load
        from adaponder.evaluation.text import open_text, open_vocabulary

        name = str(self.dtype).removeprefix("torch.")
        self.checkpoint, folder = load(checkpoint, dtype=name, device=str(self.device))
        text = open_text(data_of(data), open_vocabulary(str(folder)), whose=checkpoint, max_tokens=1_000_000)
        self.prompts = text.stream.tolist()

    def measure(self, case: DecodeCase) -> DecodeTiming:
        """Measures one case; an error leaves no model or engine in memory."""
        try:
            return self._in_engine(case) if case.side in IN_ENGINE else self._outside(case)
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Frees model and engine."""
        self._held.clear()
        forget(self.device)

    def config(self, case: DecodeCase) -> AdaPonderConfig:
        """Returns the config of the case's model."""
        if self.checkpoint is not None:
            return self.checkpoint.config
        return shape_config(case.shape, vanilla=case.side in PLAIN_SIDES)

    def limit(self, case: DecodeCase, timing: DecodeTiming, hardware: dict[str, Any]) -> float | None:
        """Returns the most tokens per second that the memory's rate allows; ``None`` if the case is not steady.

        With drafting a tick holds several tokens of each lane, and the limit depends on how many are accepted.
        """
        if case.kind != STEADY or case.side == DRAFTING:
            return None
        config = self.config(case)
        if case.shape not in self._shapes:
            self._shapes[case.shape] = shape_of(config)
        where = {"lanes": timing.resident or case.lanes, "context": timing.context or case.context}
        shares, rate = timing.shares or (1.0,), hardware["copy_bytes"]
        return limit(config, self._shapes[case.shape], shares, **where, dtype=self.dtype, copy_rate=rate)

    # --- in the engine ----------------------------------------------------------------------------------------------

    def _in_engine(self, case: DecodeCase) -> DecodeTiming:
        engine = self._engine(case)
        shares = case.shares(engine.iterations)
        # The first load captures graphs and compiles kernels.
        first, load = (DecodeLoad(engine, case, shares, self.seed + more, self.prompts) for more in (1, 0))
        if case.kind == STEADY:
            first_tokens(first)
            return steady(load, warmup=self.warmup, repeats=self.repeats, part=self.part)
        if case.kind == MEMORY:
            through_memory(first, requests=6 * case.lanes)
            return through_memory(load, requests=6 * case.lanes)
        end_to_end(first, rounds=1)
        return end_to_end(load)

    def _engine(self, case: DecodeCase) -> Engine:
        """Returns the engine for this case and for all that differ in context and depth only."""
        key = (case.side, case.shape, case.lanes, case.kind)
        if self._held.get("engine_key") != key:
            self._held.pop("engine", None)
            model = self._model(case)
            forget(self.device)
            same = [other for other in self.all_cases if (other.side, other.shape, other.lanes, other.kind) == key]
            tokens = max(self._tokens(other) for other in [case, *same])
            most = model.config.max_position_embeddings
            settings: dict[str, Any] = {"lanes": case.lanes, "tokens": tokens if most is None else min(tokens, most)}
            if case.kind == MEMORY:
                # Rows for `lanes` sequences of full depth and average length, and lanes enough for shallower ones.
                rows = case.lanes * (case.context + case.new) * model.config.iterations
                settings |= {"lanes": 3 * case.lanes, "rows": rows}
            settings["drafts"] = model.config.iterations - 1 if case.side == DRAFTING else 0
            self._held |= {"engine": Engine(model, **settings), "engine_key": key}
        return self._held["engine"]

    def _tokens(self, case: DecodeCase) -> int:
        """Returns the length of a case's longest sequence."""
        steps = {"warmup": self.warmup, "repeats": self.repeats, "part": self.part}
        new = {STEADY: steady_length(case, **steps), MEMORY: 2 * case.new}
        return case.context + new.get(case.kind, case.new)

    def _model(self, case: DecodeCase) -> AdaPonderForCausalLM:
        if self.checkpoint is not None:
            return self.checkpoint
        return self._kept(("ours", case.shape, case.side == VANILLA), lambda: build(self.config(case), **self._how))

    def _kept(self, key: object, make: Callable[[], Any]) -> Any:
        """Returns the model under this key, after freeing another one."""
        if self._held.get("model_key") != key:
            self.forget()
            self._held |= {"model": make(), "model_key": key}
        return self._held["model"]

    @property
    def _how(self) -> dict[str, Any]:
        return {"device": self.device, "dtype": self.dtype, "seed": self.seed}

    # --- outside of it ----------------------------------------------------------------------------------------------

    def _outside(self, case: DecodeCase) -> DecodeTiming:
        self._held.pop("engine", None)
        self._held.pop("engine_key", None)
        new, size = _NEW[case.side], self.config(case).vocab_size
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(size, (case.lanes, case.context), generator=generator).to(self.device)
        if case.side != PORTABLE:
            stock = self._kept(("stock", case.shape), lambda: build_stock(self.config(case), **self._how))
            if case.side == HF_BATCH:
                return _continuous(stock, ids.tolist(), new=new, device=self.device)
            return _timed(_generating(stock, ids), case, new=new, shares=(1.0,), device=self.device)
        model, more = self._model(case), {}
        shares = case.shares(model.config.iterations)
        if shares is not None:
            length = case.context + new
            depths = [draw_depths(shares, length, seed=self.seed + lane) for lane in range(case.lanes)]
            more["policy"] = ForcedDepths(torch.tensor(depths, device=self.device))
        return _timed(_generating(model, ids, **more), case, new=new, shares=shares or (1.0,), device=self.device)


def _generating(model: Any, ids: Tensor, **more: Any) -> Callable[[int], None]:
    """Returns a function that generates that many tokens of every sequence."""
    fixed: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": True, "pad_token_id": 0, **more}

    @torch.no_grad()
    def run(new: int) -> None:
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, **fixed)

    return run


def _timed(
    run: Callable[[int], None], case: DecodeCase, *, new: int, shares: Sequence[float], device: torch.device
) -> DecodeTiming:
    """Returns the tokens per second after the first: the time of ``new`` tokens less that of one."""
    run(2)
    reset_peak(device)
    first = _seconds(lambda: run(1), device)
    rates = [case.lanes * (new - 1) / max(1e-9, _seconds(lambda: run(new), device) - first) for _ in range(2)]
    return DecodeTiming(
        rates=rates,
        first=[first],
        between=[case.lanes / rate for rate in rates],
        shares=tuple(shares),
        context=case.context + new / 2,
        resident=case.lanes,
        peak_bytes=peak(device),
    )


def _continuous(stock: PreTrainedModel, prompts: list[list[int]], *, new: int, device: torch.device) -> DecodeTiming:
    """Times Hugging Face's continuous batching, prompts included: it does not report when each token came."""
    settings = GenerationConfig(max_new_tokens=new, do_sample=True, eos_token_id=-1, pad_token_id=0)
    model: Any = stock
    outputs: dict[Any, Any] = {}

    def run() -> None:
        outputs.update(model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False))

    run()
    outputs.clear()
    seconds = _seconds(run, device)
    tokens = sum(len(output.generated_tokens) for output in outputs.values())
    if not tokens:
        raise RuntimeError("generate_batch made no token")
    context = len(prompts[0]) + new / 2
    return DecodeTiming(rates=[tokens / seconds], shares=(1.0,), context=context, resident=len(prompts))


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    _synchronize(device)
    began = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Resets the peak of allocated memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int | None:
    """Returns the peak of allocated memory since."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


# --- loads of the engine -------------------------------------------------------------------------------------------


@dataclass
class TokenClock:
    """Notes when tokens came.

    Attributes:
        submitted: when each request was submitted.
        arrived: for each request, (time, tokens) of each step that brought tokens.
        depths: tokens of each depth.
        ended: finished requests.
        total: tokens so far.
    """

    submitted: dict[int, float] = field(default_factory=dict)
    arrived: dict[int, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    depths: Counter[int] = field(default_factory=Counter)
    ended: int = 0
    total: int = 0

    def step(self, engine: Engine) -> None:
        """Runs one step of the engine and notes its tokens."""
        events = engine.step()
        now = time.perf_counter()
        tokens: Counter[int] = Counter()
        for event in events:
            if event.token is not None:
                tokens[event.request] += 1
                self.depths[event.token.depth] += 1
            if event.completion is not None:
                self.ended += 1
                if event.completion.error is not None:
                    raise RuntimeError(event.completion.error)
        for request, count in tokens.items():
            self.arrived[request].append((now, count))
        self.total += tokens.total()

    def first(self) -> list[float]:
        """Returns the seconds from each request to its first token."""
        return [times[0][0] - self.submitted[request] for request, times in self.arrived.items()]

    def between(self, since: float) -> list[float]:
        """Returns the seconds per token since then; tokens that came together share the time before them."""
        found = []
        for times in self.arrived.values():
            for (before, _), (now, count) in pairwise(times):
                if before >= since:
                    found += [(now - before) / count] * count
        return found


@dataclass
class DecodeLoad:
    """Submits requests of one case: random prompts, and depths forced in the given shares or left to the model."""

    engine: Engine
    case: DecodeCase
    shares: Sequence[float] | None
    seed: int
    prompts: Sequence[int] | None = None
    clock: TokenClock = field(default_factory=TokenClock)
    count: int = 0

    def submit(self, new: int) -> int:
        """Submits one more request of ``new`` tokens."""
        draw, context = random.Random(self.seed * 1_000_003 + self.count), self.case.context
        if self.prompts is None:
            prompt = [draw.randrange(self.engine.model.config.vocab_size) for _ in range(context)]
        else:
            start = draw.randrange(max(1, len(self.prompts) - context))
            prompt = list(self.prompts[start : start + context])
        depths = (
            None if self.shares is None else draw_depths(self.shares, context + new - 1, seed=draw.randrange(2**31))
        )
        settings: dict[str, Any] = {"max_new_tokens": new, "ignore_eos": True, "seed": self.count, "depths": depths}
        request_id = self.engine.submit(Request(prompt=prompt, **settings))
        self.clock.submitted[request_id] = time.perf_counter()
        self.count += 1
        return request_id

    def settle(self) -> None:
        """Steps until every lane decodes, or no further request can be admitted."""
        engine, clock, began = self.engine, self.clock, time.perf_counter()
        while len(clock.arrived) < self.case.lanes:
            clock.step(engine)
            counts = engine.statistics
            stuck = counts["waiting"] and all(sum(n for _, n in times) >= 16 for times in clock.arrived.values())
            if stuck and len(clock.arrived) >= counts["resident"]:
                return
            if time.perf_counter() - began > _LONGEST_WAIT:
                raise RuntimeError(
                    f"only {len(clock.arrived)} of {self.case.lanes} lanes decode after {_LONGEST_WAIT:.0f} s"
                )

    def drain(self) -> None:
        """Cancels the remaining requests, so that the engine is empty again."""
        for request_id in self.clock.submitted:
            self.engine.cancel(request_id)
        while self.engine.busy:
            self.engine.step()

    def timing(self, rates: list[float], resident: Sequence[int], *, since: float) -> DecodeTiming:
        """Summarises what the clock has noted."""
        clock, counts = self.clock, self.engine.statistics
        lengths = [sum(count for _, count in times) for times in clock.arrived.values()]
        depths = range(1, max(clock.depths, default=1) + 1)
        return DecodeTiming(
            rates=rates,
            first=clock.first(),
            between=clock.between(since),
            shares=tuple(clock.depths[depth] / max(1, clock.depths.total()) for depth in depths),
            context=self.case.context + sum(lengths) / max(1, len(lengths)) / 2,
            resident=sum(resident) / max(1, len(resident)),
            waiting=counts["waiting"],
            rows=counts["pages_held"] * self.engine.pages.size,
            peak_bytes=peak(self.engine.model.device),
            accepted=counts["accepted"] / counts["drafted"] if counts["drafted"] else None,
        )


def first_tokens(load: DecodeLoad) -> None:
    """Lets every lane make some tokens, untimed, and empties the engine."""
    try:
        for _ in range(load.case.lanes):
            load.submit(min(load.engine.tokens - load.case.context, 64))
        load.settle()
    finally:
        load.drain()


def steady_length(case: DecodeCase, *, warmup: int, repeats: int, part: int) -> int:
    """Returns the new tokens of a sequence that decodes from before the last lane begins until the last timed part."""
    return (warmup + repeats + 2) * part + 64 + case.lanes * case.context // 4096


def steady(load: DecodeLoad, *, warmup: int, repeats: int, part: int) -> DecodeTiming:
    """Times ``repeats`` parts in which every lane decodes, each of at least ``part`` tokens per lane."""
    engine, case, clock = load.engine, load.case, load.clock
    # A launch's answers come while the next one runs, and bring several tokens of each lane.
    new = min(engine.tokens - case.context, steady_length(case, warmup=warmup, repeats=repeats, part=part))
    reset_peak(engine.model.device)
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
            raise RuntimeError(f"--tokens {part} is too large: a sequence ended before a part was timed")
        seconds = (time.perf_counter() - began) / max(1, engine.statistics["ticks"] - ticks)
        timing = load.timing(rates, resident, since=began)
        return replace(timing, idle=idle_share(load, seconds))
    finally:
        load.drain()


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
            load.clock.step(engine)
    torch.cuda.synchronize(engine.model.device)
    busy = sum(start.elapsed_time(end) for start, end, _ in timed) / 1e3
    return max(0.0, 1.0 - busy / max(1, sum(ticks for _, _, ticks in timed)) / seconds)


def through_memory(load: DecodeLoad, *, requests: int) -> DecodeTiming:
    """Runs many requests through a KV cache that holds only some; times the middle three fifths of their tokens."""
    engine, case, clock = load.engine, load.case, load.clock
    reset_peak(engine.model.device)
    # Lengths from half to one and a half times, so that sequences do not begin and end together.
    lengths = [case.new // 2 + case.new * (index % 9) // 8 for index in range(requests)]
    total, marks, resident = sum(lengths), [], []
    try:
        for length in lengths:
            load.submit(max(1, length))
        while engine.busy and clock.total < 0.8 * total:
            clock.step(engine)
            if clock.total >= 0.2 * total:
                marks.append((time.perf_counter(), clock.total))
                resident.append(engine.statistics["resident"])
        if len(marks) < 2:
            raise RuntimeError("too few steps to time: use more lanes")
        # Three parts of equal time show how steady it was.
        rates = [_rate(marks, part / 3, (part + 1) / 3) for part in range(3)]
        return load.timing([rate for rate in rates if rate > 0], resident, since=marks[0][0])
    finally:
        load.drain()


def end_to_end(load: DecodeLoad, *, rounds: int = 2) -> DecodeTiming:
    """Keeps ``lanes`` requests under way until ``rounds`` times as many are done; times all their new tokens."""
    engine, case, clock = load.engine, load.case, load.clock
    total = rounds * case.lanes
    reset_peak(engine.model.device)
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
        return load.timing([clock.total / (time.perf_counter() - began)], resident, since=began)
    finally:
        load.drain()


def _rate(marks: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Returns the tokens per second between two shares of the marked time."""
    start, span = marks[0][0], marks[-1][0] - marks[0][0]
    inside = [mark for mark in marks if begin * span <= mark[0] - start <= end * span]
    if len(inside) < 2 or inside[-1][0] == inside[0][0]:
        return 0.0
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


# --- the limit -----------------------------------------------------------------------------------------------------


class TickBytes(NamedTuple):
    """Bytes that an average tick moves, by what they belong to."""

    body: float
    head: float
    table: float
    gates: float
    rows: float

    @property
    def total(self) -> float:
        return sum(self)


def tick_bytes(
    config: AdaPonderConfig, shape: Shape, shares: Sequence[float], *, lanes: float, context: float, dtype: torch.dtype
) -> TickBytes:
    """Returns the bytes of a tick over one row of each of ``lanes`` sequences of ``context`` tokens.

    A tick reads every weight of the body once. It reads the head if a row mixes the vocabulary or ends a token, the
    embedding table if a row continues and the method mixes its rows, and the gate of each iteration of a row. Each row
    reads the keys and values before it and writes its own. Activations and indices are left out: thousandths.
    ``shares[d - 1]`` is the share of tokens of depth d.
    """
    method, width = method_class(config.method), dtype.itemsize
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


def limit(
    config: AdaPonderConfig, shape: Shape, shares: Sequence[float], *, lanes: float, copy_rate: float, **how: Any
) -> float:
    """Returns the tokens per second if bytes moved at the rate of a large copy and nothing else took time."""
    depth = 1.0 if method_class(config.method).slots_per_token(config.iterations) > 1 else mean_depth(shares)
    return copy_rate * lanes / depth / tick_bytes(config, shape, shares, lanes=lanes, **how).total


def _any(share: float, lanes: float) -> float:
    """Returns the probability that one of ``lanes`` rows is among a share of them."""
    return 1 - (1 - min(1.0, share)) ** lanes
