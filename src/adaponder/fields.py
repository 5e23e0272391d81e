"""Declares each setting of models and requests once: name, type, default, range and meaning.

The engine's ``Request``, the config, recipes, command-line options and the server's bodies (so ``/openapi.json`` too)
derive from the dataclasses here, so their ranges cannot disagree. Importing this module imports only the standard
library; ``option`` imports typer, ``body_field`` pydantic.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from adaponder.errors import AdaPonderError, ConfigError, InputError, choice, shown
from adaponder.registry import DEFAULT_METHOD, Scale, method_names

PonderOn = Literal["probabilities", "logits"]

LARGEST_INT = 2**63 - 1  # the largest integer in a command line or a JSON body

# Maps a bound's name, as in ``pydantic.Field``, to its comparison and the comparison's words in errors.
_BOUNDS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "greater than"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "less than"),
}


@dataclass(frozen=True)
class Range:
    """An interval of numbers; ``bounds`` maps ``ge``, ``gt``, ``le``, ``lt`` to numbers, as in ``pydantic.Field``."""

    bounds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def parse(cls, interval: str) -> Range:
        """Parses an interval such as ``(0, 1]``; ``inf`` means no bound."""
        low, high = (_number(bound) for bound in interval[1:-1].split(","))
        bounds = {"ge" if interval[0] == "[" else "gt": low, "le" if interval[-1] == "]" else "lt": high}
        return cls({name: bound for name, bound in bounds.items() if not math.isinf(bound)})

    def __contains__(self, value: float) -> bool:
        return all(_BOUNDS[name][0](value, bound) for name, bound in self.bounds.items())

    def __str__(self) -> str:
        """Returns the range in words for errors, such as ``greater than 0 and at most 1``."""
        if {"ge", "le"} <= self.bounds.keys():
            return f"between {_brief(self.bounds['ge'])} and {_brief(self.bounds['le'])}"
        return " and ".join(f"{_BOUNDS[name][1]} {_brief(bound)}" for name, bound in self.bounds.items())


class Field(NamedTuple):
    """A value that a user can set. ``choices`` returns the allowed words; ``why`` is appended to errors."""

    name: str
    type: Any
    default: Any = dataclasses.MISSING
    meaning: str = ""
    range: Range = Range()
    choices: Callable[[], Sequence[str]] | None = None
    why: str = ""


def setting(
    default: Any,
    meaning: str,
    interval: str = "(-inf, inf)",
    *,
    choices: Callable[[], Sequence[str]] | None = None,
    why: str = "",
) -> Any:
    """Returns a dataclass field with help text ``meaning`` and a range such as ``(0, 1]``; see :class:`Field`."""
    metadata = {"meaning": meaning, "range": Range.parse(interval), "choices": choices, "why": why}
    return dataclasses.field(default=default, metadata={"field": metadata})


@functools.lru_cache(maxsize=32)
def fields_of(kind: type) -> Mapping[str, Field]:
    """Returns the fields of a dataclass by name."""
    hints = typing.get_type_hints(kind)
    return types.MappingProxyType(
        {
            item.name: Field(item.name, hints[item.name], item.default, **item.metadata.get("field", {}))
            for item in dataclasses.fields(kind)
        }
    )


def violation(field: Field, value: Any) -> str | None:
    """Returns an error text ``must be …`` if ``value`` is invalid for the field, else ``None``."""
    if fits(value, field.type, field):
        return None
    words = list(field.choices()) if field.choices else [str(word) for word in get_args(_literal(field.type))]
    problem = f"must be {choice(value, words)}" if words else f"must be {_allowed(field.type, field.range)}"
    return f"{problem}; {field.why}" if field.why else problem


def check_fields(
    values: Any, prefix: str = "", *, kind: type | None = None, error: type[AdaPonderError] = ConfigError
) -> None:
    """Raises an ``error`` that names the first attribute of ``values`` with an invalid value.

    ``kind`` is the dataclass whose fields are checked, by default the type of ``values``; errors begin with ``prefix``.
    """
    for name, field in fields_of(kind or type(values)).items():
        value = getattr(values, name)
        if problem := violation(field, value):
            raise error(f"{prefix}{name}={shown(value)} {problem}")


def fits(value: Any, hint: Any, field: Field) -> bool:
    """Returns whether a value has the type ``hint`` and is in the field's range; numbers must be finite."""
    origin, arguments = typing.get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, argument, field) for argument in arguments)
    if field.choices is not None and hint is not type(None):
        return isinstance(value, str) and value in field.choices()
    if origin is Literal:
        return any(type(value) is type(word) and value == word for word in arguments)
    if origin in (list, tuple):
        return isinstance(value, (list, tuple)) and _items_fit(value, origin, arguments, field)
    if hint in (int, float):
        number = isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
        # False for infinity, NaN and integers larger than any float.
        return number and abs(value) <= sys.float_info.max and value in field.range
    return hint is Any or isinstance(value, origin or hint)


