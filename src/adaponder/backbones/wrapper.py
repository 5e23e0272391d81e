"""Wraps any Hugging Face decoder, unmodified, as the backbone of a recurrence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from adaponder.backbones import attention, compiling
from adaponder.backbones.attention import Lane, LedgerLane
from adaponder.backbones.families import (
    decoder_layers,
    has_attention_dropout,
    layer_windows,
    read_whole,
    refuse_by_name,
    windows_of,
)
from adaponder.backbones.views import DenseView, GridView, IterationView, KeysValues, PlainView
from adaponder.errors import BackboneError, ConfigError
from adaponder.ops import gelu, rotary
from adaponder.ops.compact_attention import PackedRows
from adaponder.ops.dispatch import has_half_kernels
from adaponder.ops.finite import first_not_finite
from adaponder.ops.masks import Places, masked_attention, visible
from adaponder.ops.vocab_expectation import vocab_expectation

_FINAL_NORMS = ("final_layer_norm", "final_layernorm", "norm", "ln_f", "norm_f", "layer_norm")


class PassOutput(NamedTuple):
    """The output of one pass: final-normed hidden states, the residual stream before that norm, and new rows.

    ``rows`` has, per layer, the keys and values that the view has stored.
    """

    hidden: Tensor
    stream: Tensor
    rows: list[KeysValues]


class Backbone:
    """Splits a decoder into four parts: embedding table, decoder layers (``body``), final norm and linear head.

    Holds a stock ``…ForCausalLM`` and changes only its attention function (see attention.py) and, when compiled, its
    GELU and rotary functions (see ops/gelu.py, ops/rotary.py). The constructor refuses families of another structure;
    :meth:`verify` compares the parts with the stock forward on random tokens.
    """

    def __init__(self, stock: PreTrainedModel):
        refuse_by_name(stock)
        self.stock = stock
        self.body: PreTrainedModel = stock.base_model
        self.norm = _final_norm(self.body)
        self.layers: int = stock.config.num_hidden_layers
        self.windows = windows_of(stock.config)
        self.layer_windows = layer_windows(stock.config)
        # Latent attention caches compressed keys and values, which each pass expands.
        self.unfolds = getattr(stock.config, "qk_head_dim", None) is not None
        self.compile_options: dict[str, Any] | None = None
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._packs: bool | None = None

    def compile(self, *, by: str = "layer", memory_budget: float = 1.0, **options: Any) -> None:
        """Makes later passes compile layer by layer (``by="layer"``) or whole (``by="pass"``).

        Functions that run between passes are compiled too. There is one graph for first iterations, one for iterations
        that reuse rows and one for packed rows. Packed rows run uncompiled if attention has windows or dropout; passes
        over a ledger always run uncompiled. ``memory_budget`` is the share of a pass's activations to keep for
        backward, which recomputes the others. ``options`` are passed to ``torch.compile``.
        """
        if by not in ("layer", "pass"):
            raise ConfigError(f"by={by!r} must be layer or pass, the unit to compile")
        if not 0 < memory_budget <= 1:
            raise ConfigError(f"memory_budget={memory_budget} must be above 0 and at most 1, which keeps everything")
        attention.use(self.stock)
        gelu.use(self.stock)
        rotary.use(self.stock)
        self.compile_options = {"by": by, "memory_budget": memory_budget} | options
        self._compiles_layers, self._memory_budget, self._compiler_options = by == "layer", memory_budget, options
        self._compiled = {}

    def __getstate__(self) -> dict[str, Any]:
        # A compiled pass is bound to this body, so a copy of the backbone must compile again.
        return self.__dict__ | {"_compiled": {}}

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``function``, compiled if :meth:`compile` was called; for functions that run between passes."""
        if self.compile_options is None:
            return function
        if function not in self._compiled:
            # These functions keep few activations for backward, so they need no memory budget.
            self._compiled[function] = compiling.compiled(function, 1.0, self._compiler_options)
        return self._compiled[function]

    def _compiles(self, view: type[IterationView], lane: Lane | LedgerLane | None) -> bool:
        """Returns whether a pass runs compiled; see :meth:`compile`."""
        if self.compile_options is None or view not in (DenseView, GridView):
            return False
        if not isinstance(lane, Lane):
            return lane is None
        plain = lane.rows.query.document is None or lane.rows.key.spans is not None
        return plain and set(lane.windows) == {None} and not self._drops_attention()

    def _drops_attention(self) -> bool:
        return self.body.training and has_attention_dropout(self.stock.config)

    def _compiled_pass(self) -> Callable[..., PassOutput]:
        if self._one_pass not in self._compiled:
            settings = self._memory_budget, self._compiler_options
            if self._compiles_layers:
                layers = compiling.Layers(self.body, self.layer_windows, *settings)
                self._compiled[self._one_pass] = layers.in_place()(self._one_pass)
            else:
                self._compiled[self._one_pass] = compiling.compiled(self._one_pass, *settings)
        return self._compiled[self._one_pass]

    def masks_by_kernels(self, x: Tensor) -> bool:
        """Returns whether a pass over ``x`` may use attention kernels that skip masked keys, instead of a mask."""
        if not has_half_kernels(x):
            return False
        return set(self.layer_windows) == {None} and not self._drops_attention() and self.packs()

    def packs(self) -> bool:
        """Returns whether attention supports packed rows of several sequences; the first call tests it on one token."""
        if not attention.use(self.stock):
            return False
        if self._packs is None:
            weight = self._head().weight
            if weight.device.type == "meta":
                return False
            zero = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
            lane = Lane(PackedRows(zero[0], Places(zero, zero), Places(zero, zero)), self.layer_windows, [])
            x = torch.zeros(1, 1, self.stock.config.hidden_size, dtype=weight.dtype, device=weight.device)
            with torch.no_grad(), _evaluating(self.stock):
                try:
                    self.read(x, position=zero, mask=None, view=PlainView, lane=lane, stream=False)
                    self._packs = True
                except BackboneError:
                    self._packs = False
        return self._packs

    def embed(self, ids: Tensor) -> Tensor:
        return self.stock.get_input_embeddings()(ids)

    def table(self) -> Tensor:
        """Returns the effective embedding table: ``embed(ids) == table()[ids]``."""
        embedding: Any = self.stock.get_input_embeddings()
        scale = getattr(embedding, "embed_scale", None)
        if type(embedding) is not nn.Embedding and scale is None:
            raise _replaced(embedding, "the embedding")
        weight = _present(embedding.weight)
        # The scale is a number or (Gemma) a tensor, perhaps of a wider dtype than the table.
        return weight if scale is None else weight * torch.as_tensor(scale, dtype=weight.dtype)

    def head(self) -> tuple[Tensor, Tensor | None]:
        """Returns the head as (W, bias): ``logits == hidden @ W.T + bias``."""
        linear = self._head()
        return _present(linear.weight), linear.bias

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head()(hidden)

    def expected_embedding(self, hidden: Tensor, *, scale: float, **options: Any) -> Tensor:
        """Computes ``softmax(logits(hidden)) @ (scale * table)`` (eq. 6 to 8).

        ``options`` are passed to :func:`adaponder.ops.vocab_expectation.torch.vocab_expectation`.
        """
        weight, bias = self.head()
        return vocab_expectation(hidden, weight, self.table(), bias=bias, **options) * scale

    def _head(self) -> nn.Linear:
        head = self.stock.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise _replaced(head, "the head")
        return head

    def final_norm(self, stream: Tensor) -> Tensor:
        return stream if self.norm is None else self.norm(stream)

    def read(
        self,
        x: Tensor,
        *,
        position: Tensor,
        mask: Tensor | dict[str, Tensor] | None,
        view: type[IterationView],
        view_options: dict[str, Any] | None = None,
        lane: Lane | LedgerLane | None = None,
        replay: bool = False,
        stream: bool = True,
    ) -> PassOutput:
        """Runs one pass of the backbone over ``x [lanes, queries, d]``.

        The cache object of the pass is ``view(layers, **view_options)``. With a ``lane`` the queries are packed rows of
        several sequences, and ``mask`` must be ``None``. ``replay`` recomputes activations in backward (gradient
        checkpointing), each time with a new view. With ``stream=False`` the residual stream is not recorded, and
        ``stream`` of the result is the hidden state.
        """
        compiles, view_options = self._compiles(view, lane), view_options or {}
        one_pass = self._compiled_pass() if compiles else self._one_pass
        if mask is not None:
            one_pass = partial(_under_mask, one_pass)
        if lane is not None:
            if compiles and isinstance(lane, Lane) and view is GridView:
                _vary(x, position, lane, view_options)
            # A decoder that receives a mask does not build its own mask of rows x rows.
            unused = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=x.device)
            mask = unused if len(self.windows) == 1 else dict.fromkeys(self.windows, unused)
        arguments = (x, position, mask, view, view_options, stream, lane)
        return checkpoint(one_pass, *arguments, use_reentrant=False) if replay else one_pass(*arguments)

    def _one_pass(
        self,
        x: Tensor,
        position: Tensor,
        mask: Tensor | dict[str, Tensor] | None,
        view: type[IterationView],
        view_options: dict[str, Any],
        stream: bool,
        lane: Lane | LedgerLane | None,
    ) -> PassOutput:
        cache = view(self.layers, **view_options)
        if lane is not None:
            lane.arrived.clear()
        streams: list[Tensor] = []
        with self._keeping_stream(streams) if stream else nullcontext():
            out = self.body(
                inputs_embeds=x,
                position_ids=position,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                **({} if lane is None else {"lane": lane}),
            )
        if lane is not None and len(lane.arrived) != self.layers:
            raise BackboneError(
                f"{self.stock.config.model_type}: {len(lane.arrived)} of {self.layers} layers received the packed "
                "rows: it does not pass keyword arguments on to its attention"
            )
        hidden = out.last_hidden_state
        return PassOutput(hidden, streams[0] if streams else hidden, cache.rows())

    def _keeping_stream(self, streams: list[Tensor]) -> AbstractContextManager[None]:
        """Context manager that appends the residual stream to ``streams``.

        It is the final norm's input or, without such a norm, the last layer's output. If the norm has an unknown name,
        the last layer's output may not be the stream; then :meth:`verify` raises.
        """
        if self.norm is not None:
            return _watching(self.norm, lambda norm_input, _: streams.append(norm_input))
        layers = decoder_layers(self.body, self.layers)
        if not layers:
            return nullcontext()
        return _watching(layers[-1], lambda _, out: streams.append(out[0] if isinstance(out, tuple) else out))

    def mask(self, query: Places, key: Places, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Returns the attention mask in the form that the decoder takes: additive for eager attention, else bool.

        If the decoder has several attention kinds, returns a dict with a mask for each. Raises if it takes no mask.
        """
        if read_whole(self.stock.config):
            raise BackboneError(
                f"{self.stock.config.model_type} takes no explicit mask: it can only be read whole, without padding, "
                "packed documents or a cache (as adaponder eval --data does, and tasks with --batch-size 1)"
            )
        attention.refuse_attention(self.stock.config._attn_implementation)  # the user may have set it on the backbone
        masks = {kind: self._as_attention(visible(query, key, window=w), dtype) for kind, w in self.windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _as_attention(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        if self.stock.config._attn_implementation != "eager":
            return mask
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)

    @torch.no_grad()
    def verify(self) -> None:
        """Raises unless the four parts of the decoder reproduce the stock forward; does nothing on the meta device."""
        weight = self._head().weight
        if weight.device.type == "meta":
            return
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.stock.config.vocab_size, (2, 7), generator=generator, device="cpu").to(weight.device)
        with _evaluating(self.stock):
            expected = self.stock(input_ids=ids, use_cache=False)
            _require_numbers(self.stock, expected.logits)
            position = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
            embedded = self.embed(ids)
            _agree(self.stock, "the embedding table", self.table()[ids], embedded)
            output = self.read(embedded, position=position, mask=None, view=PlainView)
            _agree(self.stock, "the final norm", self.final_norm(output.stream), output.hidden)
            head, bias = self.head()
            logits = nn.functional.linear(output.hidden, head, bias)
            _agree(self.stock, "the head (logits = W h + b)", logits, expected.logits)
            _agree(self.stock, "the body with embeddings fed in", self.logits(output.hidden), expected.logits)
        self.packs()  # tested now, so that it slows down no forward


@contextmanager
def _watching(module: nn.Module, see: Callable[[Any, Any], None]) -> Iterator[None]:
    """Context manager that calls ``see(first argument, result)`` after each call of the module.

    Replaces the module's forward, because the compiler cannot trace the registration of a hook.
    """
    replaced, forward = module.__dict__.get("forward"), module.forward

    def watched(*arguments: Any, **named: Any) -> Any:
        result = forward(*arguments, **named)
        see(arguments[0], result)
        return result

    module.__dict__["forward"] = watched
    try:
        yield
    finally:
        if replaced is None:
            module.__dict__.pop("forward")
        else:
            module.__dict__["forward"] = replaced


@contextmanager
def _evaluating(stock: PreTrainedModel) -> Iterator[None]:
    """Context manager that switches the model to evaluation mode and restores the mode of each module at the end."""
    training = {module: module.training for module in stock.modules()}
    stock.eval()
    try:
        yield
    finally:
        for module, flag in training.items():
            module.training = flag


def _under_mask(one_pass: Callable[..., PassOutput], *arguments: Any) -> PassOutput:
    """Runs a pass with a mask, and its recomputation in backward, under :func:`masked_attention` (a cuDNN bug)."""
    with masked_attention():
        return one_pass(*arguments)


def _vary(x: Tensor, position: Tensor, lane: Lane, view_options: dict[str, Any]) -> None:
    """Marks the number of packed rows as dynamic for the compiler."""
    compiling.vary([x, position, lane.rows.query.slot, lane.rows.query.order], 1)
    compiling.vary([lane.rows.sequence, view_options["sequence"], view_options["slot"], view_options["stored"]], 0)


def _final_norm(body: nn.Module) -> nn.Module | None:
    for owner in (body, getattr(body, "decoder", None)):
        for name in _FINAL_NORMS:
            if isinstance(norm := getattr(owner, name, None), nn.Module):
                return norm
    return None


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Returns the largest absolute difference of two tensors, divided by the largest absolute value of ``theirs``."""
    ours, theirs = ours.double(), theirs.double()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))


