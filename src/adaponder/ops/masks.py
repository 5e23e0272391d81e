"""Builds attention masks: a query attends to its own slot and to present earlier slots of its document and window."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_lock = threading.Lock()
_enabled_before: list[bool] = []  # per open context of _without_cudnn, whether cuDNN was enabled when it was entered
_NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Places:
    """Describes queries or keys to attention; tensors are ``[lanes, n]``.

    Attributes:
        slot: the slot of each query or key; queries attend to no later slot.
        order: index among the real tokens of the sequence; sliding windows are measured in it.
        document: document ids; ``None``: each lane is one document.
        present: false for keys that only the query of the same slot attends to (padding; halted tokens of ``mor``);
            ``None``: all are present.
        spans: the documents in the form that kernels read, ``[3, lanes, n]``, from :func:`spans_of`.
    """

    slot: Tensor
    order: Tensor
    document: Tensor | None = None
    present: Tensor | None = None
    spans: Tensor | None = None

    def of(self, lanes: Tensor | slice, columns: slice = slice(None)) -> Places:
        """Selects the entries of the given lanes and columns."""
        document = None if self.document is None else self.document[lanes, columns]
        present = None if self.present is None else self.present[lanes, columns]
        spans = None if self.spans is None else self.spans[:, lanes, columns]
        return Places(self.slot[lanes, columns], self.order[lanes, columns], document, present, spans)


def spans_of(document: Tensor) -> Tensor:
    """Returns ``[3, lanes, slots]``: the document id of each slot, and the first and the last slot with that id."""
    ids, order = document.sort(dim=1, stable=True)
    index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    new = torch.ones_like(ids, dtype=torch.bool)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    first = torch.where(new, index, 0).cummax(1).values
    ends = new.roll(-1, 1)  # the first entry is new, so the last one ends a document
    last = torch.where(ends, index, ids.shape[1]).flip(1).cummin(1).values.flip(1)
    slots = [torch.empty_like(order).scatter(1, order, order.gather(1, edge)) for edge in (first, last)]
    return torch.stack([document.to(order.dtype), *slots])


def visible(query: Places, key: Places, *, window: int | None) -> Tensor:
    """Returns the boolean attention mask ``[lanes, 1, queries, keys]``.

    Every query attends to its own slot, because for a padded or absent token an empty softmax would give NaN; the
    results of such tokens are never read.
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


def masked_attention() -> AbstractContextManager[object]:
    """Context manager in which torch's attention uses any backend but cuDNN.

    On H100 and H200, torch prefers cuDNN, whose backward with a mask returns NaN for some lengths and scores (torch
    2.11 to 2.13; pytorch issue 196678, docs/design.md). Without a mask, cuDNN is correct and the fastest.
    """
    # Only torch's own context manager can be traced; but it would enable backends that the caller has disabled.
    return sdpa_kernel(_NOT_CUDNN) if torch.compiler.is_compiling() else _without_cudnn()


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Context manager that disables cuDNN attention in the process until the last nested or concurrent one ends."""
    with _lock:
        _enabled_before.append(torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        with _lock:
            if len(_enabled_before) == 1:
                torch.backends.cuda.enable_cudnn_sdp(_enabled_before[0])
            _enabled_before.pop()
