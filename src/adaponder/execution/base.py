"""The operations with which a method advances rows, and their implementation for whole batches.

A method defines what one row does between two passes of the backbone (:class:`adaponder.methods.base.Method`), in terms
of :class:`Rows`, which may be at different iterations. :class:`Execution` implements them for a batch whose tokens are
all at the same iteration: :mod:`dense <adaponder.execution.dense>` computes every token and masks;
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

    ``gate`` is as in :class:`adaponder.policies.PolicyInput`, or ``None`` if no halting decision follows this pass.
    ``active`` marks the tokens that were active in this pass.
    """

    index: int
    hidden: Tensor
    gate: Tensor | None
    active: Tensor


class Pass(NamedTuple):
    """One pass of the backbone: ``hidden`` is final-normed, ``stream`` the residual stream before that norm.

    Entries of rows that the pass did not compute are undefined.
    """

    hidden: Tensor
    stream: Tensor


@dataclass(frozen=True)
class Control:
    """Run-time control of one forward.

    Attributes:
        iterations: the most iterations of a token in this forward, at most ``config.iterations``.
        policy: halts tokens (methods that never halt ignore it).
        seed: seed of the policy: one for all sequences, or a tensor ``[batch]`` with one for each.
        every_gate: also evaluate the gates after a token has halted (the ponder loss needs them; decoding does not).
        keep_states: keep the hidden states after each pass.
        hook: called with each :class:`Iteration`.
    """

    iterations: int
    policy: Policy
    seed: int | Tensor = 0
    every_gate: bool = True
    keep_states: bool = False
    hook: Callable[[Iteration], None] | None = None


class Rows(ABC):
    """The rows that a method advances. Each may be at a different iteration.

    Attributes:
        backbone: embedding table, head and final norm.
        active: bool per row: in ``receive``, whether it was active in the last pass; after ``decide``, whether it is in
            the next. Always false for padding.
        slots_per_token: number of slots of a token in the backbone's input (more than one for pause).
    """

    backbone: Backbone
    active: Tensor
    slots_per_token: int

    @abstractmethod
    def map(self, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """Applies ``function`` to the values of each active row. Entries of other rows are undefined."""

    @abstractmethod
    def gate(self, gates: Sequence[nn.Module] | nn.ModuleList, values: Tensor) -> Tensor:
        """Returns each row's gate logit: of ``gates[i]`` after iteration ``i``. A single gate serves all iterations."""

    @abstractmethod
    def decide(self, gate: Tensor, hidden: Tensor) -> None:
        """Halts rows by the policy (eq. 5), given ``gate`` (0 to 1; larger means continue) and ``hidden``."""

    @abstractmethod
    def freeze(self, new: Tensor, old: Tensor | None) -> Tensor:
        """Returns ``new`` for active rows, ``old`` for halted ones (law 3); ``new`` for all if ``old`` is ``None``."""

    @abstractmethod
    def after_first(self, first: Tensor, later: Callable[[], Tensor]) -> Tensor:
        """Returns ``first`` for rows after iteration 0, ``later()`` for all others."""

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Returns ``function``, compiled if passes are compiled and the number of rows is constant."""
        return function


class Execution(Rows):
    """One forward over a batch: its tokens ``[batch, time]``, all at the same iteration.

    Attributes:
        reuse: the row of a halted token that others attend to. ``state``: its last active row, with its hidden state
            frozen; ``kv``: the same row, but its hidden state still changes; ``none``: its newest; ``absent``: no row.
        replay: recompute passes in backward instead of keeping their activations.
        stream: whether the method needs the residual stream.
        passes, shown: the number of passes done, and of those that :meth:`show` has reported.
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
        """Runs one pass of the backbone over the active tokens (eq. 1), reusing the rows of halted ones (eq. 10)."""
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
        """Reports the last pass to the caller's hook, and keeps its hidden states if ``keep_states``."""
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
            self._halt(policy.choose(gate, self.active, self.tokens.lengths, self.passes - 1))
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
        """Returns the seed of each row. ``like`` has an entry per row."""
        seed = self.control.seed
        if isinstance(seed, Tensor):
            return self._rows(seed.to(like.device)[:, None].expand_as(self.tokens.slot))
        return torch.full_like(like, as_int64(seed))

    def _halt(self, keep: Tensor) -> None:
        """Halts every token where ``keep [batch, time]`` is false. Halted tokens stay halted (eq. 5)."""
        self.active = self.active & keep

    @abstractmethod
    def _pass(self, x: Tensor) -> Pass: ...

    @abstractmethod
    def _map(self, function: Callable[[Tensor], Tensor], grid: Tensor, *, all_real: bool) -> Tensor:
        """Applies ``function`` to each active token (``all_real``: each real token). Elsewhere 0 or undefined."""

    @abstractmethod
    def _rows(self, grid: Tensor) -> Tensor:
        """Returns the entries of active tokens (dense: of all)."""

    @abstractmethod
    def _grid(self, rows: Tensor) -> Tensor:
        """Inverts :meth:`_rows` for booleans and returns ``[batch, time]``, false elsewhere."""
