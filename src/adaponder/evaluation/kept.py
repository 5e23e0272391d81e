"""Finished parts of a long measurement on disk: after an interruption the same settings continue from them."""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from adaponder.errors import InputError
from adaponder.evaluation.text import Text
from adaponder.files import read_json, write_whole
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.version import __version__

FOLDER = "unfinished"
_SETTINGS = "settings.json"
_FACTS = "facts"


class Part(NamedTuple):
    """One finished part: JSON values, and arrays by name."""

    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Kept:
    """Finished parts, a file each, in a folder that the first part creates and :meth:`remove` deletes.

    A folder with parts of other ``settings`` (JSON values) is refused.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        self.folder = folder
        self.settings = json.loads(json.dumps({**settings, "adaponder": __version__}))
        if not (folder / _SETTINGS).exists():
            return
        before = read_json(folder / _SETTINGS, InputError)
        if changed := sorted(key for key in before.keys() | self.settings if before.get(key) != self.settings.get(key)):
            raise InputError(
                f"{folder} holds {len(self)} finished parts of another measurement (other {', '.join(changed)}): "
                "give the same settings to go on, name another --out, or delete that folder to begin anew"
            )

    def __len__(self) -> int:
        return len(list(self.folder.glob("*.npz")))

    def load(self, name: str) -> Part | None:
        """The part of this name, or ``None`` if it was not finished."""
        path = self._path(name)
        if not path.exists():
            return None
        try:
            with np.load(path) as archive:
                arrays = {key: archive[key] for key in archive.files}
            return Part(json.loads(str(arrays.pop(_FACTS))), arrays)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(f"{path} is damaged ({error}): delete it, that part is then measured again") from None

    def save(self, name: str, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Writes a finished part atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / _SETTINGS).exists():
            write_whole(self.folder / _SETTINGS, json.dumps(self.settings, indent=2).encode())
        content = io.BytesIO()
        members = {_FACTS: np.array(json.dumps(facts)), **(arrays or {})}
        np.savez(content, **members)  # pyright: ignore[reportArgumentType]
        write_whole(self._path(name), content.getvalue())

    def remove(self) -> None:
        """Deletes the parts, and the folder unless it holds something else."""
        for path in [*self.folder.glob("*.npz"), self.folder / _SETTINGS]:
            path.unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _path(self, name: str) -> Path:
        return self.folder / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)}.npz"


def fingerprint(model: AdaPonderForCausalLM, text: Text) -> str:
    """SHA-256 of the model's config and weights and of the text's tokens and what counts of them."""
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True, default=str).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    for array in (text.stream, text.starts, *(() if text.learned is None else (text.learned,))):
        digest.update(array.tobytes())
    return digest.hexdigest()
