"""Attention of scattered rows: some tokens of each sequence ask, all of its tokens answer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from adaponder.masks import Places, visible


@dataclass(frozen=True)
class Rows:
    """Which tokens ask, packed into one lane in the order of sequences and slots, and who answers.

    Attributes:
        sequence: ``[n]``, whose tokens they are; never decreasing.
        query: places ``[1, n]`` of the rows.
        key: places ``[sequences, slots]`` of all tokens.
    """

    sequence: Tensor
    query: Places
    key: Places

    @cached_property
    def offset(self) -> Tensor:
        """``[n]``, the how-manieth row of its sequence each one is."""
        everyone = torch.arange(self.key.slot.shape[0], device=self.sequence.device)
        first = torch.searchsorted(self.sequence, everyone)
        return torch.arange(len(self.sequence), device=self.sequence.device) - first[self.sequence]

    @cached_property
    def width(self) -> int:
        """The most rows that any sequence has."""
        return int(self.offset.max()) + 1

    def spread(self, rows: Tensor) -> Tensor:
        """``[n, …]`` as a rectangle ``[sequences, width, …]``; zeros where a sequence has fewer rows."""
        grid = rows.new_zeros(self.key.slot.shape[0], self.width, *rows.shape[1:])
        return grid.index_put((self.sequence, self.offset), rows)

    def gather(self, grid: Tensor) -> Tensor:
        """The inverse of :meth:`spread`."""
        return grid[self.sequence, self.offset]

    @cached_property
    def _masks(self) -> dict[int | None, Tensor]:
        return {}

    def mask(self, window: int | None) -> Tensor:
        """Who sees whom in the rectangle, ``[sequences, 1, width, slots]``; kept, because every layer asks again."""
        if window not in self._masks:
            query = self.query
            document = None if query.document is None else self.spread(query.document[0])
            spread = Places(self.spread(query.slot[0]), self.spread(query.order[0]), document)
            self._masks[window] = visible(spread, self.key, window=window)
        return self._masks[window]


def compact_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    *,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Equals attention of every token, read at ``rows`` only.

    Args:
        query: ``[n, heads, size]``.
        keys: ``[sequences, key heads, slots, size]``; heads are a multiple of key heads.
        values: ``[sequences, key heads, slots, value size]``.
        rows: where the queries stand.
        window: how many tokens a query sees at most; ``None`` for all.
        scale: of the scores; by default one over the root of the size.
        dropout: share of the weights that is dropped.

    Returns:
        ``[n, heads, value size]``.
    """
    spread = rows.spread(query).transpose(1, 2)
    mixed = scaled_dot_product_attention(
        spread,
        keys,
        values,
        attn_mask=rows.mask(window),
        scale=scale,
        dropout_p=dropout,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return rows.gather(mixed.transpose(1, 2))
