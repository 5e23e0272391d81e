"""Writes tokens as Megatron does, for tests that read them."""

import struct
from pathlib import Path

import numpy as np


def write_megatron(stem: Path, documents: list[list[int]], *, dtype: str = "<u2", code: int = 8) -> None:
    """Writes the pair of files of a ``MMapIndexedDataset``, each document one sequence."""
    sizes = np.array([len(tokens) for tokens in documents], "<i4")
    pointers = (np.cumsum(sizes) - sizes).astype("<i8") * np.dtype(dtype).itemsize
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sizes), len(sizes) + 1)
    bounds = np.arange(len(sizes) + 1, dtype="<i8")
    stem.with_suffix(".idx").write_bytes(header + sizes.tobytes() + pointers.tobytes() + bounds.tobytes())
    stem.with_suffix(".bin").write_bytes(np.concatenate([np.array(d, dtype) for d in documents]).tobytes())
