"""Times decoding: one stream and many lanes, short and long contexts, tokens of every depth, ours beside others."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from adaponder.bench.decode_depths import shares_of
from adaponder.bench.decode_models import ITERATIONS
from adaponder.errors import AdaPonderError, in_one_line

# Ours, in the engine, and the plain decoder there.
ENGINE, VANILLA = "engine", "vanilla"
# Ours again, next tokens begun before they are certain.
DRAFTING = "drafting"
# Outside of it: our `generate`, Hugging Face's on the plain decoder, and its continuous batching.
PORTABLE, HF, HF_BATCH = "portable", "hf generate", "hf continuous"
IN_ENGINE = (ENGINE, VANILLA, DRAFTING)
PLAIN_SIDES = (VANILLA, HF, HF_BATCH)

STEADY, MEMORY, WHOLE = "steady", "memory", "end to end"


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        side: who decodes.
        shape: the model's shape, or the name of a checkpoint.
        lanes: sequences at a time.
        context: tokens of each prompt.
        depth: forced mean depth; ``None``: the model decides.
        kind: ``steady``, all lanes decoding; ``memory``, many requests through pools with rows for ``lanes`` sequences
            of full depth; ``end to end``, prompts and all.
        new: tokens that each request makes, where it runs to its end.
    """

    side: str
    shape: str
    lanes: int
    context: int
    depth: float | None = float(ITERATIONS)
    kind: str = STEADY
    new: int = 128

    @property
    def name(self) -> str:
        """What it is called on the screen and in the record."""
        depth = "" if self.side in PLAIN_SIDES else ", own depth" if self.depth is None else f", depth {self.depth:g}"
        kind = "" if self.kind == STEADY else f", {self.kind}"
        lanes = "one stream" if self.lanes == 1 else f"{self.lanes} lanes"
        return f"{self.shape}, {self.side}, {lanes}, context {self.context}{depth}{kind}"


@dataclass(frozen=True)
class Measured:
    """What a case's sequences did while it was timed.

    Attributes:
        rates: tokens per second in each of the timed parts.
        first: seconds from a request to its first token, of each request.
        between: seconds between two tokens of a sequence, of each token.
        shares: share of the timed tokens of depth 1, 2, …
        context: mean number of tokens that a row could see.
        resident: lanes that decoded, on average.
        waiting: requests that waited for memory.
        rows: rows of keys and values in use at the end of the timed parts.
        idle: share of the time in which the device waited for the host; ``None`` where that is not known.
        peak_bytes: most memory allocated; ``None`` where it is not counted.
        accepted: share of the drafted tokens that did follow; ``None`` where none was drafted.
    """

    rates: list[float]
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    shares: tuple[float, ...] = ()
    context: float = 0.0
    resident: float | None = None
    waiting: int = 0
    rows: int | None = None
    idle: float | None = None
    peak_bytes: int | None = None
    accepted: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """(Largest minus smallest) over the median."""
        return (max(self.rates) - min(self.rates)) / self.tokens_per_second


@dataclass(frozen=True)
class Result:
    """A case's measurement, or the one line that says why there is none."""

    case: Case
    measured: Measured | None = None
    problem: str | None = None


