"""Dense execution: every pass computes every token, and ``torch.where`` keeps the rows of halted ones (Algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adaponder.backbones.attention import Lane
from adaponder.backbones.views import DenseView, KeysValues
from adaponder.execution.base import Execution, Pass
from adaponder.ops.compact_attention import PackedRows
from adaponder.ops.masks import Places


class Dense(Execution):
    """Computes every token, so no shape depends on data. This is the default in training and the reference."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.previous: list[KeysValues] | None = None
        self.mask: Tensor | dict[str, Tensor] | None = None
        self.rows: PackedRows | None = None  # describes the mask to kernels, which then replaces it

    def _pass(self, x: Tensor) -> Pass:
        tokens, vanishing = self.tokens, self.reuse == "absent"
        # The mask changes between iterations only if halted tokens are no longer attended to.
        if (vanishing and self.passes > 0) or (self.passes == 0 and not tokens.plain):
            present = self.active if vanishing else None if tokens.unpadded else tokens.real
            places = Places(tokens.slot, tokens.order, tokens.document, present)
            if self.backbone.masks_by_kernels(x):
                self.rows = self._every_row(replace(places, spans=tokens.spans))
            else:
                self.mask = self.backbone.mask(places, places, x.dtype)
        previous = self.previous if self.reuse in ("state", "kv") else None
        output = self.backbone.read(
            x,
            position=tokens.position,
            mask=self.mask,
            lane=None if self.rows is None else Lane(self.rows, self.backbone.layer_windows, []),
            view=DenseView,
            # The first pass reuses nothing and needs no mask of active tokens: one compiled graph less.
            holding={"previous": previous, "active": None if previous is None else self.active},
            replay=self.replay,
            stream=self.stream,
        )
        self.previous = output.rows
        return Pass(output.hidden, output.stream)

    def _every_row(self, key: Places) -> PackedRows:
        """Returns all tokens as rows."""
        batch, time = key.slot.shape
        sequence = torch.arange(batch, device=key.slot.device)[:, None].expand(batch, time).flatten()
        slot, order = (index.reshape(1, -1) for index in (key.slot, key.order))
        document = None if key.document is None else key.document.reshape(1, -1)
        return PackedRows(sequence, Places(slot, order, document), key)

    def _map(self, function: Callable[[Tensor], Tensor], grid: Tensor, *, all_real: bool) -> Tensor:
        return function(grid)

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return self.backbone.compiled(function)

    def _rows(self, grid: Tensor) -> Tensor:
        return grid

    def _grid(self, rows: Tensor) -> Tensor:
        return rows
