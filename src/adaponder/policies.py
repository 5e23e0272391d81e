"""Who decides depth at run time: a policy looks at one token after one iteration and says whether it reads on."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from adaponder.errors import InputError
from adaponder.halting import stays_active


@dataclass(frozen=True)
class PolicyInput:
    """What a policy may look at: one entry per token, all of one shape (``hidden`` and ``logits`` have one more axis).

    Attributes:
        iteration: the iteration just finished, from 0.
        gate: how much the model wants to read on, in (0, 1): the learned gate's ``s`` (mor: the router's sigmoid;
            ouro: the probability of not having exited yet).
        hidden: final-normed hidden states.
        position: position of the token in its document.
        seed: the caller's seed.
        sequence: row of the batch that the token belongs to.
        slot: index of the token in its row, padding and cached tokens counted.
        active: tokens still in play; the others' answers do not matter.
        lengths: real tokens of each sequence in this forward.
        head: computes logits from hidden states; use :attr:`logits`.
    """

    iteration: int
    gate: Tensor
    hidden: Tensor
    position: Tensor
    seed: int
    sequence: Tensor
    slot: Tensor
    active: Tensor
    lengths: Tensor
    head: Callable[[Tensor], Tensor] = field(repr=False)

    @property
    def logits(self) -> Tensor:
        """The next-token logits at this iteration, computed when asked for: most policies never pay for them."""
        return self.head(self.hidden)


class Policy(ABC):
    """Decides the mask only: the update stays weighted by the learned ``s``.

    ``causal`` promises that a token's answer never depends on later tokens; a policy without it is for evaluation
    and is refused in generation. ``fingerprint`` names policy and settings: equal fingerprints, equal decisions.
    """

    causal: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, seen: PolicyInput) -> Tensor:
        """True for tokens that read on."""

    @property
    def fingerprint(self) -> str:
        return repr(self)


def as_policy(policy: Policy | Callable[[PolicyInput], Tensor]) -> Policy:
    """The policy itself, or the user's own callable made one."""
    if isinstance(policy, Policy):
        return policy
    if callable(policy):
        return Custom(policy)
    raise InputError(f"policy={policy!r}: a Policy object or a callable taking PolicyInput is needed")


@dataclass(frozen=True)
class LearnedGate(Policy):
    """Read on while ``s >= tau`` (eq. 4): the paper's rule, with one tau or one per gate."""

    tau: float | tuple[float, ...] = 1e-4

    def __post_init__(self) -> None:
        _settle(self, tau=_numbers("tau", self.tau))
        for tau in self.tau if isinstance(self.tau, tuple) else (self.tau,):
            _check_share("tau", tau)

    def __call__(self, seen: PolicyInput) -> Tensor:
        return stays_active(seen.gate, _at(self.tau, seen.iteration, "tau"))


@dataclass(frozen=True)
class RouterThreshold(Policy):
    """Read on while the router's logit is positive: how mor, trained to rank, decides causally."""

    def __call__(self, seen: PolicyInput) -> Tensor:
        return seen.gate.float() > 0.5


@dataclass(frozen=True)
class ExitThreshold(Policy):
    """Exit once the cumulative exit probability reaches ``q``: ouro's rule."""

    q: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.q <= 1.0:
            raise InputError(f"q={self.q}: a probability above 0 is needed")

    def __call__(self, seen: PolicyInput) -> Tensor:
        return 1.0 - seen.gate.float() < self.q


@dataclass(frozen=True)
class FixedDepth(Policy):
    """Every token is read ``depth`` times."""

    depth: int

    def __post_init__(self) -> None:
        if not isinstance(self.depth, int) or self.depth < 1:
            raise InputError(f"depth={self.depth}: a whole number is needed, and a token must be read at least once")

    def __call__(self, seen: PolicyInput) -> Tensor:
        return torch.full_like(seen.active, seen.iteration + 1 < self.depth)


