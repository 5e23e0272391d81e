"""Dense execution: each pass computes every token, and ``torch.where`` keeps halted tokens' old rows (Algorithm 2)."""

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
    """Computes every token, so that no shape depends on data: the default in training, and the reference."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.previous: list[KeysValues] | None = None
        self.mask: Tensor | dict[str, Tensor] | None = None
        self.rows: PackedRows | None = None  # replaces the mask for kernels that skip masked keys

    def _pass(self, x: Tensor) -> Pass:
        tokens = self.tokens
        # The mask changes between iterations only if halted tokens can no longer be attended to.
        needs_mask = not tokens.plain if self.passes == 0 else self.reuse == "absent"
        if needs_mask:
            places = Places(tokens.slot, tokens.order, tokens.document, self._attendable())
            if self.backbone.masks_by_kernels(x):
                self.rows = _as_rows(replace(places, spans=tokens.spans))
            else:
                self.mask = self.backbone.mask(places, places, x.dtype)
        previous = self.previous if self.reuse in ("state", "kv") else None
        output = self.backbone.read(
            x,
            position=tokens.position,
            mask=self.mask,
            lane=None if self.rows is None else Lane(self.rows, self.backbone.layer_windows, []),
            view=DenseView,
            # A pass that reuses nothing gets no mask of active tokens, which saves a compiled graph.
            view_options={"previous": previous, "active": None if previous is None else self.active},
            replay=self.replay,
            stream=self.stream,
        )
        self.previous = output.rows
        return Pass(output.hidden, output.stream)

    def _map(self, function: Callable[[Tensor], Tensor], grid: Tensor, *, all_real: bool) -> Tensor:
        return function(grid)

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return self.backbone.compiled(function)

    def _rows(self, grid: Tensor) -> Tensor:
        return grid

    def _grid(self, rows: Tensor) -> Tensor:
        return rows


def _as_rows(key: Places) -> PackedRows:
    """Describes all tokens of a batch as packed rows, which attend to the earlier tokens of their sequences."""
    batch, time = key.slot.shape
    sequence = torch.arange(batch, device=key.slot.device)[:, None].expand(batch, time).flatten()
    document = None if key.document is None else key.document.reshape(1, -1)
    return PackedRows(sequence, Places(key.slot.reshape(1, -1), key.order.reshape(1, -1), document), key)
