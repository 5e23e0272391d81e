"""A model's settings, said once with their types and ranges: config, recipe and command line derive from this list."""

# ruff: noqa: RUF009 (a call of `setting` makes a dataclass field, as `dataclasses.field` does)

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from adaponder.errors import ConfigError, choice, shown
from adaponder.registry import DEFAULT_METHOD, Scale, method_names

PonderOn = Literal["probabilities", "logits"]

# The factor on the hidden size d under the root, by the name of the scale.
SCALES: dict[str, float] = {"sqrt(d)": 1.0, "sqrt(2.5 d)": 2.5}


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


@dataclass(frozen=True)
class Words:
    """The words that ``listed()`` returns at the moment it is asked: a choice that may grow."""

    listed: Callable[[], Sequence[str]]


Limit = Span | Words | None


def limited(
    low: float, high: float, *, default: Any = None, above: bool = False, below: bool = False, because: str = ""
) -> Any:
    """A dataclass field whose numbers lie in that span; ``because`` is told to who leaves it."""
    return dataclasses.field(default=default, metadata={"span": Span(low, high, above, below, because)})


def check_fields(values: Any, prefix: str = "") -> None:
    """Raises an error that names the first field of a dataclass whose value has not its type or leaves its span."""
    check_against(type(values), values, prefix)


def check_against(kind: type, values: Any, prefix: str = "") -> None:
    """As :func:`check_fields`, by the fields of ``kind``, for any object with these attributes."""
    for name, hint, limit in _declared(kind):
        value = getattr(values, name)
        if not fits(value, hint, limit):
            raise ConfigError(f"{prefix}{name}={shown(value)}: {needed(value, hint, limit)}")


@functools.lru_cache(maxsize=16)
def _declared(kind: type) -> tuple[tuple[str, Any, Limit], ...]:
    hints = typing.get_type_hints(kind)
    return tuple((item.name, hints[item.name], item.metadata.get("span")) for item in dataclasses.fields(kind))


def fits(value: Any, hint: Any, span: Limit) -> bool:
    """Whether ``value`` has the type ``hint``, and is one of the words or lies in the span, if there is one.

    Numbers must be finite in any case.
    """
    if isinstance(span, Words):
        return isinstance(value, str) and value in span.listed()
    origin, arguments = typing.get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, argument, span) for argument in arguments)
    if origin is Literal:
        return any(type(value) is type(word) and value == word for word in arguments)
    if origin is tuple:
        return isinstance(value, (list, tuple)) and _parts_fit(value, arguments, span)
    if hint in (int, float):
        number = isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
        return number and math.isfinite(_as_float(value)) and (span is None or value in span)
    return hint is Any or isinstance(value, origin or hint)


def _parts_fit(values: Sequence[Any], hints: Sequence[Any], span: Limit) -> bool:
    """:func:`fits` for each value of a tuple; ``hints`` end with ``...`` where all values have the first type."""
    hints = [hints[0]] * len(values) if ... in hints else hints
    return len(values) == len(hints) and all(fits(value, hint, span) for value, hint in zip(values, hints, strict=True))


