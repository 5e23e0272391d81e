"""The kernels behind the matrix-vector products, and the pieces that others build on."""

# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from adaponder.ops.dependent import allow_next, wait_for_previous


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """1: GELU, 2: GELU by tanh, 3: ReLU, 4: SiLU, 0: x itself; triton.py gives them these numbers."""
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
    """``[outputs, block]`` of ``weight [size, inputs]`` from row ``first`` on; zeros outside."""
    output, k = tl.arange(0, OUTPUTS)[:, None], tl.arange(0, BLOCK)[None, :]
    at = weight + first.to(tl.int64) * INPUTS + output * INPUTS + k
    return tl.load(at, mask=(first + output < size) & (k < INPUTS), other=0.0)


@triton.jit
def row_tile(x, INPUTS: tl.constexpr, BLOCK: tl.constexpr):
    """A row of so many inputs as ``[1, block]``, zeros beyond them."""
    k = tl.arange(0, BLOCK)[None, :]
    return tl.load(x + k, mask=k < INPUTS, other=0.0)


@triton.jit
def normalised(
    x, gain, shift, eps, INPUTS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, SHIFTED: tl.constexpr
):
    """A row ``[1, block]`` through its norm, in float32."""
    if NORM == 1:
        x = x - tl.sum(x, 1)[:, None] / INPUTS
        x = tl.where(tl.arange(0, BLOCK)[None, :] < INPUTS, x, 0.0)
    if NORM > 0:
        x = x * tl.rsqrt(tl.sum(x * x, 1)[:, None] / INPUTS + eps) * gain.to(tl.float32)
    if SHIFTED:
        x += shift.to(tl.float32)
    return x


@triton.jit
def _map(
    x,
    result,
    weight,
    bias,
    gain,
    shift,
    block,
    size,
    eps,
    x_stride,
    result_stride,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    NORM: tl.constexpr,
    SHIFTED: tl.constexpr,
    BIASED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One block of outputs of one linear map, of one row."""
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


# fmt: off
@triton.jit
def normed_kernel(
    x, result, weight_0, bias_0, gain_0, shift_0, weight_1, bias_1, gain_1, shift_1, weight_2, bias_2, gain_2, shift_2,
    size_0, size_1, size_2, end_0, end_1, eps_0, eps_1, eps_2, x_stride, result_stride,
    INPUTS: tl.constexpr, BLOCK: tl.constexpr, OUTPUTS: tl.constexpr,
    MAPS: tl.constexpr, NORMS: tl.constexpr, SHIFTED: tl.constexpr, BIASED: tl.constexpr,
    ACTIVATIONS: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Up to three maps of the same rows, side by side; programs up to ``end_0`` work at the first, and so on."""
    allow_next(DEPENDENT)
    block = tl.program_id(0)
    if MAPS == 1 or block < end_0:
        _map(
            x, result, weight_0, bias_0, gain_0, shift_0, block, size_0, eps_0, x_stride, result_stride,
            INPUTS, BLOCK, OUTPUTS, NORMS[0], SHIFTED[0], BIASED[0], ACTIVATIONS[0], DEPENDENT,
        )
    elif MAPS == 2 or block < end_1:
        _map(
            x, result + size_0, weight_1, bias_1, gain_1, shift_1, block - end_0, size_1, eps_1, x_stride,
            result_stride, INPUTS, BLOCK, OUTPUTS, NORMS[1], SHIFTED[1], BIASED[1], ACTIVATIONS[1], DEPENDENT,
        )
    else:
        _map(
            x, result + size_0 + size_1, weight_2, bias_2, gain_2, shift_2, block - end_1, size_2, eps_2, x_stride,
            result_stride, INPUTS, BLOCK, OUTPUTS, NORMS[2], SHIFTED[2], BIASED[2], ACTIVATIONS[2], DEPENDENT,
        )
# fmt: on


@triton.jit
def gated_kernel(
    x,
    result,
    gate,
    gate_bias,
    up,
    up_bias,
    gain,
    shift,
    size,
    eps,
    x_stride,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    NORM: tl.constexpr,
    SHIFTED: tl.constexpr,
    BIASED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One block of outputs ``activation(gate(n)) * up(n)`` of one row, ``n`` being its norm."""
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
def residual_kernel(
    residual,
    result,
    x_0,
    x_1,
    weight_0,
    bias_0,
    weight_1,
    bias_1,
    size,
    stride,
    stride_0,
    stride_1,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TERMS: tl.constexpr,
    BIASED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One block of outputs of one row: its residual plus one linear map, or two, each of an input of its own."""
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


# fmt: off
@triton.jit
def norm_kernel(
    x, result, gain, shift, gain_1, shift_1, eps, stride,
    INPUTS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, SHIFTED: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Each row through one norm or through two; the second ones' results lie behind all of the first."""
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
# fmt: on
