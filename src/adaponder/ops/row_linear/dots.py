"""The same products for some tens of rows: matrix products whose weights stream through, each read once.

A program owns a few outputs of all rows and walks the inputs. Rows come normalised.
"""

# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from adaponder.ops.dependent import allow_next, wait_for_previous
from adaponder.ops.row_linear.kernels import activate

# fmt: off


@triton.jit
def _loaded(base, line, stride, lines, start, INPUTS: tl.constexpr, STEP: tl.constexpr):
    """``[lines, step]`` of a matrix of so many inputs, from input ``start`` on; zeros outside."""
    k = start + tl.arange(0, STEP)
    mask = (line < lines)[:, None]
    if INPUTS % STEP != 0:
        mask = mask & (k < INPUTS)[None, :]
    return tl.load(base + line[:, None].to(tl.int64) * stride + k[None, :], mask=mask, other=0.0)


@triton.jit
def _product(total, x, x_stride, rows, weight, output, size, begin, end, INPUTS: tl.constexpr, STEP: tl.constexpr):
    """``total [rows, outputs]`` plus ``x @ weight[output].T``, of the inputs from ``begin`` to ``end``."""
    row = tl.arange(0, total.shape[0])
    EXACT: tl.constexpr = "ieee" if weight.dtype.element_ty == tl.float32 else "tf32"  # noqa: N806
    for start in tl.range(begin, end, STEP):
        values = _loaded(x, row, x_stride, rows, start, INPUTS, STEP)
        tile = _loaded(weight, output, INPUTS, size, start, INPUTS, STEP)
        total = tl.dot(values, tl.trans(tile), total, input_precision=EXACT)
    return total


@triton.jit
def _keep(result, total, result_stride, rows, output, size):
    row = tl.arange(0, total.shape[0])
    at = result + row[:, None] * result_stride + output[None, :]
    tl.store(at, total, mask=(row < rows)[:, None] & (output < size)[None, :])


@triton.jit
def _bias(bias, output, size):
    return tl.load(bias + output, mask=output < size, other=0.0).to(tl.float32)[None, :]


@triton.jit
def maps_kernel(
    result, x_0, weight_0, bias_0, x_1, weight_1, bias_1, x_2, weight_2, bias_2, size_0, size_1, size_2, end_0, end_1,
    rows, x_stride, result_stride,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, MAPS: tl.constexpr,
    BIASED: tl.constexpr, ACTIVATIONS: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Up to three maps side by side; programs up to ``end_0`` work at the first, and so on."""
    allow_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    block = tl.program_id(0)
    if MAPS == 1 or block < end_0:
        _one_map(result, x_0, weight_0, bias_0, block, size_0, rows, x_stride, result_stride,
                 INPUTS, ROWS, OUTPUTS, STEP, BIASED[0], ACTIVATIONS[0])
    elif MAPS == 2 or block < end_1:
        _one_map(result + size_0, x_1, weight_1, bias_1, block - end_0, size_1, rows, x_stride, result_stride,
                 INPUTS, ROWS, OUTPUTS, STEP, BIASED[1], ACTIVATIONS[1])
    else:
        _one_map(result + size_0 + size_1, x_2, weight_2, bias_2, block - end_1, size_2, rows, x_stride, result_stride,
                 INPUTS, ROWS, OUTPUTS, STEP, BIASED[2], ACTIVATIONS[2])


@triton.jit
def _one_map(
    result, x, weight, bias, block, size, rows, x_stride, result_stride,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, BIASED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    output = block * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    total = _product(total, x, x_stride, rows, weight, output, size, 0, INPUTS, INPUTS, STEP)
    if BIASED:
        total += _bias(bias, output, size)
    _keep(result, activate(total, ACTIVATION), result_stride, rows, output, size)


@triton.jit
def gated_kernel(
    result, x, gate, gate_bias, up, up_bias, size, rows, x_stride,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, BIASED: tl.constexpr,
    ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One block of outputs ``activation(gate(x)) * up(x)`` of all rows, which are normed already."""
    allow_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    output, row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    opened, total = tl.zeros([ROWS, OUTPUTS], tl.float32), tl.zeros([ROWS, OUTPUTS], tl.float32)
    EXACT: tl.constexpr = "ieee" if gate.dtype.element_ty == tl.float32 else "tf32"  # noqa: N806
    for start in tl.range(0, INPUTS, STEP):
        values = _loaded(x, row, x_stride, rows, start, INPUTS, STEP)
        gate_tile = _loaded(gate, output, INPUTS, size, start, INPUTS, STEP)
        up_tile = _loaded(up, output, INPUTS, size, start, INPUTS, STEP)
        opened = tl.dot(values, tl.trans(gate_tile), opened, input_precision=EXACT)
        total = tl.dot(values, tl.trans(up_tile), total, input_precision=EXACT)
    if BIASED[0]:
        opened += _bias(gate_bias, output, size)
    if BIASED[1]:
        total += _bias(up_bias, output, size)
    _keep(result, activate(opened, ACTIVATION) * total, size, rows, output, size)


@triton.jit
def residual_kernel(
    result, residual, x_0, weight_0, bias_0, x_1, weight_1, bias_1, parts, counter, size, rows, stride, stride_0,
    stride_1,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, TERMS: tl.constexpr,
    SPLITS: tl.constexpr, BIASED: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """A residual and one or two terms; programs along the second axis share the steps, and the last one adds up."""
    allow_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    block, split = tl.program_id(0), tl.program_id(1)
    output, row = block * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    first_steps: tl.constexpr = (INPUTS[0] + STEP - 1) // STEP
    steps: tl.constexpr = first_steps + ((INPUTS[1] + STEP - 1) // STEP if TERMS == 2 else 0)
    share: tl.constexpr = (steps + SPLITS - 1) // SPLITS
    begin, end = split * share, tl.minimum(split * share + share, steps)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    total = _product(total, x_0, stride_0, rows, weight_0, output, size, begin * STEP,
                     tl.minimum(end, first_steps) * STEP, INPUTS[0], STEP)
    if TERMS == 2:
        total = _product(total, x_1, stride_1, rows, weight_1, output, size, tl.maximum(begin - first_steps, 0) * STEP,
                         (end - first_steps) * STEP, INPUTS[1], STEP)
    mask = (row < rows)[:, None] & (output < size)[None, :]
    at = row[:, None] * size + output[None, :]
    if SPLITS > 1:
        tl.store(parts + split * rows * size + at, total, mask=mask)
        # All threads have stored before the program counts as done.
        tl.debug_barrier()
        if tl.atomic_add(counter + block, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(counter + block, 0)
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for number in range(SPLITS):
            total += tl.load(parts + number * rows * size + at, mask=mask, other=0.0, cache_modifier=".cg")
    if BIASED[0]:
        total += _bias(bias_0, output, size)
    if TERMS == 2 and BIASED[1]:
        total += _bias(bias_1, output, size)
    total += tl.load(residual + row[:, None] * stride + output[None, :], mask=mask, other=0.0).to(tl.float32)
    _keep(result, total, size, rows, output, size)
