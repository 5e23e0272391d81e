"""Defines the operations with which a method updates rows, and implements them for whole batches.

A method (:class:`adaponder.methods.base.Method`) updates rows between two passes by the operations of :class:`Rows`,
whose rows may be at different iterations. :class:`Execution` implements these operations for a batch whose tokens are
all at the same iteration: :mod:`dense <adaponder.execution.dense>` computes every token and masks the results;
:mod:`compact <adaponder.execution.compact>` and :mod:`cached <adaponder.execution.cached>` compute active rows only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adaponder.backbones.wrapper import Backbone
from adaponder.execution.tokens import Tokens
from adaponder.halting import freeze_halted, read_gate
from adaponder.policies import Policy, PolicyInput, SequencePolicy, as_int64


class Iteration(NamedTuple):
    """The argument of an ``on_iteration`` hook, which is called after each pass; tensors are ``[batch, time, …]``.

    ``gate`` is the signal to continue, in (0, 1), or ``None`` if no halting decision follows this pass.
    ``active`` is true for the tokens that were active in this pass.
    """

    index: int
    hidden: Tensor
    gate: Tensor | None
    active: Tensor


class Pass(NamedTuple):
    """The result of one pass: final-normed hidden states, and the residual stream before that norm.

    Entries of tokens that the pass did not compute are undefined.
    """

    hidden: Tensor
    stream: Tensor


@dataclass(frozen=True)
class Control:
    """The resolved settings of one forward.

    Attributes:
        iterations: the maximum depth of a token in this forward, at most ``config.iterations``.
        policy: the policy that halts tokens; ignored by methods that never halt.
        seed: the policy's seed: one for all sequences, or a tensor ``[batch]`` with one per sequence.
        every_gate: also evaluate the gates of halted tokens (the ponder loss needs them; decoding does not).
        keep_states: keep the hidden states after each pass.
        hook: called with an :class:`Iteration` after each pass.
    """

    iterations: int
    policy: Policy
    seed: int | Tensor = 0
    every_gate: bool = True
    keep_states: bool = False
    hook: Callable[[Iteration], None] | None = None


class Rows(ABC):
    """The rows that a method updates; each row may be at a different iteration.

    Attributes:
        backbone: the backbone, for its embedding table, head and final norm.
        active: bool per row: whether the row was active in the last pass or, after :meth:`decide`, will be active in
            the next pass. False for padding.
        slots_per_token: number of slots of a token in the backbone's input (more than one for pause).
    """

    backbone: Backbone
    active: Tensor
    slots_per_token: int

    @abstractmethod
    def map(self, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """Returns ``function(values)`` for active rows; entries of other rows are undefined."""

    @abstractmethod
    def gate(self, gates: Sequence[nn.Module] | nn.ModuleList, values: Tensor) -> Tensor:
        """Returns the gate logit of each row, ``gates[min(i, len(gates) - 1)](values)`` after iteration ``i``."""

    @abstractmethod
    def decide(self, gate: Tensor, hidden: Tensor) -> None:
        """Lets the policy halt rows (eq. 5), given ``gate``, the signal to continue (0 to 1), and hidden states."""

    @abstractmethod
    def freeze(self, new: Tensor, old: Tensor | None) -> Tensor:
        """Returns ``new`` for active rows, ``old`` for halted ones (law 3); ``new`` for all if ``old`` is ``None``."""

    @abstractmethod
    def after_first(self, first: Tensor, later: Callable[[], Tensor]) -> Tensor:
        """Returns ``first`` for rows whose last pass was iteration 0, ``later()`` for all others."""

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Returns ``function``, compiled if passes are compiled and the number of rows is constant."""
        return function


