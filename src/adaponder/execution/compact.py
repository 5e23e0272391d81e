"""Compact execution for prefill and training: skips halted tokens and packs active rows into one lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    A row index is an index into the flattened grid, ``sequence * time + t``. A padding row has the index ``batch *
    time``; it repeats the computation of the batch's last token, and its result is dropped.
    """

    pads = False  # whether there may be padding rows

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._real_index: Tensor | None = None
        self._active_index: Tensor | None = None

    def index_of(self, mask: Tensor) -> Tensor:
        """Returns the row indices where ``mask``, which must be ``self.tokens.real`` or ``self.active``, is true.

        The result is cached, because finding its length synchronises with the device.
        """
        if mask is self.tokens.real:
            if self._real_index is None and self.tokens.unpadded:
                self._real_index = torch.arange(mask.numel(), device=mask.device)
            elif self._real_index is None:
                self._real_index = mask.flatten().nonzero().squeeze(1)
            return self._real_index
        assert mask is self.active
        if self._active_index is None:
            self._active_index = self._find_active()
        return self._active_index

    def _find_active(self) -> Tensor:
        """Returns the row indices of the active tokens."""
        return self.active.flatten().nonzero().squeeze(1)

    def _halt(self, continues: Tensor) -> None:
        super()._halt(continues)
        self._active_index = None

    def computed(self) -> Tensor:
        """Returns the mask of tokens that the next pass computes, bool ``[batch, time]``."""
        return self.active if self.reuse in ("state", "absent") else self.tokens.real

    def stored(self) -> Tensor:
        """Returns the mask of tokens whose new rows are stored for others to attend to, bool ``[batch, time]``."""
        return self.tokens.real if self.reuse == "none" else self.active

    def _read_lane(
        self,
        x: Tensor,
        row_index: Tensor,
        *,
        sequence: Tensor,
        key: Places,
        view: type[IterationView],
        view_options: dict,
    ) -> PassOutput:
        """Runs one pass over the rows at ``row_index``, packed into one batch entry.

        ``sequence`` is, for each row, the index of its sequence in ``key`` and in the keys and values of the view.
        """
        tokens, row_index = self.tokens, self._clamped(row_index)

        def lane(grid: Tensor) -> Tensor:
            return grid.flatten(0, 1)[row_index][None]

        document = None if tokens.document is None else lane(tokens.document)
        query = Places(lane(tokens.slot), lane(tokens.order), document)
        return self.backbone.read(
            lane(x),
            position=lane(tokens.position),
            mask=None,
            view=view,
            view_options=view_options,
            lane=Lane(PackedRows(sequence=sequence, query=query, key=key), self.backbone.layer_windows, []),
            replay=self.replay,
            stream=self.stream,
        )

    def _map(self, function: Callable[[Tensor], Tensor], grid: Tensor, *, all_real: bool) -> Tensor:
        mask = self.tokens.real if all_real else self.active
        if self.tokens.unpadded and mask is self.tokens.real:  # true for all tokens, known without synchronising
            return function(grid)
        index = self.index_of(mask)
        return self._scatter(index, function(grid.flatten(0, 1)[self._clamped(index)]))

    def _rows(self, grid: Tensor) -> Tensor:
        return grid.flatten(0, 1)[self._clamped(self.index_of(self.active))]

    def _grid(self, rows: Tensor) -> Tensor:
        return self._scatter(self.index_of(self.active), rows)

    def _clamped(self, index: Tensor) -> Tensor:
        """Returns row indices that can be gathered: padding rows get the index of the last token."""
        return index.clamp_max(self.active.numel() - 1) if self.pads else index

    def _scatter(self, index: Tensor, rows: Tensor) -> Tensor:
        """Scatters rows to a grid ``[batch, time, …]`` that is zero where there is no row; drops padding rows."""
        size = self.active.numel()
        grid = rows.new_zeros(size + self.pads, *rows.shape[1:]).index_copy(0, index, rows)
        return grid[:size].unflatten(0, self.active.shape)


class Packed(Sparse):
    """Computes the rows of all sequences as one batch entry, without padding and without a cache for decoding.

    Each row attends to its own sequence (:class:`adaponder.backbones.attention.Lane`). With ``limits``, the pass after
    halting decision n (from 0) computes ``limits[n]`` rows, however many tokens are active. Then no shape depends on
    data, so that a forward without padding never waits for the device and can be captured in a CUDA graph. Active
    tokens beyond the limit are dropped, which makes the results wrong, so callers must compare ``depth`` with the
    limits.
    """

    def __init__(self, *args: Any, limits: Sequence[int] | None = None, **options: Any):
        super().__init__(*args, **options)
        # Per layer, keys and values [batch, heads, slots, size] of all tokens after the latest pass.
        self.grids: list[KeysValues] | None = None
        self.limits, self.pads = limits, limits is not None

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return self.backbone.compiled(function) if self.pads else function

    def _find_active(self) -> Tensor:
        if self.limits is None:
            return super()._find_active()
        active, limit = self.active.flatten(), self.limits[self.passes - 1]
        tokens = torch.arange(len(active), device=active.device)
        # The rank of each active token among the active ones; all tokens without a row go to an extra last entry.
        rank = torch.where(active, active.cumsum(0) - 1, limit).clamp_max(limit)
        return torch.full((limit + 1,), len(active), device=active.device).scatter(0, rank, tokens)[:limit]

    def _pass(self, x: Tensor) -> Pass:
        tokens, time = self.tokens, x.shape[1]
        if self.passes == 0 and tokens.plain:  # an ordinary causal pass: every token is computed, nothing is reused
            output = self.backbone.read(
                x,
                position=tokens.position,
                mask=None,
                view=DenseView,
                view_options={"previous": None, "active": None},
                replay=self.replay,
                stream=self.stream,
            )
            self.grids = output.rows
            return Pass(output.hidden, output.stream)
        index = self.index_of(self.computed())
        if not index.numel():
            return Pass(x, x)  # undefined, but gates whose tokens have all halted get gradients of 0, as in dense
        stored_index = self.stored().flatten()[index].nonzero().squeeze(1) if self.reuse == "kv" else None
        rows = self._clamped(index)
        key = Places(tokens.slot, tokens.order, tokens.document, self._attendable(), tokens.spans)
        sequence, lanes = rows // time, None
        if self.backbone.unfolds and not self.pads:
            # Sequences without rows are left out, so that their keys need not be expanded.
            lanes, sequence = sequence.unique(return_inverse=True)
            key = key.of(lanes)
        view_options = {
            "grids": self.grids,
            "shape": tuple(x.shape[:2]),
            "lanes": lanes,
            "sequence": rows // time,
            "slot": rows % time,
            "stored": stored_index,
        }
        if self.pads or torch.is_grad_enabled():
            stored = torch.arange(len(index), device=index.device) if stored_index is None else stored_index
            empty = torch.full((self.active.numel() + self.pads,), -1, device=index.device)
            place = empty.scatter(0, index if stored_index is None else index[stored], stored)
            view_options["place"] = place[: self.active.numel()].view(self.active.shape)
        output = self._read_lane(x, index, sequence=sequence, key=key, view=GridView, view_options=view_options)
        self.grids = output.rows
        return Pass(self._scatter(index, output.hidden[0]), self._scatter(index, output.stream[0]))
