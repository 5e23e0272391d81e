"""The rows of a tick as a method sees them: each at its own iteration, of its own lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adaponder.backbones.wrapper import Backbone
from adaponder.execution.base import Rows
from adaponder.inference.lane_policies import LanePolicies
from adaponder.ops.vocab_expectation import vocab_expectation
from adaponder.policies import PolicyInput


class TickRows(Rows):
    """Rows of many sequences; everything is ``[n, 1]`` or ``[n, width, d]``, the first axis counting tokens.

    Attributes:
        lane, token, iteration, last: int64 ``[n]``: whose row it is, which token of the sequence, at which iteration,
            and which iteration is the last that is allowed.
        before: hidden states ``[n, 1, d]`` one iteration earlier; of no meaning at iteration 0.
        alone: how many rows, the first ones, decode; of the others no logits are kept.
        wants: what the gates said, ``[n, 1]``, where the method asked any.
    """

    def __init__(
        self,
        backbone: Backbone,
        policies: LanePolicies,
        *,
        lane: Tensor,
        token: Tensor,
        iteration: Tensor,
        last: Tensor,
        before: Tensor,
        alone: int,
        width: int,
    ):
        self.lane, self.token, self.iteration, self.last = lane, token, iteration, last
        self.before, self.alone, self.slots_per_token = before, alone, width
        self.policies = policies
        self.backbone = TickHead(backbone, self)
        self.active = torch.ones_like(lane, dtype=torch.bool)[:, None]
        self.wants: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        return function(values)

    def gate(self, gates: Sequence[nn.Module] | nn.ModuleList, values: Tensor) -> Tensor:
        if len(gates) == 1:
            return gates[0](values)
        every = torch.stack([gate(values) for gate in gates], dim=-1)
        return every.gather(-1, self.iteration.clamp(max=len(gates) - 1)[:, None, None]).squeeze(-1)

    def decide(self, gate: Tensor, hidden: Tensor) -> None:
        self.wants = gate
        rows = PolicyInput(
            iteration=self.iteration[:, None],
            gate=gate,
            hidden=hidden,
            position=self.token[:, None],
            seed=self.lane[:, None],  # each lane has its own, which its policy is given
            sequence=self.lane[:, None],
            slot=self.token[:, None],
            active=self.active,
            head=self.backbone.logits,
            previous=self.before,
        )
        self.active = self.active & self.policies(rows)

    def freeze(self, new: Tensor, old: Tensor | None) -> Tensor:
        return new  # halted rows are not in the pass

    def after_first(self, first: Tensor, later: Callable[[], Tensor]) -> Tensor:
        return torch.where((self.iteration == 0)[:, None, None], first, later())


class TickHead:
    """A backbone's ends as the method uses them in a tick: the logits of rows that decode are computed once."""

    def __init__(self, backbone: Backbone, rows: TickRows):
        self._backbone, self._rows = backbone, rows
        self._of: Tensor | None = None
        self._kept: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backbone, name)

    def decoding_logits(self, hidden: Tensor) -> Tensor:
        """Those of the rows that decode, ``[alone, vocabulary]``."""
        if self._kept is None or hidden is not self._of:
            self._of, self._kept = hidden, self._backbone.logits(hidden[: self._rows.alone, 0])
        return self._kept

    def expected_embedding(self, hidden: Tensor, *, scale: float, **options: Any) -> Tensor:
        """As :meth:`Backbone.expected_embedding`; rows that decode take it from the logits that sampling needs too."""
        alone, parts = self._rows.alone, []
        table = self._backbone.table()
        if alone:
            parts.append(expectation(self.decoding_logits(hidden), table, options.get("top_k"))[:, None])
        if alone < len(hidden):
            weight, bias = self._backbone.head()
            parts.append(vocab_expectation(hidden[alone:], weight, table, bias=bias, **options))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)) * scale


def expectation(logits: Tensor, table: Tensor, top_k: int | None) -> Tensor:
    """Equals ``softmax(logits) @ table``, with ``top_k`` over the likeliest words alone."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    if top_k:
        best = logits.to(wide).topk(top_k, dim=-1)
        shares = best.values.softmax(-1).to(table.dtype)
        return torch.einsum("nk,nkd->nd", shares, table[best.indices])
    return logits.to(wide).softmax(-1).to(table.dtype) @ table
