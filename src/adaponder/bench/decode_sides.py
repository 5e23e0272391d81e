"""Everyone who decodes: our engine, our portable ``generate``, and Hugging Face's on the plain decoder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from adaponder.backbones.shape import Shape, shape_of
from adaponder.bench import decode_engine
from adaponder.bench.decode import (
    DRAFTING,
    HF,
    HF_BATCH,
    IN_ENGINE,
    MEMORY,
    PLAIN_SIDES,
    PORTABLE,
    STEADY,
    VANILLA,
    Case,
    Measured,
    case_shares,
)
from adaponder.bench.decode_depths import drawn
from adaponder.bench.decode_limit import limit
from adaponder.bench.decode_models import build, build_stock, config_of
from adaponder.bench.timing import forget
from adaponder.config import AdaPonderConfig
from adaponder.inference.engine import Engine
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import ForcedDepths

# Tokens that a side outside the engine makes; the slow one fewer.
_NEW = {PORTABLE: 12, HF: 48, HF_BATCH: 48}


@dataclass
class Sides:
    """Measures cases, with one model and one engine in memory at a time, kept while the next case needs the same.

    Attributes:
        device: where.
        dtype: of weights, and of keys and values.
        seed: of weights, prompts and depths.
        warmup: parts that are not timed.
        repeats: timed parts.
        part: tokens of each lane in a part.
        all_cases: what will be measured, so that an engine is opened with room for all its cases.
        checkpoint: a model that takes the place of a shape.
        prompts: token ids that prompts are cut from; random ones without.
    """

    device: torch.device
    dtype: torch.dtype
    seed: int
    warmup: int
    repeats: int
    part: int
    all_cases: Sequence[Case]
    checkpoint: AdaPonderForCausalLM | None = None
    prompts: Sequence[int] | None = None
    _held: dict[str, Any] = field(default_factory=dict)
    _shapes: dict[str, Shape] = field(default_factory=dict)

    def measure(self, case: Case) -> Measured:
        """Measures one case; raises what is wrong, with nothing left behind."""
        try:
            if case.side in IN_ENGINE:
                return self._in_engine(case)
            return self._outside(case)
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Gives model and engine back."""
        self._held.clear()
        forget(self.device)

    def config(self, case: Case) -> AdaPonderConfig:
        if self.checkpoint is not None:
            return self.checkpoint.config
        return config_of(case.shape, vanilla=case.side in PLAIN_SIDES)

    def limit(self, case: Case, measured: Measured, copy_rate: float) -> float | None:
        """The most tokens per second that the memory's rate allows while lanes decode; ``None`` for another kind.

        Where tokens are drafted a tick holds several of each lane, and what it allows depends on how many follow.
        """
        if case.kind != STEADY or case.side == DRAFTING:
            return None
        config = self.config(case)
        if case.shape not in self._shapes:
            self._shapes[case.shape] = shape_of(config)
        return limit(
            config,
            self._shapes[case.shape],
            measured.shares or (1.0,),
            lanes=measured.resident or case.lanes,
            context=measured.context or case.context,
            dtype=self.dtype,
            copy_rate=copy_rate,
        )

    # --- in the engine ------------------------------------------------------------------------------------------

    def _in_engine(self, case: Case) -> Measured:
        engine = self._engine(case)
        load = decode_engine.Load(
            engine, case, shares=case_shares(case, engine.iterations), seed=self.seed, prompts=self.prompts
        )
        # The first time graphs are captured and kernels compiled.
        once = decode_engine.Load(engine, case, shares=load.shares, seed=self.seed + 1, prompts=self.prompts)
        if case.kind == STEADY:
            decode_engine.first_tokens(once)
            return decode_engine.steady(load, warmup=self.warmup, repeats=self.repeats, part=self.part)
        if case.kind == MEMORY:
            decode_engine.through_memory(once, requests=6 * case.lanes)
            return decode_engine.through_memory(load, requests=6 * case.lanes)
        decode_engine.end_to_end(once, rounds=1)
        return decode_engine.end_to_end(load)

    def _engine(self, case: Case) -> Engine:
        """The engine for this case and for all that differ in context and depth only."""
        key = (case.side, case.shape, case.lanes, case.kind)
        if self._held.get("engine_key") != key:
            self._held.pop("engine", None)
            model = self._model(case)
            forget(self.device)
            same = [one for one in self.all_cases if (one.side, one.shape, one.lanes, one.kind) == key]
            tokens = max((self._tokens(one) for one in same), default=self._tokens(case))
            most = model.config.max_position_embeddings
            settings: dict[str, Any] = {"lanes": case.lanes, "tokens": tokens if most is None else min(tokens, most)}
            if case.kind == MEMORY:
                # Rows for `lanes` sequences of full depth and average length, and lanes enough for shallower ones.
                rows = case.lanes * (case.context + case.new) * model.config.iterations
                settings |= {"lanes": 3 * case.lanes, "rows": rows}
            settings["drafts"] = model.config.iterations - 1 if case.side == DRAFTING else 0
            self._held |= {"engine": Engine(model, **settings), "engine_key": key}
        return self._held["engine"]

    def _tokens(self, case: Case) -> int:
        """How long the sequences of a case get."""
        steps = {"warmup": self.warmup, "repeats": self.repeats, "part": self.part}
        new = {STEADY: decode_engine.steady_length(case, **steps), MEMORY: 2 * case.new}
        return case.context + new.get(case.kind, case.new)

    def _model(self, case: Case) -> AdaPonderForCausalLM:
        if self.checkpoint is not None:
            return self.checkpoint
        return self._kept(("ours", case.shape, case.side == VANILLA), lambda: build(self.config(case), **self._how))

    def _kept(self, key: object, make: Callable[[], Any]) -> Any:
        """The model under this key; another one is given back first."""
        if self._held.get("model_key") != key:
            self.forget()
            self._held |= {"model": make(), "model_key": key}
        return self._held["model"]

    @property
    def _how(self) -> dict[str, Any]:
        return {"device": self.device, "dtype": self.dtype, "seed": self.seed}

    # --- outside of it ------------------------------------------------------------------------------------------

    def _outside(self, case: Case) -> Measured:
        self._held.pop("engine", None)
        self._held.pop("engine_key", None)
        new, ids = _NEW[case.side], self._ids(case)
        if case.side == PORTABLE:
            model = self._model(case)
            shares = case_shares(case, model.config.iterations)
            policy = None if shares is None else _forced(shares, case, new, self.seed, self.device)
            run = _generating(model, ids, policy=policy)
        else:
            stock = self._kept(("stock", case.shape), lambda: build_stock(self.config(case), **self._how))
            if case.side == HF_BATCH:
                return _continuous(stock, ids.tolist(), new=new, device=self.device)
            shares, run = None, _generating(stock, ids)
        return _timed(run, case, new=new, shares=shares or (1.0,), device=self.device)

    def _ids(self, case: Case) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        size = self.config(case).vocab_size
        return torch.randint(size, (case.lanes, case.context), generator=generator).to(self.device)


