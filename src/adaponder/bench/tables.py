"""Table cells of the lines of a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TRAIN_HEAD = ("variant", "tokens/s", "spread", "peak GiB", "x plain", "x memory", "of matmul")
LARGEST_HEAD = ("variant", "sequences", "tokens/s", "peak GiB")
PREFILL_HEAD = ("variant", "ms", "spread", "tokens/s", "x dense", "x compiled dense", "promised")
OPS_HEAD = ("implementation", "ms", "spread", "peak GiB", "x plain", "of matmul", "of copy")
DECODE_HEAD = (
    "who, lanes, context, depth",
    "tokens/s",
    "spread",
    "of limit",
    "first ms",
    "between ms",
    "p99",
    "resident",
    "waiting",
    "peak GiB",
    "idle",
)
NO_MEMORY = "out of memory"


def train_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row under :data:`TRAIN_HEAD`."""
    speed = _number(row["tokens_per_second"], ",.0f") if row["fits"] else NO_MEMORY
    ratios = (_number(row["times_plain"], ".2f"), _number(row["memory_of_plain"], ".2f"))
    return (row["variant"], speed, _share(row["spread"]), _gib(row), *ratios, _share(row["matmul_share"]))


def largest_cells(row: dict[str, Any], start: int) -> tuple[str, ...]:
    """A row under :data:`LARGEST_HEAD`."""
    batch = f"{row['batch']:,}" if row["batch"] else f"not even {start}"
    return (row["variant"], batch, _number(row["tokens_per_second"], ",.0f"), _gib(row))


def prefill_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row under :data:`PREFILL_HEAD`."""
    time = _number(row["median_seconds"] and row["median_seconds"] * 1e3, ",.2f") if row["fits"] else NO_MEMORY
    speed = _number(row["tokens_per_second"], ",.0f")
    ratios = (_number(row[name], ".2f") for name in ("times_dense", "times_compiled", "times_promised"))
    return (row["variant"], time, _share(row["spread"]), speed, *ratios)


def op_cells(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    """A row under :data:`OPS_HEAD`."""
    time = _number(row["milliseconds"], ",.3f") if row["fits"] else NO_MEMORY
    shares = (_share(row["matmul_share"]), _share(row["copy_share"]))
    return (name, time, _share(row["spread"]), _gib(row), _number(row["times_plain"], ".2f"), *shares)


def decode_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row under :data:`DECODE_HEAD`; of one that failed the name alone, as :func:`decode_problems` says why."""
    kind = "" if row["kind"] == "steady" else f" {row['kind']}"
    depth = row.get("mean_depth") or row["depth"]
    name = f"{row['side']}{kind}, {row['lanes']}, {row['context']}, {'own' if depth is None else f'{depth:.2f}'}"
    if row.get("accepted_share") is not None:
        name += f", {row['accepted_share']:.0%} kept"
    if not row["works"]:
        return (name, NO_MEMORY if NO_MEMORY in row["problem"].lower() else "failed", *[""] * (len(DECODE_HEAD) - 2))
    first, between = row["first_token_seconds"] or {}, row["between_tokens_seconds"] or {}
    seconds = (first.get("p50"), between.get("p50"), between.get("p99"))
    return (
        name,
        _number(row["tokens_per_second"], ",.0f"),
        _share(row["spread"]),
        _share(row["limit_share"]),
        *(_number(value and value * 1e3, ",.2f") for value in seconds),
        _number(row["resident_lanes"], ".1f"),
        str(row["waiting_requests"]),
        _gib(row),
        _share(row["idle_share"]),
    )


def decode_problems(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each row that failed."""
    return [f"{row['name']}: {row['problem']}" for row in rows if not row["works"]]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _gib(row: dict[str, Any]) -> str:
    return _number(row["peak_bytes"] and row["peak_bytes"] / 2**30, ".1f")