@dataclass(frozen=True)
class ForcedDepths(Policy):
    """Each token is read as often as ``depths[sequence, slot]`` says: replay, oracles, tests."""

    depths: Tensor

    def __post_init__(self) -> None:
        if self.depths.ndim != 2:
            raise InputError(f"depths has shape {tuple(self.depths.shape)}: [batch, time] is needed")

    def __call__(self, seen: PolicyInput) -> Tensor:
        depths = self.depths.to(seen.slot.device)
        if int(seen.slot.max()) >= depths.shape[1] or int(seen.sequence.max()) >= depths.shape[0]:
            raise InputError(f"depths has shape {tuple(depths.shape)}: too small for this batch")
        return seen.iteration + 1 < depths[seen.sequence, seen.slot]

    @property
    def fingerprint(self) -> str:
        return f"ForcedDepths({self.depths.tolist()})"


@dataclass(frozen=True)
class Random(Policy):
    """Read on with probability ``keep``: a hash of (seed, position, iteration), so a batch equals its singles."""

    keep: float

    def __post_init__(self) -> None:
        _check_share("keep", self.keep)
        _settle(self, keep=float(self.keep))

    def __call__(self, seen: PolicyInput) -> Tensor:
        return _unit_hash(seen.position, seen.seed, seen.iteration) < self.keep


