"""Runs a backbone over the KV pools: with fused kernels where the architecture allows it, else with stock layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adaponder.backbones.attention import LedgerLane
from adaponder.backbones.views import IterationView, KeysValues, PlainView
from adaponder.backbones.wrapper import Backbone
from adaponder.errors import InputError
from adaponder.execution.base import Pass
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.ops import ledger_attention as attention
from adaponder.ops.ledger_attention import Angles, LedgerRows, Projection, Scratch
from adaponder.ops.masks import Places
from adaponder.ops.precision import wide_dtype
from adaponder.ops.row_linear import Linear, Norm, Piece, Term, gated_linear, normed_linears, residual_linears, row_norm

# Activation names in a decoder's config, and the kernels' names for them.
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}
# The shapes of a row's keys and values in one layer, [heads, size] each.
RowShape = tuple[tuple[int, int], tuple[int, int]]
# Rotary embeddings whose angles depend on the position alone.
ROPES = ("default", "linear", "llama3", "yarn")


class Pools(NamedTuple):
    """The keys and values of all rows, one pair of tensors ``[rows, heads, size]`` per layer."""

    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def empty(cls, shapes: list[RowShape], rows: int, dtype: torch.dtype, device: torch.device) -> Pools:
        """Allocates ``rows`` rows of zeros.

        Uninitialised memory could contain NaN, which attention would keep when it multiplies masked values by 0.
        """
        keys, values = zip(*shapes, strict=True)
        like = torch.zeros(0, dtype=dtype, device=device)
        return cls([like.new_zeros(rows, *shape) for shape in keys], [like.new_zeros(rows, *shape) for shape in values])


class Body(ABC):
    """The decoder layers and final norm of a backbone, as the engine runs them."""

    @abstractmethod
    def row_shapes(self) -> list[RowShape]:
        """Returns for each layer the shapes ``(heads, size)`` of a row's keys and values."""

    @abstractmethod
    def forward(self, x: Tensor, position: Tensor, rows: LedgerRows, pools: Pools) -> Pass:
        """Runs one pass (eq. 1) over ``x [n, d]`` at ``position [n]``; returns hidden states and residual stream.

        Each layer writes the rows' keys and values to the pools at ``rows.row``; then each row attends to the pool rows
        that ``rows.index`` lists for its lane and iteration.
        """


def build_body(model: AdaPonderForCausalLM, kind: str | None, *, rows: int, positions: int, width: int) -> Body:
    """Builds the ``fused`` or ``stock`` body; ``None`` means fused if the backbone supports it, else stock.

    ``rows`` is the maximum number of decode rows in one pass, padding included; ``positions`` is the maximum length of
    a sequence; ``width`` is the number of slots per token. Raises if ``kind="fused"`` does not support the backbone.
    """
    reason = None if kind == "stock" else unsupported(model.wrapped)
    if kind != "stock" and reason is None:
        return FusedBody(model.wrapped, rows=rows, independent=width == 1, positions=positions)
    if kind == "fused":
        raise InputError(f"body='fused' does not support this backbone ({reason}); use body='stock'")
    return StockBody(model.wrapped, stream=model.method.needs_stream(model.config.iterations))


class Names(NamedTuple):
    """The names of a decoder layer's modules.

    ``gate`` is ``None`` if the MLP is not gated; ``after`` names the norm after attention and the norm after the MLP,
    and is empty if the layer has neither.
    """

    attention: str
    qkv: tuple[str, ...]
    out: str
    gate: str | None
    up: str
    down: str
    after: tuple[str, ...] = ()


