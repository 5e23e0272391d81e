"""A folder of weights appears whole or not at all, and what kept it from being written is said in one line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from adaponder.errors import CheckpointError
from adaponder.files import replacing_folder


@contextmanager
def saving(
    folder: Path, partial: Path, *, intact: str, make_way: Callable[[Path], object] = os.rmdir
) -> Iterator[Path]:
    """:func:`adaponder.files.replacing_folder`, in which an error of the disk says what is ``intact`` all the same."""
    try:
        with replacing_folder(folder, partial, make_way=make_way):
            yield partial
            share_weights(partial)
    except (OSError, SafetensorError) as error:  # the second where weights do not fit on the disk
        raise CheckpointError(f"{folder} could not be saved: {error}; {intact}") from error


def share_weights(folder: Path) -> None:
    """Lets those read the weights in ``folder`` who may read the configuration beside them.

    safetensors 0.8 writes files that only their owner may read, whatever the umask says.
    """
    found = [path for name in ("config.json", "adapter_config.json") if (path := folder / name).exists()]
    for path in folder.glob("*.safetensors") if found else ():
        # Where a file system gives all files one mode, it may refuse to set another.
        if path.stat().st_mode != found[0].stat().st_mode:
            shutil.copymode(found[0], path)
