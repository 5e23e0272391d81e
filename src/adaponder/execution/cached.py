"""Cached execution: computes active rows only and stores them in a ledger, for prefill and decoding with a cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adaponder.backbones.views import RowPlan, RowView
from adaponder.backbones.wrapper import PassOutput
from adaponder.execution.base import Pass
from adaponder.execution.compact import Sparse
from adaponder.execution.ledger import Ledger
from adaponder.ops.masks import Places


class Cached(Sparse):
    """Computes rows without padding and stores them in a ledger.

    If all sequences have the same number of rows to compute, a pass is one batch ``[sequences, count]``. Otherwise all
    rows are packed into one batch entry (a lane). If attention takes no packed rows, sequences with the same number of
    rows form a batch, and the pass runs once per batch.
    """

    def __init__(self, *args: Any, ledger: Ledger, **options: Any):
        super().__init__(*args, **options)
        self.ledger = ledger
        self.past = ledger.slots
        ledger.extend(*self.tokens.slot.shape, self.tokens.slot.device)

    def read(self, x: Tensor) -> Pass:
        output = super().read(x)
        self.ledger.record_depth(self.past, self.depth)
        return output

    def _pass(self, x: Tensor) -> Pass:
        computed, stored = self.computed(), self.stored()
        if self.passes and self.reuse != "absent":
            self.ledger.carry_over(self.past, self.passes)
        indices, hidden, stream = [], [], []
        for index, output in self._outputs(x, computed, stored):
            indices.append(index)
            hidden.append(output.hidden.flatten(0, 1))
            stream.append(output.stream.flatten(0, 1))
        if not indices:
            return Pass(x, x)  # undefined, as in Packed
        index = torch.cat(indices)
        return Pass(self._scatter(index, torch.cat(hidden)), self._scatter(index, torch.cat(stream)))

    def _outputs(self, x: Tensor, computed: Tensor, stored: Tensor) -> Iterator[tuple[Tensor, PassOutput]]:
        """Runs one pass; a generator of (row indices, output of these rows), one item if packed, else one per batch."""
        counts = computed.sum(1)
        distinct_counts = [count for count in counts.unique().tolist() if count]
        if len(distinct_counts) > 1 and self.backbone.packs():
            index = self.index_of(computed)
            yield index, self._read_packed(x, index, counts.nonzero().squeeze(1), stored.flatten()[index])
            return
        for count in distinct_counts:
            sequences = (counts == count).nonzero().squeeze(1)
            times = computed[sequences].nonzero()[:, 1].view(-1, count)
            entries = (sequences[:, None], times)
            output = self._read_rectangle(x[entries], sequences, times, stored[entries])
            yield (sequences[:, None] * x.shape[1] + times).flatten(), output

    def _read_packed(self, x: Tensor, index: Tensor, sequences: Tensor, stored: Tensor) -> PassOutput:
        """Runs one pass over the rows at ``index`` as one batch entry; stores the rows where ``stored`` is true."""
        ledger, time = self.ledger, x.shape[1]
        stored_index = stored.nonzero().squeeze(1)
        sequence, slot = index[stored_index] // time, self.past + index[stored_index] % time
        read = ledger.write(sequence, slot, sequences, self.passes)
        slot_index = torch.searchsorted(sequences, sequence) * ledger.slots + slot
        plan = RowPlan(read=read, stored=stored_index, slot_index=slot_index)
        # No document ids: rows are packed here only with a caller's ledger, and that excludes packed documents.
        key = Places(*ledger.places(sequences), present=read >= 0)
        view_options = {"stores": ledger.snapshot(), "plan": plan}
        lane = torch.searchsorted(sequences, index // time)
        output = self._read_lane(x, index, sequence=lane, key=key, view=RowView, view_options=view_options)
        ledger.append(output.rows)
        return output

    def _read_rectangle(self, x: Tensor, sequences: Tensor, times: Tensor, stored: Tensor) -> PassOutput:
        """Runs one pass over a batch ``x [sequences, count, d]``: the tokens at ``times [sequences, count]``."""
        tokens, ledger = self.tokens, self.ledger
        entries = (sequences[:, None], times)
        lane = torch.arange(len(sequences), device=x.device)[:, None].expand_as(times)[stored]
        slot = self.past + times[stored]
        read = ledger.write(sequences[lane], slot, sequences, self.passes)
        # The first pass over an empty ledger and unpadded sequences attends only to its own rows.
        fresh = self.passes == 0 and self.past == 0 and times.shape[1] == ledger.slots
        stored_index = stored.flatten().nonzero().squeeze(1)
        plan = RowPlan(read=read, stored=stored_index, slot_index=lane * ledger.slots + slot, fresh=fresh)
        mask = None
        if not fresh or tokens.document is not None:
            key = Places(*ledger.places(sequences), present=read >= 0)
            query = Places(tokens.slot[entries], tokens.order[entries])
            if tokens.document is not None:
                key = replace(key, document=tokens.document[sequences])
                query = replace(query, document=tokens.document[entries])
            mask = self.backbone.mask(query, key, x.dtype)
        output = self.backbone.read(
            x,
            position=tokens.position[entries],
            mask=mask,
            view=RowView,
            view_options={"stores": ledger.snapshot(), "plan": plan},
            replay=self.replay,
            stream=self.stream,
        )
        ledger.append(output.rows)
        return output
