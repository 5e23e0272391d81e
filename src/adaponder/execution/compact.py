"""Only active rows are computed: gathered, packed into one lane, and put back. For prefill, and training with skips."""

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
    """What packed and cached execution share: grids ``[batch, time, …]`` flattened to rows and back.

    A row index counts tokens of the flattened grid.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._real_index: Tensor | None = None
        self._active_index: Tensor | None = None

    def index_of(self, chosen: Tensor) -> Tensor:
        """The row indices of the tokens of a mask, which must be ``tokens.real`` or ``active`` itself.

        How many they are is something that the host must wait for, so it is asked once for each of the two.
        """
        if chosen is self.tokens.real:
            if self._real_index is None:
                self._real_index = chosen.flatten().nonzero().squeeze(1)
            return self._real_index
        assert chosen is self.active
        if self._active_index is None:
            self._active_index = self.active.flatten().nonzero().squeeze(1)
        return self._active_index

    def _halt(self, keep: Tensor) -> None:
        super()._halt(keep)
        self._active_index = None

    def computed(self) -> Tensor:
        """The tokens that a pass computes, ``[batch, time]``."""
        return self.active if self.reuse in ("state", "absent") else self.tokens.real

    def stored(self) -> Tensor:
        """The tokens whose rows of a pass others see, ``[batch, time]``."""
        return self.tokens.real if self.reuse == "none" else self.active

    def _read_lane(
        self,
        x: Tensor,
        row_index: Tensor,
        *,
        sequence: Tensor,
        key: Places,
        view: type[IterationView],
        holding: dict[str, Any],
    ) -> PassOutput:
        """One pass over the rows at ``row_index``, packed into one lane.

        ``sequence`` is, for each of them, the sequence among those of ``key`` and of what the view answers.
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

    def _map(self, function: Callable[[Tensor], Tensor], grid: Tensor, *, everyone: bool) -> Tensor:
        chosen = self.tokens.real if everyone else self.active
        index = self.index_of(chosen)
        rows = function(grid.flatten(0, 1)[index])
        return rows.new_zeros(chosen.numel(), *rows.shape[1:]).index_copy(0, index, rows).unflatten(0, chosen.shape)

    def _rows(self, grid: Tensor) -> Tensor:
        return grid.flatten(0, 1)[self.index_of(self.active)]

    def _grid(self, rows: Tensor) -> Tensor:
        grid = torch.zeros(self.active.numel(), dtype=torch.bool, device=rows.device)
        return grid.index_copy(0, self.index_of(self.active), rows).view(self.active.shape)


class Packed(Sparse):
    """All rows that a pass computes in one lane, whatever sequence they are of.

    Products see no padding, and attention finds each row's sequence (:class:`adaponder.backbones.attention.Lane`).
    Nothing is left to decode on from: for that, see :class:`adaponder.execution.cached.Cached`.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.grids: list[KeysValues] | None = None

    def _pass(self, x: Tensor) -> Pass:
        if self.passes == 0 and self.tokens.plain:
            return self._first_pass(x)
        tokens, time = self.tokens, x.shape[1]
        index = self.index_of(self.computed())
        if not index.numel():
            return Pass(x, x)  # no entry has a meaning; gates whose tokens all halt have gradients of 0, as if dense
        kept = None
        if self.reuse == "kv":
            kept = self.stored().flatten()[index].nonzero().squeeze(1)
        stored = index if kept is None else index[kept]
        # Halted tokens may be absent; padding always is.
        present = self.active if self.reuse == "absent" else None if tokens.plain else tokens.real
        key, sequence, lanes = Places(tokens.slot, tokens.order, tokens.document, present), index // time, None
        if self.backbone.unfolds:
            # Sequences with nothing to compute are left out: nobody unfolds their keys.
            lanes, sequence = sequence.unique(return_inverse=True)
            key = key.of(lanes)
        holding = {"grids": self.grids, "shape": tuple(x.shape[:2]), "lanes": lanes, "kept": kept}
        holding |= {"sequence": stored // time, "slot": stored % time}
        output = self._read_lane(x, index, sequence=sequence, key=key, view=GridView, holding=holding)
        self.grids = output.rows

        def grid(rows: Tensor) -> Tensor:
            return torch.zeros_like(x, dtype=rows.dtype).flatten(0, 1).index_copy(0, index, rows[0]).view(x.shape)

        return Pass(grid(output.hidden), grid(output.stream))

    def _first_pass(self, x: Tensor) -> Pass:
        """Every token is computed and nothing is there to be reused: an ordinary causal pass."""
        output = self.backbone.read(
            x,
            position=self.tokens.position,
            mask=None,
            view=DenseView,
            holding={"previous": None, "active": None},
            replay=self.replay,
            stream=self.stream,
        )
        self.grids = output.rows
        return Pass(output.hidden, output.stream)
