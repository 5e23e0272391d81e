"""Reuses the keys and values of halted tokens: a halted token keeps the keys and values of its last iteration.

A backbone's attention calls ``past_key_values.update(k, v, layer)`` after rotary embedding and uses only the result.
So a view is a cache object whose ``update`` receives a layer's new rows and returns the rows to attend to:

* :class:`DenseView` returns ``where(active, new, previous)``: Algorithm 2, for training and as the reference;
* :class:`GridView`, in a pass over active rows, returns the rows of all tokens, which the execution keeps as grids
  ``[batch, heads, slots, size]`` between passes;
* :class:`RowView`, in a pass over active rows, returns the rows of all tokens, the old ones gathered from a
  :class:`adaponder.execution.ledger.Ledger`.

A view serves one pass only; recomputing a pass (gradient checkpointing) builds a new view.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.cache_utils import Cache

from adaponder.errors import BackboneError, CacheError

KeysValues = tuple[Tensor, Tensor]


class IterationView(Cache):
    """The cache object of one pass over the backbone; holds the rows that each layer reads and writes."""

    previous: list[KeysValues] | None = None  # keys and values of an earlier pass by layer, in views that have them

    def __init__(self, layers: int):
        super().__init__(layers=[])  # an empty cache to the backbone, which then builds a plain causal mask
        self.calls = [0] * layers
        self.written: list[KeysValues | None] = [None] * layers
        self.single = False  # whether of_layer made this view, which then has the rows of one layer

    def answer(self, keys: Tensor, values: Tensor, layer: int) -> KeysValues:
        """Stores a layer's new keys and values; returns the keys and values that the layer attends to."""
        raise NotImplementedError

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs) -> KeysValues:
        layer = 0 if self.single else layer_idx
        self.calls[layer] += 1
        # Under autocast, rotary embedding widens keys to float32; rows are stored in the values' dtype instead.
        return self.answer(key_states.to(value_states.dtype), value_states, layer)

    def rows(self) -> list[KeysValues]:
        """Returns the rows of the pass; raises unless every layer called ``update`` exactly once."""
        wrong = [layer for layer, calls in enumerate(self.calls) if calls != 1]
        if wrong:
            raise BackboneError(
                f"layers {wrong} called the cache {[self.calls[layer] for layer in wrong]} times in one pass instead "
                "of once: keys and values were not reused. Checkpointing of the backbone's own layers drops the cache "
                "(use model.gradient_checkpointing_enable()), and layers that share or skip K/V are not supported"
            )
        return [row for row in self.written if row is not None]

    def of_layer(self, layer: int) -> IterationView:
        """Returns a copy with only the rows of this layer, without its index, so that layers share a compiled graph."""
        view = copy.copy(self)
        view.single, view.calls, view.written = True, [0], [None]
        if self.previous is not None:
            view.previous = [self.previous[layer]]
        return view

    def take(self, layer: int, view: IterationView) -> None:
        """Copies the calls and rows that ``view``, made by :meth:`of_layer` for this layer, has recorded."""
        self.calls[layer] += view.calls[0]
        self.written[layer] = view.written[0]


class PlainView(IterationView):
    """A view that reuses nothing: every layer reads the rows that it has just written."""

    def answer(self, keys: Tensor, values: Tensor, layer: int) -> KeysValues:
        self.written[layer] = (keys, values)
        return keys, values


class DenseView(IterationView):
    """View of a dense pass (Algorithm 2): keys and values are ``where(active, new, previous)`` for all tokens.

    ``previous`` has the keys and values of the previous iteration. If it is ``None`` (first iteration, or a method that
    does not reuse them), all tokens get their new keys and values.
    """

    def __init__(self, layers: int, *, previous: list[KeysValues] | None, active: Tensor | None):
        super().__init__(layers)
        self.previous = previous
        self.active = None if active is None else _columns(active)

    def answer(self, keys: Tensor, values: Tensor, layer: int) -> KeysValues:
        if self.previous is not None and self.active is not None:
            old_keys, old_values = self.previous[layer]
            keys = torch.where(self.active, keys, old_keys)  # eq. 10
            values = torch.where(self.active, values, old_values)
        elif torch.compiler.is_compiling():
            # In some decoders new values are a slice of a wider product, unlike merged rows, and the compiler
            # specialises on layout: with one layout, all passes after the first share a graph.
            values = values.clone()
        self.written[layer] = (keys, values)
        return keys, values


