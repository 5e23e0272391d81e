"""Runs all decoder layers over one row in a single kernel launch: one decoding stream at the speed of the memory.

With one row, a layer's three to five kernels each take about as long to begin and end as to read their weights. Here
every multiprocessor runs one block for the whole pass. Each warp of a block streams its share of every product's
weights through its own ring in shared memory (bulk copies, about 200 KiB ahead), so that reading never stops while
blocks wait for one another: after the QKV product, after attention, and after each sum to the residual stream. Each
block holds the whole residual stream in float32; norms are computed by every block for itself.

``kernel.cu`` is compiled for the model's shapes when an engine is built. The tests run it on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from adaponder.ops.cuda import CompileError, Kernel, compile_source
from adaponder.ops.dispatch import has_kernels, runs_unproven
from adaponder.ops.ledger_attention import LedgerRows, Projection
from adaponder.ops.row_linear import Linear, Norm, Piece

SOURCE = Path(__file__).with_name("kernel.cu")
_ACTIVATIONS = {"gelu": 1, "gelu_tanh": 2, "relu": 3, "silu": 4}
_ENTRIES = 25  # addresses per layer, the order of ``enum Entry``
_SHARED_BYTES = 227 * 1024  # of a block with compute capability 9

Launch = Callable[[int, int, Sequence[Tensor | int]], None]


class LayerWeights(NamedTuple):
    """The weights of a decoder layer: ``qkv`` and ``up`` include the norms before them, ``up`` also the activation.

    ``after`` has the norms after attention and after the MLP, or ``None`` twice.
    """

    qkv: Piece
    projection: Projection
    out: Linear
    gate: Linear | None
    up: Piece
    down: Linear
    after: tuple[Norm | None, Norm | None]
    scale: float


class Decoder(NamedTuple):
    """Decoder layers and the norm after them; ``windows`` has each layer's attention window, ``cos`` and ``sin`` the
    rotary tables; in ``parallel`` layers attention and MLP read the same residual stream."""

    layers: Sequence[LayerWeights]
    norm: Norm
    windows: Sequence[int | None]
    cos: Tensor
    sin: Tensor
    parallel: bool


class RowPass:
    """A pass of ``decoder`` over one row, by ``blocks`` blocks; ``launch`` runs the kernel with these constants."""

    def __init__(self, decoder: Decoder, constants: dict[str, int | float], blocks: int, launch: Launch):
        self.decoder, self.blocks, self.launch = decoder, blocks, launch
        self.threads = int(constants["THREADS"])
        norm, projection = decoder.norm, decoder.layers[0].projection
        like = norm.weight
        most_splits = max(blocks // projection.heads, 1)
        partial = projection.heads * most_splits * (projection.size + 4)
        entries = (projection.heads + 2 * projection.key_heads) * projection.size
        floats = entries + int(constants["INNER"]) + int(constants["D"]) + partial
        self.scratch = torch.zeros(floats, dtype=torch.float32, device=like.device)
        self.counter = torch.zeros(2, dtype=torch.int32, device=like.device)
        self.epsilons = torch.tensor([norm.eps, projection.epsilon], dtype=torch.float32, device=like.device)
        self._table: tuple[int, Tensor] | None = None

    def __call__(
        self, x: Tensor, position: Tensor, rows: LedgerRows, pools: tuple[list[Tensor], list[Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Returns hidden state and residual stream, ``[1, d]``, of row ``x [1, d]``; writes its keys and values.

        ``pools`` are the keys and the values of all rows, ``[rows, key heads, size]`` per layer.
        """
        norm, x = self.decoder.norm, x.contiguous()
        hidden, stream = torch.empty_like(x), torch.empty_like(x)
        shift = norm.weight if norm.bias is None else norm.bias
        arguments = (
            x, hidden, stream, self._addresses(*pools), norm.weight, shift, rows.index, rows.lane, rows.slot,
            rows.iteration, rows.row, position, self.decoder.cos, self.decoder.sin, self.epsilons, self.scratch,
            self.counter, int(norm.bias is not None), *rows.index.stride()[:2],
        )  # fmt: skip
        self.launch(self.blocks, self.threads, arguments)
        return hidden, stream

    def _addresses(self, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Returns the table of addresses ``[layers, entries]``; kept, because an engine's pools stay in place."""
        if self._table is None or self._table[0] != keys[0].data_ptr():
            layers = zip(self.decoder.layers, keys, values, self.decoder.windows, strict=True)
            lines = [
                [*_layer_addresses(layer), key.data_ptr(), value.data_ptr(), window or 0]
                for layer, key, value, window in layers
            ]
            self._table = keys[0].data_ptr(), torch.tensor(lines, dtype=torch.int64).to(keys[0].device)
        return self._table[1]


def _layer_addresses(layer: LayerWeights) -> list[int]:
    """Returns the addresses of a layer's parameters in the order of ``enum Entry``, 0 for what it does not have."""
    assert layer.qkv.norm is not None
    assert layer.up.norm is not None
    query, *key_value = layer.qkv.linears
    key, value = key_value or (None, None)
    tensors = [layer.qkv.norm.weight, layer.qkv.norm.bias, layer.up.norm.weight, layer.up.norm.bias]
    tensors += [None if norm is None else norm.weight for norm in layer.after]
    for linear in (query, key, value, layer.out, layer.gate, layer.up.linears[0], layer.down):
        tensors += (None, None) if linear is None else linear
    tensors += [layer.projection.query_norm, layer.projection.key_norm]
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def constants_for(decoder: Decoder, blocks: int) -> dict[str, int | float] | str:
    """Returns the constants of ``kernel.cu`` for a decoder, or why the kernel cannot run it."""
    first, norm = decoder.layers[0], decoder.norm
    heads, key_heads, size, packed, rotary = first.projection[:5]
    hidden, inner, width = norm.weight.shape[0], first.down.weight.shape[1], heads * size
    norms = [norm, *(norm for layer in decoder.layers for norm in (layer.qkv.norm, layer.up.norm, *layer.after))]
    linears = [(x.gate, x.out, x.down, *x.qkv.linears, *x.up.linears) for x in decoder.layers]
    tensors = [linear.weight for group in linears for linear in group if linear is not None]
    if norm.weight.dtype not in (torch.bfloat16, torch.float16):
        return f"weights in {norm.weight.dtype}"
    if size not in (32, 64, 128) or any(number % 256 for number in (hidden, inner, width)):
        return f"hidden size {hidden}, MLP size {inner} and {heads} heads of {size}"
    if any(kind is not None and (kind.eps, kind.centred) != (norm.eps, norm.centred) for kind in norms):
        return "norms of several kinds"
    if any(tensor.data_ptr() % 16 or not tensor.is_contiguous() for tensor in tensors):
        return "weights that are not contiguous"
    threads = 512 if hidden % 512 == 0 else 256
    segment = next(length for length in (1024, 512, 256) if not any(n % length for n in (hidden, inner, width)))
    entry_pairs = (width + 2 * key_heads * size + (inner if decoder.parallel else 0)) // 2
    products = [(entry_pairs, hidden), (hidden // 2, width), (hidden // 2, inner)]
    products += [] if decoder.parallel else [(inner if first.gate is not None else inner // 2, hidden)]
    most_tasks = max(-(-pairs // blocks) * (inputs // segment) for pairs, inputs in products)
    warps, layers = threads // 32, len(decoder.layers)
    floats = 2 * hidden + max(width, inner) + 4 * most_tasks + warps * (size + 6) + 2 * size
    fixed = 4 * floats + 8 * layers * _ENTRIES + 256
    slots = (_SHARED_BYTES - fixed) // (warps * (4 * segment + 8))
    if slots < 2:
        return f"hidden size {hidden} and MLP size {inner} leave no shared memory for the weights"
    return {
        "D": hidden, "INNER": inner, "HEADS": heads, "KEY_HEADS": key_heads, "SIZE": size, "ROTARY": rotary,
        "LAYERS": layers, "PARALLEL": int(decoder.parallel), "PACKED": int(packed),
        "GATED": int(first.gate is not None), "NORM": 1 if norm.centred else 2,
        "AFTER": int(first.after[0] is not None), "HEAD_NORM": int(first.projection.query_norm is not None),
        "ACTIVATION": _ACTIVATIONS[first.up.activation or ""], "FP16": int(norm.weight.dtype == torch.float16),
        "SCALE": first.scale * 1.4426950408889634, "THREADS": threads, "SEGMENT": segment, "SLOTS": min(slots, 16),
        "MOST_TASKS": most_tasks, "SHARED_BYTES": _SHARED_BYTES,
    }  # fmt: skip


def options_for(constants: dict[str, int | float]) -> list[str]:
    """Returns the compiler's options that define the constants."""
    return [f"-D{name}={value!r}" + ("f" if isinstance(value, float) else "") for name, value in constants.items()]


def build_row_pass(decoder: Decoder) -> RowPass | str:
    """Compiles the kernel for a decoder on a GPU of compute capability 9, or returns why it cannot be used."""
    like = decoder.norm.weight
    if not has_kernels(like):
        return "no CUDA device"
    if not runs_unproven():
        return "ADAPONDER_UNPROVEN is not 1"
    properties = torch.cuda.get_device_properties(like.device)
    if properties.major != 9:
        return f"compute capability {properties.major}.{properties.minor}"
    constants = constants_for(decoder, properties.multi_processor_count)
    if isinstance(constants, str):
        return constants
    try:
        kernel = _kernel(tuple(options_for(constants)), like.device)
    except CompileError as error:
        return str(error)
    return RowPass(decoder, constants, properties.multi_processor_count, kernel)


@lru_cache(maxsize=8)
def _kernel(options: tuple[str, ...], device: torch.device) -> Kernel:
    code = compile_source(SOURCE.read_text(encoding="utf-8"), ["-arch=sm_90a", "-std=c++17", *options])
    return Kernel(code, "row_pass", device, _SHARED_BYTES)
