"""Who may attend to whom: earlier tokens of the same document, within the window, that have a row to read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Places:
    """Where queries or keys stand: ``[lanes, n]`` each; ``present`` marks keys that have a row to read."""

    slot: Tensor
    order: Tensor
    document: Tensor | None = None
    present: Tensor | None = None

    def of(self, lanes: Tensor) -> Places:
        """Those of some lanes."""

        def some(grid: Tensor | None) -> Tensor | None:
            return None if grid is None else grid[lanes]

        return Places(self.slot[lanes], self.order[lanes], some(self.document), some(self.present))


def visible(query: Places, key: Places, *, window: int | None) -> Tensor:
    """The boolean attention mask ``[lanes, 1, queries, keys]``.

    Every query sees its own slot: a padded or absent token has no softmax over nothing, hence no NaN, and nobody
    reads what it computes.
    """
    query_slot, key_slot = query.slot[..., :, None], key.slot[..., None, :]
    mask = key_slot <= query_slot
    if key.present is not None:
        mask = mask & key.present[..., None, :]
    if window is not None:
        mask = mask & (query.order[..., :, None] - key.order[..., None, :] < window)
    if query.document is not None and key.document is not None:
        mask = mask & (query.document[..., :, None] == key.document[..., None, :])
    return (mask | (key_slot == query_slot)).unsqueeze(1)
