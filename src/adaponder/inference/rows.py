"""The rows of a tick as a method sees them: each at its own iteration, of its own lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from adaponder.backbones.wrapper import Backbone
from adaponder.execution.base import Rows
from adaponder.halting import pondered
from adaponder.inference.lane_policies import LanePolicies
from adaponder.inference.row_gates import RowGates
from adaponder.ops.lane_books import ponder_rows
from adaponder.ops.ledger_attention import Cohort
from adaponder.ops.row_vocabulary import row_expectation, row_logits
from adaponder.ops.vocab_expectation import vocab_expectation
from adaponder.policies import PolicyInput


class Surroundings(Protocol):
    """What the rows of a tick use of the :class:`~adaponder.inference.runner.Runner` that computes them."""

    width: int
    backbone: Backbone
    policies: LanePolicies
    top_k: int | None

    def everybody(self, rows: int) -> Tensor: ...

    def gates(self, gates: Sequence[nn.Module] | nn.ModuleList) -> RowGates: ...


class TickInput(NamedTuple):
    """The tokens of a tick, ``[n]`` each: lane, place in the sequence, iteration, last iteration allowed.

    ``row`` are the pool rows, ``[n, width]``; ``before`` are the hidden states of the iteration before, where a policy
    looks at them.
    """

    lane: Tensor
    place: Tensor
    iteration: Tensor
    last: Tensor
    row: Tensor
    before: Tensor | None

    @classmethod
    def joined(cls, parts: Sequence[TickInput]) -> TickInput:
        """The tokens of several, one after the other."""
        if len(parts) == 1:
            return parts[0]
        *columns, before = zip(*parts, strict=True)
        return cls(*(torch.cat(column) for column in columns), None if before[0] is None else torch.cat(before))


class TickRows(Rows):
    """Rows of many sequences; everything is ``[n, 1]`` or ``[n, width, d]``, the first axis counting tokens.

    Attributes:
        alone: how many tokens, the first ones, decode; the others are chunks of prompts, which ``cohorts`` lists.
        gate_said: what the gates said, ``[n, 1]``, where the method asked any.
    """

    def __init__(self, runner: Surroundings, tick: TickInput, alone: int, cohorts: tuple[Cohort, ...]):
        self.lane, self.place, self.iteration = tick.lane, tick.place, tick.iteration
        self.before, self.alone, self.cohorts = tick.before, alone, cohorts
        self.slots_per_token = runner.width
        self.runner = runner
        self.backbone: Any = TickHead(runner.backbone, self)
        self.active = runner.everybody(len(tick.lane))
        self.gate_said: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        return function(values)

    def gate(self, gates: Sequence[nn.Module] | nn.ModuleList, values: Tensor) -> Tensor:
        alone, parts = self.alone, []
        if alone:
            parts.append(self.runner.gates(gates)(values[:alone], self.iteration[:alone, None]))
        for iteration, together in groupby(self.cohorts, key=lambda cohort: cohort.iteration):
            first, *_ = those = list(together)
            rows = slice(first.start // self.slots_per_token, those[-1].stop // self.slots_per_token)
            parts.append(gates[min(iteration, len(gates) - 1)](values[rows]))
        return parts[0] if len(parts) == 1 else torch.cat([part.to(parts[0].dtype) for part in parts])

    def decide(self, gate: Tensor, hidden: Tensor) -> None:
        self.gate_said = gate
        rows = PolicyInput(
            iteration=self.iteration[:, None],
            gate=gate,
            hidden=hidden,
            position=self.place[:, None],
            seed=self.lane[:, None],  # each lane has its own, which its policy is given
            sequence=self.lane[:, None],
            slot=self.place[:, None],
            active=self.active,
            head=self.backbone.logits,
            previous=self.before if self.runner.policies.reads_previous() else None,
        )
        self.active = self.active & self.runner.policies(rows)

    def freeze(self, new: Tensor, old: Tensor | None) -> Tensor:
        return new  # halted rows are not in the pass

    def after_first(self, first: Tensor, later: Callable[[], Tensor]) -> Tensor:
        return torch.where((self.iteration == 0)[:, None, None], first, later())

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return ponder_rows if function is pondered else function


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
            weight, bias = self._backbone.head()
            self._of, self._kept = hidden, row_logits(hidden[: self._rows.alone, 0], weight, bias=bias)
        return self._kept

    def expected_embedding(
        self, hidden: Tensor, *, scale: float, top_k: int | None = None, keep_logits: bool = False
    ) -> Tensor:
        """As :meth:`Backbone.expected_embedding`; rows that decode take it from the logits that sampling needs too.

        Those that have halted get zeros.
        """
        alone, parts, table = self._rows.alone, [], self._backbone.table()
        top_k = top_k if self._rows.runner.top_k is None else self._rows.runner.top_k
        if alone:
            goes_on = self._rows.active[:alone, 0]
            logits = self.decoding_logits(hidden)
            parts.append(row_expectation(logits, table, goes_on, scale=scale, top_k=top_k)[:, None])
        if alone < len(hidden):
            weight, bias = self._backbone.head()
            parts.append(vocab_expectation(hidden[alone:], weight, table, bias=bias, top_k=top_k) * scale)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
