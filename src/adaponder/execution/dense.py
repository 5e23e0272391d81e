"""Dense execution: every pass computes every token, and ``torch.where`` keeps the rows of halted ones (Algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from adaponder.backbones.views import DenseView, KeysValues
from adaponder.execution.base import Execution, Pass
from adaponder.ops.masks import Places


class Dense(Execution):
    """Computes every token, so no shape depends on data. This is the default in training and the reference."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.previous: list[KeysValues] | None = None
        self.mask: Tensor | dict[str, Tensor] | None = None

    def _pass(self, x: Tensor) -> Pass:
        tokens, vanishing = self.tokens, self.reuse == "absent"
        # The mask changes between iterations only if halted tokens are no longer attended to.
        if (vanishing and self.passes > 0) or (self.passes == 0 and not tokens.plain):
            places = Places(tokens.slot, tokens.order, tokens.document, self.active if vanishing else tokens.real)
            self.mask = self.backbone.mask(places, places, x.dtype)
        previous = self.previous if self.reuse in ("state", "kv") else None
        output = self.backbone.read(
            x,
            position=tokens.position,
            mask=self.mask,
            view=DenseView,
            # The first pass reuses nothing and needs no mask of active tokens: one compiled graph less.
            holding={"previous": previous, "active": None if previous is None else self.active},
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
