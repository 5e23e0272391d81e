"""An engine whose tick is a sleep: what a server adds to it is the server's own, whatever the model.

It has the interface of :class:`adaponder.inference.Engine` as far as a server uses it. Each tick takes ``tick`` seconds
and brings every resident sequence one token; a prompt takes one tick.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from adaponder.bench.decode_models import ITERATIONS, build, sizes_of
from adaponder.config import AdaPonderConfig
from adaponder.errors import EvaluationError, InputError
from adaponder.inference.config import eos_ids, max_tokens
from adaponder.inference.engine import Engine
from adaponder.inference.outputs import Completion, Event, FinishReason, Token
from adaponder.inference.request import Request, check_request
from adaponder.modeling import AdaPonderForCausalLM

VOCABULARY = 768
# Below it, a byte-level tokenizer has single bytes, which are no characters yet.
FIRST_WORD = 257


@dataclass
class _Sequence:
    """One sample under way."""

    number: int
    sample: int
    request: Request
    completion: Completion
    read: bool = False

    def next_token(self, vocabulary: int, iterations: int, eos_ids: frozenset[int]) -> Token:
        """A token that depends on prompt, seed, sample and position alone, and ends nothing."""
        position = len(self.completion.tokens)
        mixed = (sum(self.completion.prompt) + int(self.request.seed) + self.sample) * 7919 + position * 104_729
        first = FIRST_WORD if vocabulary > FIRST_WORD else 0
        number = first + mixed % (vocabulary - first)
        while number in eos_ids and len(eos_ids) < vocabulary:
            number = (number + 1) % vocabulary
        return Token(id=number, depth=1 + position % iterations)


def stand_in_model() -> AdaPonderForCausalLM:
    """A tiny model that says what a request may be."""
    sizes = sizes_of("tiny")
    backbone = sizes.backbone() | {"vocab_size": VOCABULARY, "max_position_embeddings": 4096}
    config = AdaPonderConfig(backbone_config=backbone, method=sizes.method, iterations=ITERATIONS)
    return build(config, device=torch.device("cpu"), dtype=torch.float32, seed=0)


class SleepingEngine:
    """Yields ``lanes`` tokens per ``tick`` seconds at most.

    Args:
        model: asked what a request may be; never run.
        lanes: sequences that get a token in each tick.
        tick: seconds that a tick sleeps.
    """

    def __init__(self, model: AdaPonderForCausalLM, *, lanes: int = 64, tick: float = 0.008) -> None:
        self.model, self.config = model, model.config
        self.lanes, self.tick = lanes, tick
        self.tokens, self.iterations, self.eos_ids = max_tokens(model, None), model.config.iterations, eos_ids(model)
        self.waiting: deque[_Sequence] = deque()
        self.resident: dict[tuple[int, int], _Sequence] = {}
        self._left: dict[int, int] = {}
        self._sinks: dict[int, Callable[[Event], None]] = {}
        self._ended: list[Event] = []
        self._numbers = itertools.count()
        self._user = threading.RLock()
        self._ticks = self._made = self._most = 0

    def submit(self, request: Request, on_event: Callable[[Event], None] | None = None) -> int:
        """Takes a request in and returns its number; raises :class:`InputError` if it cannot be honoured."""
        with self._alone():
            check_request(request, self.model, positions=self.tokens, iterations=self.iterations, eos_ids=self.eos_ids)
            if request.prompt_log_probabilities is not None or request.log_probabilities is not None:
                raise InputError("log_probabilities: the stand-in has no distribution; leave them out")
            number = next(self._numbers)
            self._left[number] = request.samples
            if on_event is not None:
                self._sinks[number] = on_event
            for sample in range(request.samples):
                completion = Completion(request=request, sample=sample, prompt=list(request.prompt))
                self.waiting.append(_Sequence(number, sample, request, completion))
            return number

    def cancel(self, number: int, sample: int | None = None) -> None:
        """Ends a request's samples that are not finished, or one of them."""
        with self._alone():
            for one in [one for one in self.waiting if one.number == number and sample in (None, one.sample)]:
                self.waiting.remove(one)
                self._ended.append(self._end(one, "cancelled"))
            for key in [key for key in self.resident if key[0] == number and sample in (None, key[1])]:
                self._ended.append(self._end(self.resident.pop(key), "cancelled"))

    @property
    def busy(self) -> bool:
        """Whether any request is not finished, or the end of one has not been told."""
        return bool(self._left)

    @property
    def longest_request(self) -> int:
        """Tokens of a prompt and of what follows it, together: as many as positions allow."""
        return self.tokens + 1

    def step(self) -> list[Event]:
        """One tick: sleeps, and returns what has become known."""
        with self._alone():
            while self.waiting and len(self.resident) < self.lanes:
                one = self.waiting.popleft()
                self.resident[one.number, one.sample] = one
            self._most = max(self._most, len(self.resident))
            events, self._ended = self._ended, []
            if self.resident:
                time.sleep(self.tick)
                self._ticks += 1
                for one in list(self.resident.values()):
                    events += self._advance(one)
            return self._tell(events)

    def _advance(self, one: _Sequence) -> list[Event]:
        """What a tick brings to one sequence."""
        if not one.read:
            one.read = True
            one.completion.prompt_depths = [self.iterations] * len(one.completion.prompt)
            return []
        token = one.next_token(self.config.vocab_size, self.iterations, self.eos_ids)
        one.completion.tokens.append(token)
        self._made += 1
        events = [Event(one.number, one.sample, token=token)]
        if len(one.completion.tokens) >= one.request.max_new_tokens or token.id in one.request.stop_ids:
            del self.resident[one.number, one.sample]
            stopped = token.id in one.request.stop_ids
            one.completion.stop_id = token.id if stopped else None
            events.append(self._end(one, "stop" if stopped else "length"))
        return events

    def _end(self, one: _Sequence, reason: FinishReason) -> Event:
        one.completion.finish_reason = reason
        return Event(one.number, one.sample, completion=one.completion)

    def _tell(self, events: list[Event]) -> list[Event]:
        for event in events:
            sink = self._sinks.get(event.request)
            if event.completion is not None:
                self._left[event.request] -= 1
                if not self._left[event.request]:
                    del self._left[event.request]
                    self._sinks.pop(event.request, None)
            if sink is not None:
                sink(event)
        return events

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._user.acquire(blocking=False):
            raise EvaluationError("engine: another thread is using it; let one thread submit and step")
        try:
            yield
        finally:
            self._user.release()

    @property
    def statistics(self) -> dict[str, int]:
        """The counts of :attr:`adaponder.inference.Engine.statistics`; a page is a resident sequence."""
        return dict.fromkeys(_COUNTS, 0) | {
            "ticks": self._ticks,
            "rows": self._made,
            "tokens": self._made,
            "waiting": len(self.waiting),
            "resident": len(self.resident),
            "most_resident": self._most,
            "pages": self.lanes,
            "pages_held": len(self.resident),
        }


_COUNTS = (
    "ticks",
    "rows",
    "tokens",
    "waiting",
    "resident",
    "most_resident",
    "preemptions",
    "pages",
    "pages_held",
    "prefix_tokens_reused",
    "drafted",
    "accepted",
)


def engine_rate(engine: Engine | SleepingEngine, requests: list[Request]) -> float:
    """Tokens per second of an engine by itself, from when every request had begun until the first one ended.

    What :func:`adaponder.bench.serve_load.steady_rate` is of a server.
    """
    numbers = [engine.submit(request) for request in requests]
    begun: set[int] = set()
    since, made, rate = None, 0, 0.0
    while engine.busy:
        events = engine.step()
        now = time.perf_counter()
        if since is not None and not rate:
            made += sum(event.token is not None for event in events)
            if any(event.completion is not None for event in events):
                rate = made / (now - since)
        begun |= {event.request for event in events if event.token is not None}
        if since is None and len(begun) == len(numbers):
            since = now
    return rate