class GridView(IterationView):
    """The view of a pass over some rows of a batch: enters them into grids and returns the rows of all tokens.

    Args:
        grids: per layer, keys and values ``[batch, heads, slots, size]`` of all tokens; ``None`` before the first pass.
        shape: (batch, slots).
        lanes: indices of the sequences whose keys and values are returned; ``None``: all.
        sequence, slot: ``[rows]``, sequence and slot of each row.
        stored: indices of the rows to store; ``None``: all. Only read if ``place`` is ``None``.
        place: ``[batch, slots]``, for each token the index of its new row, or -1 if it has none. With ``place``, grids
            are copied, which gradients need, and padding rows, which belong to no token, are left out. With ``None``,
            rows are written into the old grids in place.
    """

    def __init__(
        self,
        layers: int,
        *,
        grids: list[KeysValues] | None,
        shape: tuple[int, int],
        lanes: Tensor | None,
        sequence: Tensor,
        slot: Tensor,
        stored: Tensor | None,
        place: Tensor | None = None,
    ):
        super().__init__(layers)
        self.previous, self.shape, self.lanes = grids, shape, lanes
        self.sequence, self.slot, self.stored, self.place = sequence, slot, stored, place

    def answer(self, keys: Tensor, values: Tensor, layer: int) -> KeysValues:
        old_keys, old_values = (None, None) if self.previous is None else self.previous[layer]
        keys, values = self._put(keys, old_keys), self._put(values, old_values)
        self.written[layer] = (keys, values)
        return (keys, values) if self.lanes is None else (keys[self.lanes], values[self.lanes])

    def _put(self, new: Tensor, grid: Tensor | None) -> Tensor:
        rows = new[0].transpose(0, 1)
        if grid is None:
            batch, slots = self.shape
            grid = new.new_zeros(batch, new.shape[1], slots, new.shape[3])
        if self.place is not None:
            return _Merged.apply(grid, rows, self.place, self.sequence, self.slot)
        stored = slice(None) if self.stored is None else self.stored
        grid[self.sequence[stored], :, self.slot[stored]] = rows[stored]
        return grid


class _Merged(torch.autograd.Function):
    """Returns a copy of a grid in which the entries of some tokens are replaced by their new rows ``[n, heads, size]``.

    Forward and backward are gathers, which the compiler fuses with neighbouring operations.
    """

    @staticmethod
    def forward(ctx: Any, grid: Tensor, rows: Tensor, place: Tensor, sequence: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(place, sequence, slot)
        # The grid is the second operand, whose layout becomes that of the result, on which compiled graphs depend.
        return torch.where(_columns(place < 0), grid, rows[place.clamp_min(0)].transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        place, sequence, slot = ctx.saved_tensors
        stored = place[sequence, slot] == torch.arange(len(sequence), device=place.device)
        grad_rows = torch.where(stored[:, None, None], grad[sequence, :, slot], 0)
        return torch.where(_columns(place >= 0), 0, grad), grad_rows, None, None, None


def _columns(mask: Tensor) -> Tensor:
    """Returns a mask ``[batch, slots]`` in a shape that broadcasts with keys and values."""
    return mask[:, None, :, None]


@dataclass(frozen=True)
class RowPlan:
    """Describes the ledger rows that one pass reads and writes; its lanes are the sequences that the pass reads.

    Attributes:
        read: ``[lanes, slots]``, the ledger row of each slot; -1 if there is none.
        stored: ``[new]``, indices of the rows to store among the pass's flattened queries.
        slot_index: ``[new]``, ``lane * slots + slot`` of each stored row.
        fresh: whether the pass computes all slots, so that it attends to its new rows as they are.
    """

    read: Tensor
    stored: Tensor
    slot_index: Tensor
    fresh: bool = False


class RowView(IterationView):
    """The view of a pass over active rows: returns the rows of all slots, new or gathered from the ledger."""

    def __init__(self, layers: int, *, stores: list[KeysValues], plan: RowPlan):
        super().__init__(layers)
        self.stores = stores
        self.plan = plan

    def answer(self, keys: Tensor, values: Tensor, layer: int) -> KeysValues:
        old_keys, old_values = self.stores[layer] if self.stores else (None, None)
        new_keys, keys = self._rows_of(keys, old_keys)
        new_values, values = self._rows_of(values, old_values)
        self.written[layer] = (new_keys, new_values)
        return keys, values

    def _rows_of(self, new: Tensor, old: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns (new rows to store, ``[new, heads, size]``; rows to attend to, ``[lanes, heads, slots, size]``)."""
        plan = self.plan
        lanes, slots = plan.read.shape
        heads, size = new.shape[1], new.shape[3]
        rows = new.transpose(1, 2).reshape(-1, heads, size)
        if plan.fresh:
            return rows, new
        rows = rows.index_select(0, plan.stored)
        if old is None:
            table = new.new_zeros(lanes * slots, heads, size)
        elif old.dtype != new.dtype:
            raise CacheError(f"past_key_values has {old.dtype}, this forward computes {new.dtype}: autocast changed?")
        else:
            # Slots without a row (-1) and slots of this pass gather an arbitrary row: masked, or overwritten below.
            table = old.index_select(0, plan.read.clamp(0, old.shape[0] - 1).flatten())
        # In place, because nothing else refers to the gathered table.
        table.index_copy_(0, plan.slot_index, rows)
        return rows, table.view(lanes, slots, heads, size).transpose(1, 2)
