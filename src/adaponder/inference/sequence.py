"""Holds the host's view of each sequence: the constants of its request, its progress and its results."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adaponder.inference.config import EngineShape
from adaponder.inference.kv_cache import KVRows
from adaponder.inference.lanes import select_state
from adaponder.inference.outputs import Completion, Event, FinishReason, PromptToken
from adaponder.inference.request import Request, forced_depths
from adaponder.inference.sampler import Features
from adaponder.methods import State
from adaponder.ops.lanes import NOT_A_NUMBER
from adaponder.policies import Policy

WAITING, PREFILLING, DECODING, FINISHED = "waiting", "prefilling", "decoding", "finished"


class Submission:
    """A submitted request and the constants derived from it, shared by its samples.

    Attributes:
        namespace: the prefix-cache namespace; ``None`` disables sharing.
        stop_ids: the request's stop ids (not the model's end-of-text ids) and ``NOT_A_NUMBER``, a code in the log.
        kind: (policy, iterations): the scheduler averages depths over requests of one kind.
        forced: the request's forced depths, by slot; they replace the policy's decisions.
        forced_mean: the mean of the forced depths if every slot has one, else ``None``.
    """

    def __init__(
        self, request: Request, number: int, policy: Policy, iterations: int, namespace: Hashable, shape: EngineShape
    ):
        self.request, self.number, self.policy = request, number, policy
        self.iterations, self.namespace, self.page_size = iterations, namespace, shape.page_size
        self.passes = min(shape.passes, iterations)
        self.prompt = [int(token) for token in request.prompt]
        self.features = Features.of(request)
        self.stop_ids = frozenset((NOT_A_NUMBER, *map(int, request.stop_ids)))
        self.kind: Hashable = (policy.fingerprint, iterations)
        self.forced = forced_depths(request)
        slots = range(len(self.prompt) + request.max_new_tokens - 1)
        self.forced_mean: float | None = None
        if all(slot in self.forced for slot in slots):
            self.forced_mean = sum(min(self.forced[slot], iterations) for slot in slots) / len(slots)
        self.samples: list[Sequence] = []
        for sample in range(request.samples):  # the first sample prefills for all
            self.samples.append(Sequence(self, sample, self.samples[0] if sample else None))


@dataclass(eq=False)
class Chunk:
    """Prompt tokens of a sequence that are prefilled together, one iteration per pass, until all have halted.

    Attributes:
        tokens: the tokens that have not halted, as ascending indices into the sequence.
        iteration: the iteration that is running (if ``in_flight``) or comes next.
        state: the method's state of each token, with hidden states if a policy reads them; ``None`` before iteration 0.
        rows: the pool rows of these tokens in the latest pass.
        in_flight: whether the host has still to process the results of that pass.
    """

    sequence: Sequence
    tokens: list[int]
    iteration: int = 0
    state: State | None = None
    rows: list[int] = field(default_factory=list)
    in_flight: bool = False

    @property
    def launched(self) -> int:
        """The latest iteration that has been scheduled; -1 for none."""
        return self.iteration if self.in_flight else self.iteration - 1

    def hidden(self, zeros: Tensor) -> Tensor:
        """Returns the hidden states of the chunk's tokens, or ``zeros [1, …]`` for each token if none are stored."""
        if self.state is None or self.state.hidden is None:
            return zeros.expand(len(self.tokens), -1, -1)
        return self.state.hidden

    def keep(self, numbers: list[int]) -> None:
        """Drops all tokens except those at the indices ``numbers`` of ``tokens``."""
        if self.state is not None and 0 < len(numbers) < len(self.tokens):
            index = torch.tensor(numbers).to(self.state.input.device, non_blocking=True)
            self.state = select_state(self.state, index)
        self.tokens = [self.tokens[number] for number in numbers]


class Sequence:
    """One sample of a request.

    Attributes:
        order: (request, sample), the order of arrival.
        rank: (number of its client's older sequences with a lane, order); lower ranks get pages first.
        leader: the sample that prefills the shared prompt; ``None`` if this sample does.
        tokens: prompt and generated tokens.
        depths: the depth of each token, 0 while unknown.
        num_scheduled: tokens assigned to prefill chunks, cached ones included.
        chunks: prefill chunks that are not finished.
        num_iterations: without drafting, the iterations of the current token so far.
        window: with drafting, the log of the latest ticks, for the longest time that a token can stay in the window.
        extras: for each of the latest ticks, (the launch's extras, the tick's index, the sequence's first row in them);
            empty if the request needs no such outputs.
        lane: ``None`` while the sequence waits.
    """

    def __init__(self, submission: Submission, sample: int, leader: Sequence | None):
        self.submission, self.sample, self.leader = submission, sample, leader
        self.order = (submission.number, sample)
        self.rank = (0, self.order)
        self.client = submission.request.client
        self.request, self.iterations, self.passes = submission.request, submission.iterations, submission.passes
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
        """Resets the sequence to its state before prefill; the caller must have released the pages."""
        self.kv = KVRows(self.submission.page_size)
        self.chunks: list[Chunk] = []
        self.num_scheduled = 0
        self.num_iterations = 0
        self.window: tuple[list[int], list[int], list[int]] = ([], [], [])
        self.extras: list[tuple[Any, int, int]] = []

    @property
    def lane_number(self) -> int:
        """The sequence's lane; raises if it has none."""
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

    def final_event(self, reason: FinishReason, *, stop_id: int | None = None, error: str | None = None) -> Event:
        """Marks the sequence as finished and returns its final event; frees no lane and no pages."""
        self.state, completion = FINISHED, self.completion
        completion.prompt_depths = self.depths[: len(completion.prompt)]
        completion.finish_reason, completion.stop_id, completion.error = reason, stop_id, error
        return Event(*self.order, None, completion)

    def waiting_samples(self) -> list[Sequence]:
        """Returns the samples that wait for this one to prefill their prompt."""
        return [
            sample
            for sample in self.submission.samples
            if sample.leader is self and sample.state == WAITING and not sample.kv.shared
        ]
