"""The names of the methods, and the embedding scale of each: known without importing torch.

The classes stand in :mod:`adaponder.methods`, under the same names.
"""

from __future__ import annotations

from typing import Literal

from adaponder.errors import ConfigError, choice, shown

# Embedding scales that depend on the hidden size d, as a recipe writes them.
Scale = Literal["sqrt(d)", "sqrt(2.5 d)"]

# What a model trained from scratch has unless its config says otherwise: the same for every method of one comparison,
# vanilla included; loop's is its release's. It stands here and not with the other facts, in the class, because the hash
# of a recipe contains it: `adaponder recipes` takes one second, importing torch four more.
_SCALES: dict[str, Scale] = {
    "adaponder": "sqrt(d)",
    "ponder": "sqrt(d)",
    "loop": "sqrt(2.5 d)",
    "pause": "sqrt(d)",
    "mor": "sqrt(d)",
    "ouro": "sqrt(d)",
    "act": "sqrt(d)",
    "pondernet": "sqrt(d)",
    "anytime": "sqrt(d)",
    "relay": "sqrt(d)",
    "reread": "sqrt(d)",
    "vanilla": "sqrt(d)",
}

DEFAULT_METHOD = "adaponder"  # of a model or recipe that names none
PLAIN_METHOD = "vanilla"  # computes what the stock decoder computes


def method_names() -> tuple[str, ...]:
    """Returns every registered method, in the order in which they are listed to a user."""
    return tuple(_SCALES)


def check_method(name: str) -> str:
    """Returns ``name`` if it is a registered method; raises otherwise."""
    if not isinstance(name, str) or name not in _SCALES:
        raise ConfigError(f"method={shown(name)}: {choice(name, method_names())}")
    return name


def scale_from_scratch(name: str) -> Scale:
    """Returns the default embedding scale of a model of this method that is trained from scratch."""
    return _SCALES[check_method(name)]


def register_name(name: str, embedding_scale: Scale) -> None:
    """Adds a method's name; :func:`adaponder.methods.register_method` adds its class too."""
    _SCALES[name] = embedding_scale
