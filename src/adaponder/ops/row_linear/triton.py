"""Matrix-vector kernels: each weight is read once, in wide loads, and begins to arrive before the rows are known.

A program owns one row, a few outputs and all inputs. It loads its weights, waits for the kernel before it (see
:mod:`adaponder.ops.dependent`), and then loads, normalises and multiplies its row. A tile of weights is
``[outputs, inputs]``, held in registers, its inputs spread over all threads as a row's are. More rows than ``FEW`` are
multiplied together (:mod:`adaponder.ops.row_linear.dots`), more than ``SOME`` by the matrix library, both with their
norm in a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional

from adaponder.ops.dependent import launch_options
from adaponder.ops.dispatch import on_device_of
from adaponder.ops.row_linear import kernels, some
from adaponder.ops.row_linear.torch import ACTIVATIONS, Linear, Norm, Piece, Term

# Most rows for which these kernels are used, and those of `dots`.
FEW, SOME = 2, 64
# The kernels' numbers for activations and norms; 0 is none.
_CODES = {None: 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "silu": 4}
_LAYER_NORM, _RMS_NORM = 1, 2


class Blocks(NamedTuple):
    """How a product is cut: outputs of a program, and its warps."""

    outputs: int
    warps: int


def blocks_for(inputs: int, outputs: int) -> Blocks:
    """The fastest measured on an H200 (README), for a product of so many inputs and outputs in all."""
    if inputs <= 512:
        return Blocks(8, 2) if outputs > 16384 else Blocks(4, 1)
    if inputs <= 1024:
        return Blocks(4, 2) if outputs > 16384 else Blocks(8, 2)
    return Blocks(4, 4) if inputs <= 4096 else Blocks(1, 4) if inputs <= 5632 and outputs > 1024 else Blocks(2, 4)


def row_norm(x: Tensor, norm: Norm) -> Tensor:
    """Equals :func:`adaponder.ops.row_linear.torch.row_norm`, rounded once."""
    return _norms(x.reshape(-1, x.shape[-1]), norm, norm, 1)[0].reshape(x.shape)


def _norms(x: Tensor, norm: Norm, other: Norm, count: int) -> Tensor:
    """``[count, n, d]``: each row through the first norm, or through both, which are of one kind."""
    rows, inputs = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    result = torch.empty(count, rows, inputs, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(inputs)
    if rows:
        with on_device_of(x):
            kernels.norm_kernel[(rows, count)](
                x,
                result,
                *_norm_pointers(norm),
                *_norm_pointers(other),
                norm.eps,
                x.stride(0),
                INPUTS=inputs,
                BLOCK=block,
                NORM=_norm_code(norm),
                SHIFTED=norm.bias is not None,
                num_warps=min(8, max(1, block // 256)),
                **launch_options(x),
            )
    return result


def normed_linears(x: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """Equals :func:`adaponder.ops.row_linear.torch.normed_linears`; results of few rows are views of one tensor."""
    maps = [_Map(linear, piece.norm, piece.activation) for piece in pieces for linear in piece.linears]
    if x.shape[0] > SOME or len(maps) > 3 or not _plain(x, [each.linear for each in maps]):
        return _many_normed(x, pieces)
    if x.shape[0] <= FEW:
        wide = _each(x, maps)
    else:
        given, codes = _normed(x, [each.norm for each in maps]), [_CODES[each.activation] for each in maps]
        wide = some.maps(given, [each.linear for each in maps], codes)
    return list(wide.split([piece.outputs for piece in pieces], -1))


class _Map(NamedTuple):
    """One linear map with what comes before and after it, as a kernel is handed it."""

    linear: Linear
    norm: Norm | None
    activation: str | None

    @property
    def eps(self) -> float:
        return 0.0 if self.norm is None else self.norm.eps

    @property
    def shifted(self) -> bool:
        return self.norm is not None and self.norm.bias is not None

    def pointers(self, like: Tensor) -> tuple[Tensor, ...]:
        """Weight, bias, the norm's weight and bias; anything in the place of what is not there."""
        norm = (like, like) if self.norm is None else _norm_pointers(self.norm)
        return *some.pointers(self.linear), *norm


def _each(x: Tensor, maps: Sequence[_Map]) -> Tensor:
    """Up to three maps side by side, row by row."""
    rows, inputs = x.shape
    sizes = [each.linear.weight.shape[0] for each in maps]
    result = torch.empty(rows, sum(sizes), dtype=x.dtype, device=x.device)
    blocks = blocks_for(inputs, sum(sizes))
    counts = [triton.cdiv(size, blocks.outputs) for size in sizes]
    three = [*maps, maps[-1], maps[-1]][:3]
    if rows:
        with on_device_of(x):
            kernels.normed_kernel[(sum(counts), rows)](
                x,
                result,
                *(pointer for each in three for pointer in each.pointers(x)),
                *[*sizes, 0, 0][:3],
                counts[0],
                sum(counts[:2]),
                *(each.eps for each in three),
                x.stride(0),
                result.stride(0),
                INPUTS=inputs,
                BLOCK=triton.next_power_of_2(inputs),
                OUTPUTS=blocks.outputs,
                MAPS=len(maps),
                NORMS=tuple(_norm_code(each.norm) for each in three),
                SHIFTED=tuple(each.shifted for each in three),
                BIASED=tuple(each.linear.bias is not None for each in three),
                ACTIVATIONS=tuple(_CODES[each.activation] for each in three),
                num_warps=blocks.warps,
                **launch_options(x),
            )
    return result


