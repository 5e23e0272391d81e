"""Kernels of linear layers on few rows: matrix-vector up to ``FEW`` rows, tiled up to ``SOME`` rows (triton.py).

In ``few_*``, a program computes a few outputs of one row and loads their weights while the previous kernel still runs.
In ``some_*``, a program computes a few outputs of all rows in a loop over the inputs; another kernel applies norms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adaponder.ops.kernels import allow_next, wait_for_previous

# fmt: off


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Applies an activation by its code in triton.py: 1 GELU, 2 GELU by tanh, 3 ReLU, 4 SiLU, 0 none."""
    if ACTIVATION == 1:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 2:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x / (1.0 + tl.exp(-2.0 * inner))  # x (1 + tanh(inner)) / 2
    elif ACTIVATION == 3:
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == 4:
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def weight_tile(weight, first, size, INPUTS: tl.constexpr, BLOCK: tl.constexpr, OUTPUTS: tl.constexpr):
    """Loads a tile ``[outputs, block]`` of ``weight [size, inputs]`` from row ``first`` on; zeros outside."""
    output, k = tl.arange(0, OUTPUTS)[:, None], tl.arange(0, BLOCK)[None, :]
    at = weight + first.to(tl.int64) * INPUTS + output * INPUTS + k
    return tl.load(at, mask=(first + output < size) & (k < INPUTS), other=0.0)


@triton.jit
def row_tile(x, INPUTS: tl.constexpr, BLOCK: tl.constexpr):
    """Loads a row as ``[1, block]``, padded with zeros."""
    k = tl.arange(0, BLOCK)[None, :]
    return tl.load(x + k, mask=k < INPUTS, other=0.0)


@triton.jit
def normalised(
    x, gain, shift, eps, INPUTS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, SHIFTED: tl.constexpr
):
    """Applies a norm to a row ``[1, block]`` in float32: 1 LayerNorm, 2 RMSNorm, 0 none."""
    if NORM == 1:
        x = x - tl.sum(x, 1)[:, None] / INPUTS
        x = tl.where(tl.arange(0, BLOCK)[None, :] < INPUTS, x, 0.0)
    if NORM > 0:
        x = x * tl.rsqrt(tl.sum(x * x, 1)[:, None] / INPUTS + eps) * gain.to(tl.float32)
    if SHIFTED:
        x += shift.to(tl.float32)
    return x


