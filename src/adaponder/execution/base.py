"""What a method may ask of the rows it advances, and how whole batches answer.

A method says what one row does between two passes of the backbone (:class:`adaponder.methods.base.Method`). It asks
:class:`Rows` for a function of each row (``map``), for what each row's own gate says (``gate``), to let the policy halt
rows (``decide``), for the hidden state that a halted row keeps (``freeze``) and, where the first iteration differs, for
``after_first``. Rows need not stand at the same iteration.

:class:`Execution` answers for whole batches, in which they do: :mod:`dense <adaponder.execution.dense>` computes every
token and masks; :mod:`compact <adaponder.execution.compact>` and :mod:`cached <adaponder.execution.cached>` gather the
active rows, compute those and put them back. With a ledger that already holds tokens, the last is cached decoding.
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
    """What an ``on_iteration`` hook is shown after each pass: tensors ``[batch, time, …]``.

    ``gate`` is how much the model wants to go on (see :class:`adaponder.policies.PolicyInput`), ``None`` where nothing
    is left to decide; ``active`` are the tokens that were active in this pass.
    """

    index: int
    hidden: Tensor
    gate: Tensor | None
    active: Tensor


class Pass(NamedTuple):
    """One pass of the backbone: ``hidden`` is final-normed, ``stream`` the residual stream before that norm.

    Entries of rows that the pass did not compute have no meaning.
    """

    hidden: Tensor
    stream: Tensor


@dataclass(frozen=True)
class Control:
    """Run-time control of one forward.

    Attributes:
        iterations: the most iterations of a token in this forward, at most ``config.iterations``.
        policy: who halts tokens (methods that never halt do not ask it).
        seed: handed to the policy; one for all sequences, or a tensor ``[batch]`` with one for each.
        every_gate: evaluate later gates of halted tokens too (the ponder loss needs them; decoding does not).
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
    """The rows that a method advances; each may stand at another iteration.

    Attributes:
        backbone: embedding table, head and final norm.
        active: bool per row: whether it takes part, in ``receive`` in the pass just done, after ``decide`` in the next.
            Padding never does.
        slots_per_token: slots that a token takes in the sequence the backbone reads.
    """

    backbone: Backbone
    active: Tensor
    slots_per_token: int

    @abstractmethod
    def map(self, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """``function`` of the values of each active row; entries of other rows have no meaning."""

    @abstractmethod
    def gate(self, gates: Sequence[nn.Module] | nn.ModuleList, values: Tensor) -> Tensor:
        """What each row's own gate says of its values, as a logit: gate ``i`` after iteration ``i``; one serves all."""

    @abstractmethod
    def decide(self, gate: Tensor, hidden: Tensor) -> None:
        """Halts rows by the policy (eq. 5), which sees ``gate`` (0 to 1, larger: go on) and ``hidden``."""

    @abstractmethod
    def freeze(self, new: Tensor, old: Tensor | None) -> Tensor:
        """``new`` for active rows, ``old`` for halted ones (law 3).

        ``new`` for all where ``old`` is ``None`` (the first pass) or reuse is ``kv`` or ``none``.
        """

    @abstractmethod
    def after_first(self, first: Tensor, later: Callable[[], Tensor]) -> Tensor:
        """``first`` for rows after iteration 0, ``later()`` for all others."""

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``function``, compiled where passes are and the number of rows does not change."""
        return function


class Execution(Rows):
    """One forward over a batch: its tokens ``[batch, time]``, all at the same iteration.

    Attributes:
        tokens: which tokens there are and where they stand.
        control: iterations, policy, seed, hooks.
        reuse: what others see of a halted token. ``state``: its last row, and its hidden state stays; ``kv``: its
            last row, though its hidden state moves on; ``none``: its newest row; ``absent``: nothing.
        replay: compute passes again in backward instead of keeping their activations.
        stream: whether the method needs the residual stream.
        depth: in how many passes each token was active.
        passes: how many passes are done.
        gate_logits: what :meth:`gate` returned, in order.
        states: hidden states after each pass, where they are kept.
        shown: how many passes :meth:`show` has shown.
    """

    def __init__(
        self,
        backbone: Backbone,
        tokens: Tokens,
        control: Control,
        *,
        reuse: str,
        replay: bool = False,
        stream: bool = True,
    ):
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
        """One pass of the backbone over the active tokens (eq. 1), the rows of halted ones reused (eq. 10)."""
        output = self._pass(x)
        self.depth = self.depth + self.active
        self.passes += 1
        return output

    def gate(self, gates: Sequence[nn.Module] | nn.ModuleList, values: Tensor) -> Tensor:
        own = partial(self.compiled(read_gate), gates[min(self.passes, len(gates)) - 1])
        logit = self._map(own, values, everyone=self.control.every_gate)
        self.gate_logits.append(logit)
        return logit

    def map(self, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        return self._map(function, values, everyone=False)

    def freeze(self, new: Tensor, old: Tensor | None) -> Tensor:
        if old is None or self.reuse in ("kv", "none"):
            return new
        return self.compiled(freeze_halted)(self.active, new, old)

    def after_first(self, first: Tensor, later: Callable[[], Tensor]) -> Tensor:
        return first if self.passes == 1 else later()

    def show(self, hidden: Tensor, gate: Tensor | None = None) -> None:
        """Shows the pass just done to the caller's hook, and keeps its states where they are wanted."""
        self.shown += 1
        if self.control.keep_states:
            self.states.append(hidden)
        if self.control.hook is not None:
            slots = self.slots_per_token  # of which the last is what is shown
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
        """The seed of each row; ``like`` has an entry per row."""
        seed = self.control.seed
        if isinstance(seed, Tensor):
            return self._rows(seed.to(like.device)[:, None].expand_as(self.tokens.slot))
        return torch.full_like(like, as_int64(seed))

    def _halt(self, keep: Tensor) -> None:
        """Monotone (eq. 5): a token that has halted never comes back. ``keep`` is ``[batch, time]``."""
        self.active = self.active & keep

    @abstractmethod
    def _pass(self, x: Tensor) -> Pass: ...

    @abstractmethod
    def _map(self, function: Callable[[Tensor], Tensor], grid: Tensor, *, everyone: bool) -> Tensor:
        """``function`` of each active token (``everyone``: of each real one); 0, or no meaning, elsewhere."""

    @abstractmethod
    def _rows(self, grid: Tensor) -> Tensor:
        """The entries of active tokens (dense: of all)."""

    @abstractmethod
    def _grid(self, rows: Tensor) -> Tensor:
        """``[batch, time]`` of what :meth:`_rows` took apart; false elsewhere."""
