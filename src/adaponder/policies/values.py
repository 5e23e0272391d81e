"""Numbers that policies hold: checked when a policy is made, and looked up per row when it decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adaponder.errors import InputError, shown

if TYPE_CHECKING:
    from adaponder.policies.base import Policy


def at(value: float | Sequence[float] | Tensor, iteration: Tensor, dtype: torch.dtype) -> float | Tensor:
    """Equals ``value[iteration]`` row by row, in ``dtype``; or ``value`` itself where one number serves all gates.

    A tensor holds each row's number at its iteration already: rows of one call may then have different settings.

    Made of fills and selections only: nothing is copied from the host, so a CUDA graph can capture it. Rows at an
    iteration that has no entry get NaN, which no comparison keeps; :meth:`Policy.check` refuses such settings.
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
    """``seed`` modulo 2**64, in the range of an int64: what wrapping int64 arithmetic makes of it."""
    if -(1 << 63) <= seed < (1 << 63):
        return seed  # as it is: a compiler that lets seeds vary could not hold the numbers below
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def sequence_seeds(seed: int, number: Tensor) -> Tensor:
    """A seed for each sequence, of one seed for all and the sequence's ``number`` (int64); equal numbers, equal seeds.

    Every step can be undone: no two sequences get the same seed.
    """
    return scrambled(number + as_int64(seed * 0x9E3779B97F4A7C15))


def scrambled(x: Tensor) -> Tensor:
    """The two rounds of splitmix64 on int64, whose products wrap around modulo 2**64; each can be undone."""
    for factor in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * factor
    return x


def as_number(name: str, value: float) -> float:
    """One number as a float: equal settings then have equal fingerprints. Raises on anything else, and on NaN."""
    if isinstance(value, bool) or not hasattr(value, "__float__") or math.isnan(float(value)):
        raise InputError(f"{name}={shown(value)}: a number is needed")
    return float(value)


def as_share(name: str, value: float) -> float:
    """One number from 0 to 1 as a float; raises on anything else."""
    number = as_number(name, value)
    if not 0.0 <= number <= 1.0:
        raise InputError(f"{name}={number}: lies between 0 and 1")
    return number


def check_one_per_gate(policy: Policy, name: str, value: float | Sequence[float], iterations: int) -> None:
    """Raises where ``policy``'s list of numbers ``name`` is not one for each gate of a model of K = ``iterations``."""
    if isinstance(value, Sequence) and len(value) != iterations - 1:
        raise InputError(
            f"policy={policy.spelling}: {name} has {len(value)} entries, a model of K={iterations} has "
            f"{iterations - 1} gates: give one number, or one per gate"
        )


def as_floats(name: str, value: float | Sequence[float]) -> float | tuple[float, ...]:
    """One number or one per gate, each as :func:`as_number` makes it."""
    if not isinstance(value, Sequence):
        return as_number(name, value)
    if isinstance(value, str):  # a sequence too, of letters
        raise InputError(f"{name}={shown(value)}: a number is needed")
    return tuple(as_number(name, number) for number in value)


def set_fields(policy: Policy, **fields: object) -> None:
    """Writes checked values into a frozen policy, from its ``__post_init__``."""
    for name, value in fields.items():
        object.__setattr__(policy, name, value)
