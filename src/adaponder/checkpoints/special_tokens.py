"""Compares and aligns end token, padding token and maximum length of config, generation config and tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from adaponder.errors import CheckpointError
from adaponder.files import parse_json, read_json, write_whole

TOKENIZER, SETTINGS, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"


class SpecialTokens(NamedTuple):
    """Ids of a tokenizer's end (EOS) and padding tokens, and its ``model_max_length``; ``None`` if not set."""

    end: int | None
    padding: int | None
    length: int | None


def read_special_tokens(folder: Path) -> SpecialTokens | None:
    """Returns the special tokens of the tokenizer in ``folder``; ``None`` unless both of its JSON files are there."""
    if not all(os.path.lexists(folder / name) for name in (TOKENIZER, SETTINGS)):
        return None
    content, settings = read_json(folder / TOKENIZER), read_json(folder / SETTINGS)
    length = settings.get("model_max_length")
    return SpecialTokens(
        _id_of(folder, content, settings, "eos_token"),
        _id_of(folder, content, settings, "pad_token"),
        length if isinstance(length, int) and length < 10**20 else None,  # beyond: Hugging Face's "unknown"
    )


def _id_of(folder: Path, content: dict[str, Any], settings: dict[str, Any], role: str) -> int | None:
    token = settings.get(role)
    token = token.get("content") if isinstance(token, dict) else token
    if token is None:
        return None
    ids = _vocabulary(content)
    # Tokens that were added later may be in the settings only.
    later = settings.get("added_tokens_decoder")
    for index, entry in later.items() if isinstance(later, dict) else ():
        if isinstance(entry, dict) and index.isdecimal():
            ids.setdefault(str(entry.get("content")), int(index))
    if not isinstance(token, str) or token not in ids:
        raise CheckpointError(f"{folder / SETTINGS}: {role}={token!r} is not in the vocabulary of {TOKENIZER}")
    return ids[token]


def _vocabulary(content: dict[str, Any]) -> dict[str, int]:
    """Returns the id of each token of a parsed ``tokenizer.json``, whose vocabulary is a mapping or an ordered list."""
    model, added = content.get("model"), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str, Any] = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    if isinstance(vocabulary, list):
        ids = {str(entry[0]): index for index, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict):
            ids[str(token.get("content"))] = token.get("id")
    return {token: index for token, index in ids.items() if isinstance(index, int)}


def require_agreement(
    folder: Path, config: Mapping[str, Any] | None = None, generation: Mapping[str, Any] | None = None
) -> None:
    """Raises unless config, generation config and tokenizer agree; the arguments are those of :func:`disagreements`."""
    if problems := disagreements(folder, config, generation):
        raise CheckpointError(
            f"{folder}: {'; '.join(problems)}; adaponder doctor {folder} --seal lets the tokenizer decide"
        )


def disagreements(
    folder: Path, config: Mapping[str, Any] | None = None, generation: Mapping[str, Any] | None = None
) -> list[str]:
    """Describes the differences between config, generation config and tokenizer; ignores unset values.

    ``config`` is the backbone's; ``config`` and ``generation`` are read from ``folder`` if ``None``.
    """
    if (tokens := read_special_tokens(folder)) is None:
        return []
    if config is None:
        settings = read_json(folder / "config.json")
        config = settings.get("backbone_config", settings)
    if generation is None:
        generation = read_json(folder / GENERATION) if os.path.lexists(folder / GENERATION) else {}
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{folder / 'config.json'}: backbone_config must be an object")
    problems = []
    for name, values in (("config.json", config), (GENERATION, generation)):
        ends, padding = as_ids(values.get("eos_token_id")), values.get("pad_token_id")
        if ends and tokens.end is not None and tokens.end not in ends:
            problems.append(f"{name} has eos_token_id={values['eos_token_id']!r}, the tokenizer's end is {tokens.end}")
        if padding is not None and tokens.padding is not None and padding != tokens.padding:
            problems.append(f"{name} has pad_token_id={padding!r}, the tokenizer pads with {tokens.padding}")
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and tokens.length is not None and tokens.length > positions:
        problems.append(
            f"the tokenizer allows model_max_length={tokens.length} tokens, the model has {positions} positions"
        )
    return problems


