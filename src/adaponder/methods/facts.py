"""What the rest of the package may ask of a method, so that it need not ask for its name."""

from __future__ import annotations

from typing import Any, ClassVar

from adaponder.fields import Recurrence
from adaponder.policies import Policy


class Facts:
    """The facts of a method, with the values of one that reads every token K times and owns no parameter.

    Facts that depend on settings are class methods of a config: costs and figures are known before a model is built.

    Attributes:
        halts: whether tokens can stop before the last iteration.
        signal: what policies are given as ``gate``; a policy that reads another signal is refused.
        fixed_iterations: the only K it has, whatever the config says; ``None`` leaves K to the config.
        mixes_vocabulary: whether a token's next input contains the expected embedding over the vocabulary.
        has_ponder_term: whether ``Objective.ponder_weight`` adds a term to its loss. Then it can be steered towards
            ``train.target_depth``, its gates wait for ``train.gate_start``, and training warns when they close too
            early or stay open.
        has_exit_loss: whether its loss reads the ``exit_…`` values of an ``Objective``.
        gates_apart: whether its own parameters and the backbone's get no gradient of each other's loss. Then each is
            clipped by itself, and the backbone trains as if the others were not there.
        gate_meaning: what a gate's value is, on the axis of a figure.
        gates_decide: whether a policy's threshold is compared with the gate's value itself, so that a figure may draw
            it among gates.
        after_halting: what a figure calls the iterations that a halted token did not take part in.
        exported: whether the file that ``adaponder export`` writes computes it. A subclass says so anew: it may
            compute something else (:meth:`can_be_exported`).
    """

    halts: ClassVar[bool] = False
    signal: ClassVar[str] = "gate"
    fixed_iterations: ClassVar[int | None] = None
    mixes_vocabulary: ClassVar[bool] = False
    has_ponder_term: ClassVar[bool] = False
    has_exit_loss: ClassVar[bool] = False
    gates_apart: ClassVar[bool] = False
    gate_meaning: ClassVar[str] = "gate"
    gates_decide: ClassVar[bool] = True
    after_halting: ClassVar[str] = "halted: K/V reused"
    exported: ClassVar[bool] = False

    @classmethod
    def can_be_exported(cls) -> bool:
        """Whether the class itself, not one that it inherits from, is ``exported``."""
        return bool(vars(cls).get("exported", False))

    # --- the config ---------------------------------------------------------------------------------------------

    @classmethod
    def complete(cls, config: Recurrence) -> None:
        """Fills in settings that were left open, and raises on settings that only this method finds wrong."""

    @classmethod
    def described(cls, config: Recurrence) -> dict[str, Any]:
        """Its own settings, by the names that ``adaponder inspect`` prints."""
        return {}

    # --- rows and slots -----------------------------------------------------------------------------------------

    @classmethod
    def passes(cls, iterations: int) -> int:
        """How many passes of the backbone so many iterations take: the most rows that a ledger keeps per slot."""
        return iterations

    @classmethod
    def slots_per_token(cls, iterations: int) -> int:
        """Slots that a token takes in the sequence the backbone reads."""
        return 1

    @classmethod
    def reuse_rule(cls, config: Recurrence) -> str:
        """What others see of a halted token.

        ``state``: keys and values of its last iteration, and its hidden state stays too; ``kv``: keys and values of its
        last iteration; ``none``: those of the newest pass, as if it had not halted; ``absent``: it cannot be attended
        to.
        """
        return "state"

    # --- what it costs ------------------------------------------------------------------------------------------

    @classmethod
    def own_parameters(cls, config: Recurrence) -> int:
        """How many parameters it adds to the backbone's, biases included."""
        return 0

    @classmethod
    def gates_asked(cls, iterations: int) -> int:
        """After how many iterations, from the first on, a gate is evaluated: all but the last, if it halts."""
        return iterations - 1 if cls.halts else 0

    @classmethod
    def gate_flops(cls, config: Recurrence) -> int:
        """FLOPs of one evaluation of a gate; by default, of one row of weights."""
        return 2 * config.hidden_size

    # --- training -----------------------------------------------------------------------------------------------

    @classmethod
    def states_scored(cls, iterations: int) -> int:
        """After how many iterations the training loss is taken: so often a token passes the head."""
        return 1

    def training_policy(self, progress: float) -> Policy | None:
        """The policy in training when ``progress`` of ``train.capacity_warmup`` has passed (1 where there is none).

        ``None``: :meth:`default_policy`; before ``train.ponder_start`` full depth, unless ``train.halt_before_ponder``.
        """
        return None

    @classmethod
    def requested_depth(cls, config: Recurrence, pressed: float) -> float | None:
        """Mean depth that training asks for when the ponder term presses on the share ``pressed`` of all gates.

        ``None`` where the objective names no depth.
        """
        return None if cls.halts else float(config.iterations)
