"""The checkpoints that come with the package: small, trained, and opened by name without a network.

``sample`` writes Python, ``sample-hops`` answers puzzles whose needed depth is known. A folder of that name in the
working directory goes before it; ``adaponder:NAME`` always means the package's.
"""

from __future__ import annotations

from pathlib import Path

from adaponder.errors import CheckpointError, InputError

NAMES = SAMPLE, HOPS = "sample", "sample-hops"
_PREFIX = "adaponder:"
# Text that ``sample`` has not been trained on, beside its weights.
TEXT = "held-out.txt"


def sample_path(name: str = SAMPLE) -> Path:
    """The folder of a checkpoint that comes with the package, for ``from_pretrained`` and the Auto classes."""
    folder = Path(__file__).parents[1] / name
    if name not in NAMES:
        raise CheckpointError(f"{name}: with adaponder come {', '.join(NAMES)}")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is missing or incomplete: install adaponder again")
    return folder


def full_name(name: str) -> str:
    """What means the package's checkpoint whatever lies in the working directory."""
    return _PREFIX + name


def shipped(name: str | Path) -> Path | None:
    """The folder of the package's checkpoint that ``name`` means: its full name, or its short one if none lies here."""
    short = str(name).removeprefix(_PREFIX)
    if short not in NAMES or (short == str(name) and Path(name).exists()):
        return None
    return sample_path(short)


def data_of(name: str) -> str:
    """``name`` of a text, or the path of the held-out text where it means the package's checkpoint."""
    folder = shipped(name)
    if folder is None:
        return name
    if not (folder / TEXT).is_file():
        raise InputError(f"--data {name}: that checkpoint comes without a text; adaponder puzzle makes its own")
    return str(folder / TEXT)