def rounding_bound(dtype: torch.dtype) -> float:
    """Returns the relative difference that rounding may cause; a missing scale or softcap has a far larger effect."""
    return min(200 * torch.finfo(dtype).eps, 0.02)


def _replaced(module: Any, role: str) -> BackboneError:
    # The full class name, because adapters have the names of the classes that they adapt.
    return BackboneError(
        f"{type(module).__module__}.{type(module).__name__} replaces {role}: an adapter there is not part of the "
        "expectation over the vocabulary; adapt other modules, or merge it first"
    )


def _present(weight: Tensor) -> Tensor:
    if weight.device.type == "meta":
        raise BackboneError("the embedding or the head is offloaded: both are needed on a device in every iteration")
    return weight


def _require_numbers(stock: PreTrainedModel, logits: Tensor) -> None:
    """Raises if any logit is NaN; the error names the first weight that is not finite, if any."""
    if not bool(logits.isnan().any()):
        return
    damaged, precision = first_not_finite(stock.state_dict().items()), str(logits.dtype).removeprefix("torch.")
    reason = f"its logits are NaN although its weights are finite: it overflows in {precision}"
    if damaged is not None:
        reason = f"weights contain {damaged.holds}: {damaged.name}; the model was damaged or diverged in training"
    raise BackboneError(f"{stock.config.model_type}: {reason}")


def _agree(stock: PreTrainedModel, component: str, ours: Tensor, theirs: Tensor) -> None:
    error = relative_difference(ours, theirs)
    if not error <= rounding_bound(theirs.dtype):
        raise BackboneError(
            f"{stock.config.model_type} cannot be a backbone: {component} does not reproduce the stock model "
            f"(relative difference {error:.1e}); something between embedding and logits is not modelled here"
        )