def _items_fit(values: Sequence[Any], origin: Any, hints: Sequence[Any], field: Field) -> bool:
    if origin is list or ... in hints:
        hints = [hints[0]] * len(values)
    return len(values) == len(hints) and all(fits(item, hint, field) for item, hint in zip(values, hints, strict=True))


def _literal(hint: Any) -> Any:
    """Returns the ``Literal[…]`` in a hint ``Literal[…]`` or ``Literal[…] | None``; ``None`` for any other hint."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        members = [member for member in get_args(hint) if member is not type(None)]
        hint = members[0] if len(members) == 1 else hint
    return hint if typing.get_origin(hint) is Literal else None


def _allowed(hint: Any, limits: Range) -> str:
    """Describes the values that a type and a range allow, such as ``a whole number at least 1``."""
    origin, arguments = typing.get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_allowed(argument, limits) for argument in arguments if argument is not type(None))
    if origin is Literal:
        return " or ".join(str(word) for word in arguments)
    bounds = f" {limits}" if limits.bounds else ""
    if origin in (list, tuple):
        count = "" if origin is list or ... in arguments else f"{len(arguments)} "
        return f"a list of {count}numbers" + (f", each{bounds}" if bounds else "")
    if hint in (int, float):
        return f"{'a whole number' if hint is int else 'a number'}{bounds}"
    return {bool: "true or false", str: "text"}.get(hint, "a mapping")


def _number(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _brief(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


# Maps a removed ``section.field`` of a recipe or config to (its default, the last version that had it).
REMOVED: dict[str, tuple[Any, str]] = {}


def is_removed(path: str, value: Any) -> bool:
    """Returns whether the field ``path`` was removed.

    Raises if its ``value`` is neither ``None`` nor the default in the last version that had the field.
    """
    if path not in REMOVED:
        return False
    default, version = REMOVED[path]
    same = list(value) == list(default) if isinstance(default, (list, tuple)) and value else value == default
    if value is not None and not same:
        raise ConfigError(
            f"{path}={shown(value)} was removed; adaponder {version} is the last version that has it, and without it "
            f"{path} is {shown(default)}"
        )
    return True


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings of a completion: sampling, stopping and optional outputs.

    The engine's ``Request`` inherits these fields; ``adaponder generate`` and the server's request bodies take their
    ranges and help from them.
    """

    max_new_tokens: int = setting(128, "Maximum number of tokens to generate.", "[1, inf)")
    min_new_tokens: int = setting(0, "Generate at least this many tokens before an end-of-text or stop id.", "[0, inf)")
    temperature: float = setting(1.0, "Sampling temperature; 0 always takes the most likely token.", "[0, 100]")
    top_k: int = setting(0, "Sample from the k most likely tokens; 0 keeps all.", "[0, inf)")
    top_p: float = setting(
        1.0,
        "Sample from the fewest most likely tokens with at least this total probability.",
        "(0, 1]",
        why="temperature=0 takes the most likely token",
    )
    min_p: float = setting(
        0.0, "Sample from tokens at least this many times as probable as the most likely one.", "[0, 1]"
    )
    repetition_penalty: float = setting(
        1.0,
        "Divide positive and multiply negative logits of tokens in prompt or output by this; above 1 they get less "
        "likely.",
        "[1e-6, 1e6]",
    )
    presence_penalty: float = setting(0.0, "Subtract this from the logits of tokens in the output.", "[-2, 2]")
    frequency_penalty: float = setting(
        0.0, "Subtract this from a token's logit for each time it is in the output.", "[-2, 2]"
    )
    seed: int = setting(0, "Random seed of sampling, and of policies that draw random numbers.")
    samples: int = setting(1, "Number of completions of each prompt.", "[1, 128]")
    ignore_eos: bool = setting(False, "Generate past the model's end-of-text ids.")
    log_probabilities: int | None = setting(
        None, "Return log-probabilities: of each token and of this many most likely tokens.", "[0, 20]"
    )
    prompt_log_probabilities: int | None = setting(
        None, "Like log_probabilities, but for the prompt's tokens from the second on.", "[0, 20]"
    )
    tau: float | None = setting(None, "Threshold of the learned gate, instead of the checkpoint's.", "[0, 1]")
    max_iterations: int | None = setting(None, "Maximum depth of each token.", "[1, 1024]")
    gates: bool = setting(False, "Return the gates of each token.")
    iteration_top: int = setting(0, "Return this many most likely tokens after each iteration.", "[0, 20]")