class Execution(Rows):
    """One forward over a batch ``[batch, time]``, whose tokens are all at the same iteration.

    Attributes:
        reuse: which row of a halted token other tokens attend to. ``state``: the row of its last active iteration;
            ``kv``: the same row, although the token's hidden state still changes; ``none``: the row of the newest pass,
            because all tokens are computed; ``absent``: no row.
        replay: recompute passes in backward instead of keeping their activations.
        stream: whether the method needs the residual stream.
        passes: number of passes done so far.
        shown: number of passes reported by :meth:`show`.
        depth: the number of passes in which each token was active.
        gate_logits: the results of :meth:`gate`, in order.
        states: hidden states after each pass, if ``control.keep_states``.
    """

    def __init__(self, backbone: Backbone, tokens: Tokens, control: Control, *, reuse: str, replay: bool, stream: bool):
        self.backbone, self.tokens, self.control = backbone, tokens, control
        self.reuse, self.replay, self.stream = reuse, replay, stream
        self.active, self.slots_per_token = tokens.real, tokens.per_token
        self.depth = torch.zeros_like(tokens.slot)
        self.passes = 0
        self.gate_logits: list[Tensor] = []
        self.states: list[Tensor] = []
        self.shown = 0
        self._hidden_before: Tensor | None = None

    def read(self, x: Tensor) -> Pass:
        """Runs one backbone pass over ``x`` (eq. 1); halted tokens' rows are reused as ``reuse`` says (eq. 10)."""
        output = self._pass(x)
        self.depth = self.depth + self.active
        self.passes += 1
        return output

    def gate(self, gates: Sequence[nn.Module] | nn.ModuleList, values: Tensor) -> Tensor:
        gate = partial(self.compiled(read_gate), gates[min(self.passes, len(gates)) - 1])
        logit = self._map(gate, values, all_real=self.control.every_gate)
        self.gate_logits.append(logit)
        return logit

    def map(self, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        return self._map(function, values, all_real=False)

    def freeze(self, new: Tensor, old: Tensor | None) -> Tensor:
        if old is None or self.reuse in ("kv", "none"):
            return new
        return self.compiled(freeze_halted)(self.active, new, old)

    def after_first(self, first: Tensor, later: Callable[[], Tensor]) -> Tensor:
        return first if self.passes == 1 else later()

    def show(self, hidden: Tensor, gate: Tensor | None = None) -> None:
        """Reports the last pass to ``control.hook``, and stores its hidden states if ``control.keep_states``."""
        self.shown += 1
        if self.control.keep_states:
            self.states.append(hidden)
        if self.control.hook is not None:
            slots = self.slots_per_token  # a token's last slot predicts the next token
            self.control.hook(Iteration(self.passes - 1, hidden, gate, self.active[:, slots - 1 :: slots]))

    def decide(self, gate: Tensor, hidden: Tensor) -> None:
        self.show(hidden, gate)
        previous, self._hidden_before = self._hidden_before, hidden
        policy = self.control.policy
        if isinstance(policy, SequencePolicy):
            self._halt(policy.choose(gate, self.active, self.tokens.real.sum(1), self.passes - 1))
            return
        active = self._rows(self.active)
        if active.numel():
            self._halt(self._grid(policy(self._policy_input(active, gate, hidden, previous))))

    def _policy_input(self, active: Tensor, gate: Tensor, hidden: Tensor, previous: Tensor | None) -> PolicyInput:
        tokens, sequence = self.tokens, torch.arange(gate.shape[0], device=gate.device)
        slot = self._rows(tokens.slot)
        return PolicyInput(
            iteration=torch.full_like(slot, self.passes - 1),
            gate=self._rows(gate),
            hidden=self._rows(hidden),
            position=self._rows(tokens.position),
            seed=self._seeds(slot),
            sequence=self._rows(sequence[:, None].expand_as(tokens.slot)),
            slot=slot,
            active=active,
            head=self.backbone.logits,
            previous=None if previous is None else self._rows(previous),
        )

    def _seeds(self, like: Tensor) -> Tensor:
        """Returns the policy's seed for each row, int64 of the shape of ``like``."""
        seed = self.control.seed
        if isinstance(seed, Tensor):
            return self._rows(seed.to(like.device)[:, None].expand_as(self.tokens.slot))
        return torch.full_like(like, as_int64(seed))

    def _halt(self, continues: Tensor) -> None:
        """Halts the tokens where ``continues``, bool ``[batch, time]``, is false; halted tokens stay halted (eq. 5)."""
        self.active = self.active & continues

    def _attendable(self) -> Tensor | None:
        """Returns which tokens the next pass may attend to, bool ``[batch, time]``; ``None``: all."""
        if self.reuse == "absent":
            return self.active
        return None if self.tokens.unpadded else self.tokens.real

    @abstractmethod
    def _pass(self, x: Tensor) -> Pass: ...

    @abstractmethod
    def _map(self, function: Callable[[Tensor], Tensor], grid: Tensor, *, all_real: bool) -> Tensor:
        """Applies ``function`` to active tokens or, if ``all_real``, to all real ones; other entries are undefined."""

    @abstractmethod
    def _rows(self, grid: Tensor) -> Tensor:
        """Gathers the active tokens of ``grid [batch, time, …]`` as rows; dense execution returns ``grid`` itself."""

    @abstractmethod
    def _grid(self, rows: Tensor) -> Tensor:
        """Scatters one bool per row, in the order of :meth:`_rows`, to a mask ``[batch, time]``; false elsewhere."""
