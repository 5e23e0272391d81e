"""One sequence on its way through the engine: what the host knows of it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from adaponder.inference.outputs import Token
from adaponder.inference.pages import RowStream
from adaponder.inference.prefixes import Span
from adaponder.inference.request import Request, forced_depths
from adaponder.inference.sampler import Features
from adaponder.methods import State
from adaponder.policies import Policy

WAITING, PREFILLING, DECODING, FINISHED = "waiting", "prefilling", "decoding", "finished"


@dataclass(eq=False)
class Chunk:
    """Prompt tokens of one sequence that are read together, iteration by iteration: those that have not halted.

    Attributes:
        tokens: the index of each token in its sequence, ascending.
        iteration: the iteration that is next, or in flight.
        state: what the method keeps of each token; ``None`` before the first iteration.
        before: hidden states of the iteration before.
        in_flight: whether a pass over it has been launched whose decisions are not known yet.
    """

    sequence: Sequence
    tokens: list[int]
    iteration: int = 0
    state: State | None = None
    before: Tensor | None = None
    in_flight: bool = False

    @property
    def issued(self) -> int:
        """The highest iteration of it that has been launched; -1 for none."""
        return self.iteration if self.in_flight else self.iteration - 1


@dataclass(eq=False)
class Sequence:
    """A request, or one of its samples.

    Attributes:
        number: of arrival: the older goes first when memory is short.
        policy: who decides its depth.
        iterations: the most times one of its tokens is read.
        root: with whom it may share a prompt; ``None``: with nobody.
        kind: sequences of one kind are expected to have equal mean depths.
        needs: what it asks of a tick: features of the sampler, and whether gates are returned.
        request_number: of the request it belongs to.
        leader: the sample that reads the prompt for it; ``None`` if it does that itself.
        samples: all samples of its request.
        tokens: prompt and generated tokens.
        lane: where it is on the device; ``None`` while it waits.
        stay: counts its stays in a lane: an answer to an earlier stay is out of date.
        shared: prompt tokens whose rows it shares, held.
        prompt_rows: the stream of rows of tokens that it read as a chunk.
        rows: that of tokens that it read one by one.
        ahead: how many rows of ``rows`` the device may have used beyond those that it is known to have used.
        begun: how many tokens of the sequence have been given to chunks, shared ones included.
        reading: how many iterations of the token now being read are known.
        depths: of each token, how often it was read; 0 while that is not known.
        dropped_rows: rows of its window that are known, less those of the tokens that were accepted.
        cached_tokens: tokens of its prompt that an earlier request had read.
        forced: depth by slot of the tokens whose depth its request forces.
        forced_depth: their mean, where that is every token.
    """

    request: Request
    sample: int
    number: int
    policy: Policy
    iterations: int
    root: Hashable | None
    tokens: list[int]
    page_size: int
    request_number: int = 0
    leader: Sequence | None = None
    samples: list[Sequence] = field(default_factory=list)
    forced_depth: float | None = None
    state: str = WAITING
    lane: int | None = None
    stay: int = 0
    shared: list[Span] = field(default_factory=list)
    prompt_rows: RowStream = field(init=False)
    rows: RowStream = field(init=False)
    ahead: int = 0
    begun: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    reading: int = 0
    depths: list[int] = field(default_factory=list)
    generated: list[Token] = field(default_factory=list)
    gates: list[float] = field(default_factory=list)
    iteration_top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    prompt_log_probabilities: list | None = None
    preemptions: int = 0
    dropped_rows: int = 0
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        wanted, top = self.request.iteration_top, self.request.log_probabilities
        asks = replace(self.request, log_probabilities=max(wanted, top or 0)) if wanted else self.request
        self.needs = Features.of(asks), self.request.gates
        self.kind: Hashable = (self.policy.fingerprint, self.iterations)
        self.prompt_length = len(self.tokens)
        self.forced = forced_depths(self.request)
        self.forget_rows()

    def forget_rows(self) -> None:
        """As before the first token was read; the pages must have been released."""
        self.prompt_rows, self.rows = RowStream(self.page_size), RowStream(self.page_size)
        self.shared, self.chunks = [], []
        self.begun = self.reading = self.ahead = 0
        self.gates, self.iteration_top = [], []
        self._written: list[tuple[list[int], list[int]]] = []

    @property
    def lane_number(self) -> int:
        """Its lane; it must have one."""
        if self.lane is None:
            raise RuntimeError("a sequence that waits has no lane")
        return self.lane

    @property
    def to_prefill(self) -> int:
        """How many tokens are read in chunks: all but the last, which is the first to be decoded."""
        return len(self.tokens) - 1

    @property
    def prefilled(self) -> bool:
        return self.begun == self.to_prefill and not self.chunks

    @property
    def left(self) -> int:
        """How many tokens may still be generated."""
        return self.request.max_new_tokens - len(self.generated)

    @property
    def held_rows(self) -> int:
        """Rows on the pages of its own."""
        return (len(self.prompt_rows.pages) + len(self.rows.pages)) * self.page_size

    def set_depth(self, places: list[int], depth: int) -> None:
        """The tokens at these places, ascending, were read so often."""
        if places:
            self.depths += [0] * (places[-1] + 1 - len(self.depths))
        for place in places:
            self.depths[place] = depth

    def waiting_samples(self) -> list[Sequence]:
        """The samples for which it reads the prompt, and which have nothing of it yet."""
        return [one for one in self.samples if one.leader is self and one.state == WAITING and not one.shared]

    def wrote(self, tokens: list[int], rows: list[int]) -> None:
        """A pass writes these pool rows, equally many for each of these tokens of a chunk."""
        self._written.append((tokens, rows))

    def pages_by_block(self, size: int) -> dict[int, frozenset[int]]:
        """The pages on which rows of its own lie, for each block of so many tokens that it read in chunks."""
        pages: dict[int, list[int]] = {}
        for tokens, rows in self._written:
            block = np.repeat(np.array(tokens) // size, len(rows) // len(tokens))
            for number, page in np.unique(np.stack([block, np.array(rows) // self.page_size]), axis=1).T.tolist():
                pages.setdefault(number, []).append(page)
        return {number: frozenset(those) for number, those in pages.items()}

    def pages(self) -> list[int]:
        """Every page it holds, as often as it holds it."""
        return [page for span in self.shared for page in span.pages] + self.prompt_rows.pages + self.rows.pages