def _forced(shares: Sequence[float], case: Case, new: int, seed: int, device: torch.device) -> ForcedDepths:
    rows = [drawn(shares, case.context + new, seed=seed + lane) for lane in range(case.lanes)]
    return ForcedDepths(torch.tensor(rows, device=device))


def _generating(model: Any, ids: Tensor, **more: Any) -> Callable[[int], None]:
    """A function that makes so many tokens of every sequence."""
    more = {name: value for name, value in more.items() if value is not None}

    @torch.no_grad()
    def run(new: int) -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=True,
            pad_token_id=0,
            **more,
        )

    return run


def _timed(
    run: Callable[[int], None], case: Case, *, new: int, shares: Sequence[float], device: torch.device
) -> Measured:
    """Tokens per second after the first: the time of ``new`` tokens less that of one."""
    run(2)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    first = _seconds(run, 1, device)
    rates = [case.lanes * (new - 1) / max(1e-9, _seconds(run, new, device) - first) for _ in range(2)]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    between = [case.lanes / rate for rate in rates]
    return Measured(
        rates=rates,
        first=[first],
        between=between,
        shares=tuple(shares),
        context=case.context + new / 2,
        resident=case.lanes,
        peak_bytes=peak,
    )


def _seconds(run: Callable[[int], None], new: int, device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    run(new)
    _wait(device)
    return time.perf_counter() - began


def _continuous(stock: PreTrainedModel, prompts: list[list[int]], *, new: int, device: torch.device) -> Measured:
    """Hugging Face's continuous batching, prompts included: it does not say when a token came."""
    settings = GenerationConfig(max_new_tokens=new, do_sample=True, eos_token_id=-1, pad_token_id=0)
    model: Any = stock
    model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
    _wait(device)
    began = time.perf_counter()
    outputs = model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
    _wait(device)
    made = sum(len(output.generated_tokens) for output in outputs.values())
    if not made:
        raise RuntimeError("generate_batch made no token")
    rate = made / (time.perf_counter() - began)
    return Measured(rates=[rate], shares=(1.0,), context=len(prompts[0]) + new / 2, resident=len(prompts))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
