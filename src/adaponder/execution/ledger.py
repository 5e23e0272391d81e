"""Defines the ledger: a batch's KV cache, with a row per token and iteration and a table of the rows to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from adaponder.backbones.views import KeysValues
from adaponder.errors import CacheError


class RowStore:
    """The keys and values of one layer, ``[rows, heads, size]`` each, which grow by appending rows.

    Without gradients, rows are written into a buffer that doubles when full. With gradients, each append allocates new
    tensors, because autograd needs the old ones.
    """

    def __init__(self, keys: Tensor, values: Tensor):
        self.count = keys.shape[0]
        self._keys, self._values = keys, values

    def tensors(self) -> KeysValues:
        return self._keys[: self.count], self._values[: self.count]

    def append(self, keys: Tensor, values: Tensor) -> None:
        total = self.count + keys.shape[0]
        old_keys, old_values = self.tensors()
        if keys.requires_grad or old_keys.requires_grad:
            self._keys, self._values = torch.cat([old_keys, keys]), torch.cat([old_values, values])
        else:
            self._keys = self._write(self._keys, keys, total)
            self._values = self._write(self._values, values, total)
        self.count = total

    def _write(self, buffer: Tensor, rows: Tensor, total: int) -> Tensor:
        if total > buffer.shape[0]:
            grown = buffer.new_empty(2 * total, *buffer.shape[1:])
            grown[: self.count] = buffer[: self.count]
            buffer = grown
        buffer[self.count : total] = rows
        return buffer

    def select(self, rows: Tensor) -> None:
        keys, values = self.tensors()
        self.count = rows.shape[0]
        self._keys, self._values = keys[rows], values[rows]


class Ledger(Cache):
    """The KV cache of a batch: in each layer, a token has as many rows as its depth.

    If the method does not reuse rows (``reuse="none"``), each token has K rows. ``table[sequence, slot, iteration]`` is
    the row that an iteration reads for a token: the row of the token's iteration ``min(iteration, depth - 1)`` (law 3),
    or -1 if the method hides halted tokens. So nothing is copied when a token halts, and beams share the rows of their
    common prefix. ``identity`` has the settings that the rows depend on; a model refuses a ledger with other settings.
    """

    def __init__(self, *, layers: int, iterations: int, slots_per_token: int = 1, **identity: Any):
        super().__init__(layers=[])
        counts = {"layers": layers, "max_iterations": iterations, "slots_per_token": slots_per_token}
        self.identity: dict[str, Any] = counts | identity
        self.layers_count = layers
        self.iterations = iterations
        self.slots_per_token = slots_per_token
        self.stores: list[RowStore] = []  # one per layer; empty before the first pass
        self.table: Tensor | None = None
        self.slot_depth: Tensor | None = None

    @property
    def depth(self) -> Tensor:
        """Depth of each token, ``[batch, tokens]``; 0 for padding. Raises if the ledger is empty."""
        return self._tables()[1].unflatten(1, (-1, self.slots_per_token)).sum(-1)

    @property
    def rows(self) -> int:
        """Number of rows stored per layer."""
        return self.stores[0].count if self.stores else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the stored keys and values, without spare buffer capacity."""
        tensors = [tensor for store in self.stores for tensor in store.tensors()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def slots(self) -> int:
        return 0 if self.table is None else self.table.shape[1]

    def extend(self, batch: int, slots: int, device: torch.device) -> None:
        """Adds ``slots`` empty slots to each sequence."""
        table = torch.full((batch, slots, self.iterations), -1, dtype=torch.long, device=device)
        depth = torch.zeros(batch, slots, dtype=torch.long, device=device)
        if self.table is None or self.slot_depth is None:
            self.table, self.slot_depth = table, depth
            return
        if self.table.shape[0] != batch:
            raise CacheError(f"the cache holds {self.table.shape[0]} sequences, the batch has {batch}: they must agree")
        self.table = torch.cat([self.table, table], 1)
        self.slot_depth = torch.cat([self.slot_depth, depth], 1)

    def carry_over(self, past: int, iteration: int) -> None:
        """Copies the row numbers of ``iteration - 1`` to ``iteration`` for all slots from ``past`` on."""
        table, _ = self._tables()
        table[:, past:, iteration] = table[:, past:, iteration - 1]

    def write(self, sequence: Tensor, slot: Tensor, sequences: Tensor, iteration: int) -> Tensor:
        """Enters into the table the rows that a pass will append: the i-th row is for ``sequence[i]``, ``slot[i]``.

        Returns the row that this iteration reads for each slot of ``sequences``, ``[sequences, slots]``; -1 for none.
        """
        table, _ = self._tables()
        table[sequence, slot, iteration] = self.rows + torch.arange(len(slot), device=slot.device)
        return table[sequences, :, iteration]

    def record_depth(self, past: int, depth: Tensor) -> None:
        self._tables()[1][:, past:] = depth

    def places(self, sequences: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (slot, order among real tokens) of every slot of these sequences, ``[sequences, slots]`` each."""
        table, _ = self._tables()
        slot = torch.arange(self.slots, device=table.device).expand(len(sequences), -1)
        return slot, (table[sequences, :, 0] >= 0).cumsum(1) - 1

    def _tables(self) -> tuple[Tensor, Tensor]:
        if self.table is None or self.slot_depth is None:
            raise CacheError("the cache is empty: no token has been read yet")
        return self.table, self.slot_depth

    def snapshot(self) -> list[KeysValues]:
        """Returns the current keys and values of each layer (empty list: no rows); later appends do not change them."""
        return [store.tensors() for store in self.stores]

    def append(self, rows: list[KeysValues]) -> None:
        if not self.stores:
            self.stores = [RowStore(keys, values) for keys, values in rows]
            return
        for store, (keys, values) in zip(self.stores, rows, strict=True):
            store.append(keys, values)

    # The interface that generate() uses.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.slots // self.slots_per_token

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def __len__(self) -> int:
        return self.layers_count

    @property
    def batch_size(self) -> int:
        return -1 if self.table is None else self.table.shape[0]

    @property
    def is_initialized(self) -> bool:
        return self.table is not None

    def update(self, *args, **kwargs) -> KeysValues:
        raise CacheError("a Ledger works with AdaPonderForCausalLM only; a backbone alone cannot use it")

    def reset(self) -> None:
        self.stores = []
        self.table = self.slot_depth = None

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens and frees their rows; a positive number is refused."""
        if tokens_to_remove > 0:
            raise CacheError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        self.forget(self.slots + tokens_to_remove * self.slots_per_token)

    def forget(self, slots: int) -> None:
        """Keeps the first ``slots`` slots of every sequence and frees the rows that no slot uses any more."""
        if slots <= 0:
            self.reset()
        elif slots < self.slots:
            self._change(lambda values: values[:, :slots])
            self._sweep(spare=0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        # Beams change at every step: their unused rows are freed once they outnumber the used ones.
        self._take(beam_idx, spare=self.rows // 2)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._take(indices, spare=0)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda values: values.repeat_interleave(repeats, 0))

    def _take(self, sequences: Tensor, *, spare: int) -> None:
        self._change(lambda values: values[sequences.to(values.device)])
        self._sweep(spare=spare)

    def _change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Applies ``function`` to the table and the depths, unless the ledger is empty."""
        if self.table is not None and self.slot_depth is not None:
            self.table, self.slot_depth = function(self.table), function(self.slot_depth)

    def _sweep(self, *, spare: int) -> None:
        """Frees the rows that no slot uses any more, if there are more than ``spare`` of them."""
        if self.table is None:
            return
        used, renumbered = self.table.unique(return_inverse=True)
        empty = int(used.numel() > 0 and used[0] < 0)  # 1 if -1 (no row) is among them
        count = used.numel() - empty
        if self.rows - count <= spare:
            return
        if 2 * count > self.rows and int(used[-1]) == count - 1:
            # The unused rows are the last ones: appending overwrites them, and nothing is copied.
            for store in self.stores:
                store.count = count
            return
        self.table = renumbered - empty
        for store in self.stores:
            store.select(used[empty:])
