"""Decodes with every sequence at its own token and iteration: the reference of what an engine does.

One pass holds one row of each sequence; each sequence starts one pass after the one before it, and a row that halts is
followed by its sequence's next token. The methods' ``start``, ``receive`` and ``advance`` are called; keys and values
are read through a ledger's table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adaponder import AdaPonderForCausalLM, Policy, PolicyInput
from adaponder.backbones.views import RowPlan, RowView
from adaponder.execution.base import Pass, Rows
from adaponder.execution.ledger import Ledger
from adaponder.methods import State
from adaponder.ops.masks import Places
from adaponder.policies import as_int64


class Decoded(NamedTuple):
    """Final hidden states and depths ``[sequences, tokens, …]``, and the most different iterations of one pass."""

    hidden: Tensor
    depth: Tensor
    apart: int


class Staggered(Rows):
    """One row of each sequence; ``iteration`` and ``time`` are per row, ``[sequences, 1]``."""

    slots_per_token = 1

    def __init__(self, model: AdaPonderForCausalLM, policy: Policy, seed: int, sequences: int):
        self.model, self.policy, self.seed = model, policy, seed
        self.backbone, self.last = model.wrapped, model.config.iterations - 1
        self.iteration = torch.zeros(sequences, 1, dtype=torch.long)
        self.time = torch.zeros(sequences, 1, dtype=torch.long)
        self.active = torch.ones(sequences, 1, dtype=torch.bool)
        self.before: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        return function(values)

    def gate(self, gates: nn.ModuleList, values: Tensor) -> Tensor:
        every = torch.stack([gate(values) for gate in gates], dim=-1)
        return every.gather(-1, self.iteration.clamp(max=len(gates) - 1)[..., None]).squeeze(-1)

    def decide(self, gate: Tensor, hidden: Tensor) -> None:
        rows = PolicyInput(
            iteration=self.iteration,
            gate=gate,
            hidden=hidden,
            position=self.time,
            seed=torch.full_like(self.time, as_int64(self.seed)),
            sequence=torch.arange(len(gate))[:, None],
            slot=self.time,
            active=self.active,
            head=self.backbone.logits,
            previous=self.before,
        )
        self.active = self.active & self.policy(rows)

    def freeze(self, new: Tensor, old: Tensor | None) -> Tensor:
        return new  # halted rows are not in the pass

    def after_first(self, first: Tensor, later: Callable[[], Tensor]) -> Tensor:
        return torch.where((self.iteration == 0)[..., None], first, later())

    def read(self, x: Tensor, ledger: Ledger, vanishes: bool) -> Pass:
        """Runs a pass over all rows; each reads the rows of earlier tokens of its sequence at its iteration."""
        sequence = torch.arange(len(x))
        slot, iteration = self.time[:, 0], self.iteration[:, 0]
        assert ledger.table is not None
        for number in range(len(x)):
            # A token that halts here is read at its last row from now on, or not at all.
            stop = iteration[number] + 1 if vanishes else None
            ledger.table[number, slot[number], iteration[number] : stop] = ledger.rows + number
        later = torch.arange(ledger.slots) > slot[:, None]
        read = ledger.table[sequence, :, iteration].masked_fill(later, -1)
        plan = RowPlan(read=read, stored=sequence, slot_index=sequence * ledger.slots + slot)
        key_slot = torch.arange(ledger.slots).expand_as(read)
        mask = self.backbone.mask(
            Places(slot[:, None], slot[:, None]), Places(key_slot, key_slot, present=read >= 0), x.dtype
        )
        output = self.backbone.read(
            x, position=self.time, mask=mask, view=RowView, holding={"stores": ledger.snapshot(), "plan": plan}
        )
        ledger.append(output.rows)
        return Pass(output.hidden, output.stream)


def _select(mask: Tensor, new: State, old: State) -> State:
    """Returns ``new`` for rows where ``mask``, else ``old``."""

    def pick(mine: Tensor, other: Tensor) -> Tensor:
        return torch.where(mask[..., None] if mine.ndim == 3 else mask, mine, other)

    carried = tuple(pick(mine, other) for mine, other in zip(new.carried, old.carried, strict=True))
    return State(pick(new.input, old.input), old.hidden, carried)


@torch.no_grad()
def decode(model: AdaPonderForCausalLM, ids: Tensor, policy: Policy | None, *, seed: int = 0) -> Decoded:
    """Decodes ``ids [sequences, tokens]``, every sequence at its own pace."""
    sequences, tokens = ids.shape
    method, config = model.method, model.config
    policy = method.default_policy(training=False) if policy is None else policy
    rows = Staggered(model, policy, seed, sequences)
    ledger = Ledger(layers=rows.backbone.layers, iterations=config.iterations)
    ledger.extend(sequences, tokens, ids.device)
    embedded = rows.backbone.embed(ids)
    hidden, depth = torch.zeros_like(embedded), torch.zeros_like(ids)
    every = torch.arange(sequences)
    state = method.start(rows, embedded[:, :1])
    apart, left = 0, torch.ones(sequences, 1, dtype=torch.bool)
    waiting = every[:, None]
    while bool(left.any()):
        apart = max(apart, rows.iteration[left].unique().numel())
        state = method.receive(rows, state, rows.read(state.input, ledger, method.reuse() == "absent"))
        reached, at = state.hidden, (every, rows.time[:, 0])
        hidden[at] = torch.where(left, reached[:, 0], hidden[at])
        depth[at] = torch.where(left[:, 0], rows.iteration[:, 0] + 1, depth[at])
        rows.active = rows.iteration < rows.last
        state = method.advance(rows, state)
        held, waiting = waiting > 0, (waiting - 1).clamp(min=0)  # these start again: their results do not count yet
        goes_on = rows.active & (rows.iteration < rows.last) & ~held
        rows.before = reached
        # The next iteration of this token, or the first one of the next.
        left = left & (held | goes_on | (rows.time + 1 < tokens))
        rows.time = torch.where(goes_on | held, rows.time, (rows.time + 1).clamp(max=tokens - 1))
        rows.iteration = torch.where(goes_on, rows.iteration + 1, 0)
        fresh = method.start(rows, embedded[every, rows.time[:, 0]][:, None])
        state = _select(goes_on, state, fresh._replace(hidden=state.hidden))
    return Decoded(hidden, depth, apart)
