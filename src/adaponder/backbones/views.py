"""A halted token keeps the keys and values of its last iteration.

A backbone's attention calls ``past_key_values.update(k, v, layer)`` after rotary embedding and uses only the result.
So K/V reuse is a cache that answers with other rows than it was given:

* :class:`DenseView` answers ``where(active, new, previous)``: Algorithm 2 of the paper, for training and as the oracle;
* :class:`GridView` answers a pass over active rows with those of all tokens, kept as grids between passes;
* :class:`RowView` answers it with rows gathered from a :class:`adaponder.execution.ledger.Ledger`.

A view serves one pass and is never used again: replaying a pass (gradient checkpointing) makes a new one.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from adaponder.errors import BackboneError, CacheError

KeysValues = tuple[Tensor, Tensor]


class IterationView(Cache):
    """Serves as the cache of one pass over the backbone; holds the rows that each layer reads and writes."""

    previous: list[KeysValues] | None = None  # what an earlier pass left, for views that hold it by layer

    def __init__(self, layers: int):
        super().__init__(layers=[])
        self.calls = [0] * layers
        self.written: list[KeysValues | None] = [None] * layers
        self.single = False  # holds one layer's rows, without its number

    def answer(self, keys: Tensor, values: Tensor, layer: int) -> KeysValues:
        raise NotImplementedError

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs) -> KeysValues:
        layer = 0 if self.single else layer_idx
        self.calls[layer] += 1
        # Under autocast rotary angles widen keys to float32 and attention narrows them again: rows are stored narrow.
        return self.answer(key_states.to(value_states.dtype), value_states, layer)

    def rows(self) -> list[KeysValues]:
        """Returns the rows of the pass, after checking the counted contract: every layer called ``update`` once."""
        wrong = [layer for layer, calls in enumerate(self.calls) if calls != 1]
        if wrong:
            raise BackboneError(
                f"layers {wrong} called the cache {[self.calls[layer] for layer in wrong]} times in one pass instead "
                "of once: keys and values were not reused. Checkpointing of the backbone's own layers drops the cache "
                "(use model.gradient_checkpointing_enable()), and layers that share or skip K/V are not supported"
            )
        return [row for row in self.written if row is not None]

    def of_layer(self, layer: int) -> IterationView:
        """Returns the view of one layer, without its number, so that one graph fits all layers (see compiling.py)."""
        view = copy.copy(self)
        view.single, view.calls, view.written = True, [0], [None]
        if self.previous is not None:
            view.previous = [self.previous[layer]]
        return view

    def take(self, layer: int, view: IterationView) -> None:
        """Adds the calls and rows that a layer left in its own view."""
        self.calls[layer] += view.calls[0]
        self.written[layer] = view.written[0]

    # Masks are ours, except for a plain causal pass, where the backbone sizes its own by these.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self.calls)

    @property
    def is_compileable(self) -> bool:
        return False


class PlainView(IterationView):
    """Reuses nothing: every layer reads the rows that it has just computed."""

    def answer(self, keys: Tensor, values: Tensor, layer: int) -> KeysValues:
        self.written[layer] = (keys, values)
        return keys, values


class DenseView(IterationView):
    """Equals Algorithm 2: ``where(active, new, previous)`` for every token of a grid ``[batch, time]``.

    ``previous`` is what the iteration before left; ``None`` (the first iteration, or no reuse) passes rows through.
    """

    def __init__(self, layers: int, *, previous: list[KeysValues] | None, active: Tensor | None):
        super().__init__(layers)
        self.previous = previous
        self.active = None if active is None else active[:, None, :, None]

    def answer(self, keys: Tensor, values: Tensor, layer: int) -> KeysValues:
        if self.previous is not None and self.active is not None:
            old_keys, old_values = self.previous[layer]
            keys = torch.where(self.active, keys, old_keys)  # eq. 10
            values = torch.where(self.active, values, old_values)
        elif torch.compiler.is_compiling():
            # Some decoders' values are a slice of a wider product, merged rows are not, and a compiler distinguishes
            # them: with one layout for all, the passes after the first share one graph.
            values = values.clone()
        self.written[layer] = (keys, values)
        return keys, values


class GridView(IterationView):
    """Answers a pass over some rows of a batch with the rows of all its tokens, kept as grids between passes.

    Args:
        grids: per layer keys and values ``[batch, heads, slots, size]``; ``None`` before the first pass.
        shape: (batch, slots).
        lanes: the sequences whose keys and values are returned; ``None`` for all.
        sequence, slot: ``[stored]``, the place of each stored row.
        kept: ``[stored]``, which rows of the pass are stored; ``None`` for all.
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
        kept: Tensor | None,
    ):
        super().__init__(layers)
        self.previous, self.shape, self.lanes = grids, shape, lanes
        self.sequence, self.slot, self.kept = sequence, slot, kept

    def answer(self, keys: Tensor, values: Tensor, layer: int) -> KeysValues:
        old_keys, old_values = (None, None) if self.previous is None else self.previous[layer]
        keys, values = self._put(keys, old_keys), self._put(values, old_values)
        self.written[layer] = (keys, values)
        return (keys, values) if self.lanes is None else (keys[self.lanes], values[self.lanes])

    def _put(self, new: Tensor, grid: Tensor | None) -> Tensor:
        rows = new[0].transpose(0, 1)
        if self.kept is not None:
            rows = rows[self.kept]
        if grid is None:
            batch, slots = self.shape
            grid = new.new_zeros(batch, new.shape[1], slots, new.shape[3])
        elif torch.is_grad_enabled() and (grid.requires_grad or rows.requires_grad):
            grid = grid.clone()  # autograd keeps the old one
        grid[self.sequence, :, self.slot] = rows
        return grid


@dataclass(frozen=True)
class RowPlan:
    """Describes the rows that one pass reads and writes, of ``lanes`` sequences side by side, or packed into one lane.

    Attributes:
        read: ``[lanes, slots]`` ledger row of each slot; -1 where there is none.
        stored: ``[new]`` index of the pass's queries (flattened) that leave a row.
        slot_index: ``[new]`` flattened ``lane * slots + slot`` of each of those.
        fresh: whether the pass reads only its own rows, in order.
    """

    read: Tensor
    stored: Tensor
    slot_index: Tensor
    fresh: bool = False


class RowView(IterationView):
    """Answers a pass over active rows with every visible token's row: gathered from the ledger, or just computed."""

    def __init__(self, layers: int, *, stores: list[KeysValues | None], plan: RowPlan):
        super().__init__(layers)
        self.stores = stores
        self.plan = plan

    def answer(self, keys: Tensor, values: Tensor, layer: int) -> KeysValues:
        store = self.stores[layer]
        old_keys, old_values = (None, None) if store is None else store
        new_keys, keys = self._answer_one(keys, old_keys)
        new_values, values = self._answer_one(values, old_values)
        self.written[layer] = (new_keys, new_values)
        return keys, values

    def _answer_one(self, new: Tensor, old: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns (rows to store ``[new, heads, size]``, rows to attend to ``[lanes, heads, slots, size]``)."""
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
            # Slots without a row (-1) and rows of this pass fetch any row: masked, or overwritten below.
            table = old.index_select(0, plan.read.clamp(0, old.shape[0] - 1).flatten())
        # In place: nothing else refers to the gathered table.
        table.index_copy_(0, plan.slot_index, rows)
        return rows, table.view(lanes, slots, heads, size).transpose(1, 2)