@dataclass(frozen=True)
class Entropy(Policy):
    """Read on while the next-token distribution's entropy (nats) is at least ``threshold``."""

    threshold: float | tuple[float, ...]

    def __post_init__(self) -> None:
        _settle(self, threshold=_numbers("threshold", self.threshold))

    def __call__(self, seen: PolicyInput) -> Tensor:
        log_p = torch.log_softmax(seen.logits.float(), dim=-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return entropy >= _at(self.threshold, seen.iteration, "threshold")


@dataclass(frozen=True)
class _Share(Policy):
    """Keeps the tokens of highest gate, a prescribed share of the sequence at each iteration.

    With ``thresholds`` (see :func:`thresholds_for`) the rule is causal and per token. ``Ranked`` variants below rank
    within the sequence, exactly the paper's experiment, and look at the future.
    """

    thresholds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _settle(self, thresholds=_numbers("thresholds", self.thresholds))

    def share(self, iteration: int) -> float:
        raise NotImplementedError

    def __call__(self, seen: PolicyInput) -> Tensor:
        if not self.thresholds:
            name = type(self).__name__
            raise InputError(
                f"{name} needs calibrated thresholds: {name}(…, thresholds=thresholds_for(policy, gates)); "
                f"or Ranked({name}(…)) ranks within the sequence, for evaluation only"
            )
        return stays_active(seen.gate, _at(self.thresholds, seen.iteration, "thresholds"))


@dataclass(frozen=True)
class Uniform(_Share):
    """After every iteration the same share ``keep`` of tokens reads on (section 5.2)."""

    keep: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share("keep", self.keep)
        _settle(self, keep=float(self.keep))

    def share(self, iteration: int) -> float:
        return self.keep


@dataclass(frozen=True)
class Geometric(_Share):
    """After iteration i the share ``rate ** (i + 1)`` of tokens reads on (section 5.2)."""

    rate: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share("rate", self.rate)
        _settle(self, rate=float(self.rate))

    def share(self, iteration: int) -> float:
        return self.rate ** (iteration + 1)


@dataclass(frozen=True)
class Shares(_Share):
    """A share of its own for each iteration: mor's capacities are this."""

    shares: tuple[float, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for share in self.shares:
            _check_share("shares", share)

    def share(self, iteration: int) -> float:
        return _at(self.shares, iteration, "shares")


@dataclass(frozen=True)
class Ranked(Policy):
    """Prunes the lowest-gate tokens of each sequence down to the schedule's share: non-causal, evaluation only."""

    schedule: _Share
    causal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, _Share):
            raise InputError(f"schedule={self.schedule!r}: Uniform, Geometric or Shares is needed to rank by")

    def __call__(self, seen: PolicyInput) -> Tensor:
        # The share is of the whole sequence, as read at iteration 0, not of what pruning has left of it.
        budget = (self.schedule.share(seen.iteration) * seen.lengths.double() + 1e-9).long()
        grid = seen.gate.new_full((seen.lengths.shape[0], int(seen.slot.max()) + 1), -math.inf, dtype=torch.float32)
        grid[seen.sequence, seen.slot] = torch.where(seen.active, seen.gate.float(), -math.inf)
        rank = grid.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return (rank[seen.sequence, seen.slot] < budget[seen.sequence]) & seen.active


@dataclass(frozen=True)
class Custom(Policy):
    """The user's own callable. It is trusted to be causal and per token; law 1 can be tested on it."""

    function: Callable[[PolicyInput], Tensor]

    def __call__(self, seen: PolicyInput) -> Tensor:
        keep = self.function(seen)
        if not isinstance(keep, Tensor) or keep.shape != seen.active.shape or keep.dtype != torch.bool:
            raise InputError(f"policy {self.function!r} must return a bool tensor of shape {tuple(seen.active.shape)}")
        return keep


def thresholds_for(schedule: _Share, gates: Tensor) -> tuple[float, ...]:
    """Thresholds at which ``schedule`` keeps its shares of these tokens: quantiles of ``gates`` among survivors.

    ``gates`` is ``[tokens, K-1]``, from a run at full depth on text like that to come. The thresholds are then causal.
    """
    alive = torch.ones(gates.shape[0], dtype=torch.bool, device=gates.device)
    thresholds = []
    for iteration in range(gates.shape[1]):
        count = int(schedule.share(iteration) * gates.shape[0] + 1e-9)
        survivors = gates[alive, iteration].float()
        if count >= survivors.numel():
            threshold = 0.0
        elif count == 0:
            threshold = math.inf
        else:
            threshold = float(survivors.topk(count).values[-1])
        alive &= gates[:, iteration].float() >= threshold
        thresholds.append(threshold)
    return tuple(thresholds)


def _at(value: float | Sequence[float], iteration: int, name: str) -> float:
    if isinstance(value, (int, float)):
        return float(value)
    if iteration >= len(value):
        raise InputError(f"{name} has {len(value)} entries, none for gate {iteration}: give one per gate")
    return float(value[iteration])


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise InputError(f"{name}={value}: lies between 0 and 1")


def _numbers(name: str, value: float | Sequence[float]) -> float | tuple[float, ...]:
    """One number or one per gate, as floats: equal settings then have equal fingerprints."""
    several = value if isinstance(value, Sequence) else (value,)
    numbers = tuple(float(number) for number in several)
    if any(math.isnan(number) for number in numbers):
        raise InputError(f"{name}={value}: not a number")
    return numbers if isinstance(value, Sequence) else numbers[0]


def _settle(policy: Policy, **fields: object) -> None:
    """Writes checked values into a frozen policy."""
    for name, value in fields.items():
        object.__setattr__(policy, name, value)


def _unit_hash(position: Tensor, seed: int, iteration: int) -> Tensor:
    """Equals a uniform number in [0, 1) that depends on (seed, position, iteration) alone (splitmix64)."""
    x = position.long() + (seed * 0x9E3779B9 + iteration * 0x85EBCA6B) % (1 << 62)
    for factor in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * factor
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return (x & ((1 << 24) - 1)).double() / (1 << 24)


def parse_policy(text: str) -> Policy:
    """A policy from the command line: ``name:value[,value…]``, e.g. ``fixed:2`` or ``gate:0.1,0.2,0.3``."""
    name, _, value = text.partition(":")
    makers: dict[str, Callable[[tuple[float, ...]], Policy]] = {
        "gate": lambda v: LearnedGate(v[0] if len(v) == 1 else v),
        "fixed": lambda v: FixedDepth(int(v[0])),
        "random": lambda v: Random(v[0]),
        "entropy": lambda v: Entropy(v[0] if len(v) == 1 else v),
        "exit": lambda v: ExitThreshold(v[0]),
    }
    if name not in makers:
        raise InputError(f"--policy {text}: name one of {', '.join(makers)}, then a colon and its value")
    try:
        numbers = tuple(float(part) for part in value.split(","))
    except ValueError:
        raise InputError(f"--policy {text}: {value!r} is not a number or a list of numbers") from None
    return makers[name](numbers)
