"""Launches linear layers on few rows, with the kernel and tile config for the number of rows.

Above ``FEW`` rows, the norm is a separate kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional

from adaponder.ops.dispatch import on_device_of
from adaponder.ops.kernels import launch_options
from adaponder.ops.row_linear import kernels
from adaponder.ops.row_linear.torch import ACTIVATIONS, Linear, Norm, Piece, Term

# Most rows for the matrix-vector kernels (few_*), and for the tiled kernels (some_*).
FEW, SOME = 2, 64
# The kernels' codes of activations and norms; 0 is none.
_CODES = {None: 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "silu": 4}
_LAYER_NORM, _RMS_NORM = 1, 2


class Cut(NamedTuple):
    """Tile config of a linear layer: outputs and warps per program.

    Above ``FEW`` rows, a program loops over the inputs in steps of ``step``, with ``stages`` pipeline stages. In a
    residual sum, ``splits`` programs share the inputs of the same outputs.
    """

    outputs: int
    warps: int
    step: int = 0
    stages: int = 0
    splits: int = 1


def few_cut(inputs: int, outputs: int) -> Cut:
    """Returns the tile config measured fastest on an H200 for up to ``FEW`` rows."""
    if inputs <= 512:
        return Cut(8, 2) if outputs > 16384 else Cut(4, 1)
    if inputs <= 1024:
        return Cut(4, 2) if outputs > 16384 else Cut(8, 2)
    return Cut(4, 4) if inputs <= 4096 else Cut(1, 4) if inputs <= 5632 and outputs > 1024 else Cut(2, 4)


def some_cut(rows: int, inputs: int, outputs: int) -> Cut:
    """Returns the tile config measured fastest on an H200 for more than ``FEW`` and at most ``SOME`` rows."""
    if outputs <= 2048:
        splits = max(1, min(8, (8192 if rows <= 32 else 4096) // outputs, inputs // 512))
        if rows <= 16:
            return Cut(32, 4, 256, 6, min(4, splits)) if outputs == 1024 else Cut(32, 4, 128, 6, splits)
        if rows <= 32:
            return Cut(32, 8, 128, 6, splits) if outputs <= 1024 else Cut(32, 4, 128, 8, splits)
        return Cut(32, 4, 256, 3 if outputs <= 1024 else 4, splits)
    if rows <= 16:
        return Cut(32, 4, 64, 8)
    return Cut(32, 4, 128, 4) if rows <= 32 else Cut(64, 4, 128, 3)


def some_gated_cut(rows: int) -> Cut:
    """Returns the tile config measured fastest for gated layers of more than ``FEW`` and at most ``SOME`` rows."""
    return Cut(32, 4, 128, 8) if rows <= 16 else Cut(64, 8, 64, 6) if rows <= 32 else Cut(64, 4, 128, 4)


@lru_cache
def _counter(device: torch.device) -> Tensor:
    """Returns counters of finished splits, which are 0 between kernel launches; all launches must be on one stream."""
    return torch.zeros(4096, dtype=torch.int32, device=device)


def row_norm(x: Tensor, norm: Norm) -> Tensor:
    """Applies a norm to each row, like ``row_norm`` in torch.py, but rounds only the result."""
    return _norms(x.reshape(-1, x.shape[-1]), norm, norm, 1)[0].reshape(x.shape)


def _norms(x: Tensor, norm: Norm, other: Norm, count: int) -> Tensor:
    """Returns ``[count, n, d]``: ``norm(x)`` and, if ``count`` is 2, ``other(x)``; both norms are of the same kind."""
    rows, inputs = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    result = torch.empty(count, rows, inputs, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(inputs)
    if rows:
        with on_device_of(x):
            kernels.norm_kernel[(rows, count)](
                x, result, *_norm_pointers(norm, x), *_norm_pointers(other, x), norm.eps, x.stride(0),
                INPUTS=inputs, BLOCK=block, NORM=_norm_code(norm), SHIFTED=norm.bias is not None,
                num_warps=min(8, max(1, block // 256)), **launch_options(x),
            )  # fmt: skip
    return result


class _Map(NamedTuple):
    """One linear layer with the norm before and the activation after it, as a kernel receives them."""

    linear: Linear
    norm: Norm | None
    activation: str | None


def normed_linears(x: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """Returns ``activation(linear(norm(x)))`` of each piece; outputs of the kernels are views of one tensor."""
    maps = [_Map(linear, piece.norm, piece.activation) for piece in pieces for linear in piece.linears]
    if x.shape[0] > SOME or len(maps) > 3 or not _plain(x, [single.linear for single in maps]):
        return _many_normed(x, pieces)
    return list(_maps(x, maps).split([piece.outputs for piece in pieces], -1))


def _maps(x: Tensor, maps: Sequence[_Map]) -> Tensor:
    """Returns the concatenated outputs of up to three linear layers, computed by the kernels."""
    rows, inputs = x.shape
    sizes = [single.linear.weight.shape[0] for single in maps]
    result = torch.empty(rows, sum(sizes), dtype=x.dtype, device=x.device)
    if not rows:
        return result
    three = [*maps, maps[-1], maps[-1]][:3]
    linears, norms, activations = zip(*three, strict=True)
    cut = few_cut(inputs, sum(sizes)) if rows <= FEW else some_cut(rows, inputs, sum(sizes))
    counts = [triton.cdiv(size, cut.outputs) for size in sizes]
    bounds = (*[*sizes, 0, 0][:3], counts[0], sum(counts[:2]))
    constants = _constants(x, linears, cut) | {
        "INPUTS": inputs, "MAPS": len(maps), "ACTIVATIONS": tuple(_CODES[name] for name in activations),
    }  # fmt: skip
    with on_device_of(x):
        if rows <= FEW:
            pointers = [(*_pointers(linear), *_norm_pointers(norm, x)) for linear, norm, _ in three]
            kernels.few_maps_kernel[(sum(counts), rows)](
                x, result, *pointers[0], *pointers[1], *pointers[2], *bounds,
                *(0.0 if norm is None else norm.eps for norm in norms), x.stride(0), result.stride(0),
                BLOCK=triton.next_power_of_2(inputs), NORMS=tuple(map(_norm_code, norms)),
                SHIFTED=tuple(norm is not None and norm.bias is not None for norm in norms), **constants,
            )  # fmt: skip
        else:
            normed = _normed(x, norms)
            pointers = [(source, *_pointers(linear)) for source, linear in zip(normed, linears, strict=True)]
            kernels.some_maps_kernel[(sum(counts), 1)](
                result, *pointers[0], *pointers[1], *pointers[2], *bounds, rows, normed[0].stride(0), result.stride(0),
                ROWS=_padded(rows), **constants,
            )  # fmt: skip
    return result


def gated_linear(x: Tensor, gate: Linear, up: Linear, norm: Norm, *, activation: str) -> Tensor:
    """Computes ``activation(gate(norm(x))) * up(norm(x))``, like ``gated_linear`` in torch.py."""
    rows, inputs = x.shape
    if rows > SOME or not _plain(x, (gate, up)):
        normed = row_norm(x, norm)
        return ACTIVATIONS[activation](functional.linear(normed, *gate)).mul_(functional.linear(normed, *up))
    size = gate.weight.shape[0]
    result = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if not rows:
        return result
    cut = few_cut(2 * inputs, size) if rows <= FEW else some_gated_cut(rows)
    maps = (*_pointers(gate), *_pointers(up))
    constants = _constants(x, (gate, up), cut) | {"INPUTS": inputs, "ACTIVATION": _CODES[activation]}
    blocks = triton.cdiv(size, cut.outputs)
    with on_device_of(x):
        if rows <= FEW:
            kernels.few_gated_kernel[(blocks, rows)](
                x, result, *maps, *_norm_pointers(norm, x), size, norm.eps, x.stride(0),
                BLOCK=triton.next_power_of_2(inputs), NORM=_norm_code(norm), SHIFTED=norm.bias is not None, **constants,
            )  # fmt: skip
        else:
            normed = row_norm(x, norm)
            kernels.some_gated_kernel[(blocks, 1)](
                result, normed, *maps, size, rows, normed.stride(0), ROWS=_padded(rows), **constants
            )
    return result


def residual_linears(residual: Tensor, terms: Sequence[Term]) -> Tensor:
    """Returns ``residual`` plus the linear layers ``terms``; for few rows, rounds only the final sum."""
    rows, size = residual.shape
    fits = all(_plain(term.x, [term.linear]) for term in terms) and residual.stride(-1) == 1
    if rows > SOME or not 1 <= len(terms) <= 2 or not fits:
        return _many_residual(residual, terms)
    result = torch.empty(rows, size, dtype=residual.dtype, device=residual.device)
    if not rows:
        return result
    first, second = terms[0], terms[-1]
    inputs = first.x.shape[1], second.x.shape[1]
    every_input = sum(inputs[: len(terms)])
    cut = few_cut(every_input, size) if rows <= FEW else some_cut(rows, every_input, size)
    constants = _constants(residual, (first.linear, second.linear), cut) | {"INPUTS": inputs, "TERMS": len(terms)}
    strides = residual.stride(0), first.x.stride(0), second.x.stride(0)
    blocks = triton.cdiv(size, cut.outputs)
    with on_device_of(residual):
        if rows <= FEW:
            kernels.few_residual_kernel[(blocks, rows)](
                residual, result, first.x, second.x, *_pointers(first.linear), *_pointers(second.linear),
                size, *strides, BLOCK=tuple(map(triton.next_power_of_2, inputs)), **constants,
            )  # fmt: skip
        else:
            parts = residual
            if cut.splits > 1:
                parts = torch.empty(cut.splits, rows, size, dtype=torch.float32, device=residual.device)
            kernels.some_residual_kernel[(blocks, cut.splits)](
                result, residual, first.x, *_pointers(first.linear), second.x, *_pointers(second.linear),
                parts, _counter(residual.device), size, rows, *strides,
                ROWS=_padded(rows), SPLITS=cut.splits, **constants,
            )  # fmt: skip
    return result


def _constants(like: Tensor, linears: Sequence[Linear], cut: Cut) -> dict[str, Any]:
    """Returns the constants and launch options that all product kernels share."""
    biased = tuple(linear.bias is not None for linear in linears)
    constants = {"BIASED": biased, "OUTPUTS": cut.outputs, "num_warps": cut.warps} | launch_options(like)
    return constants | ({"STEP": cut.step, "num_stages": cut.stages} if cut.step else {})


def _padded(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows))


def _normed(x: Tensor, norms: Sequence[Norm | None]) -> list[Tensor]:
    """Returns ``x`` after each norm (``None``: ``x`` itself); equal norms run once, two of one kind in one kernel."""
    distinct = list(dict.fromkeys(norm for norm in norms if norm is not None))
    done: dict[Norm | None, Tensor] = {None: x.contiguous()}  # kernels receive one stride for all inputs
    kinds = {(norm.eps, norm.centred, norm.bias is None) for norm in distinct}
    if len(distinct) == 2 and len(kinds) == 1:
        done |= zip(distinct, _norms(x, *distinct, 2), strict=True)
    else:
        done |= {norm: row_norm(x, norm) for norm in distinct}
    return [done[norm] for norm in norms]


def _many_normed(x: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """Computes :func:`normed_linears` by the matrix library, for many rows."""
    results = []
    for (linears, _, activation), normed in zip(pieces, _normed(x, [piece.norm for piece in pieces]), strict=True):
        product = functional.linear(normed, *linears[0]) if len(linears) == 1 else _side_by_side(normed, linears)
        results.append(product if activation is None else ACTIVATIONS[activation](product))
    return results


def _side_by_side(x: Tensor, linears: Sequence[Linear]) -> Tensor:
    """Applies several linear layers to ``x`` and returns their outputs concatenated, each computed into its slice."""
    sizes = [linear.weight.shape[0] for linear in linears]
    result = torch.empty(x.shape[0], sum(sizes), dtype=x.dtype, device=x.device)
    for part, (weight, bias) in zip(result.split(sizes, -1), linears, strict=True):
        if bias is None:
            torch.mm(x, weight.t(), out=part)
        else:
            torch.addmm(bias, x, weight.t(), out=part)
    return result


def _many_residual(residual: Tensor, terms: Sequence[Term]) -> Tensor:
    """Computes :func:`residual_linears` by the matrix library, for many rows; fuses additions into products (addmm)."""
    if not terms:
        return residual
    *rest, (x, linear) = terms
    total = functional.linear(x, *linear)
    for x, (weight, bias) in reversed(rest):
        total = torch.addmm(total, x, weight.t())
        total = total if bias is None else total.add_(bias)
    return total.add_(residual)


def _plain(x: Tensor, linears: Sequence[Linear]) -> bool:
    """Returns whether ``x`` and the weights have the layout and dtype that the kernels need."""
    return x.stride(-1) == 1 and all(w.is_contiguous() and w.dtype == x.dtype for w, _ in linears)


def _pointers(linear: Linear) -> tuple[Tensor, Tensor]:
    """Returns weight and bias; without a bias the weight again, as a pointer that the kernel never reads."""
    return linear.weight, linear.weight if linear.bias is None else linear.bias


def _norm_pointers(norm: Norm | None, like: Tensor) -> tuple[Tensor, Tensor]:
    if norm is None:
        return like, like
    return norm.weight, norm.weight if norm.bias is None else norm.bias


def _norm_code(norm: Norm | None) -> int:
    return 0 if norm is None else _LAYER_NORM if norm.centred else _RMS_NORM
