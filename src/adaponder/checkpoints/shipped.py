"""The checkpoint that comes with the package: small, trained, and opened by the name ``sample`` without a network.

A folder called ``sample`` in the working directory goes before it; ``adaponder:sample`` always means the package's.
"""

from __future__ import annotations

from pathlib import Path

from adaponder.errors import CheckpointError

NAME, FULL_NAME = "sample", "adaponder:sample"
# Text that the checkpoint has not been trained on, beside its weights.
TEXT = "held-out.txt"


def sample_path() -> Path:
    """The folder of the checkpoint that comes with the package, for ``from_pretrained`` and the Auto classes."""
    folder = Path(__file__).parents[1] / NAME
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is missing or incomplete: install adaponder again")
    return folder


def is_sample(name: str | Path) -> bool:
    """Whether ``name`` means the package's checkpoint: its full name, or its short one where no such folder is."""
    return str(name) == FULL_NAME or (str(name) == NAME and not Path(name).exists())


def data_of(name: str) -> str:
    """``name`` of a text, or the path of the held-out text where it means the package's checkpoint."""
    return str(sample_path() / TEXT) if is_sample(name) else name