@triton.jit
def _few_map(
    x, result, weight, bias, gain, shift, block, size, eps, x_stride, result_stride,
    INPUTS: tl.constexpr, BLOCK: tl.constexpr, OUTPUTS: tl.constexpr, NORM: tl.constexpr, SHIFTED: tl.constexpr,
    BIASED: tl.constexpr, ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Computes one block of outputs of ``activation(linear(norm(x)))`` for one row."""
    first = block * OUTPUTS
    output = first + tl.arange(0, OUTPUTS)
    tile = weight_tile(weight, first, size, INPUTS, BLOCK, OUTPUTS)
    if NORM > 0:
        gain = row_tile(gain, INPUTS, BLOCK)
    if SHIFTED:
        shift = row_tile(shift, INPUTS, BLOCK)
    if BIASED:
        bias = tl.load(bias + output, mask=output < size, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(1)
    values = row_tile(x + row * x_stride, INPUTS, BLOCK).to(tl.float32)
    values = normalised(values, gain, shift, eps, INPUTS, BLOCK, NORM, SHIFTED)
    total = tl.sum(tile.to(tl.float32) * values, 1)
    if BIASED:
        total += bias
    total = activate(total, ACTIVATION)
    tl.store(result + row * result_stride + output, total, mask=output < size)


@triton.jit
def few_maps_kernel(
    x, result, weight_0, bias_0, gain_0, shift_0, weight_1, bias_1, gain_1, shift_1, weight_2, bias_2, gain_2, shift_2,
    size_0, size_1, size_2, end_0, end_1, eps_0, eps_1, eps_2, x_stride, result_stride,
    INPUTS: tl.constexpr, BLOCK: tl.constexpr, OUTPUTS: tl.constexpr,
    MAPS: tl.constexpr, NORMS: tl.constexpr, SHIFTED: tl.constexpr, BIASED: tl.constexpr,
    ACTIVATIONS: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Computes up to three linear layers of the same rows; programs below ``end_0`` compute the first, and so on."""
    allow_next(DEPENDENT)
    block = tl.program_id(0)
    if MAPS == 1 or block < end_0:
        _few_map(
            x, result, weight_0, bias_0, gain_0, shift_0, block, size_0, eps_0, x_stride, result_stride,
            INPUTS, BLOCK, OUTPUTS, NORMS[0], SHIFTED[0], BIASED[0], ACTIVATIONS[0], DEPENDENT,
        )
    elif MAPS == 2 or block < end_1:
        _few_map(
            x, result + size_0, weight_1, bias_1, gain_1, shift_1, block - end_0, size_1, eps_1, x_stride,
            result_stride, INPUTS, BLOCK, OUTPUTS, NORMS[1], SHIFTED[1], BIASED[1], ACTIVATIONS[1], DEPENDENT,
        )
    else:
        _few_map(
            x, result + size_0 + size_1, weight_2, bias_2, gain_2, shift_2, block - end_1, size_2, eps_2, x_stride,
            result_stride, INPUTS, BLOCK, OUTPUTS, NORMS[2], SHIFTED[2], BIASED[2], ACTIVATIONS[2], DEPENDENT,
        )


@triton.jit
def few_gated_kernel(
    x, result, gate, gate_bias, up, up_bias, gain, shift, size, eps, x_stride,
    INPUTS: tl.constexpr, BLOCK: tl.constexpr, OUTPUTS: tl.constexpr, NORM: tl.constexpr, SHIFTED: tl.constexpr,
    BIASED: tl.constexpr, ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Computes one block of outputs of ``activation(gate(norm(x))) * up(norm(x))`` for one row."""
    allow_next(DEPENDENT)
    first = tl.program_id(0) * OUTPUTS
    output = first + tl.arange(0, OUTPUTS)
    gate_tile = weight_tile(gate, first, size, INPUTS, BLOCK, OUTPUTS)
    up_tile = weight_tile(up, first, size, INPUTS, BLOCK, OUTPUTS)
    gain = row_tile(gain, INPUTS, BLOCK)
    if SHIFTED:
        shift = row_tile(shift, INPUTS, BLOCK)
    if BIASED[0]:
        gate_bias = tl.load(gate_bias + output, mask=output < size, other=0.0).to(tl.float32)
    if BIASED[1]:
        up_bias = tl.load(up_bias + output, mask=output < size, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(1)
    values = row_tile(x + row * x_stride, INPUTS, BLOCK).to(tl.float32)
    values = normalised(values, gain, shift, eps, INPUTS, BLOCK, NORM, SHIFTED)
    opened = tl.sum(gate_tile.to(tl.float32) * values, 1)
    total = tl.sum(up_tile.to(tl.float32) * values, 1)
    if BIASED[0]:
        opened += gate_bias
    if BIASED[1]:
        total += up_bias
    tl.store(result + row * size + output, activate(opened, ACTIVATION) * total, mask=output < size)


@triton.jit
def few_residual_kernel(
    residual, result, x_0, x_1, weight_0, bias_0, weight_1, bias_1, size, stride, stride_0, stride_1,
    INPUTS: tl.constexpr, BLOCK: tl.constexpr, OUTPUTS: tl.constexpr, TERMS: tl.constexpr, BIASED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Computes one block of outputs for one row: its residual plus one or two linear layers."""
    allow_next(DEPENDENT)
    first = tl.program_id(0) * OUTPUTS
    output = first + tl.arange(0, OUTPUTS)
    tile_0 = weight_tile(weight_0, first, size, INPUTS[0], BLOCK[0], OUTPUTS)
    if TERMS == 2:
        tile_1 = weight_tile(weight_1, first, size, INPUTS[1], BLOCK[1], OUTPUTS)
    bias = tl.zeros([OUTPUTS], tl.float32)
    if BIASED[0]:
        bias += tl.load(bias_0 + output, mask=output < size, other=0.0).to(tl.float32)
    if TERMS == 2 and BIASED[1]:
        bias += tl.load(bias_1 + output, mask=output < size, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(1)
    start = tl.load(residual + row * stride + output, mask=output < size, other=0.0).to(tl.float32)
    values = row_tile(x_0 + row * stride_0, INPUTS[0], BLOCK[0]).to(tl.float32)
    total = tl.sum(tile_0.to(tl.float32) * values, 1)
    if TERMS == 2:
        values = row_tile(x_1 + row * stride_1, INPUTS[1], BLOCK[1]).to(tl.float32)
        total += tl.sum(tile_1.to(tl.float32) * values, 1)
    tl.store(result + row * size + output, total + bias + start, mask=output < size)


@triton.jit
def norm_kernel(
    x, result, gain, shift, gain_1, shift_1, eps, stride,
    INPUTS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, SHIFTED: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Normalises each row of ``x`` with gain, shift and, if the grid has two columns, also with gain_1, shift_1.

    ``result`` is ``[norms, rows, INPUTS]``.
    """
    allow_next(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < INPUTS
    if tl.program_id(1) == 1:
        gain, shift = gain_1, shift_1
        result += tl.num_programs(0) * INPUTS
    weight = tl.load(gain + k, mask=inside, other=0.0).to(tl.float32)
    if SHIFTED:
        bias = tl.load(shift + k, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    values = tl.load(x + row * stride + k, mask=inside, other=0.0).to(tl.float32)
    if NORM == 1:
        values = tl.where(inside, values - tl.sum(values, 0) / INPUTS, 0.0)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / INPUTS + eps) * weight
    if SHIFTED:
        values += bias
    tl.store(result + row * INPUTS + k, values, mask=inside)


@triton.jit
def _loaded(base, line, stride, lines, start, INPUTS: tl.constexpr, STEP: tl.constexpr):
    """Loads a tile ``[lines, step]`` of a matrix from column ``start`` on; zeros outside."""
    k = start + tl.arange(0, STEP)
    mask = (line < lines)[:, None]
    if INPUTS % STEP != 0:
        mask = mask & (k < INPUTS)[None, :]
    return tl.load(base + line[:, None].to(tl.int64) * stride + k[None, :], mask=mask, other=0.0)


@triton.jit
def _product(total, x, x_stride, rows, weight, output, size, begin, end, INPUTS: tl.constexpr, STEP: tl.constexpr):
    """Returns ``total [rows, outputs]`` plus ``x @ weight[output].T`` over the inputs from ``begin`` to ``end``."""
    row = tl.arange(0, total.shape[0])
    EXACT: tl.constexpr = "ieee" if weight.dtype.element_ty == tl.float32 else "tf32"
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
def some_maps_kernel(
    result, x_0, weight_0, bias_0, x_1, weight_1, bias_1, x_2, weight_2, bias_2, size_0, size_1, size_2, end_0, end_1,
    rows, x_stride, result_stride,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, MAPS: tl.constexpr,
    BIASED: tl.constexpr, ACTIVATIONS: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Computes up to three linear layers, outputs concatenated; programs below ``end_0`` compute the first, etc."""
    allow_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    block = tl.program_id(0)
    if MAPS == 1 or block < end_0:
        _some_map(result, x_0, weight_0, bias_0, block, size_0, rows, x_stride, result_stride,
                  INPUTS, ROWS, OUTPUTS, STEP, BIASED[0], ACTIVATIONS[0])
    elif MAPS == 2 or block < end_1:
        _some_map(result + size_0, x_1, weight_1, bias_1, block - end_0, size_1, rows, x_stride, result_stride,
                  INPUTS, ROWS, OUTPUTS, STEP, BIASED[1], ACTIVATIONS[1])
    else:
        _some_map(result + size_0 + size_1, x_2, weight_2, bias_2, block - end_1, size_2, rows, x_stride, result_stride,
                  INPUTS, ROWS, OUTPUTS, STEP, BIASED[2], ACTIVATIONS[2])


@triton.jit
def _some_map(
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
def some_gated_kernel(
    result, x, gate, gate_bias, up, up_bias, size, rows, x_stride,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, BIASED: tl.constexpr,
    ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Computes one block of outputs of ``activation(gate(x)) * up(x)`` for all rows; ``x`` is already normalised."""
    allow_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    output, row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    opened, total = tl.zeros([ROWS, OUTPUTS], tl.float32), tl.zeros([ROWS, OUTPUTS], tl.float32)
    EXACT: tl.constexpr = "ieee" if gate.dtype.element_ty == tl.float32 else "tf32"
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
def some_residual_kernel(
    result, residual, x_0, weight_0, bias_0, x_1, weight_1, bias_1, parts, counter, size, rows, stride, stride_0,
    stride_1,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, TERMS: tl.constexpr,
    SPLITS: tl.constexpr, BIASED: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Adds one or two linear layers to a residual; ``SPLITS`` programs split the inputs, the last sums the results."""
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
        # All threads must have stored before the program counts as finished.
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
