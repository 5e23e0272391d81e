"""Compiling passes over the backbone: one layer's graph for all layers and passes, or each pass as one graph.

A layer's graph takes seconds, and serves every layer of the same kind. A graph of a whole pass takes a minute or two to
make with 24 layers. The compiler may fuse across them, which gained no speed beyond the spread and less than a
gigabyte; but the host does little more than half the work, which counts where the GPU is the faster. Neither changes
what is computed.
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
from adaponder.backbones.views import IterationView
from adaponder.errors import BackboneError, ConfigError
from adaponder.ops import joined

UNITS = ("layer", "pass")


def check(by: str, memory_budget: float) -> None:
    if by not in UNITS:
        raise ConfigError(f"by={by!r}: {' or '.join(UNITS)}, what is compiled at once")
    if not 0 < memory_budget <= 1:
        raise ConfigError(f"memory_budget={memory_budget}: a share above 0, and 1 to keep everything")


def compiled(function: Callable[..., Any], memory_budget: float, options: dict[str, Any]) -> Callable[..., Any]:
    """``torch.compile`` with that share of activations kept for backward."""
    made = torch.compile(function, **joined.settings(options))
    if memory_budget == 1:
        return made

    def within_budget(*arguments: Any, **named: Any) -> Any:
        # The compiler reads the budget when it splits a graph into forward and backward.
        with torch._functorch.config.patch(activation_memory_budget=memory_budget):
            return made(*arguments, **named)

    return within_budget


class Layers:
    """A decoder's layers, each run by the compiled forward of its class."""

    def __init__(self, body: nn.Module, windows: Sequence[int | None], memory_budget: float, options: dict[str, Any]):
        self.layers = decoder_layers(body, len(windows))
        if not self.layers:
            raise BackboneError(
                f"{type(body).__name__}: no list of its {len(windows)} layers is found; compile by='pass' instead"
            )
        # Layers that see differently far are kinds of their own, and the compiler counts the graphs of all together. Of
        # each there may be a dozen: without or with rows to reuse, in training or evaluation, for one shape or any.
        self.limit = 2 * torch._dynamo.config.recompile_limit * len(set(windows))
        kinds = {type(layer) for layer in self.layers}
        self.forwards = {kind: compiled(kind.forward, memory_budget, options) for kind in kinds}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The decoder calls its layers, and they run compiled; afterwards they are as they were."""
        if changed := [layer for layer in self.layers if "forward" in layer.__dict__]:
            raise BackboneError(
                f"{type(changed[0]).__name__}.forward has been replaced (by offloading?): compile by='pass' instead"
            )
        try:
            for index, layer in enumerate(self.layers):
                layer.forward = partial(self._forward, index, layer)
            # Layers of a kind differ in their number alone, and nothing in a graph depends on it.
            with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=self.limit):
                yield
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)

    def _forward(self, index: int, layer: nn.Module, *arguments: Any, **named: Any) -> Any:
        taken: list[tuple[IterationView, IterationView]] = []
        lanes: list[tuple[Lane, Lane]] = []

        def own(value: Any) -> Any:
            """What of an argument is this layer's: a graph that saw the others' would not fit them."""
            if isinstance(value, IterationView):
                taken.append((value, value.of_layer(index)))
                return taken[-1][1]
            if isinstance(value, Lane):
                lanes.append((value, value.of_layer(index)))
                return lanes[-1][1]
            return value

        arguments, named = tuple(map(own, arguments)), {name: own(value) for name, value in named.items()}
        if lanes:
            _vary_rows(arguments, named)
        result = self.forwards[type(layer)](layer, *arguments, **named)
        for view, part in taken:
            view.take(index, part)
        for lane, part in lanes:
            lane.arrived.extend(part.arrived)
        return result


def vary(tensors: Sequence[Tensor | None], dimension: int) -> None:
    """Tells the compiler that this dimension differs from pass to pass."""
    for tensor in tensors:
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def _vary_rows(arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    # Hidden states and rotary angles: what a layer is given is made between the layers, and not marked yet.
    inputs = [*arguments, *named.values()]
    grids = [part for value in inputs for part in (value if type(value) is tuple else (value,))]
    vary([grid for grid in grids if isinstance(grid, Tensor) and grid.ndim == 3], 1)
