"""Holds the host's view of each sequence, by life time: request constants, progress, KV rows and results."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from adaponder.inference.outputs import Completion, PromptToken, Token, TopTokens
from adaponder.inference.pages import RowStream
from adaponder.inference.prefixes import Span
from adaponder.inference.request import Request, forced_depths
from adaponder.inference.sampler import Features
from adaponder.methods import State
from adaponder.policies import Policy

WAITING, PREFILLING, DECODING, FINISHED = "waiting", "prefilling", "decoding", "finished"


class Needs(NamedTuple):
    """The outputs that decoding sequences need of a tick: sampling features, and whether gates are returned."""

    features: Features = Features()
    gates: bool = False

    @classmethod
    def of(cls, sequences: Many[Sequence]) -> Needs:
        """Returns what any of these sequences needs."""
        needs = {sequence.submission.needs for sequence in sequences}
        return cls(Features.union(features for features, _ in needs), any(gates for _, gates in needs))


class Submission:
    """A submitted request and the constants derived from it, shared by its samples.

    Attributes:
        number: the number that :meth:`Engine.submit` returned.
        iterations: the maximum depth of its tokens.
        namespace: the prefix-cache namespace; ``None`` disables sharing.
        kind: sequences of one kind are expected to have the same mean depth.
        forced: forced depth by slot.
        forced_mean: the mean forced depth where every slot is forced, else ``None``.
        samples: all samples of the request.
    """

    def __init__(
        self,
        request: Request,
        number: int,
        *,
        policy: Policy,
        iterations: int,
        namespace: Hashable | None,
        page_size: int,
    ):
        self.request, self.number, self.policy = request, number, policy
        self.iterations, self.namespace, self.page_size = iterations, namespace, page_size
        self.prompt = [int(token) for token in request.prompt]
        top = max(request.iteration_top, request.log_probabilities or 0)
        sampled = replace(request, log_probabilities=top) if request.iteration_top else request
        self.needs = Needs(Features.of(sampled), request.gates)
        self.kind: Hashable = (policy.fingerprint, iterations)
        self.forced = forced_depths(request)
        slots = range(len(self.prompt) + request.max_new_tokens - 1)
        self.forced_mean: float | None = None
        if all(slot in self.forced for slot in slots):
            self.forced_mean = sum(min(self.forced[slot], iterations) for slot in slots) / len(slots)
        self.samples: list[Sequence] = []

    def add_sample(self, number: int) -> Sequence:
        """Adds the next sample, the ``number``-th sequence of the engine; the first sample prefills for all."""
        sequence = Sequence(self, len(self.samples), number, leader=self.samples[0] if self.samples else None)
        self.samples.append(sequence)
        return sequence


@dataclass(eq=False)
class Chunk:
    """Prompt tokens of a sequence that are prefilled together, one iteration per pass; halted tokens leave it.

    Attributes:
        tokens: the index of each active token in its sequence, ascending.
        iteration: the next iteration, or the one in flight.
        state: the method's state of each token; ``None`` before the first iteration.
        previous: hidden states of the previous iteration, where a policy reads them.
        in_flight: whether a pass over it has been launched whose results are not known yet.
    """

    sequence: Sequence
    tokens: list[int]
    iteration: int = 0
    state: State | None = None
    previous: Tensor | None = None
    in_flight: bool = False

    @property
    def launched(self) -> int:
        """The last iteration that has been launched; -1 for none."""
        return self.iteration if self.in_flight else self.iteration - 1


class KVRows:
    """The pool rows of a sequence's keys and values: spans shared with others, and rows on its own pages.

    Attributes:
        shared: cached spans of the prompt, whose pages it holds.
        prefill: rows of tokens computed in chunks.
        decode: rows of tokens computed one by one.
        in_flight: decode rows that the device may have used beyond ``decode.used``.
    """

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.shared: list[Span] = []
        self.prefill, self.decode = RowStream(page_size), RowStream(page_size)
        self.in_flight = 0
        self._written: list[tuple[list[int], list[int]]] = []

    @property
    def num_cached(self) -> int:
        """The number of tokens in the shared spans."""
        return sum(len(span.depths) for span in self.shared)

    @property
    def held_rows(self) -> int:
        """The number of rows on its own pages."""
        return (len(self.prefill.pages) + len(self.decode.pages)) * self.page_size

    def pages(self) -> list[int]:
        """Returns every page that it holds, once per hold."""
        return [page for span in self.shared for page in span.pages] + self.prefill.pages + self.decode.pages

    def take_prefill(self, tokens: list[int], rows: int) -> list[int]:
        """Takes ``rows`` prefill rows for one iteration of these tokens, the same number for each."""
        taken = self.prefill.take(rows)
        self._written.append((tokens, taken))
        return taken

    def pages_by_block(self, size: int) -> dict[int, frozenset[int]]:
        """Returns the pages of the prefill rows of each block of ``size`` tokens."""
        pages: dict[int, list[int]] = {}
        for tokens, rows in self._written:
            block = np.repeat(np.array(tokens) // size, len(rows) // len(tokens))
            for number, page in np.unique(np.stack([block, np.array(rows) // self.page_size]), axis=1).T.tolist():
                pages.setdefault(number, []).append(page)
        return {number: frozenset(block_pages) for number, block_pages in pages.items()}


@dataclass(slots=True)
class TokenProgress:
    """The iterations computed so far of a token that is being decoded: their number, gates and top tokens.

    A draft also has the next ``token`` that its latest iteration sampled.
    """

    drafted: bool = False
    iterations: int = 0
    gates: list[float] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)
    token: Token | None = None


class Sequence:
    """One sample of a request.

    Attributes:
        number: the order of arrival: older sequences have priority when pages run short.
        leader: the sample that prefills the shared prompt; ``None`` if this one does.
        tokens: prompt and generated tokens.
        depths: the depth of each token, 0 while it is unknown.
        num_scheduled: tokens assigned to prefill chunks, cached ones included.
        chunks: prefill chunks that are not finished.
        window: progress of the tokens that are being decoded, by position modulo the window's size.
        lane: its lane; ``None`` while it waits.
        kv: its rows in the pools.
        completion: its results so far.
    """

    def __init__(self, submission: Submission, sample: int, number: int, *, leader: Sequence | None = None):
        self.submission, self.sample, self.number, self.leader = submission, sample, number, leader
        self.request, self.iterations = submission.request, submission.iterations
        self.state = WAITING
        self.lane: int | None = None
        self.num_preemptions = 0
        self.tokens = list(submission.prompt)
        self.depths: list[int] = []
        self.completion = Completion(self.request, sample, list(submission.prompt))
        if self.request.prompt_log_probabilities is not None:
            self.completion.prompt_log_probabilities = [PromptToken(token) for token in submission.prompt]
        self.reset()

    def reset(self) -> None:
        """Returns to the state before prefill; the pages must have been released."""
        self.kv = KVRows(self.submission.page_size)
        self.chunks: list[Chunk] = []
        self.num_scheduled = 0
        self.window: dict[int, TokenProgress] = {}

    @property
    def lane_number(self) -> int:
        """Its lane; raises if it has none."""
        if self.lane is None:
            raise RuntimeError("a waiting sequence has no lane")
        return self.lane

    @property
    def num_prefill(self) -> int:
        """The number of tokens to prefill: all but the last, which is the first to be decoded."""
        return len(self.tokens) - 1

    @property
    def prefilled(self) -> bool:
        """Whether every token to prefill has been computed."""
        return self.num_scheduled == self.num_prefill and not self.chunks

    @property
    def num_remaining(self) -> int:
        """The number of tokens that may still be generated."""
        return self.request.max_new_tokens - len(self.completion.tokens)

    def set_depth(self, indices: list[int], depth: int) -> None:
        """Sets the depth of the tokens at these ascending indices."""
        if indices:
            self.depths += [0] * (indices[-1] + 1 - len(self.depths))
        for index in indices:
            self.depths[index] = depth

    def waiting_samples(self) -> list[Sequence]:
        """Returns the samples that wait for this one to prefill their prompt."""
        return [
            sample
            for sample in self.submission.samples
            if sample.leader is self and sample.state == WAITING and not sample.kv.shared
        ]
