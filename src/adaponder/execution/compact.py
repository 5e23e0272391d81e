"""Compact execution for prefill and training: skips halted tokens, packs active rows into one batch entry (a lane)."""

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
    """Base class of packed and cached execution: converts grids ``[batch, time, …]`` to rows and back.

    A row index is an index into the flattened grid, ``sequence * time + t``.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._real_index: Tensor | None = None
        self._active_index: Tensor | None = None

    def index_of(self, mask: Tensor) -> Tensor:
        """Returns the row indices where ``mask``, which must be ``self.tokens.real`` or ``self.active``, is true.

        The result is cached, because finding its length synchronises with the device.
        """
        if mask is self.tokens.real:
            if self._real_index is None:
                self._real_index = mask.flatten().nonzero().squeeze(1)
            return self._real_index
        assert mask is self.active
        if self._active_index is None:
            self._active_index = self.active.flatten().nonzero().squeeze(1)
        return self._active_index

    def _halt(self, continues: Tensor) -> None:
        super()._halt(continues)
        self._active_index = None

    def computed(self) -> Tensor:
        """Returns the mask of tokens that the next pass computes, bool ``[batch, time]``."""
        return self.active if self.reuse in ("state", "absent") else self.tokens.real

    def stored(self) -> Tensor:
        """Returns the mask of tokens whose new rows are kept for others to attend to, bool ``[batch, time]``."""
        return self.tokens.real if self.reuse == "none" else self.active

    def _read_lane(
        self, x: Tensor, row_index: Tensor, *, sequence: Tensor, key: Places, view: type[IterationView], holding: dict
    ) -> PassOutput:
        """Runs one pass over the rows at ``row_index``, packed into one batch entry.

        ``sequence`` is, for each row, the index of its sequence in ``key`` and in the keys and values of the view.
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
    """Computes the rows of all sequences as one batch entry, without padding and without a cache for decoding.

    Each row attends to its own sequence (:class:`adaponder.backbones.attention.Lane`).
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
