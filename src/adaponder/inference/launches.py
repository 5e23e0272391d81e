"""What a tick is asked beside its tokens, what the device has been given, and what it says of it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from adaponder.inference.prompts import Read
from adaponder.inference.sampler import Features
from adaponder.inference.sequence import Chunk, Sequence


class Needs(NamedTuple):
    """What the sequences that decode ask of a tick beyond its tokens."""

    features: Features = Features()
    gates: bool = False

    @classmethod
    def of(cls, sequences: Many[Sequence]) -> Needs:
        each = {one.needs for one in sequences}
        return cls(Features.union(features for features, _ in each), any(gates for _, gates in each))


class Extras(NamedTuple):
    """What one tick says of each lane that decodes beside its token: ``[n]``, and ``[n, top]``; ``None``: not asked."""

    gate: Tensor | None = None
    log_probability: Tensor | None = None
    top_ids: Tensor | None = None
    top_log_probabilities: Tensor | None = None


class Log(NamedTuple):
    """What several ticks said: ``token [ticks, n]``, see :mod:`adaponder.ops.lane_books`, and their extras."""

    token: Tensor
    extras: Extras


@dataclass
class Launch:
    """Work that the device has been given, and the answers that will come.

    Attributes:
        decoding: whose rows the logs are, each with the stay in which it was.
        log: what every tick said, on the host once it is ``ready``: ``[ticks, n, …]``.
        chunks: the chunks that were read, each with its sequence's stay and its answer.
        ticks: how many ticks it has.
        failed: what a user's own policy raised, by lane.
    """

    decoding: list[tuple[Sequence, int]]
    ticks: int
    log: Log | None = None
    chunks: list[tuple[Chunk, int, Read]] = field(default_factory=list)
    failed: dict[int, Exception] = field(default_factory=dict)
    ready: Any = None

    def wait(self) -> Log:
        """The log, when it is on the host."""
        if self.ready is not None:
            self.ready.synchronize()
        assert self.log is not None
        return self.log