def cases(
    shapes: Sequence[str],
    *,
    lanes: Sequence[int] = (1, 4, 16, 64, 256),
    contexts: Sequence[int] = (128, 512, 2048),
    depths: Sequence[float] = (4.0, 3.7, 3.0, 2.0, 1.0),
    new: int = 128,
) -> list[Case]:
    """What ``adaponder bench decode`` measures of each shape, cases of one engine together.

    One stream and ``lanes`` at full depth over all contexts; every depth at the middle context; the other sides there,
    at full depth and at mean depth 2. ``new`` is the length of requests that run to their ends.
    """
    found: list[Case] = []
    middle, full, many = sorted(contexts)[len(contexts) // 2], max(depths), _many(lanes)
    low = 2.0 if 2.0 in depths else min(depths)
    for shape in shapes:
        for count in lanes:
            found += [Case(ENGINE, shape, count, context, full) for context in contexts]
            if count == many:
                found += [Case(ENGINE, shape, count, middle, depth) for depth in depths if depth != full]
        found += [Case(ENGINE, shape, max(2, many // 2), middle, depth, MEMORY, new) for depth in {full: 0, low: 0}]
        found.append(Case(DRAFTING, shape, min(lanes), min(contexts), full))
        for side in (VANILLA, PORTABLE, HF):
            counts = dict.fromkeys((min(lanes), many))
            found += [Case(side, shape, count, min(contexts), 1.0 if side in PLAIN_SIDES else full) for count in counts]
        found.append(Case(HF_BATCH, shape, many, min(contexts), 1.0, WHOLE, new))
    return list(dict.fromkeys(found))


def subset(shapes: Sequence[str]) -> list[Case]:
    """The rows that the aims are stated for, in a few minutes."""
    found = []
    for shape in shapes:
        found += [Case(side, shape, 1, 128) for side in (ENGINE, DRAFTING)]
        if shape != shapes[-1]:
            continue
        found += [Case(ENGINE, shape, 64, 512, depth) for depth in (4.0, 3.7, 2.0)]
        found += [Case(ENGINE, shape, 32, 512, depth, MEMORY) for depth in (4.0, 2.0)]
        found += [Case(VANILLA, shape, lanes, 128, 1.0) for lanes in (1, 64)]
        found += [Case(PORTABLE, shape, lanes, 128) for lanes in (1, 64)]
        found += [Case(HF, shape, lanes, 128, 1.0) for lanes in (1, 64)]
        found += [Case(HF_BATCH, shape, 64, 128, 1.0, WHOLE)]
    return found


def served(shape: str, *, lanes: Sequence[int] = (1, 32, 128), context: int = 1024, new: int = 128) -> list[Case]:
    """Requests from prompt to last token, at full depth, so many at a time."""
    return [Case(ENGINE, shape, count, context, float(ITERATIONS), WHOLE, new) for count in lanes]


def _many(lanes: Sequence[int]) -> int:
    """The number of lanes that sides and depths are compared at: 64, or the nearest there is."""
    return min(lanes, key=lambda count: abs(count - 64))


def compare(chosen: Iterable[Case], measure: Callable[[Case], Measured]) -> Iterator[Result]:
    """Yields each case's result as soon as there is one; a case that fails is a result that says why."""
    for case in chosen:
        try:
            yield Result(case, measure(case))
        except (AdaPonderError, RuntimeError, MemoryError, TypeError, ValueError, NotImplementedError) as error:
            # Memory that does not suffice, an option that an engine has not: the other rows are measured all the same.
            yield Result(case, problem=in_one_line(error))


def case_shares(case: Case, iterations: int) -> tuple[float, ...] | None:
    """The shares of depths that a case forces; ``None`` where it forces none."""
    if case.depth is None or case.side in PLAIN_SIDES:
        return None
    return shares_of(case.depth, iterations)


def as_row(result: Result, *, limit: float | None) -> dict[str, Any]:
    """A record's line; ``limit`` is the most tokens per second that the memory's rate allows."""
    case, measured = result.case, result.measured
    row: dict[str, Any] = {
        "name": case.name,
        **{name: getattr(case, name) for name in ("side", "shape", "lanes", "context", "depth", "kind", "new")},
        "works": measured is not None,
        "problem": result.problem,
    }
    if measured is None:
        return row
    depth = sum(number * share for number, share in enumerate(measured.shares, start=1))
    return row | {
        "tokens_per_second": measured.tokens_per_second,
        "spread": measured.spread,
        "rates": measured.rates,
        "mean_depth": depth or None,
        "first_token_seconds": _quantiles(measured.first),
        "between_tokens_seconds": _quantiles(measured.between),
        "limit_tokens_per_second": limit,
        "limit_share": None if limit is None else measured.tokens_per_second / limit,
        "resident_lanes": measured.resident,
        "waiting_requests": measured.waiting,
        "kv_rows": measured.rows,
        "idle_share": measured.idle,
        "peak_bytes": measured.peak_bytes,
        "accepted_share": measured.accepted,
    }


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How much faster ours is where two rows differ in one thing only: the depth, the side, or one stream."""
    by_case = {_key(row): row for row in rows if row.get("tokens_per_second")}
    found = []
    for key, row in by_case.items():
        if key.side == DRAFTING:
            others = {"over engine": by_case.get(replace(key, side=ENGINE))}
        elif key.side == ENGINE:
            full = by_case.get(replace(key, depth=float(ITERATIONS)))
            others = {f"over depth {ITERATIONS}": full if key.depth != ITERATIONS else None}
            others["over portable"] = by_case.get(replace(key, side=PORTABLE))
        else:
            continue
        for what, other in others.items():
            if other is not None:
                ratio = {"name": row["name"], "what": what}
                ratio["times"] = row["tokens_per_second"] / other["tokens_per_second"]
                if row.get("resident_lanes") and other.get("resident_lanes"):
                    ratio["lanes_times"] = row["resident_lanes"] / other["resident_lanes"]
                found.append(ratio)
    return found


def _key(row: dict[str, Any]) -> Case:
    return Case(**{name: row[name] for name in ("side", "shape", "lanes", "context", "depth", "kind", "new")})


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Median and 99th percentile."""
    if not values:
        return None
    tensor = torch.tensor(values, dtype=torch.float64)
    return {"p50": float(tensor.quantile(0.5)), "p99": float(tensor.quantile(0.99))}
