"""Lists the methods' names and default embedding scales, without importing torch.

The classes are in :mod:`adaponder.methods`, under the same names.
"""

from __future__ import annotations

import math
from typing import Literal

from adaponder.errors import ConfigError, choice, shown

# Embedding scales that depend on the hidden size d, as written in recipes, and their factor on d under the root.
Scale = Literal["sqrt(d)", "sqrt(2.5 d)"]
SCALES: dict[str, float] = {"sqrt(d)": 1.0, "sqrt(2.5 d)": 2.5}

# The default embedding scale of a model trained from scratch: the same for all methods, vanilla included, so that they
# can be compared; loop has the scale of its published model. The scales are here, not in the methods' classes, because
# the hash of a recipe contains them: `adaponder recipes` takes one second, importing torch would take four more.
_NAMES = ("adaponder", "ponder", "loop", "pause", "mor", "ouro", "act")
_NAMES += ("pondernet", "anytime", "relay", "reread", "vanilla")
_SCALES: dict[str, Scale] = {name: "sqrt(2.5 d)" if name == "loop" else "sqrt(d)" for name in _NAMES}

# Maps a removed method to the last version that had it.
REMOVED_METHODS: dict[str, str] = {}

DEFAULT_METHOD = "adaponder"  # of a model or recipe that names none
PLAIN_METHOD = "vanilla"  # computes what the stock decoder computes


def method_names() -> tuple[str, ...]:
    """Returns the names of all registered methods, in the order in which they are shown."""
    return tuple(_SCALES)


def check_method(name: str | None, prefix: str = "") -> str:
    """Returns ``name``; raises unless it is a registered method. Errors begin with ``prefix``, e.g. ``model.``."""
    if isinstance(name, str) and name in REMOVED_METHODS:
        version = REMOVED_METHODS[name]
        raise ConfigError(f"{prefix}method={name} was removed; adaponder {version} is the last version that has it")
    if not isinstance(name, str) or name not in _SCALES:
        raise ConfigError(f"{prefix}method={shown(name)} must be {choice(name, method_names())}")
    return name


def scale_from_scratch(name: str) -> Scale:
    """Returns a method's default embedding scale in training from scratch."""
    return _SCALES[check_method(name)]


def scale_of(rule: str, hidden_size: int) -> float:
    """Returns the embedding scale that ``rule``, a key of ``SCALES`` such as ``sqrt(d)``, gives for ``hidden_size``."""
    return math.sqrt(SCALES[rule] * hidden_size)


def register_name(name: str, embedding_scale: Scale) -> None:
    """Adds a method's name; :func:`adaponder.methods.register_method` adds the class too."""
    _SCALES[name] = embedding_scale