NEOX = Names("attention", ("query_key_value",), "dense", None, "dense_h_to_4h", "dense_4h_to_h")
LLAMA = Names("self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj", "gate_proj", "up_proj", "down_proj")
FAMILIES = {"gpt_neox": NEOX, "llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA}
FAMILIES["hyperclovax"] = LLAMA._replace(after=("post_norm1", "post_norm2"))


class FusedLayer(NamedTuple):
    """The weights of a decoder layer: ``qkv`` and ``up`` include the norms before them, ``up`` also the activation.

    ``after`` is the norm after attention and the norm after the MLP, or ``(None, None)`` if the layer has neither.
    """

    qkv: Piece
    projection: Projection
    out: Linear
    gate: Linear | None
    up: Piece
    down: Linear
    after: tuple[Norm | None, Norm | None]
    scale: float


# Rows of a pass and the rotary angles of their positions.
PassRows = tuple[LedgerRows, Angles]


class FusedBody(Body):
    """Runs a GPT-NeoX layer in three kernels and a Llama-family layer in five, on the parameters of the stock modules.

    Each norm after attention or after the MLP needs one more kernel and an addition in PyTorch. Weights are not copied,
    so in-place changes take effect. If a parameter is replaced by another tensor (a merged adapter, a module moved to
    another device), a new body must be built.

    Args:
        backbone: a decoder for which :func:`unsupported` returns ``None``.
        rows: the largest number of decode rows in a pass.
        independent: whether no decode row attends to another row of the same pass; false for pause tokens.
        positions: the number of positions in the rotary tables.
    """

    def __init__(self, backbone: Backbone, *, rows: int, independent: bool, positions: int):
        config: Any = backbone.stock.config
        self.windows, self.independent = backbone.layer_windows, independent
        self.norm = norm_weights(backbone.norm)
        like = self.norm.weight
        self.cos, self.sin = _rotary_table(backbone, like, positions)
        self.heads: int = config.num_attention_heads
        self.key_heads: int = getattr(config, "num_key_value_heads", None) or self.heads
        self.size: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        # Attention and MLP read the same residual stream: QKV and up are one kernel, and so are out and down.
        self.parallel: bool = getattr(config, "use_parallel_residual", False)
        self.layers = self._layers(backbone)
        self.scratch: Scratch | None = None
        # Programmatic dependent launch needs compute capability 9.
        self.dependent = like.is_cuda and torch.cuda.get_device_capability(like.device) >= (9, 0)
        if like.is_cuda:
            self.scratch = attention.scratch_for(rows, self.heads, self.size, like.device)

    def _layers(self, backbone: Backbone) -> list[FusedLayer]:
        body: Any = backbone.body
        config: Any = backbone.stock.config
        names, activation = FAMILIES[config.model_type], ACTIVATIONS[config.hidden_act]
        packed = len(names.qkv) == 1  # query, key and value of each head are adjacent
        shared = Projection(self.heads, self.key_heads, self.size, packed=packed, rotary=self.cos.shape[-1])
        layers = []
        for layer in body.layers:
            block, mlp, projection = getattr(layer, names.attention), layer.mlp, shared
            if hasattr(block, "q_norm"):
                query, key = norm_weights(block.q_norm), norm_weights(block.k_norm)
                projection = shared._replace(query_norm=query.weight, key_norm=key.weight, epsilon=query.eps)
            qkv = tuple(linear_weights(getattr(block, name)) for name in names.qkv)
            up = (linear_weights(getattr(mlp, names.up)),)
            after = [norm_weights(getattr(layer, name)) for name in names.after] or [None, None]
            layers.append(
                FusedLayer(
                    qkv=Piece(qkv, norm_weights(layer.input_layernorm)),
                    projection=projection,
                    out=linear_weights(getattr(block, names.out)),
                    gate=None if names.gate is None else linear_weights(getattr(mlp, names.gate)),
                    up=Piece(up, norm_weights(layer.post_attention_layernorm), activation),
                    down=linear_weights(getattr(mlp, names.down)),
                    after=(after[0], after[1]),
                    scale=block.scaling,
                )
            )
        return layers

    def row_shapes(self) -> list[RowShape]:
        return [((self.key_heads, self.size), (self.key_heads, self.size))] * len(self.windows)

    def forward(self, x: Tensor, position: Tensor, rows: LedgerRows, pools: Pools) -> Pass:
        split, stream = self._split(position, rows), x
        for number in range(len(self.layers)):
            stream = self._layer(number, stream, *split, pools)
        return Pass(row_norm(stream, self.norm), stream)

    def _layer(self, number: int, x: Tensor, decode: PassRows, prefill: PassRows | None, pools: Pools) -> Tensor:
        """Runs layer ``number`` on the residual stream ``x [n, d]``; returns the new residual stream."""
        layer = self.layers[number]
        if self.parallel:
            qkv, inner = normed_linears(x, (layer.qkv, layer.up))
            mixed = self._attend(number, qkv, decode, prefill, pools)
            return residual_linears(x, (Term(mixed, layer.out), Term(inner, layer.down)))
        (qkv,) = normed_linears(x, (layer.qkv,))
        x = _added(x, Term(self._attend(number, qkv, decode, prefill, pools), layer.out), layer.after[0])
        if layer.gate is None:
            (inner,) = normed_linears(x, (layer.up,))
        else:
            (up,), norm, activation = layer.up
            assert norm is not None
            assert activation is not None
            inner = gated_linear(x, layer.gate, up, norm, activation=activation)
        return _added(x, Term(inner, layer.down), layer.after[1])

    def _split(self, position: Tensor, rows: LedgerRows) -> tuple[PassRows, PassRows | None]:
        """Splits a pass into decode rows and prefill rows (``None`` if none); both parts number their rows from 0."""
        count = rows.num_single
        decode = rows.select(slice(count)), Angles(position[:count], self.cos, self.sin)
        if not rows.cohorts and rows.tiles is None:
            return decode, None
        cohorts = tuple(x._replace(start=x.start - count, stop=x.stop - count) for x in rows.cohorts)
        prefill = rows.select(slice(count, None), cohorts)._replace(num_single=0)
        return decode, (prefill, Angles(position[count:], self.cos, self.sin))

    def _attend(self, number: int, qkv: Tensor, decode: PassRows, prefill: PassRows | None, pools: Pools) -> Tensor:
        """Rotates queries and keys, writes keys and values, and returns the attention output ``[n, heads * size]``."""
        layer, keys, values = self.layers[number], pools.keys[number], pools.values[number]
        options: dict[str, Any] = {"window": self.windows[number], "scale": layer.scale}
        (rows, angles), mixed = decode, []
        count = rows.num_single
        if count and self.independent:
            inputs = (qkv[:count], keys, values, rows, layer.projection, angles)
            mixed.append(attention.decode_attention(*inputs, **options, scratch=self.scratch, dependent=self.dependent))
        elif count:
            query = attention.enter(qkv[:count], keys, values, rows.row, layer.projection, angles)
            mixed.append(attention.ledger_attention(query, keys, values, rows, **options, scratch=self.scratch))
        if prefill is not None:
            rows, angles = prefill
            query = attention.enter(qkv[count:], keys, values, rows.row, layer.projection, angles)
            mixed.append(attention.ledger_attention(query, keys, values, rows, **options))
        return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).flatten(1)


