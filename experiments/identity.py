"""A hash of what a run computes: equal recipes have equal identities, whatever fields the package gains or loses."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adaponder.errors import InputError
from adaponder.files import read_yaml

# Fields of data that are left out: records carry a hash of the data instead.
_BY_HASH = ("source", "tokenizer", "validation")
# Fields of train that change how often a run logs and saves, or how it computes the same numbers.
_FREE = ("eval_every", "eval_tokens", "save_every", "keep", "log_every", "keep_logits", "compile_by")
# The square of the embedding scale over the hidden size, for models trained from scratch; 1 for all other methods.
_SCALES = {"loop": 2.5}


def identity(recipe: Mapping[str, Any]) -> str:
    """Hashes a resolved recipe without names, prose, logging, the data's location and fields at their default.

    Defaults are those of ``defaults.yaml``, not the package's: a field that is removed or added later changes no
    identity.
    """
    model = dict(recipe["model"])
    if isinstance(model["backbone"], Mapping):
        model["embedding_scale"] = _embedding_scale(model)
    decisive = {
        "model": _departures("model", model, ()),
        "data": _departures("data", recipe["data"], _BY_HASH),
        "train": _departures("train", recipe["train"], _FREE),
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def _embedding_scale(model: Mapping[str, Any]) -> float:
    """Returns the factor of the embeddings; recipes may write ``sqrt(d)`` or nothing."""
    stated = model.get("embedding_scale")
    if stated and not isinstance(stated, str):
        return float(stated)
    factor = {"sqrt(d)": 1.0, "sqrt(2.5 d)": 2.5}[stated] if stated else _SCALES.get(model.get("method", ""), 1.0)
    return math.sqrt(factor * model["backbone"]["hidden_size"])


@functools.cache
def frozen_defaults() -> Mapping[str, Mapping[str, Any]]:
    """Reads the default of each field, by section."""
    return read_yaml(Path(__file__).with_name("defaults.yaml"), InputError)


def _departures(section: str, values: Mapping[str, Any], ignored: Sequence[str]) -> dict[str, Any]:
    """Returns the fields that differ from their defaults; integers become floats, so that 1 equals 1.0."""
    defaults = frozen_defaults()[section]
    plain = {name: _plain(value) for name, value in values.items() if name not in ignored}
    return {name: value for name, value in plain.items() if value != defaults.get(name)}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