def as_ids(ids: Any) -> list[Any]:
    """Returns a config's ``eos_token_id`` (``None``, one id or several) as a list."""
    if ids is None:
        return []
    return list(ids) if isinstance(ids, (list, tuple)) else [ids]


def align(model: PreTrainedModel, end: int, padding: int | None = None, *, from_scratch: bool = False) -> list[str]:
    """Sets end and padding tokens of a model's config and generation config; returns a description of each change.

    With ``from_scratch``, ``end`` becomes the only end token. Otherwise the model's end tokens stay too, and a config
    without a padding token gets none, because stock decoders do not train the padding token's embedding.
    """
    config, generation, changes = model.config.get_text_config(), model.generation_config, []
    assert generation is not None  # every generating model has one
    if padding is None:
        paddings = (generation.pad_token_id, getattr(config, "pad_token_id", None))
        padding = end if from_scratch else next((token for token in paddings if token is not None), end)
    for name, settings in (("config", config), ("generation config", generation)):
        before = (getattr(settings, "eos_token_id", None), getattr(settings, "pad_token_id", None))
        ends = as_ids(before[0])
        if from_scratch or not ends:
            settings.eos_token_id = end
        elif end not in ends:
            settings.eos_token_id = [end, *ends]
        if from_scratch or settings is generation or before[1] is not None:
            settings.pad_token_id = padding
        if from_scratch:
            settings.bos_token_id = end
        after = (settings.eos_token_id, getattr(settings, "pad_token_id", None))
        ids = zip(("eos_token_id", "pad_token_id"), before, after, strict=True)
        changes += [f"{name}: {key} {old} → {new}" for key, old, new in ids if new != old]
    return changes


def mend(folder: Path) -> list[str]:
    """Changes config and generation config to agree with the folder's tokenizer; returns a description of each change.

    A ``model_max_length`` above the model's positions is lowered in the tokenizer's settings.
    """
    tokens, changes = read_special_tokens(folder), []
    if tokens is None or not disagreements(folder):
        return []
    model = read_json(folder / "config.json")
    config = model.get("backbone_config", model)
    files = {"config.json": (model, config)}
    if os.path.lexists(folder / GENERATION):
        generation = read_json(folder / GENERATION)
        files[GENERATION] = (generation, generation)
    for name, (content, settings) in files.items():
        for key, token in (("eos_token_id", tokens.end), ("pad_token_id", tokens.padding)):
            before = settings.get(key)
            if token is not None and before is not None and token not in as_ids(before):
                settings[key] = token
                changes.append(f"{name}: {key} {before} → {token}")
        write_whole(folder / name, (json.dumps(content, indent=2) + "\n").encode(), CheckpointError)
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and tokens.length is not None and tokens.length > positions:
        settings = read_json(folder / SETTINGS) | {"model_max_length": positions}
        write_whole(folder / SETTINGS, json.dumps(settings, indent=1).encode(), CheckpointError)
        changes.append(f"{SETTINGS}: model_max_length {tokens.length} → {positions}")
    return changes


def with_padding(files: Mapping[str, str], model: PreTrainedModel) -> dict[str, str]:
    """Returns a tokenizer's ``files`` (content by name), changed to pad left with the model's padding token.

    A padding token or side that the files already set is kept; ``model_max_length`` is limited to the model's number of
    positions. Files without ``tokenizer.json`` or ``tokenizer_config.json`` are returned unchanged.
    """
    if not {TOKENIZER, SETTINGS} <= files.keys():
        return dict(files)
    settings = parse_json(files[SETTINGS].encode(), SETTINGS)
    config, generation = model.config.get_text_config(), model.generation_config
    if settings.get("pad_token") is None and generation is not None:
        names = {index: token for token, index in _vocabulary(parse_json(files[TOKENIZER].encode(), TOKENIZER)).items()}
        if generation.pad_token_id in names:
            settings["pad_token"] = names[generation.pad_token_id]
    settings.setdefault("padding_side", "left")
    positions, length = getattr(config, "max_position_embeddings", None), settings.get("model_max_length")
    if positions is not None and (not isinstance(length, int) or length > positions):
        settings["model_max_length"] = positions
    return dict(files) | {SETTINGS: json.dumps(settings, indent=1, ensure_ascii=False)}
