"""What every method of the family is: what one row does between two passes of the same backbone, and its facts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from adaponder.execution.base import Execution, Pass, Rows
from adaponder.execution.tokens import Tokens
from adaponder.fields import Recurrence
from adaponder.methods.objectives import CrossEntropy, LossFunction, Objective, Trajectory
from adaponder.policies import ExitThreshold, FixedDepth, Policy


class State(NamedTuple):
    """What a method keeps of each row from one pass to the next: tensors with one entry per row.

    Attributes:
        input: what the next pass reads, ``[…, d]``.
        hidden: the final-normed hidden state after the last pass, which head and gates read; ``None`` before the first.
        carried: any other tensors of the method, one entry per row each.
    """

    input: Tensor
    hidden: Tensor = None  # type: ignore[assignment]
    carried: tuple[Tensor, ...] = ()


class Method(nn.Module, ABC):
    """One recurrence, defined for a row: ``start``, then ``receive`` after each pass and ``advance`` before the next.

    :meth:`forward` runs it over whole batches, all rows at one iteration. The engine calls the three with rows at
    different iterations, so nothing in them may depend on the batch.

    The rest of the package reads a method's facts from its class and never tests for its name. Facts that depend on
    settings are class methods of a config, so costs are known before a model is built.

    Attributes:
        halts: whether tokens can stop before the last iteration.
        signal: the kind of signal that policies get as ``gate``; a policy that needs another signal is refused.
        fixed_iterations: the only K it has, overriding the config; ``None`` leaves K to the config.
        mixes_vocabulary: whether a token's next input contains the expected embedding over the vocabulary.
        has_ponder_term: whether ``Objective.ponder_weight`` adds a term to its loss, so that ``train.target_depth`` and
            ``train.gate_start`` apply.
        has_exit_loss: whether its loss reads the ``exit_…`` values of an ``Objective``.
        exit_threshold: its default for ``config.exit_threshold``; ``None`` if it has no such rule.
        gates_apart: whether its own parameters and the backbone's get no gradient of each other's loss; each is then
            clipped by itself.
        gate_meaning: what a gate's value is, on the axis of a figure.
        gates_decide: whether a policy compares its threshold with the gate's value itself.
        after_halting: what a figure calls the iterations after a token has halted.
        exported: whether the file that ``adaponder export`` writes computes it; not inherited.
        keep_logits: keep the vocabulary's logits for backward instead of computing them again.
    """

    halts: ClassVar[bool] = False
    signal: ClassVar[str] = "gate"
    fixed_iterations: ClassVar[int | None] = None
    mixes_vocabulary: ClassVar[bool] = False
    has_ponder_term: ClassVar[bool] = False
    has_exit_loss: ClassVar[bool] = False
    exit_threshold: ClassVar[float | None] = None
    gates_apart: ClassVar[bool] = False
    gate_meaning: ClassVar[str] = "gate"
    gates_decide: ClassVar[bool] = True
    after_halting: ClassVar[str] = "halted: K/V reused"
    exported: ClassVar[bool] = False

    def __init__(self, config: Recurrence):
        super().__init__()
        self.config = config
        self.keep_logits = False
        # Made here: a compiler (torch 2.11) does not find the fields of a policy that is made while it traces.
        self.full_depth = FixedDepth(config.iterations)

    # --- the recurrence -----------------------------------------------------------------------------------------

    def start(self, rows: Rows, embedded: Tensor) -> State:
        """Returns the state before the first pass, which reads E^0."""
        return State(self.scaled(embedded))

    @abstractmethod
    def receive(self, rows: Rows, state: State, output: Pass) -> State:
        """Returns the state after a pass."""

    def advance(self, rows: Rows, state: State) -> State:
        """Returns the state for the next pass; not called after the last.

        Methods that halt call ``rows.decide`` here, once.
        """
        return state

    def forward(self, execution: Execution, embedded: Tensor) -> Trajectory:
        """Runs the recurrence over a whole batch, ``embedded [batch, time, d]``."""
        passes = self.passes(execution.control.iterations)
        state = self.start(execution, embedded)
        for i in range(passes):
            state = self.receive(execution, state, execution.read(state.input))
            hidden = state.hidden
            if i < passes - 1:
                state = self.advance(execution, state)
            if execution.shown == i:
                execution.show(hidden)  # decide has not shown it, with a gate
        gates = torch.stack(execution.gate_logits, dim=-1) if execution.gate_logits else None
        return Trajectory(state.hidden, gates, execution.states)

    def scaled(self, embedded: Tensor) -> Tensor:
        """Returns E^0, the embeddings as the recurrence reads them first."""
        return embedded * self.config.input_scale

    def arrange(self, tokens: Tokens, iterations: int) -> Tokens:
        """Returns the tokens as the backbone reads them."""
        return tokens

    def reuse(self) -> str:
        """Returns what other tokens see of a halted one (see :meth:`reuse_rule`)."""
        return self.reuse_rule(self.config)

    def needs_stream(self, iterations: int) -> bool:
        """Returns whether the recurrence reads the residual stream before the final norm."""
        return False

    # --- training -----------------------------------------------------------------------------------------------

    def reset_parameters(self, std: float) -> None:
        """Initialises the method's own parameters."""

    def default_policy(self, *, training: bool) -> Policy:
        return self.full_depth

    def exit_policy(self) -> Policy:
        """Returns the policy that exits at ``config.exit_threshold``."""
        assert self.config.exit_threshold is not None  # filled in by complete
        return ExitThreshold(self.config.exit_threshold)

    def training_policy(self, progress: float) -> Policy | None:
        """Returns the policy when ``progress`` of ``train.capacity_warmup`` has passed; ``None``: the default one."""
        return None

    def objective(self, values: Objective) -> LossFunction:
        """Returns the method's training loss at these values of the schedule."""
        return CrossEntropy()

    @classmethod
    def states_scored(cls, iterations: int) -> int:
        """Returns the number of iterations after which the training loss is taken, each with one pass of the head."""
        return 1

    @classmethod
    def requested_depth(cls, config: Recurrence, pressed: float) -> float | None:
        """Returns the mean depth at which a share ``pressed`` of the gates is closed; ``None`` if the loss has none."""
        return None if cls.halts else float(config.iterations)

    # --- the config ---------------------------------------------------------------------------------------------

    @classmethod
    def complete(cls, config: Recurrence) -> None:
        """Fills in settings that were left open, and raises on settings that this method cannot have."""
        if config.exit_threshold is None:
            config.exit_threshold = cls.exit_threshold

    @classmethod
    def described(cls, config: Recurrence) -> dict[str, Any]:
        """Returns its own settings, by the names that ``adaponder inspect`` prints."""
        return {}

    @classmethod
    def can_be_exported(cls) -> bool:
        """Returns whether the class itself, not one that it inherits from, is ``exported``."""
        return bool(vars(cls).get("exported", False))

    # --- rows and slots -----------------------------------------------------------------------------------------

    @classmethod
    def passes(cls, iterations: int) -> int:
        """Returns the passes of the backbone that these iterations take: the most rows that a ledger keeps per slot."""
        return iterations

    @classmethod
    def slots_per_token(cls, iterations: int) -> int:
        """Returns the slots that a token takes in the sequence the backbone reads."""
        return 1

    @classmethod
    def reuse_rule(cls, config: Recurrence) -> str:
        """Returns what other tokens see of a halted one: a value of ``config.reuse``, or ``absent`` for nothing."""
        return "state"

    # --- cost ---------------------------------------------------------------------------------------------------

    @classmethod
    def own_parameters(cls, config: Recurrence) -> int:
        """Returns how many parameters it adds to the backbone's, biases included; allocates none."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in cls(config).parameters())

    @classmethod
    def gates_asked(cls, iterations: int) -> int:
        """Returns the number of iterations after which a gate is evaluated: all but the last, if it halts."""
        return iterations - 1 if cls.halts else 0

    @classmethod
    def gate_flops(cls, config: Recurrence) -> int:
        """Returns the FLOPs of one evaluation of a gate; by default, of one row of weights."""
        return 2 * config.hidden_size