def gated_linear(x: Tensor, gate: Linear, up: Linear, norm: Norm, *, activation: str) -> Tensor:
    """Equals :func:`adaponder.ops.row_linear.torch.gated_linear`."""
    plain = _plain(x, (gate, up))
    if x.shape[0] > FEW or not plain:
        normed = row_norm(x, norm)
        if x.shape[0] <= SOME and plain:
            return some.gated(normed, gate, up, _CODES[activation])
        return ACTIVATIONS[activation](functional.linear(normed, *gate)).mul_(functional.linear(normed, *up))
    rows, inputs = x.shape
    size = gate.weight.shape[0]
    result = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    blocks = blocks_for(2 * inputs, size)
    if rows:
        with on_device_of(x):
            kernels.gated_kernel[(triton.cdiv(size, blocks.outputs), rows)](
                x,
                result,
                *some.pointers(gate),
                *some.pointers(up),
                *_norm_pointers(norm),
                size,
                norm.eps,
                x.stride(0),
                INPUTS=inputs,
                BLOCK=triton.next_power_of_2(inputs),
                OUTPUTS=blocks.outputs,
                NORM=_norm_code(norm),
                SHIFTED=norm.bias is not None,
                BIASED=(gate.bias is not None, up.bias is not None),
                ACTIVATION=_CODES[activation],
                num_warps=blocks.warps,
                **launch_options(x),
            )
    return result


def residual_linears(residual: Tensor, terms: Sequence[Term]) -> Tensor:
    """Equals :func:`adaponder.ops.row_linear.torch.residual_linears`, rounded once for few rows."""
    rows, size = residual.shape
    fits = all(_plain(term.x, [term.linear]) for term in terms) and residual.stride(-1) == 1
    if rows > SOME or not 1 <= len(terms) <= 2 or not fits:
        return _many_residual(residual, terms)
    if rows > FEW:
        return some.residual(residual, terms)
    result = torch.empty(rows, size, dtype=residual.dtype, device=residual.device)
    first, second = terms[0], terms[-1]
    inputs = [term.x.shape[1] for term in terms]
    blocks = blocks_for(sum(inputs), size)
    if rows:
        with on_device_of(residual):
            kernels.residual_kernel[(triton.cdiv(size, blocks.outputs), rows)](
                residual,
                result,
                first.x,
                second.x,
                *some.pointers(first.linear),
                *some.pointers(second.linear),
                size,
                residual.stride(0),
                first.x.stride(0),
                second.x.stride(0),
                INPUTS=(inputs[0], inputs[-1]),
                BLOCK=(triton.next_power_of_2(inputs[0]), triton.next_power_of_2(inputs[-1])),
                OUTPUTS=blocks.outputs,
                TERMS=len(terms),
                BIASED=(first.linear.bias is not None, second.linear.bias is not None),
                num_warps=blocks.warps,
                **launch_options(residual),
            )
    return result


def _normed(x: Tensor, norms: Sequence[Norm | None]) -> list[Tensor]:
    """``x`` through each norm; the same one twice is computed once, and two of one kind by one kernel."""
    distinct = {norm.weight.data_ptr(): norm for norm in norms if norm is not None}
    done = {None: x.contiguous()}  # kernels are told one stride for all
    kinds = {(norm.eps, norm.centred, norm.bias is None) for norm in distinct.values()}
    if len(distinct) == 2 and len(kinds) == 1:
        done |= dict(zip(distinct, _norms(x, *distinct.values(), 2), strict=True))
    else:
        done |= {key: row_norm(x, norm) for key, norm in distinct.items()}
    return [done[None if norm is None else norm.weight.data_ptr()] for norm in norms]


def _many_normed(x: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """The same through the matrix library."""
    results = []
    for (linears, _, activation), given in zip(pieces, _normed(x, [piece.norm for piece in pieces]), strict=True):
        product = functional.linear(given, *linears[0]) if len(linears) == 1 else _side_by_side(given, linears)
        results.append(product if activation is None else ACTIVATIONS[activation](product))
    return results


def _side_by_side(x: Tensor, linears: Sequence[Linear]) -> Tensor:
    """Each product is written where it belongs."""
    sizes = [linear.weight.shape[0] for linear in linears]
    result = torch.empty(x.shape[0], sum(sizes), dtype=x.dtype, device=x.device)
    for part, (weight, bias) in zip(result.split(sizes, -1), linears, strict=True):
        if bias is None:
            torch.mm(x, weight.t(), out=part)
        else:
            torch.addmm(bias, x, weight.t(), out=part)
    return result


def _many_residual(residual: Tensor, terms: Sequence[Term]) -> Tensor:
    """The same through the matrix library, which adds to what is there; biases come with the first product."""
    if not terms:
        return residual
    *rest, (x, linear) = terms
    total = functional.linear(x, *linear)
    for x, (weight, bias) in reversed(rest):
        total = torch.addmm(total, x, weight.t())
        total = total if bias is None else total.add_(bias)
    return total.add_(residual)


def _plain(x: Tensor, linears: Sequence[Linear]) -> bool:
    """Whether rows and weights lie as the kernels read them."""
    return x.stride(-1) == 1 and all(w.is_contiguous() and w.dtype == x.dtype for w, _ in linears)


def _norm_pointers(norm: Norm) -> tuple[Tensor, Tensor]:
    return norm.weight, norm.weight if norm.bias is None else norm.bias


def _norm_code(norm: Norm | None) -> int:
    return 0 if norm is None else _LAYER_NORM if norm.centred else _RMS_NORM
