"""Compiles passes over the backbone: either one layer, with a graph that all layers share, or a whole pass.

A layer compiles in seconds. A whole pass of 24 layers compiles in a minute or two and nearly halves the host's work,
which matters if the host is slower than the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor, nn

from adaponder.backbones.attention import Lane
from adaponder.backbones.families import decoder_layers
from adaponder.backbones.views import GridView, IterationView
from adaponder.errors import BackboneError
from adaponder.ops import joined


def compiled(function: Callable[..., Any], memory_budget: float, options: dict[str, Any]) -> Callable[..., Any]:
    """Returns ``torch.compile(function)``; ``memory_budget`` is the share of activations to keep for backward."""
    compiled_function = torch.compile(function, **joined.settings(options))
    if memory_budget == 1:
        return compiled_function

    def within_budget(*arguments: Any, **named: Any) -> Any:
        # The compiler reads the budget when it splits a graph into forward and backward.
        with torch._functorch.config.patch(activation_memory_budget=memory_budget):
            return compiled_function(*arguments, **named)

    return within_budget


class Layers:
    """The layers of a decoder; all layers of a class share one compiled forward."""

    def __init__(self, body: nn.Module, windows: Sequence[int | None], memory_budget: float, options: dict[str, Any]):
        self.layers = decoder_layers(body, len(windows))
        if not self.layers:
            raise BackboneError(
                f"{type(body).__name__} has no list of its {len(windows)} layers; compile by='pass' instead"
            )
        # The recompile limit counts the graphs of all layers together. Each distinct window may need a dozen: with or
        # without rows to reuse, in training or evaluation, for static or dynamic shapes.
        self.limit = 2 * torch._dynamo.config.recompile_limit * len(set(windows))
        kinds = {type(layer) for layer in self.layers}
        self.forwards = {kind: compiled(kind.forward, memory_budget, options) for kind in kinds}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager that makes the decoder's layers run compiled."""
        if changed := [layer for layer in self.layers if "forward" in layer.__dict__]:
            raise BackboneError(
                f"{type(changed[0]).__name__}.forward has been replaced (by offloading?): compile by='pass' instead"
            )
        try:
            for index, layer in enumerate(self.layers):
                layer.forward = partial(self._forward, index, layer)
            # Layers of a class differ only in their index, and no graph depends on it.
            with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=self.limit):
                yield
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)

    def _forward(self, index: int, layer: nn.Module, *arguments: Any, **named: Any) -> Any:
        shared: list[tuple[Any, Any]] = []

        def of_layer(value: Any) -> Any:
            """Reduces a view or lane to this layer, so that all layers share a graph; other values stay as they are."""
            if not isinstance(value, (IterationView, Lane)):
                return value
            shared.append((value, value.of_layer(index)))
            return shared[-1][1]

        arguments, named = tuple(map(of_layer, arguments)), {name: of_layer(value) for name, value in named.items()}
        if any(isinstance(value, GridView) for value, _ in shared):
            _vary_rows(arguments, named)
        result = self.forwards[type(layer)](layer, *arguments, **named)
        for value, layer_value in shared:
            value.take(index, layer_value)
        return result


def vary(tensors: Sequence[Tensor | None], dimension: int) -> None:
    """Marks a dimension of these tensors as dynamic for the compiler, because its size differs from pass to pass."""
    for tensor in tensors:
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def _vary_rows(arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    # Hidden states and rotary angles are computed within the decoder, so they are not marked yet.
    inputs = [*arguments, *named.values()]
    tensors = [tensor for value in inputs for tensor in (value if type(value) is tuple else (value,))]
    vary([tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.ndim == 3], 1)
