"""Finds the small trained checkpoints that come with the package, by name and without a network.

``sample`` writes Python; ``sample-hops`` answers puzzles whose needed depth is known. ``sample-vanilla`` (a plain
model) and ``sample-adaponder`` (the paper's method) have layers of the same sizes as ``sample`` and were trained on the
same tokens. A folder of the same name in the working directory takes precedence; ``adaponder:NAME`` always means the
packaged checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from adaponder.errors import CheckpointError, InputError

SAMPLE, HOPS = "sample", "sample-hops"
NAMES = SAMPLE, HOPS, "sample-vanilla", "sample-adaponder"
_PREFIX = "adaponder:"
# Text on which ``sample`` was not trained, beside its weights.
TEXT = "held-out.txt"


def sample_path(name: str = SAMPLE) -> Path:
    """Returns the folder of a checkpoint that comes with the package, for ``from_pretrained`` and the Auto classes."""
    folder = Path(__file__).parents[1] / name
    if name not in NAMES:
        raise CheckpointError(f"{name} does not come with adaponder: choose one of {', '.join(NAMES)}")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is missing or incomplete: install adaponder again")
    return folder


def full_name(name: str) -> str:
    """Returns ``adaponder:NAME``, which means the packaged checkpoint even if a local folder is called NAME."""
    return _PREFIX + name


def shipped(name: str | Path) -> Path | None:
    """Returns the folder of the packaged checkpoint ``name``; ``None`` for other names and for local folders."""
    short = str(name).removeprefix(_PREFIX)
    if short not in NAMES or (short == str(name) and Path(name).exists()):
        return None
    return sample_path(short)


def data_of(name: str) -> str:
    """Returns the path of a packaged checkpoint's held-out text (raises if it has none); other names unchanged."""
    if (folder := shipped(name)) is None:
        return name
    if not (folder / TEXT).is_file():
        raise InputError(f"--data {name}: that checkpoint has no text; use sample (Python) or hops:seed=3 (puzzles)")
    return str(folder / TEXT)
