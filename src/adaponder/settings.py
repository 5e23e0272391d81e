"""A model's settings, said once with their types and ranges: config, recipe and command line derive from this list."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from adaponder.errors import ConfigError

Method = Literal["adaponder", "ponder", "loop", "pause", "mor", "ouro", "vanilla"]
METHODS: tuple[str, ...] = get_args(Method)

PonderOn = Literal["probabilities", "logits"]

# Embedding scales that depend on the hidden size d, as a recipe writes them: the factor on d under the root.
Scale = Literal["sqrt(d)", "sqrt(2.5 d)"]
SCALES: dict[str, float] = {"sqrt(d)": 1.0, "sqrt(2.5 d)": 2.5}


def scale_from_scratch(method: str) -> Scale:
    """The embedding scale of a model trained from scratch unless told otherwise.

    The same for every method, vanilla included, so that a comparison compares methods; loop's is its release's.
    """
    return "sqrt(2.5 d)" if method == "loop" else "sqrt(d)"


def scale_of(rule: str, hidden_size: int) -> float:
    """The number that a rule of ``SCALES`` means at that hidden size."""
    return math.sqrt(SCALES[rule] * hidden_size)


# --- ranges --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """The numbers from ``low`` to ``high``; ``above`` and ``below`` leave out the end itself. NaN is in no span."""

    low: float
    high: float
    above: bool = False
    below: bool = False
    because: str = ""

    def __contains__(self, value: float) -> bool:
        reaches = value > self.low if self.above else value >= self.low
        return reaches and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        low, high = _brief(self.low), _brief(self.high)
        if self.above:
            return f"above {low} and below {high}" if self.below else f"above {low} and up to {high}"
        return f"from {low} to below {high}" if self.below else f"from {low} to {high}"


def limited(
    low: float, high: float, *, default: Any = None, above: bool = False, below: bool = False, because: str = ""
) -> Any:
    """A dataclass field whose numbers lie in that span; ``because`` is told to who leaves it."""
    return dataclasses.field(default=default, metadata={"span": Span(low, high, above, below, because)})


def check_fields(values: Any, prefix: str = "") -> None:
    """Raises an error that names the first field of a dataclass whose value has not its type or leaves its span."""
    check_against(type(values), lambda name: getattr(values, name), prefix)


def check_against(kind: type, value_of: typing.Callable[[str], Any], prefix: str = "") -> None:
    """As :func:`check_fields` for values that stand elsewhere: ``value_of(name)`` for every field of ``kind``."""
    for name, hint, span in _declared(kind):
        value = value_of(name)
        if not fits(value, hint, span):
            raise ConfigError(f"{prefix}{name}={shown(value)}: {needed(value, hint, span)}")


@lru_cache(maxsize=16)
def _declared(kind: type) -> tuple[tuple[str, Any, Span | None], ...]:
    hints = typing.get_type_hints(kind)
    return tuple((item.name, hints[item.name], item.metadata.get("span")) for item in dataclasses.fields(kind))


def fits(value: Any, hint: Any, span: Span | None) -> bool:
    """Whether ``value`` has the type ``hint`` and every number in it lies in ``span`` and is finite."""
    origin, arguments = typing.get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, argument, span) for argument in arguments)
    if origin is Literal:
        return any(type(value) is type(word) and value == word for word in arguments)
    if origin is tuple:
        parts = [arguments[0]] * len(value) if isinstance(value, (list, tuple)) and ... in arguments else arguments
        return (
            isinstance(value, (list, tuple))
            and len(value) == len(parts)
            and all(fits(part, each, span) for part, each in zip(value, parts, strict=True))
        )
    if hint in (int, float):
        number = isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
        return number and math.isfinite(_as_float(value)) and (span is None or value in span)
    return hint is Any or isinstance(value, origin or hint)


def needed(value: Any, hint: Any, span: Span | None) -> str:
    """What a field wants instead of ``value``, and why."""
    origin, arguments = typing.get_origin(hint), get_args(hint)
    if origin is Literal:
        words = [str(word) for word in arguments]
        near = difflib.get_close_matches(str(value), words, n=1) if len(words) > 3 else []
        return f"choose one of {', '.join(words)}" + (f"; did you mean {near[0]}?" if near else "")
    why = f"; {span.because}" if span and span.because else ""
    return f"{_words(hint, span)} is needed{why}"


def _words(hint: Any, span: Span | None) -> str:
    origin, arguments = typing.get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_words(argument, span) for argument in arguments if argument is not type(None))
    if origin is Literal:
        return " or ".join(str(word) for word in arguments)
    if origin is tuple:
        count = "a list of numbers" if ... in arguments else f"a list of {len(arguments)} numbers"
        return f"{count}, each {span}" if span else count
    if hint in (int, float):
        kind = "a whole number" if hint is int else "a number"
        return f"{kind} {span}" if span else kind
    return {bool: "true or false", str: "text"}.get(hint, "a mapping")


def shown(value: Any) -> str:
    """A value as an error shows it: short, whatever it is."""
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of too many digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _brief(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


# --- the settings --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """The settings of the recurrence around a backbone; :class:`adaponder.config.AdaPonderConfig` says what each means.

    ``None`` leaves a setting open: to what a checkpoint was trained with, else to the config's default.
    (``ponder_on`` is the one setting of the config that a recipe has elsewhere: ``train.ponder_on``.)
    """

    method: Method = "adaponder"
    iterations: int | None = limited(1, 1024, because="a token must be read at least once")
    tau: float | None = limited(0, 1, above=True, below=True, because="it is a threshold on a probability")
    gate_width: int | None = limited(0, 1024, because="0 is a linear gate, else a multiple of the hidden size")
    gate_bias: float | None = limited(-1000, 1000)
    shared_gate: bool | None = None
    embedding_scale: float | Literal["sqrt(d)", "sqrt(2.5 d)"] | None = limited(0, 1_000_000, above=True)
    initial_multiplier: float | None = limited(0, 1_000_000, above=True)
    expectation_top_k: int | None = limited(1, 100_000_000)
    reuse: Literal["state", "kv", "none"] | None = None
    ponder_pool: Literal["all", "closed"] | None = None
    pause_token_id: int | None = limited(0, 2**31 - 1, because="it is a slot of the vocabulary")
    capacities: tuple[float, ...] | None = limited(0, 1, above=True)
    router_alpha: float | None = limited(0, 1_000_000, above=True)
    router_loss_weight: float | None = limited(0, 1_000_000)
    exit_threshold: float | None = limited(0, 1, above=True, because="it is a probability")
    exit_entropy_weight: float | None = limited(0, 1_000_000)
