"""Requests in, tokens out: continuous batching over sequences and depth."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from adaponder.errors import EvaluationError, InputError
from adaponder.inference.bodies import body_of
from adaponder.inference.drafting import usual_drafts, window_of
from adaponder.inference.graphs import bucket_of
from adaponder.inference.lane_policies import runs_on_host, shareable
from adaponder.inference.launches import Launch, Needs
from adaponder.inference.opening import (
    PAGE,
    check_options,
    check_top_k,
    eos_ids,
    longest,
    mean_depth,
    refuse,
    rows_that_fit,
)
from adaponder.inference.outputs import Completion, Event, PromptToken, Token
from adaponder.inference.pages import Pages
from adaponder.inference.prefixes import Prefixes
from adaponder.inference.receiving import Receiver
from adaponder.inference.request import Request, check_request, policy_of
from adaponder.inference.runner import Runner
from adaponder.inference.scheduler import Scheduler
from adaponder.inference.sequence import DECODING, FINISHED, Sequence
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import Policy


class Engine:
    """Generates for many requests at once; each token costs as many rows as the gates decide.

    A tick is one pass of the backbone over one row of each sequence, whatever iteration that row is at, and over chunks
    of prompts beside them. A sequence whose token halts goes on to its next token in the next tick. See
    ``docs/design.md``, "The engine". One thread at a time uses an engine; a second one is refused.

    Args:
        model: in evaluation mode, where its weights are to stay.
        lanes: sequences on the device at a time.
        rows: rows of keys and values that the pools hold; by default what memory allows, at most what the lanes need.
        chunk: rows of prompts in one tick, at most.
        tokens: the longest sequence; by default as far as the backbone's positions reach.
        max_iterations: the most times a token is read, for every request.
        share_prefixes: whether requests that begin alike share rows.
        prefix_block: they share whole blocks of so many tokens.
        burst: ticks between two looks of the host, at most, while nothing but decoding goes on.
        late: whether the host reads the answers to one launch while the next one runs; by default on a GPU.
        expectation_top_k: the expected embedding of the k likeliest tokens alone, for methods that mix the vocabulary;
            by default as the model was trained. Another model, strictly: see ``docs/design.md``.
        body: ``fused``, ``stock``, or by default whichever is faster here.
        drafts: tokens of a sequence, at most, that are begun before it is certain that they follow; the tokens that
            come out are the same. It spends rows to save ticks: by default as many as are of use where an engine has
            few lanes, and none elsewhere. See :mod:`adaponder.inference.drafting`.
    """

    def __init__(
        self,
        model: AdaPonderForCausalLM,
        *,
        lanes: int = 64,
        rows: int | None = None,
        chunk: int | None = None,
        tokens: int | None = None,
        max_iterations: int | None = None,
        share_prefixes: bool = True,
        prefix_block: int = 16,
        burst: int | None = None,
        late: bool | None = None,
        expectation_top_k: int | None = None,
        body: str | None = None,
        drafts: int | None = None,
    ):
        refuse(model)
        check_options(lanes=lanes, rows=rows, chunk=chunk, burst=burst, prefix_block=prefix_block)
        check_options(tokens=tokens, expectation_top_k=expectation_top_k)
        self.model, self.config, self.eos_ids = model, model.config, eos_ids(model)
        self.iterations = model.most_iterations(max_iterations)
        self.tokens = longest(model, tokens)
        on_gpu = model.device.type == "cuda"
        burst = burst or (16 if on_gpu else 1)
        width, passes = model.method.slots_per_token(self.iterations), model.method.passes(self.iterations)
        if drafts is None:
            drafts = usual_drafts(lanes, width=width, passes=passes)
        window = window_of(drafts, method=self.config.method, width=width, passes=passes)
        rows_alone = bucket_of(bucket_of(lanes) * window * width)
        built = body_of(model, body, rows=rows_alone, positions=self.tokens, width=width)
        numbers = sum(shape.numbers() for shape in built.row_shapes())
        # Beyond what the lanes need: what a launch may use before its answer is known, as `_room` counts it.
        most = lanes * (self.tokens * width * passes + 2 * PAGE) + 3 * PAGE + 2 * burst * width
        rows = rows_that_fit(model, numbers, most) if rows is None else rows
        pages = Pages(rows // PAGE + 1, PAGE)
        self.runner = Runner(
            model,
            built,
            lanes=lanes,
            iterations=self.iterations,
            tokens=self.tokens,
            rows=pages.count * PAGE,
            page_size=PAGE,
            eos_ids=self.eos_ids,
            ahead=2 * burst * width,
            window=window,
        )
        self.pages, self.prefixes = pages, Prefixes(pages, prefix_block)
        self.scheduler = Scheduler(
            lanes,
            pages,
            self.prefixes,
            chunk=max(width, chunk or (8192 if on_gpu else 256) * width),
            burst=burst,
            width=width,
            passes=passes,
        )
        if expectation_top_k is not None:
            check_top_k(model, expectation_top_k)
            self.runner.top_k = expectation_top_k
        self.scheduler.drafts = self.runner.drafts
        self.share_prefixes = share_prefixes
        if on_gpu:
            self.runner.use_graphs(burst)
        self.receiver = Receiver(self.runner, self.scheduler, self.prefixes, self.eos_ids)
        self.late = on_gpu if late is None else late
        self._requests: dict[int, list[Sequence]] = {}
        self._sinks: dict[int, Callable[[Event], None]] = {}
        self._numbers, self._ids = itertools.count(), itertools.count()
        self._in_flight: Launch | None = None
        self._ended: list[Event] = []
        self._user = threading.RLock()

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(self, request: Request, on_event: Callable[[Event], None] | None = None) -> int:
        """Takes a request in and returns its number; raises :class:`InputError` if it cannot be honoured.

        ``on_event`` is called with each of its events; if it raises, the request ends, and no other.
        """
        with self._alone():
            return self._submit(request, on_event)

    def _submit(self, request: Request, on_event: Callable[[Event], None] | None) -> int:
        self._check(request)
        prompt = [int(token) for token in request.prompt]
        asks_of_prompt = request.prompt_log_probabilities is not None
        policy, iterations = policy_of(request, self.model), request.max_iterations or self.iterations
        if self.runner.graphs is not None and runs_on_host(policy):
            warnings.warn(
                f"policy={policy.spelling}: it is called for this request alone, and every tick waits for it, so the "
                "requests beside it are slower too; give it an engine of its own, or take a policy that adaponder has, "
                "such as fixed:2, gate:0.1 or entropy:2.5",
                stacklevel=3,
            )
        number, samples = next(self._ids), []
        for sample in range(request.samples):
            one = Sequence(
                request=request,
                sample=sample,
                number=next(self._numbers),
                policy=policy,
                iterations=iterations,
                root=self._root(request, policy, iterations),
                tokens=list(prompt),
                page_size=PAGE,
                request_number=number,
                leader=samples[0] if samples else None,
                samples=samples,
                forced_depth=mean_depth(request, iterations),
                prompt_log_probabilities=[PromptToken(token) for token in prompt] if asks_of_prompt else None,
            )
            samples.append(one)
        self._requests[number] = list(samples)
        if on_event is not None:
            self._sinks[number] = on_event
        for one in samples:
            self.scheduler.add(one)
        return number

    def cancel(self, number: int, sample: int | None = None) -> None:
        """Ends a request's samples that are not finished, or one of them; what they hold is free at once."""
        with self._alone():
            for sequence in self._requests.get(number, ()):
                if sequence.state != FINISHED and sample in (None, sequence.sample):
                    self._ended.append(self.receiver.end(sequence, "cancelled"))

    @property
    def busy(self) -> bool:
        """Whether any request is not finished, or the end of one has not been told."""
        return bool(self._requests)

    def step(self) -> list[Event]:
        """One tick, or a burst of them: plans it, gives it to the device, and returns what has become known.

        If anything breaks it off, Ctrl-C too, every request ends with an ``error``, which the next step tells; the
        engine is empty then and takes requests as before.
        """
        with self._alone():
            try:
                return self._tell(self._advance())
            except BaseException as problem:
                self._start_over(problem)
                raise

    def _advance(self) -> list[Event]:
        plan = self.scheduler.plan()
        launched = None if plan.empty else self.runner.launch(plan)
        before, self._in_flight = self._in_flight, launched
        events, self._ended = self._ended, []
        if before is not None:
            events += self.receiver.receive(before)
        if launched is not None and not self.late:
            self._in_flight = None
            events += self.receiver.receive(launched)
        return events

    @torch.no_grad()
    def warm_up(self) -> None:
        """Captures at once, on a GPU, what the sequences that decode now may come to need, fewer of them included."""
        with self._alone():
            decoding = [one for one in self.scheduler.resident.values() if one.state == DECODING]
            if self.runner.graphs is not None and decoding and not self.runner.policies.callables():
                longest = max(len(one.tokens) + one.left for one in decoding) * self.runner.width
                self.runner.graphs.warm(Needs.of(decoding), longest, len(decoding))

    def _tell(self, events: list[Event]) -> list[Event]:
        """Calls back whoever wants to know."""
        for event in events:
            if event.completion is not None:
                samples = self._requests[event.request]
                samples[:] = [one for one in samples if one.sample != event.sample]
                if not samples:
                    del self._requests[event.request]
            sink = self._sinks.get(event.request)
            if event.request not in self._requests:
                self._sinks.pop(event.request, None)
            if sink is None:
                continue
            try:
                sink(event)
            except Exception as error:
                self._sinks.pop(event.request, None)
                for one in self._requests.get(event.request, ()):
                    if one.state != FINISHED:
                        self._ended.append(self.receiver.end(one, "error", error=f"on_event: {error!r}"))
        return events

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuses a second thread; what is called back may use the engine."""
        if not self._user.acquire(blocking=False):
            raise EvaluationError("engine: another thread is using it; let one thread submit and step")
        device = self.model.device
        try:
            # Streams, events and graphs are those of the current device, which need not be the model's.
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                yield
        finally:
            self._user.release()

    def _start_over(self, problem: BaseException) -> None:
        """Nothing is trusted that a broken step may have left half done: all requests end, and everything is free."""
        why = f"engine: a step was broken off by {type(problem).__name__}: {problem}".rstrip(": ")
        self._in_flight = None
        self._ended = [
            self.receiver.ended(one, "error", error=why) for samples in self._requests.values() for one in samples
        ]
        for samples in self._requests.values():
            for one in samples:
                one.state = FINISHED
        self.prefixes.forget()
        self.pages.free_all()
        self.scheduler.clear()

    # --- ways to use it -----------------------------------------------------------------------------------------

    def generate(self, requests: Iterable[Request]) -> list[list[Completion]]:
        """The completions of each request, one per sample, in the order of the requests."""
        done: dict[tuple[int, int], Completion] = {}

        def note(event: Event) -> None:
            if event.completion is not None:
                done[event.request, event.sample] = event.completion

        wanted = list(requests)
        for request in wanted:
            self._check(request)  # none is begun if one is refused
        numbers: list[int] = []
        try:
            numbers.extend(self.submit(request, note) for request in wanted)
            while any(number in self._requests for number in numbers):
                self.step()
        finally:
            for number in numbers:
                self.cancel(number)  # those that an exception has left unfinished
        return [
            [done[number, sample] for sample in range(request.samples)]
            for number, request in zip(numbers, wanted, strict=True)
        ]

    def stream(self, request: Request) -> Iterator[Token]:
        """The tokens of a request of one sample, as they come; it is cancelled when the caller leaves.

        Several streams, and other requests, may go on beside each other.
        """
        if request.samples != 1:
            raise InputError(f"samples={request.samples}: a stream is of one sample; submit with on_event for several")
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

    # --- what a request means -----------------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        check_request(request, self.model, positions=self.tokens, iterations=self.iterations, eos_ids=self.eos_ids)
        if self.runner.width > 1 and request.max_iterations not in (None, self.iterations):
            raise InputError(
                f"max_iterations={request.max_iterations}: {self.config.method} takes {self.runner.width} slots for "
                "every token of an engine; open the engine with this max_iterations"
            )
        rows, room = (len(request.prompt) + request.max_new_tokens) * self._token_rows, self._room
        if rows > room:
            raise InputError(
                f"max_new_tokens={request.max_new_tokens}: with {len(request.prompt)} prompt tokens up to {rows} rows "
                f"are needed, and the engine has {room}: shorten it, or open the engine with more rows"
            )

    @property
    def longest_request(self) -> int:
        """Tokens of a prompt and of what follows it, together: as many as positions and rows allow."""
        return min(self.tokens + 1, self._room // self._token_rows)  # the last token needs no position

    @property
    def _token_rows(self) -> int:
        """Rows of a token that is read as often as it may be."""
        return self.runner.width * self.runner.passes

    @property
    def _room(self) -> int:
        """Rows that one request may have, beside what a launch may use before its answer is known."""
        return max(0, (self.pages.count - 1) * PAGE - 2 * PAGE - 2 * self.scheduler.burst * self.runner.width)

    def _root(self, request: Request, policy: Policy, iterations: int) -> Hashable | None:
        """Whose decisions over equal tokens are equal to this request's; ``None``: nobody's."""
        decides = shareable(policy, request.seed)
        apart = request.depths is not None or request.prompt_log_probabilities is not None
        if decides is None or apart or not self.share_prefixes:
            return None
        return (request.salt, iterations, *decides)

    @property
    def statistics(self) -> dict[str, int]:
        """Counts since the engine was opened, and what is in use at this moment."""
        scheduler, receiver, drafts = self.scheduler, self.receiver, self.runner.drafts
        return {
            "ticks": receiver.ticks,
            "rows": receiver.rows,
            "tokens": receiver.tokens,
            "waiting": len(scheduler.waiting),
            "resident": len(scheduler.resident),
            "most_resident": scheduler.most_resident,
            "preemptions": scheduler.preemptions,
            "pages": self.pages.count - 1,
            "pages_held": self.pages.held,
            "prefix_tokens_reused": scheduler.tokens_reused,
            "drafted": 0 if drafts is None else drafts.drafted,
            "accepted": 0 if drafts is None else drafts.accepted,
        }