def needed(value: Any, hint: Any, span: Limit) -> str:
    """What a field wants instead of ``value``, and why."""
    if isinstance(span, Words):
        return choice(value, span.listed())
    if typing.get_origin(hint) is Literal:
        return choice(value, [str(word) for word in get_args(hint)])
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


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _brief(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


# --- the settings --------------------------------------------------------------------------------------------------


def setting(
    default: Any,
    meaning: str,
    limit: Limit = None,
    *,
    always: bool = False,
    elsewhere: str | None = None,
    option: str | None = None,
) -> Any:
    """A field of :class:`Recurrence`: its default in a config, what it means, and the values it may have.

    ``always``: a recipe cannot leave it open. ``elsewhere``: where a recipe has it, if not in its section ``model``.
    ``option``: it is an option of ``adaponder convert`` too, with this help, in which ``{default}`` is its default.
    """
    metadata = {"span": limit, "meaning": meaning, "always": always, "elsewhere": elsewhere, "option": option}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class Recurrence:
    """The settings of the recurrence around a backbone: the one list of names, types, defaults, ranges and meanings.

    :class:`adaponder.config.AdaPonderConfig` inherits these fields, a recipe's section ``model`` has them as
    :func:`left_open` makes them, and ``adaponder convert`` takes its options from here.
    """

    method: str = setting(DEFAULT_METHOD, "which recurrence", Words(method_names), always=True)
    iterations: int = setting(
        4,
        "K, the most times a token is read (PonderLM's pondering_steps + 1; pause: 1 + pauses)",
        Span(1, 1024, because="a token must be read at least once"),
        option="K; default {default}, or what the source was trained with.",
    )
    tau: float = setting(
        1e-4,
        "a token halts once its gate s < tau (eq. 4)",
        Span(0, 1, above=True, below=True, because="it is a threshold on a probability"),
        option="A token halts below this, between 0 and 1; default {default}.",
    )
    gate_width: int = setting(
        4,
        "hidden width of a gate as a multiple of the hidden size; 0 makes the gate linear",
        Span(0, 1024, because="0 is a linear gate, else a multiple of the hidden size"),
        option="Gate width in hidden sizes; 0 is linear; default {default}.",
    )
    gate_bias: float = setting(
        4.0,
        "where gates start: s = sigmoid(gate_bias)",
        Span(-1000, 1000),
        option="Gates start at sigmoid of this; default {default}.",
    )
    shared_gate: bool = setting(False, "one gate for all iterations (the paper's ablation) instead of one each")
    embedding_scale: float | Scale | None = setting(
        None,
        "factor on embeddings and on the table of the mixture: a number, sqrt(d) or sqrt(2.5 d); once built it is a "
        "number. None is what training from scratch uses: sqrt(d), for loop sqrt(2.5 d). Conversions of stock models "
        "have 1, so that vanilla is the stock model",
        Span(0, 1_000_000, above=True),
        option="Default: as the source was trained.",
    )
    initial_multiplier: float = setting(
        1.0,
        "further factor on the first embedding only (PonderLM's mutiply_pondering_steps)",
        Span(0, 1_000_000, above=True),
    )
    expectation_top_k: int | None = setting(
        None, "mix only the k likeliest tokens' embeddings; None mixes the whole vocabulary", Span(1, 100_000_000)
    )
    reuse: Literal["state", "kv", "none"] = setting(
        "state",
        "what a halted token keeps. state: keys, values and hidden state; kv: keys and values only (the paper's "
        "equations); none: nothing, it changes on like an active one (the ablation)",
    )
    ponder_on: PonderOn = setting(
        "probabilities", "the ponder loss acts on gate probabilities or logits", elsewhere="train.ponder_on"
    )
    ponder_pool: Literal["all", "closed", "each"] = setting(
        "all",
        "which gates the ponder loss ranks. all: those of every iteration together; closed: the same, later gates of a "
        "halted token counted as constant 0; each: those of each iteration by themselves, so that some halt at each",
    )
    pause_token_id: int | None = setting(
        None,
        "an unused vocabulary slot that serves as pause token; None learns a vector of its own",
        Span(0, 2**31 - 1, because="it is a slot of the vocabulary"),
    )
    capacities: list[float] | None = setting(
        None,
        "mor, share of tokens each recursion keeps in training; the first is 1 (every token is read once)",
        Span(0, 1, above=True),
    )
    router_alpha: float = setting(0.1, "mor, factor on the router's sigmoid", Span(0, 1_000_000, above=True))
    router_loss_weight: float = setting(1e-3, "mor, factor on the auxiliary loss", Span(0, 1_000_000))
    exit_threshold: float | None = setting(
        None,
        "a token exits once its cumulative exit probability reaches this. None: ouro 1 (never early), act 0.99 (its "
        "1 - epsilon), pondernet 0.5 (the median)",
        Span(0, 1, above=True, because="it is a probability"),
    )
    exit_entropy_weight: float = setting(0.1, "ouro, the beta of stage I", Span(0, 1_000_000))
    halting_cost: float = setting(
        0.01, "act, factor on the ponder cost: a token's depth and its remainder", Span(0, 1_000_000)
    )
    exit_prior: float = setting(
        0.3,
        "pondernet, chance to exit after each iteration under the geometric prior",
        Span(0, 1, above=True, below=True, because="it is a probability"),
    )
    exit_prior_weight: float = setting(
        0.01, "pondernet, factor on the divergence of exits from their prior", Span(0, 1_000_000)
    )
    state_scale: float = setting(
        1.0,
        "pondernet and reread, factor on the state that the next iteration reads beside the token's embedding; where "
        "embeddings are not scaled, a state of its full size drowns them",
        Span(0, 1_000_000, above=True),
    )
    halt_prior: float = setting(
        1.0,
        "anytime, tokens halt at random in training: P(depth > i) = halt_prior / (halt_prior + i)",
        Span(0, 1_000_000, above=True),
    )
    loss_prior: list[float] | None = setting(
        None,
        "anytime, share of each depth 1 … K in the training loss; they add up to 1, and None makes them equal",
        Span(0, 1),
    )
    gate_share: float = setting(
        0.0,
        "anytime, share of sequences in which the gates halt tokens in training, after train.capacity_warmup, "
        "instead of chance; above 0 tokens without a target learn to halt, from the first step on",
        Span(0, 1, below=True, because="gates have their labels from the other sequences"),
    )
    lookahead_delta: float = setting(
        0.05,
        "anytime, gates learn whether some later iteration lowers a token's loss by more than so many nats",
        Span(0, 1_000),
    )
    lookahead_by: Literal["tokens", "nats"] = setting(
        "tokens",
        "anytime, what a gate's label counts. tokens: each the same; nats: as much as the gain lies above or below "
        "lookahead_delta, so that a gate is half open where reading on gains that much on the average",
    )

    if TYPE_CHECKING:  # what AdaPonderConfig adds and methods read
        backbone_config: Any = None

        @property
        def hidden_size(self) -> int: ...

    @property
    def table_scale(self) -> float:
        """Factor on the embedding table of the mixture."""
        assert isinstance(self.embedding_scale, (int, float))  # resolved when a config is built
        return self.embedding_scale

    @property
    def input_scale(self) -> float:
        """Factor on the first embedding, E^0."""
        return self.table_scale * self.initial_multiplier

    def gates(self) -> int:
        """Returns how many decisions a token faces: none after the last iteration."""
        return self.iterations - 1


def left_open(settings: type) -> Any:
    """A frozen dataclass with the same fields, each of which may be left open by ``None``, which is their default.

    ``None`` leaves a setting to what a checkpoint was trained with, else to the config's default. Lists are tuples
    there, so that nobody changes them.
    """
    hints = typing.get_type_hints(settings)
    fields = []
    for item in dataclasses.fields(settings):
        if item.metadata["elsewhere"] is None:
            always = item.metadata["always"]
            hint = hints[item.name] if always else _as_tuple(hints[item.name]) | None
            default = item.default if always else None
            fields.append((item.name, hint, dataclasses.field(default=default, metadata=item.metadata)))
    return dataclasses.make_dataclass(f"Open{settings.__name__}", fields, frozen=True, kw_only=True)


def _as_tuple(hint: Any) -> Any:
    """The type with ``tuple[T, ...]`` for ``list[T]``."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return functools.reduce(operator.or_, (_as_tuple(part) for part in get_args(hint)))
    return tuple[(*get_args(hint), ...)] if typing.get_origin(hint) is list else hint


OpenRecurrence: Any = left_open(Recurrence)


def meanings(settings: type) -> str:
    """The fields of a list of settings as lines of a docstring's ``Args``."""
    wrap = functools.partial(textwrap.fill, width=120, initial_indent=" " * 8, subsequent_indent=" " * 12)
    return "\n".join(wrap(f"{item.name}: {item.metadata['meaning']}.") for item in dataclasses.fields(settings))
