"""PonderNet's step that may be stopped at any depth: the token is read again beside its own last state."""

from __future__ import annotations

import torch
from torch import Tensor

from adaponder.execution.base import Pass, Rows
from adaponder.halting import gate_probability
from adaponder.methods.anytime import Anytime
from adaponder.methods.base import State


class Reread(Anytime):
    """``E^{i+1} = E^0 + c h^i``: what PonderNet's next step reads, ``c`` being ``state_scale``.

    Losses, random halts and gates are those of :class:`Anytime`. Its expected embedding says nothing but what the
    state predicts; here the whole state is handed on, so that it can predict well at every depth and still carry what
    the next iteration needs.
    """

    mixes_vocabulary = False

    def start(self, rows: Rows, embedded: Tensor) -> State:
        x = self.scaled(embedded)
        return State(x, carried=(x,))

    def receive(self, rows: Rows, state: State, output: Pass) -> State:
        return State(state.input, rows.freeze(output.hidden, state.hidden), state.carried)

    def advance(self, rows: Rows, state: State) -> State:
        hidden, (x,) = state.hidden, state.carried
        s = gate_probability(rows.gate(self.gates, hidden.detach()))
        rows.decide(s, hidden)
        return State(torch.add(x, hidden.to(x.dtype), alpha=self.config.state_scale), hidden, (x,))
