"""Runs many requests at once, by continuous batching over sequences and over depth."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from adaponder.errors import EvaluationError, InputError
from adaponder.inference.bodies import build_body
from adaponder.inference.config import PAGE, EngineConfig, EngineShape, check_model
from adaponder.inference.kv_cache import Pages, PrefixCache
from adaponder.inference.outputs import Completion, Event, FinishReason, Token
from adaponder.inference.policies import prefix_key, runs_on_host
from adaponder.inference.postprocess import Postprocessor
from adaponder.inference.request import Request, check_request, policy_of
from adaponder.inference.runner import Launch, Runner
from adaponder.inference.sampler import Features
from adaponder.inference.scheduler import Scheduler
from adaponder.inference.sequence import DECODING, FINISHED, Sequence, Submission
from adaponder.inference.tick import pad_lanes
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import Policy


class Engine:
    """Generates tokens for many requests at once; a token costs one row per iteration until its policy halts it.

    A tick is one pass of the backbone over one row of each decoding sequence, at any iteration, and over prefill
    chunks. A sequence whose token halts starts its next token in the next tick. See ``docs/design.md``, "The engine".

    The model must be in evaluation mode and on its device. ``options`` are fields of :class:`EngineConfig` that
    override ``config``: ``Engine(model, lanes=8)``. Only one thread at a time may use an engine; calls from a second
    thread raise.
    """

    def __init__(self, model: AdaPonderForCausalLM, config: EngineConfig | None = None, **options: Any):
        check_model(model)
        self.model, self.config = model, replace(config or EngineConfig(), **options)
        shape = self._shape = EngineShape.of(self.config, model)
        self.iterations, self.tokens = shape.iterations, shape.tokens
        decode_rows = pad_lanes(pad_lanes(shape.lanes) * shape.window * shape.width)
        body = build_body(model, self.config.body, rows=decode_rows, positions=shape.tokens, width=shape.width)
        rows = shape.default_rows(model, body) if self.config.rows is None else self.config.rows
        self.pages = Pages(rows // PAGE + 1, PAGE)
        self.prefixes = PrefixCache(self.pages, self.config.prefix_block)
        self.runner = Runner(model, body, shape, rows=self.pages.count * PAGE, top_k=self.config.expectation_top_k)
        self.eos_ids = self.runner.eos_ids
        self.scheduler = Scheduler(shape, self.prefixes)
        self.postprocessor = Postprocessor(self.runner, self.scheduler)
        self.late = model.device.type == "cuda" if self.config.late is None else self.config.late
        self._token_rows = shape.width * shape.passes  # rows of a token at full depth
        # One request can use all rows except page 0, two partly used pages, and the rows of launches in flight.
        self._most_rows = max(0, (self.pages.count - 1) * PAGE - 2 * PAGE - shape.rows_in_flight)
        self._requests: dict[int, list[Sequence]] = {}
        self._callbacks: dict[int, Callable[[Event], None]] = {}
        self._request_numbers = itertools.count()
        self._in_flight: Launch | None = None
        self._pending: list[Event] = []
        self._stepping = False
        self._lock = threading.RLock()

    def submit(self, request: Request, on_event: Callable[[Event], None] | None = None) -> int:
        """Queues a request and returns the request's number; raises :class:`InputError` if the request is invalid.

        ``on_event`` is called with each event of the request and may submit and cancel requests, but not step the
        engine. An exception in ``on_event`` ends this request and no other.
        """
        with self._exclusive():
            self._check(request)
            policy = policy_of(request, self.model)
            iterations = request.max_iterations or self.iterations
            if self.runner.graphs is not None and runs_on_host(policy):
                warnings.warn(
                    f"policy={policy.spelling} is called for this request alone and every tick waits for it, so other "
                    "requests are slower too; give it a separate engine, or use a built-in policy such as fixed:2, "
                    "gate:0.1 or entropy:2.5",
                    stacklevel=2,
                )
            number = next(self._request_numbers)
            namespace = self._namespace(request, policy, iterations)
            submission = Submission(request, number, policy, iterations, namespace, self._shape)
            self._requests[number] = list(submission.samples)
            if on_event is not None:
                self._callbacks[number] = on_event
            self.scheduler.add(submission.samples)
            return number

    def cancel(self, number: int, sample: int | None = None) -> None:
        """Ends a sample, or all unfinished samples (``None``), of a request, and frees their lanes and pages."""
        with self._exclusive():
            self._finish(number, "cancelled", sample=sample)

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished or has an undelivered event."""
        return bool(self._requests)

    def step(self) -> list[Event]:
        """Schedules and launches a tick, or a burst of ticks; processes finished ticks and returns the new events.

        An exception during the step, Ctrl-C included, is raised again after every request has been ended; the next step
        returns their ``error`` events. The engine is then empty and accepts new requests.
        """
        with self._exclusive():
            if self._stepping:
                raise EvaluationError(
                    "step(), generate() and stream() cannot be called from on_event, where a step is running; call "
                    "submit() there, and step() afterwards"
                )
            self._stepping = True
            try:
                return self._dispatch(self._step())
            except BaseException as problem:
                self._reset(problem)
                raise
            finally:
                self._stepping = False

    def _step(self) -> list[Event]:
        plan = self.scheduler.schedule()
        launch = None if plan.empty else self.runner.launch(plan)
        previous, self._in_flight = self._in_flight, launch
        finished = previous if self.late else launch
        events, self._pending = self._pending, []
        return events if finished is None else events + self.postprocessor.process(finished)

    @torch.no_grad()
    def warm_up(self) -> None:
        """Captures the decode graphs of the longest context that the decoding sequences may reach (GPU only).

        Graphs of shorter contexts are captured when a tick first needs them.
        """
        with self._exclusive():
            decoding = [sequence for sequence in self.scheduler.resident.values() if sequence.state == DECODING]
            if self.runner.graphs is None or self.runner.policies.callables() or not decoding:
                return
            longest = max(len(sequence.tokens) + sequence.num_remaining for sequence in decoding)
            features = Features.union(sequence.submission.features for sequence in decoding)
            for lanes in range(1, len(decoding) + 1):
                self.runner.graphs.of(lanes, features, longest * self.runner.width)

    def _dispatch(self, events: list[Event]) -> list[Event]:
        """Passes events to their callbacks, drops finished requests and returns the events."""
        for event in events:
            callback = self._callbacks.get(event.request)
            if event.completion is not None:
                samples = self._requests[event.request]
                samples[:] = [sequence for sequence in samples if sequence.sample != event.sample]
                if not samples:
                    del self._requests[event.request]
                    self._callbacks.pop(event.request, None)
            try:
                if callback is not None:
                    callback(event)
            except Exception as error:
                self._callbacks.pop(event.request, None)
                self._finish(event.request, "error", error=f"on_event: {error!r}")
        return events

    def _finish(
        self, number: int, reason: FinishReason, *, sample: int | None = None, error: str | None = None
    ) -> None:
        """Ends a sample, or all unfinished samples (``None``), of a request; the next step returns their events."""
        for sequence in self._requests.get(number, ()):
            if sequence.state != FINISHED and sample in (None, sequence.sample):
                self._pending.append(self.postprocessor.finish(sequence, reason, error=error))

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Context manager that locks the engine (reentrantly) and sets the CUDA device; raises in a second thread."""
        if not self._lock.acquire(blocking=False):
            raise EvaluationError("engine: another thread is using it; let one thread submit and step")
        device = self.model.device
        try:
            # Streams, events and graphs use the current device, which need not be the model's.
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                yield
        finally:
            self._lock.release()

    def _reset(self, problem: BaseException) -> None:
        """Ends all requests and frees lanes, pages and prefixes, because a step stopped halfway."""
        error = f"engine: a step was interrupted by {type(problem).__name__}: {problem}".rstrip(": ")
        self._in_flight = None
        sequences = [sequence for samples in self._requests.values() for sequence in samples]
        self._pending = [sequence.final_event("error", error=error) for sequence in sequences]
        self.prefixes.forget()
        self.pages.free_all()
        self.scheduler.clear()

    def generate(self, requests: Iterable[Request]) -> list[list[Completion]]:
        """Returns the completions of each request, one per sample, in the order of the requests."""
        completions: dict[tuple[int, int], Completion] = {}

        def collect(event: Event) -> None:
            if event.completion is not None:
                completions[event.request, event.sample] = event.completion

        requests = list(requests)
        for request in requests:
            self._check(request)  # nothing is submitted if any is invalid
        numbers: list[int] = []
        try:
            numbers.extend(self.submit(request, collect) for request in requests)
            while any(number in self._requests for number in numbers):
                self.step()
        finally:
            for number in numbers:
                self.cancel(number)  # has no effect unless an exception left the request unfinished
        return [
            [completions[number, sample] for sample in range(request.samples)]
            for number, request in zip(numbers, requests, strict=True)
        ]

    def stream(self, request: Request) -> Iterator[Token]:
        """Yields the tokens of a request with one sample; cancels the request when the caller stops iterating.

        Other streams and requests may run at the same time.
        """
        self._check(request)
        if request.samples != 1:
            raise InputError(f"samples={request.samples} must be 1 for a stream; use submit() with on_event for more")
        events: deque[Event] = deque()
        number = self.submit(request, events.append)
        try:
            while True:
                while not events:
                    self.step()
                event = events.popleft()
                if event.token is not None:
                    yield event.token
                elif event.completion is not None:
                    if event.completion.error is not None:
                        raise EvaluationError(event.completion.error)
                    return
        finally:
            self.cancel(number)

    def _check(self, request: Request) -> None:
        """Raises :class:`InputError` if this engine cannot run the request."""
        check_request(request, self.model, positions=self.tokens, iterations=self.iterations, eos_ids=self.eos_ids)
        if self.runner.width > 1 and request.max_iterations not in (None, self.iterations):
            raise InputError(
                f"max_iterations={request.max_iterations} must be the engine's {self.iterations}: "
                f"{self.model.config.method} uses {self.runner.width} slots for every token; open the engine with this "
                "max_iterations"
            )
        rows = (len(request.prompt) + request.max_new_tokens) * self._token_rows
        if rows > self._most_rows:
            raise InputError(
                f"max_new_tokens={request.max_new_tokens} with {len(request.prompt)} prompt tokens needs up to {rows} "
                f"rows, and the engine has {self._most_rows}: shorten it, or open the engine with more rows"
            )

    @property
    def longest_request(self) -> int:
        """The maximum of prompt plus new tokens of one request, which positions and pool rows limit."""
        return min(self.tokens + 1, self._most_rows // self._token_rows)  # the last token needs no position

    def _namespace(self, request: Request, policy: Policy, iterations: int) -> Hashable | None:
        """Returns the prefix-cache namespace of a request; ``None`` disables sharing.

        Equal prefixes in one namespace have equal depths, so requests can share their rows.
        """
        key = prefix_key(policy, request.seed)
        unshared = request.depths is not None or request.prompt_log_probabilities is not None
        if key is None or unshared or not self.config.share_prefixes:
            return None
        return (request.salt, iterations, *key)

    @property
    def clients(self) -> dict[str, tuple[int, int]]:
        """Maps each client with unfinished sequences to its numbers of waiting sequences and sequences with a lane."""
        running = Counter(sequence.client for sequence in self.scheduler.resident.values())
        return {client: (len(queue), running[client]) for client, queue in self.scheduler.queues.items()}

    @property
    def statistics(self) -> dict[str, int]:
        """Counters since the engine was opened (ticks, rows, tokens, …), and its current load (sequences, pages)."""
        scheduler = self.scheduler
        return {
            **self.postprocessor.counts,
            "waiting": sum(map(len, scheduler.queues.values())),
            "resident": len(scheduler.resident),
            "most_resident": scheduler.most_resident,
            "preemptions": scheduler.preemptions,
            "pages": self.pages.count - 1,
            "pages_held": self.pages.held,
            "prefix_tokens_reused": scheduler.tokens_reused,
        }