REQUEST_FIELDS = fields_of(Sampling)


def check(name: str, value: Any) -> Any:
    """Returns ``value``; raises :class:`InputError` unless it is valid for the field ``name`` of a request.

    Converts numpy and torch numbers to int or float first. ``None`` is valid if the field's type includes it.
    """
    field = REQUEST_FIELDS[name]
    plain = as_plain_number(value, field.type)
    if problem := violation(field, plain):
        raise InputError(f"{name}={shown(value)} {problem}")
    return plain


def as_plain_number(value: Any, hint: Any) -> Any:
    """Converts a numpy or torch number to the int or float that ``hint`` requires; returns other values unchanged."""
    if value is None or isinstance(value, (bool, str)):
        return value
    kinds = (hint, *get_args(hint))
    try:
        if int in kinds:
            return operator.index(value)
        return float(value) if float in kinds else value
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor with more than one element
        return value


@dataclass(kw_only=True)
class Recurrence:
    """The settings of the recurrence around a backbone.

    ``AdaPonderConfig`` inherits these fields. In a recipe's section ``model``, each may also be ``None`` (unset);
    ``adaponder convert`` takes the help and ranges of its options from them.
    """

    method: str = setting(DEFAULT_METHOD, "which recurrence", choices=method_names)
    iterations: int = setting(
        4,
        "K, the maximum number of iterations per token (PonderLM's pondering_steps + 1; pause: 1 + pauses)",
        "[1, 1024]",
        why="every token needs at least one iteration",
    )
    tau: float = setting(
        1e-4, "a token halts once its gate s < tau (eq. 4)", "(0, 1)", why="it is a threshold on a probability"
    )
    gate_width: int = setting(
        4,
        "hidden width of a gate as a multiple of the hidden size; 0 makes the gate linear",
        "[0, 1024]",
        why="0 is a linear gate, else a multiple of the hidden size",
    )
    gate_bias: float = setting(4.0, "gates start at s = sigmoid(gate_bias)", "[-1000, 1000]")
    shared_gate: bool = setting(False, "one gate for all iterations (the paper's ablation) instead of one each")
    embedding_scale: float | Scale | None = setting(
        None,
        "factor on embeddings, also on expected ones: a number, sqrt(d) or sqrt(2.5 d), stored as a number. None: the "
        "default of training from scratch: sqrt(d), for loop sqrt(2.5 d). Conversions of stock models have 1, so that "
        "vanilla is the stock model",
        "(0, 1_000_000]",
    )
    initial_multiplier: float = setting(
        1.0, "further factor on the first embedding only (PonderLM's mutiply_pondering_steps)", "(0, 1_000_000]"
    )
    expectation_top_k: int | None = setting(
        None, "mix only the k likeliest tokens' embeddings; None mixes the whole vocabulary", "[1, 100_000_000]"
    )
    reuse: Literal["state", "kv", "none"] = setting(
        "state",
        "what a halted token keeps. state: keys, values and hidden state; kv: keys and values only (the paper's "
        "equations); none: nothing, it keeps changing like an active token (the ablation)",
    )
    ponder_on: PonderOn = setting("probabilities", "the ponder loss acts on gate probabilities or logits")
    ponder_pool: Literal["all", "closed", "each"] = setting(
        "all",
        "which gates the ponder loss ranks together. all: the gates of all iterations; closed: the same, but later "
        "gates of a halted token count as 0; each: the gates of one iteration, so that some tokens halt after each",
    )
    pause_token_id: int | None = setting(
        None,
        "an unused token id that serves as pause token; None: the pause is a learned vector",
        "[0, 2_147_483_647]",
        why="it is a token id",
    )
    capacities: list[float] | None = setting(
        None, "mor: share of tokens that each recursion computes in training; the first is 1 (all tokens)", "(0, 1]"
    )
    router_alpha: float = setting(0.1, "mor: factor on the router's sigmoid", "(0, 1_000_000]")
    router_loss_weight: float = setting(1e-3, "mor: factor on the routers' loss", "[0, 1_000_000]")
    exit_threshold: float | None = setting(
        None,
        "a token exits once its cumulative exit probability reaches this. None: ouro 1 (never early), act 0.99 (its "
        "1 - epsilon), pondernet 0.5 (the median)",
        "(0, 1]",
        why="it is a probability",
    )
    exit_entropy_weight: float = setting(0.1, "ouro: factor on the entropy of exits, beta of stage I", "[0, 1_000_000]")
    halting_cost: float = setting(
        0.01, "act: factor on the ponder cost, which is a token's depth plus its remainder", "[0, 1_000_000]"
    )
    exit_prior: float = setting(
        0.3,
        "pondernet: probability to exit after each iteration under the geometric prior",
        "(0, 1)",
        why="it is a probability",
    )
    exit_prior_weight: float = setting(
        0.01, "pondernet: factor on the divergence of exits from their prior", "[0, 1_000_000]"
    )
    state_scale: float = setting(
        1.0,
        "pondernet and reread: factor on the state that is added to the token's embedding for the next iteration; "
        "without an embedding scale, use less than 1, because embeddings are small beside the state",
        "(0, 1_000_000]",
    )
    halt_prior: float = setting(
        1.0, "anytime: random halts in training, P(depth > i) = halt_prior / (halt_prior + i)", "(0, 1_000_000]"
    )
    loss_prior: list[float] | None = setting(
        None, "anytime: share of each depth 1 … K in the training loss, adding up to 1; None: equal shares", "[0, 1]"
    )
    gate_share: float = setting(
        0.0,
        "anytime: share of training sequences whose tokens are halted by the gates instead of at random, after "
        "train.capacity_warmup; above 0, gates also learn to halt tokens without a target, from the first step on",
        "[0, 1)",
        why="gates have their labels from the other sequences",
    )
    lookahead_delta: float = setting(
        0.05,
        "anytime: gates learn whether a later iteration lowers a token's loss by more than this (nats)",
        "[0, 1_000]",
    )
    lookahead_by: Literal["tokens", "nats"] = setting(
        "tokens",
        "anytime: weight of a gate's label. tokens: all labels equally; nats: by the distance of the gain from "
        "lookahead_delta, so that a gate learns 1/2 if the expected gain is lookahead_delta",
    )

    if typing.TYPE_CHECKING:  # defined by AdaPonderConfig; methods read them
        backbone_config: Any = None

        @property
        def hidden_size(self) -> int: ...

    @property
    def table_scale(self) -> float:
        """The factor on the embedding table when expected embeddings are computed."""
        assert isinstance(self.embedding_scale, (int, float))  # resolved when a config is built
        return self.embedding_scale

    @property
    def input_scale(self) -> float:
        """The factor on the embeddings that make the first input, E^0."""
        return self.table_scale * self.initial_multiplier

    def gates(self) -> int:
        """Returns the number of gate evaluations of a token at full depth: one after each iteration but the last."""
        return self.iterations - 1


