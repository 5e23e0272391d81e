"""Ouro's loop that may be stopped at any depth: the state itself is handed on, and gates watch and foresee."""

from __future__ import annotations

from adaponder.execution.base import Rows
from adaponder.halting import gate_probability
from adaponder.methods.anytime import Anytime
from adaponder.methods.base import State


class Relay(Anytime):
    """``E^{i+1} = h^i``: the final-normed state is read again, instead of an embedding that it expects.

    Losses, random halts and gates are those of :class:`Anytime`. What a token has found out is handed on whether it
    makes a good prediction or not, so a loss after every iteration does not stand against steps in between.
    """

    mixes_vocabulary = False

    def advance(self, rows: Rows, state: State) -> State:
        s = gate_probability(rows.gate(self.gates, state.hidden.detach()))
        rows.decide(s, state.hidden)
        return State(state.hidden, state.hidden)
