"""The family by name: one line registers a method. Names are known without importing torch."""

from __future__ import annotations

import importlib
from typing import Any, Literal, NamedTuple

from adaponder.errors import ConfigError, choice, shown

# Embedding scales that depend on the hidden size d, as a recipe writes them.
Scale = Literal["sqrt(d)", "sqrt(2.5 d)"]


class _Entry(NamedTuple):
    """Where a method's class stands (``module:Class``, or the class itself).

    ``embedding_scale`` is what a model trained from scratch has unless told otherwise: the same for every method of
    one comparison, vanilla included; loop's is its release's. It stands here and not with the other facts, in the
    class, because the hash of a recipe contains it: ``adaponder recipes`` takes one second, importing torch four more.
    """

    where: str | type
    embedding_scale: Scale = "sqrt(d)"


_FAMILY: dict[str, _Entry] = {
    "adaponder": _Entry("adaponder.methods.adaponder:AdaPonder"),
    "ponder": _Entry("adaponder.methods.ponder:Ponder"),
    "loop": _Entry("adaponder.methods.loop:Loop", embedding_scale="sqrt(2.5 d)"),
    "pause": _Entry("adaponder.methods.pause:Pause"),
    "mor": _Entry("adaponder.methods.mor:MixtureOfRecursions"),
    "ouro": _Entry("adaponder.methods.ouro:Ouro"),
    "act": _Entry("adaponder.methods.act:AdaptiveComputationTime"),
    "pondernet": _Entry("adaponder.methods.pondernet:PonderNet"),
    "anytime": _Entry("adaponder.methods.anytime:Anytime"),
    "relay": _Entry("adaponder.methods.relay:Relay"),
    "reread": _Entry("adaponder.methods.reread:Reread"),
    "vanilla": _Entry("adaponder.methods.loop:Vanilla"),
}

DEFAULT_METHOD = "adaponder"  # of a model or recipe that names none
PLAIN_METHOD = "vanilla"  # computes what the stock decoder computes


def method_names() -> tuple[str, ...]:
    """Every registered method, in the order in which they are listed to a user."""
    return tuple(_FAMILY)


def method_class(name: str) -> Any:
    """The class of a method, a subclass of :class:`adaponder.methods.Method`; imported when first asked for."""
    where = _entry(name).where
    if isinstance(where, str):
        module, _, attribute = where.partition(":")
        return getattr(importlib.import_module(module), attribute)
    return where


def scale_from_scratch(name: str) -> Scale:
    """The embedding scale of a model of this method that is trained from scratch, unless told otherwise."""
    return _entry(name).embedding_scale


def register_method(name: str, method: type, *, embedding_scale: Scale = "sqrt(d)") -> None:
    """Makes a method of one's own known by ``name`` to configs, recipes and commands of this process.

    Args:
        name: not yet taken, unless by this same class.
        method: a subclass of :class:`adaponder.methods.Method`.
        embedding_scale: what a model trained from scratch has unless told otherwise.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f"register_method({shown(name)}, …): a name of letters, digits and _ is needed")
    base = importlib.import_module("adaponder.methods.base").Method
    call = f"register_method({name!r}, {shown(method)})"
    if not (isinstance(method, type) and issubclass(method, base)):
        raise ConfigError(f"{call}: a subclass of adaponder.methods.Method is needed")
    if name in _FAMILY and method_class(name) is not method:
        raise ConfigError(f"{call}: {method_class(name).__qualname__} has that name; choose another")
    _FAMILY[name] = _Entry(method, embedding_scale)


def _entry(name: str) -> _Entry:
    if not isinstance(name, str) or name not in _FAMILY:
        raise ConfigError(f"method={shown(name)}: {choice(name, method_names())}")
    return _FAMILY[name]
