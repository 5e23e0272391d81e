"""Checks the numbers of a policy, looks them up per row, and computes the hashes that random policies draw from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adaponder.errors import InputError, shown


def at(value: float | Sequence[float] | Tensor, iteration: Tensor, dtype: torch.dtype) -> float | Tensor:
    """Returns each row's value: a list's entry at the row's iteration, or ``value`` itself (a number, or one per row).

    Copies nothing from the host, so a CUDA graph can capture the call. A row at an iteration beyond the list gets NaN,
    with which every comparison is false.
    """
    if isinstance(value, Tensor):
        return value.to(dtype)
    if not isinstance(value, Sequence):
        return float(value)
    number_of_row = torch.full_like(iteration, math.nan, dtype=dtype)
    for i, number in enumerate(value):
        number_of_row = torch.where(iteration == i, float(number), number_of_row)
    return number_of_row


def as_int64(seed: int) -> int:
    """Returns the int64 that is congruent to ``seed`` modulo 2**64."""
    if -(1 << 63) <= seed < (1 << 63):
        return seed  # a compiler that traces the seed as a symbol cannot represent the constants below
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def sequence_seeds(seed: int, number: Tensor) -> Tensor:
    """Returns a seed for each sequence, hashed from ``seed`` and the sequence's ``number`` (int64).

    The hash is invertible in ``number``, so different numbers get different seeds.
    """
    return mix_bits(number + as_int64(seed * 0x9E3779B97F4A7C15))


def mix_bits(x: Tensor) -> Tensor:
    """Hashes int64 numbers modulo 2**64 by two invertible rounds: those of splitmix64, but both shift by 30."""
    for factor in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * factor
    return x


def unit_hash(position: Tensor, seed: Tensor, iteration: Tensor) -> Tensor:
    """Returns a uniform number in [0, 1) per row, hashed from (seed, position, iteration) by a variant of splitmix64.

    Only the low 62 bits of the int64 sum of seed and iteration are used, so its overflow is harmless.
    """
    x = mix_bits(position + ((seed * 0x9E3779B9 + iteration * 0x85EBCA6B) & ((1 << 62) - 1)))
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return (x & ((1 << 24) - 1)).double() / (1 << 24)


def as_number(name: str, value: Any) -> float:
    """Returns ``value`` as a float, so that equal settings have equal fingerprints; raises on NaN and non-numbers."""
    if isinstance(value, bool) or not hasattr(value, "__float__") or math.isnan(float(value)):
        raise InputError(f"{name}={shown(value)} must be a number")
    return float(value)


def as_share(name: str, value: float) -> float:
    """Returns ``value`` as a float; raises unless it is a number between 0 and 1."""
    number = as_number(name, value)
    if not 0.0 <= number <= 1.0:
        raise InputError(f"{name}={number} must be between 0 and 1")
    return number


def as_floats(name: str, value: float | Sequence[float]) -> float | tuple[float, ...]:
    """Returns one number, or a tuple with one per gate, each converted by :func:`as_number`."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return as_number(name, value)
    return tuple(as_number(name, number) for number in value)


def set_fields(policy: object, **fields: object) -> None:
    """Sets fields of a frozen dataclass, for use in its ``__post_init__``."""
    for name, value in fields.items():
        object.__setattr__(policy, name, value)
