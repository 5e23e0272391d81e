"""The base class of methods: how a row is updated between two passes of the backbone, and facts about a method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from adaponder.execution.base import Execution, Pass, Rows
from adaponder.execution.tokens import Tokens
from adaponder.fields import Recurrence
from adaponder.halting import Gate
from adaponder.methods.objectives import CrossEntropy, LossFunction, Objective, Trajectory
from adaponder.policies import ExitThreshold, FixedDepth, Policy


class State(NamedTuple):
    """The state of each row between two passes: tensors with one entry per row.

    ``input [..., d]`` is what the next pass reads; ``hidden [..., d]`` is the final-normed state after the latest pass
    (``None`` before the first), which head and gates read; ``carried`` holds the method's other tensors.
    """

    input: Tensor
    hidden: Tensor = None  # type: ignore[assignment]
    carried: tuple[Tensor, ...] = ()


class Method(nn.Module, ABC):
    """A recurrence, defined per row: ``start``, then ``receive`` after each pass and ``advance`` before the next pass.

    :meth:`forward` runs the recurrence over whole batches, all rows at one iteration. The engine calls ``start``,
    ``receive`` and ``advance`` with rows at different iterations, so they must not depend on the rest of the batch.

    Other packages read facts about a method from its class and never compare its name. Facts that depend on settings
    are class methods that take a config, so that costs are known before a model is built.

    Attributes:
        halts: whether tokens can stop before the last iteration.
        signal: the kind of value that policies receive as ``gate``: gate, exit or router (see ``Policy.signal``).
        fixed_iterations: the only supported K, overriding the config; ``None`` leaves K to the config.
        mixes_vocabulary: whether a token's next input contains the expected embedding over the vocabulary.
        has_ponder_term: whether ``Objective.ponder_weight`` adds a term to the loss.
        has_exit_loss: whether the loss reads the ``exit_…`` values of an ``Objective``.
        exit_threshold: the default of ``config.exit_threshold``; ``None`` for methods without an exit rule.
        gates_apart: whether gradients of the method's parameters and of the backbone are clipped separately.
        gate_meaning: axis label of the gate's value in figures.
        gates_decide: whether policies compare a threshold with one gate's value, not with a sum or product of several.
        after_halting: label in figures of the iterations after a token has halted.
        exported: whether ``adaponder export`` supports the method; a subclass does not inherit the value.
        browser_update: name of the method's ``advance`` in ``serving/local/model.js``, if it is there; each class that
            runs in a browser must set it itself.
        keep_logits: whether to keep vocabulary logits for backward instead of recomputing them.
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
    browser_update: ClassVar[str | None] = None

    def __init__(self, config: Recurrence):
        super().__init__()
        self.config = config
        self.keep_logits = False
        # Created here, because torch.compile (2.11) does not find the fields of a policy that is created while tracing.
        self.full_depth = FixedDepth(config.iterations)

    def start(self, rows: Rows, embedded: Tensor) -> State:
        """Returns the state before the first pass; its input is E^0, the scaled embeddings."""
        return State(self.scaled(embedded))

    @abstractmethod
    def receive(self, rows: Rows, state: State, output: Pass) -> State:
        """Returns the state after a pass, given the pass's ``output``."""

    def advance(self, rows: Rows, state: State) -> State:
        """Returns the state for the next pass; not called after the last pass.

        Methods that halt call ``rows.decide`` here, once.
        """
        return state

    def forward(self, execution: Execution, embedded: Tensor) -> Trajectory:
        """Runs all passes of the recurrence over a whole batch, ``embedded [batch, time, d]``."""
        passes = self.passes(execution.control.iterations)
        state = self.start(execution, embedded)
        for i in range(passes):
            state = self.receive(execution, state, execution.read(state.input))
            hidden = state.hidden
            if i < passes - 1:
                state = self.advance(execution, state)
            if execution.shown == i:  # decide, if called, has already reported the pass, with its gate
                execution.show(hidden)
        gates = torch.stack(execution.gate_logits, dim=-1) if execution.gate_logits else None
        return Trajectory(state.hidden, gates, execution.states)

    def scaled(self, embedded: Tensor) -> Tensor:
        """Returns E^0, the scaled embeddings."""
        return embedded * self.config.input_scale

    def arrange(self, tokens: Tokens, iterations: int) -> Tokens:
        """Returns the tokens in the layout that the backbone reads: as they are, except that pause inserts slots."""
        return tokens

    def reuse(self) -> str:
        """Returns the :meth:`reuse_rule` for this config."""
        return self.reuse_rule(self.config)

    def needs_stream(self, iterations: int) -> bool:
        """Returns whether the recurrence uses the residual stream before the final norm."""
        return False

    def reset_parameters(self, std: float) -> None:
        """Initialises the parameters that the method adds to the backbone; by default, its gates."""
        for module in self.modules():
            if isinstance(module, Gate):
                module.reset_parameters(std)

    def default_policy(self, *, training: bool) -> Policy:
        """Returns the policy of a forward that sets none."""
        return self.full_depth

    def exit_policy(self) -> Policy:
        """Returns the policy that halts tokens at ``config.exit_threshold``."""
        assert self.config.exit_threshold is not None  # set by complete
        return ExitThreshold(self.config.exit_threshold)

    def training_policy(self, progress: float) -> Policy | None:
        """Returns the policy at ``progress`` (0 to 1) of the warm-up in training; ``None``: the default policy.

        The length of the warm-up is ``train.capacity_warmup``.
        """
        return None

    def objective(self, values: Objective) -> LossFunction:
        """Returns the method's training loss for these scheduled values."""
        return CrossEntropy()

    @classmethod
    def states_scored(cls, iterations: int) -> int:
        """Returns the number of hidden states per token that the training loss scores with the head."""
        return 1

    @classmethod
    def requested_depth(cls, config: Recurrence, closed_share: float) -> float | None:
        """Returns the mean depth that training aims at if the ponder loss closes ``closed_share`` of the gates.

        ``None`` if training aims at no depth.
        """
        return None if cls.halts else float(config.iterations)

    @classmethod
    def complete(cls, config: Recurrence) -> None:
        """Sets the method's defaults for unset settings; raises on settings that this method does not support."""
        if config.exit_threshold is None:
            config.exit_threshold = cls.exit_threshold

    @classmethod
    def described(cls, config: Recurrence) -> dict[str, Any]:
        """Returns the method's settings under the labels that ``adaponder inspect`` prints."""
        return {}

    @classmethod
    def can_be_exported(cls) -> bool:
        """Returns ``exported`` of the class itself; a parent's value does not count."""
        return bool(vars(cls).get("exported", False))

    @classmethod
    def passes(cls, iterations: int) -> int:
        """Returns the number of backbone passes, which is also the maximum number of ledger rows per slot."""
        return iterations

    @classmethod
    def slots_per_token(cls, iterations: int) -> int:
        """Returns the number of slots per token in the sequence that the backbone reads."""
        return 1

    @classmethod
    def reuse_rule(cls, config: Recurrence) -> str:
        """Returns what halted tokens keep, a value of ``config.reuse``; ``absent`` if nothing can attend to them."""
        return "state"

    @classmethod
    def added_parameters(cls, config: Recurrence) -> int:
        """Returns the number of parameters that the method adds; allocates no memory."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in cls(config).parameters())

    @classmethod
    def gates_asked(cls, iterations: int) -> int:
        """Returns the number of gate evaluations of a token at full depth: K - 1 if the method halts, else 0."""
        return iterations - 1 if cls.halts else 0

    @classmethod
    def gate_flops(cls, config: Recurrence) -> int:
        """Returns the FLOPs of one gate evaluation; by default, those of a linear gate."""
        return 2 * config.hidden_size