def _added(residual: Tensor, term: Term, norm: Norm | None) -> Tensor:
    """Returns ``residual + norm(term.linear(term.x))``, or without the norm if ``norm`` is ``None``."""
    if norm is None:
        return residual_linears(residual, (term,))
    (product,) = normed_linears(term.x, (Piece((term.linear,)),))
    return residual + row_norm(product, norm)


def linear_weights(module: Any) -> Linear:
    """Returns the parameters of an ``nn.Linear``."""
    return Linear(module.weight.detach(), None if module.bias is None else module.bias.detach())


def norm_weights(module: Any) -> Norm:
    """Returns the parameters of a LayerNorm, or of an RMSNorm as in the Llama family."""
    if isinstance(module, nn.LayerNorm):
        bias = None if module.bias is None else module.bias.detach()
        return Norm(module.weight.detach(), bias, module.eps, centred=True)
    return Norm(module.weight.detach(), None, module.variance_epsilon, centred=False)


def unsupported(backbone: Backbone) -> str | None:
    """Returns why fused kernels cannot run a backbone, or ``None`` if they can."""
    body: Any = backbone.body
    config: Any = backbone.stock.config
    names = FAMILIES.get(config.model_type)
    if names is None:
        return f"{config.model_type} is not one of {', '.join(FAMILIES)}"
    for multiplier in ("embedding_multiplier", "residual_multiplier"):
        if getattr(config, multiplier, 1) != 1:
            return f"{multiplier}={getattr(config, multiplier)} has no kernel"
    if config.hidden_act not in ACTIVATIONS:
        return f"hidden_act={config.hidden_act!r} has no kernel"
    rope = getattr(body.rotary_emb, "rope_type", None)
    if rope not in ROPES:
        return f"rotary embedding of type {rope!r}: its angles may depend on more than the position"
    linears, norms = [], [backbone.norm]
    for layer in body.layers:
        block = getattr(layer, names.attention)
        linears += [getattr(block, name) for name in (*names.qkv, names.out)]
        linears += [getattr(layer.mlp, name) for name in (names.gate, names.up, names.down) if name is not None]
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(layer, name) for name in names.after]
        norms += [getattr(block, name) for name in ("q_norm", "k_norm") if hasattr(block, name)]
    for module in linears:
        if type(module) is not nn.Linear:
            return f"a {type(module).__name__} replaces a plain linear layer (an adapter, or quantised)"
    for module in norms:
        plain = type(module) is nn.LayerNorm or type(module).__name__.endswith("RMSNorm")
        if not plain or getattr(module, "weight", None) is None:
            return f"its norm, a {type(module).__name__}, is unknown"
    for module in body.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"hooks on its {type(module).__name__} would not be called"
    parameters = [parameter for layer in body.layers for parameter in layer.parameters()]
    if len({(parameter.device, parameter.dtype) for parameter in parameters}) > 1:
        return "its weights are on several devices or in several precisions"
    plain = all(type(parameter.data) is Tensor and parameter.is_floating_point() for parameter in parameters)
    if not plain or any(parameter.is_meta for parameter in parameters):
        return "its weights are offloaded or quantised"
    return None


