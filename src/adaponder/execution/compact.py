"""Compact execution for prefill and training that skips halted tokens: active rows form one lane, a batch of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adaponder.backbones.attention import Lane
from adaponder.backbones.views import DenseView, GridView, IterationView, KeysValues
from adaponder.backbones.wrapper import PassOutput
from adaponder.execution.base import Execution, Pass
from adaponder.ops.compact_attention import PackedRows
from adaponder.ops.masks import Places


class Sparse(Execution):
    """Base of packed and cached execution: converts grids ``[batch, time, …]`` to rows and back.

    A row index is an index into the flattened grid.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._real_index: Tensor | None = None
        self._active_index: Tensor | None = None

    def index_of(self, mask: Tensor) -> Tensor:
        """Returns the row indices of the tokens in a mask, which must be the object ``tokens.real`` or ``active``.

        Their number requires a device synchronisation, so each result is cached.
        """
        if mask is self.tokens.real:
            if self._real_index is None:
                self._real_index = mask.flatten().nonzero().squeeze(1)
            return self._real_index
        assert mask is self.active
        if self._active_index is None:
            self._active_index = self.active.flatten().nonzero().squeeze(1)
        return self._active_index

    def _halt(self, keep: Tensor) -> None:
        super()._halt(keep)
        self._active_index = None

    def computed(self) -> Tensor:
        """Returns the tokens that a pass computes, ``[batch, time]``."""
        return self.active if self.reuse in ("state", "absent") else self.tokens.real

    def stored(self) -> Tensor:
        """Returns the tokens whose new rows other tokens attend to, ``[batch, time]``."""
        return self.tokens.real if self.reuse == "none" else self.active

    def _read_lane(
        self, x: Tensor, row_index: Tensor, *, sequence: Tensor, key: Places, view: type[IterationView], holding: dict
    ) -> PassOutput:
        """Runs one pass over the rows at ``row_index``, packed into one lane.

        ``sequence`` is each row's index into the first axis of ``key`` and of the tensors that the view returns.
        """
        tokens = self.tokens

        def lane(grid: Tensor) -> Tensor:
            return grid.flatten(0, 1)[row_index][None]

        document = None if tokens.document is None else lane(tokens.document)
        query = Places(lane(tokens.slot), lane(tokens.order), document)
        return self.backbone.read(
            lane(x),
            position=lane(tokens.position),
            mask=None,
            view=view,
            holding=holding,
            lane=Lane(PackedRows(sequence=sequence, query=query, key=key), self.backbone.layer_windows, []),
            replay=self.replay,
            stream=self.stream,
        )

    def _map(self, function: Callable[[Tensor], Tensor], grid: Tensor, *, all_real: bool) -> Tensor:
        mask = self.tokens.real if all_real else self.active
        index = self.index_of(mask)
        rows = function(grid.flatten(0, 1)[index])
        return rows.new_zeros(mask.numel(), *rows.shape[1:]).index_copy(0, index, rows).unflatten(0, mask.shape)

    def _rows(self, grid: Tensor) -> Tensor:
        return grid.flatten(0, 1)[self.index_of(self.active)]

    def _grid(self, rows: Tensor) -> Tensor:
        grid = torch.zeros(self.active.numel(), dtype=torch.bool, device=rows.device)
        return grid.index_copy(0, self.index_of(self.active), rows).view(self.active.shape)


class Packed(Sparse):
    """Computes all rows of a pass in one lane, across sequences.

    No padding is computed; each row attends to its own sequence (:class:`adaponder.backbones.attention.Lane`). There is
    no cache for decoding; :class:`adaponder.execution.cached.Cached` has one.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.grids: list[KeysValues] | None = None

    def _pass(self, x: Tensor) -> Pass:
        tokens, time = self.tokens, x.shape[1]
        if self.passes == 0 and tokens.plain:  # an ordinary causal pass: every token is computed, nothing is reused
            nothing = {"previous": None, "active": None}
            options = {"view": DenseView, "holding": nothing, "replay": self.replay, "stream": self.stream}
            output = self.backbone.read(x, position=tokens.position, mask=None, **options)
            self.grids = output.rows
            return Pass(output.hidden, output.stream)
        index = self.index_of(self.computed())
        if not index.numel():
            return Pass(x, x)  # undefined, but gates whose tokens have all halted get gradients of 0, as in dense
        stored_index = self.stored().flatten()[index].nonzero().squeeze(1) if self.reuse == "kv" else None
        stored = index if stored_index is None else index[stored_index]
        # With reuse="absent" no token attends to halted ones; none ever attends to padding.
        present = self.active if self.reuse == "absent" else None if tokens.plain else tokens.real
        key, sequence, lanes = Places(tokens.slot, tokens.order, tokens.document, present), index // time, None
        if self.backbone.unfolds:
            # Sequences with nothing to compute are left out: their keys need not be unfolded.
            lanes, sequence = sequence.unique(return_inverse=True)
            key = key.of(lanes)
        holding = {"grids": self.grids, "shape": tuple(x.shape[:2]), "lanes": lanes, "kept": stored_index}
        holding |= {"sequence": stored // time, "slot": stored % time}
        output = self._read_lane(x, index, sequence=sequence, key=key, view=GridView, holding=holding)
        self.grids = output.rows

        def grid(rows: Tensor) -> Tensor:
            return torch.zeros_like(x, dtype=rows.dtype).flatten(0, 1).index_copy(0, index, rows[0]).view(x.shape)

        return Pass(grid(output.hidden), grid(output.stream))