def meanings(kind: type) -> str:
    """Returns a line ``name: meaning`` for each field of a dataclass, for the section ``Args`` of a docstring."""
    wrap = functools.partial(textwrap.fill, width=120, initial_indent=" " * 8, subsequent_indent=" " * 12)
    return "\n".join(wrap(f"{field.name}: {field.meaning}.") for field in fields_of(kind).values())


def option(name: str, *flags: str, kind: type = Sampling, help: str | None = None, **more: Any) -> Any:
    """Returns a Typer option with a field's help and range: ``top_p: Annotated[float, option("top_p")] = 1.0``."""
    import typer

    field = fields_of(kind)[name]

    def checked(value: Any) -> Any:
        if value is not None and (problem := violation(field, value)):
            raise typer.BadParameter(f"{shown(value)} {problem}")
        return value

    kinds = (field.type, *get_args(field.type))
    if bool not in kinds:
        more = {"metavar": "N" if int in kinds else "X", "callback": checked, **more}
    text = help or f"{field.meaning[:1].upper()}{field.meaning[1:]}"
    return typer.Option(*flags, help=text, **more)


def body_field(name: str, **more: Any) -> Any:
    """Returns a pydantic field with a request field's help and range: ``Annotated[float, body_field("top_p")]``.

    Integers without a bound are limited to 64 bits. Arguments in ``more`` go to ``pydantic.Field`` and take precedence.
    """
    import pydantic

    field = REQUEST_FIELDS[name]
    bounds: Mapping[str, Any] = field.range.bounds
    if int in (field.type, *get_args(field.type)):
        lowest = {} if {"ge", "gt"} & bounds.keys() else {"ge": -LARGEST_INT}
        bounds = {**lowest, "le": LARGEST_INT, **bounds}
    details: dict[str, Any] = {"description": field.meaning, **bounds, **more}
    return pydantic.Field(**details)