@torch.no_grad()
def _rotary_table(backbone: Backbone, like: Tensor, positions: int) -> tuple[Tensor, Tensor]:
    """Returns the decoder's rotary cosines and sines of positions 0, 1, …, ``[positions, rotary size]`` each."""
    body: Any = backbone.body
    position = torch.arange(positions, device=like.device)[None]
    # At least float32; stock layers round cosines and sines to the model's precision.
    cos, sin = body.rotary_emb(like.new_empty(1, 1, 1, dtype=wide_dtype(like.dtype)), position)
    return cos[0].contiguous(), sin[0].contiguous()


class StockBody(Body):
    """Runs the wrapped stock layers.

    If the decoder uses the attention of ``backbones/attention.py``, all rows form one batch entry, and each attends to
    the pool rows that ``LedgerRows.index`` lists. Otherwise, or with latent attention, each row is a batch entry, and
    the keys and values that it attends to are copied into one tensor.
    """

    def __init__(self, backbone: Backbone, *, stream: bool):
        self.backbone, self.stream = backbone, stream
        self.gathers = backbone.unfolds or not backbone.packs()

    @torch.no_grad()
    def row_shapes(self) -> list[RowShape]:
        backbone, weight = self.backbone, self.backbone.head()[0]
        x = torch.zeros(1, 1, backbone.stock.config.hidden_size, dtype=weight.dtype, device=weight.device)
        position = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
        rows = backbone.read(x, position=position, mask=None, view=PlainView, stream=False).rows
        return [((keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])) for keys, values in rows]

    def forward(self, x: Tensor, position: Tensor, rows: LedgerRows, pools: Pools) -> Pass:
        view_options: dict[str, Any] = {"pools": pools, "row": rows.row}
        if self.gathers:
            mask, view_options["read"] = self._read_slots(rows, x)
            x, position, options = x[:, None], position[:, None], {"mask": mask, "view": GatheringView}
        else:
            lane = LedgerLane(rows, self.backbone.layer_windows, [])
            x, position, options = x[None], position[None], {"mask": None, "view": PoolView, "lane": lane}
        output = self.backbone.read(x, position=position, view_options=view_options, stream=self.stream, **options)
        return Pass(output.hidden.flatten(0, 1), output.stream.flatten(0, 1))

    def _read_slots(self, rows: LedgerRows, x: Tensor) -> tuple[Tensor | dict[str, Tensor], Tensor]:
        """Returns the attention mask of each row over the slots of its lane, and the pool rows of these slots."""
        slots = rows.index.shape[2] if rows.longest is None else rows.longest
        slots = max([slots, *(cohort.last_slot + 1 for cohort in rows.cohorts)])
        read = rows.index[rows.lane, rows.iteration, :slots]
        slot = torch.arange(slots, device=x.device).expand_as(read)
        query = Places(rows.slot[:, None], rows.slot[:, None])
        return self.backbone.mask(query, Places(slot, slot, present=read >= 0), x.dtype), read.clamp(min=0).long()


class PoolView(IterationView):
    """Writes the rows of a pass to the pools and returns the pools; attention selects rows by ``LedgerRows.index``."""

    def __init__(self, layers: int, *, pools: Pools, row: Tensor):
        super().__init__(layers)
        self.pools, self.row = pools, row

    def answer(self, keys: Tensor, values: Tensor, layer: int) -> KeysValues:
        pools = self.pools
        pools.keys[layer].index_copy_(0, self.row, keys.transpose(1, 2).flatten(0, 1))
        pools.values[layer].index_copy_(0, self.row, values.transpose(1, 2).flatten(0, 1))
        self.written[layer] = pools.keys[layer], pools.values[layer]
        return pools.keys[layer], pools.values[layer]


class GatheringView(PoolView):
    """Writes like :class:`PoolView`, but returns only what each row attends to, ``[n, heads, slots, size]``."""

    def __init__(self, layers: int, *, pools: Pools, row: Tensor, read: Tensor):
        super().__init__(layers, pools=pools, row=row)
        self.read = read

    def answer(self, keys: Tensor, values: Tensor, layer: int) -> KeysValues:
        keys, values = super().answer(keys, values, layer)
        return keys[self.read].transpose(1, 2), values[self.read].transpose(1, 2)
