"""Launches of the products of some tens of rows (:mod:`adaponder.ops.row_linear.dots`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from adaponder.ops.dependent import launch_options
from adaponder.ops.dispatch import on_device_of
from adaponder.ops.row_linear import dots
from adaponder.ops.row_linear.torch import Linear, Term


class Cut(NamedTuple):
    """How a product is cut: outputs of a program, inputs of a step, warps, steps under way at once.

    ``splits`` programs share the inputs of a residual sum.
    """

    outputs: int
    step: int
    warps: int
    stages: int
    splits: int = 1


def cut_for(rows: int, inputs: int, outputs: int) -> Cut:
    """Returns the fastest setting measured on an H200 for this number of rows, inputs and outputs."""
    if outputs <= 2048:
        splits = max(1, min(8, (8192 if rows <= 32 else 4096) // outputs, inputs // 512))
        if rows <= 16:
            return Cut(32, 256, 4, 6, min(4, splits)) if outputs == 1024 else Cut(32, 128, 4, 6, splits)
        if rows <= 32:
            return Cut(32, 128, 8, 6, splits) if outputs <= 1024 else Cut(32, 128, 4, 8, splits)
        return Cut(32, 256, 4, 3 if outputs <= 1024 else 4, splits)
    if rows <= 16:
        return Cut(32, 64, 4, 8)
    return Cut(32, 128, 4, 4) if rows <= 32 else Cut(64, 128, 4, 3)


def gated_cut_for(rows: int) -> Cut:
    """The same for two maps of which one gates the other."""
    return Cut(32, 128, 4, 8) if rows <= 16 else Cut(64, 64, 8, 6) if rows <= 32 else Cut(64, 128, 4, 4)


@lru_cache
def _counter(device: torch.device) -> Tensor:
    """What programs that share a sum count with: zeros between launches, which follow one another on one stream."""
    return torch.zeros(4096, dtype=torch.int32, device=device)


def _options(cut: Cut, rows: int, like: Tensor) -> dict[str, Any]:
    return {
        "ROWS": max(16, triton.next_power_of_2(rows)),
        "OUTPUTS": cut.outputs,
        "STEP": cut.step,
        "num_warps": cut.warps,
        "num_stages": cut.stages,
    } | launch_options(like)


def pointers(linear: Linear) -> tuple[Tensor, Tensor]:
    """Weight and bias; anything in the place of a bias that is not there."""
    return linear.weight, linear.weight if linear.bias is None else linear.bias


def maps(given: Sequence[Tensor], linears: Sequence[Linear], codes: Sequence[int]) -> Tensor:
    """Up to three maps of rows of the same shape, side by side; ``codes`` are those of the activations."""
    rows, inputs = given[0].shape
    sizes = [linear.weight.shape[0] for linear in linears]
    result = torch.empty(rows, sum(sizes), dtype=given[0].dtype, device=given[0].device)
    cut = cut_for(rows, inputs, sum(sizes))
    counts = [triton.cdiv(size, cut.outputs) for size in sizes]
    three = [min(number, len(linears) - 1) for number in range(3)]
    with on_device_of(result):
        dots.maps_kernel[(sum(counts), 1)](
            result,
            *(part for number in three for part in (given[number], *pointers(linears[number]))),
            *[*sizes, 0, 0][:3],
            counts[0],
            sum(counts[:2]),
            rows,
            given[0].stride(0),
            result.stride(0),
            INPUTS=inputs,
            MAPS=len(linears),
            BIASED=tuple(linears[number].bias is not None for number in three),
            ACTIVATIONS=tuple(codes[number] for number in three),
            **_options(cut, rows, result),
        )
    return result


def gated(x: Tensor, gate: Linear, up: Linear, code: int) -> Tensor:
    """``activation(gate(x)) * up(x)``."""
    rows, inputs = x.shape
    size = gate.weight.shape[0]
    result = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    cut = gated_cut_for(rows)
    with on_device_of(result):
        dots.gated_kernel[(triton.cdiv(size, cut.outputs), 1)](
            result,
            x,
            *pointers(gate),
            *pointers(up),
            size,
            rows,
            x.stride(0),
            INPUTS=inputs,
            BIASED=(gate.bias is not None, up.bias is not None),
            ACTIVATION=code,
            **_options(cut, rows, result),
        )
    return result


def residual(start: Tensor, terms: Sequence[Term]) -> Tensor:
    """``start`` plus one or two terms."""
    rows, size = start.shape
    result = torch.empty(rows, size, dtype=start.dtype, device=start.device)
    first, second = terms[0], terms[-1]
    inputs = first.x.shape[1], second.x.shape[1]
    cut = cut_for(rows, sum(inputs[: len(terms)]), size)
    parts = torch.empty(cut.splits, rows, size, dtype=torch.float32, device=start.device) if cut.splits > 1 else start
    with on_device_of(result):
        dots.residual_kernel[(triton.cdiv(size, cut.outputs), cut.splits)](
            result,
            start,
            first.x,
            *pointers(first.linear),
            second.x,
            *pointers(second.linear),
            parts,
            _counter(start.device),
            size,
            rows,
            start.stride(0),
            first.x.stride(0),
            second.x.stride(0),
            INPUTS=inputs,
            TERMS=len(terms),
            SPLITS=cut.splits,
            BIASED=(first.linear.bias is not None, second.linear.bias is not None),
            **_options(cut, rows, result),
        )
    return result
