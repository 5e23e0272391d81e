"""Serves an engine whose tick is a sleep: what the server adds to it does not depend on a model.

``python -m benchmarks.stand_in LANES TICK_MS`` listens on a free port of 127.0.0.1 and prints its address.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from adaponder.config import AdaPonderConfig
from adaponder.data.tokenizers import END, train_bpe
from adaponder.errors import InputError
from adaponder.inference.config import eos_ids, max_tokens
from adaponder.inference.engine import Engine
from adaponder.inference.outputs import Completion, Event, FinishReason, Token
from adaponder.inference.request import Request, check_request
from adaponder.modeling import AdaPonderForCausalLM
from benchmarks.models import ITERATIONS, SHAPES, build

VOCABULARY = 768
# Below it, a byte-level tokenizer has single bytes, which are no complete characters.
FIRST_WORD = 257
_COUNTS = ("ticks", "rows", "tokens", "waiting", "resident", "most_resident", "preemptions", "pages", "pages_held")
_COUNTS += ("prefix_tokens_reused", "drafted", "accepted")


@dataclass
class _Sample:
    """One sample of a request."""

    number: int
    sample: int
    request: Request
    completion: Completion
    prompt_read: bool = False

    def next_token(self, vocabulary: int, iterations: int, eos_ids: frozenset[int]) -> Token:
        """Returns a token that depends on prompt, seed, sample and position alone and is no end of sequence."""
        position = len(self.completion.tokens)
        mixed = (sum(self.completion.prompt) + int(self.request.seed) + self.sample) * 7919 + position * 104_729
        first = FIRST_WORD if vocabulary > FIRST_WORD else 0
        token_id = first + mixed % (vocabulary - first)
        while token_id in eos_ids and len(eos_ids) < vocabulary:
            token_id = (token_id + 1) % vocabulary
        return Token(id=token_id, depth=1 + position % iterations)


class SleepingEngine:
    """Has the interface of :class:`adaponder.inference.Engine` as far as a server uses it.

    Each tick sleeps ``tick`` seconds and gives every resident sequence one token; a prompt takes one tick.

    Args:
        model: validates requests; never run.
        lanes: sequences that get a token in each tick.
        tick: seconds that a tick sleeps.
    """

    def __init__(self, model: AdaPonderForCausalLM, *, lanes: int = 64, tick: float = 0.008) -> None:
        self.model, self.config = model, model.config
        self.lanes, self.tick = lanes, tick
        self.tokens, self.iterations, self.eos_ids = max_tokens(model, None), model.config.iterations, eos_ids(model)
        self.waiting: deque[_Sample] = deque()
        self.resident: dict[tuple[int, int], _Sample] = {}
        self._unfinished: dict[int, int] = {}
        self._callbacks: dict[int, Callable[[Event], None]] = {}
        self._ended: list[Event] = []
        self._numbers = itertools.count()
        self._ticks = self._tokens = self._most_resident = 0

    def submit(self, request: Request, on_event: Callable[[Event], None] | None = None) -> int:
        """Queues a request and returns its number; raises :class:`InputError` if it cannot be honoured."""
        check_request(request, self.model, positions=self.tokens, iterations=self.iterations, eos_ids=self.eos_ids)
        if request.prompt_log_probabilities is not None or request.log_probabilities is not None:
            raise InputError("log_probabilities: the stand-in has no distribution; leave them out")
        number = next(self._numbers)
        self._unfinished[number] = request.samples
        if on_event is not None:
            self._callbacks[number] = on_event
        for sample in range(request.samples):
            completion = Completion(request=request, sample=sample, prompt=list(request.prompt))
            self.waiting.append(_Sample(number, sample, request, completion))
        return number

    def cancel(self, number: int, sample: int | None = None) -> None:
        """Ends a request's unfinished samples, or one of them."""
        for each in [*self.waiting, *self.resident.values()]:
            if each.number == number and sample in (None, each.sample):
                if self.resident.pop((number, each.sample), None) is None:
                    self.waiting.remove(each)
                self._ended.append(self._end(each, "cancelled"))

    @property
    def busy(self) -> bool:
        """Returns whether a request is unfinished, or its last event is not yet returned."""
        return bool(self._unfinished)

    @property
    def longest_request(self) -> int:
        """Returns the most tokens of a prompt and its completion together."""
        return self.tokens + 1

    def step(self) -> list[Event]:
        """Runs one tick and returns its events."""
        while self.waiting and len(self.resident) < self.lanes:
            admitted = self.waiting.popleft()
            self.resident[admitted.number, admitted.sample] = admitted
        self._most_resident = max(self._most_resident, len(self.resident))
        events, self._ended = self._ended, []
        if self.resident:
            time.sleep(self.tick)
            self._ticks += 1
            for sample in list(self.resident.values()):
                events += self._advance(sample)
        for event in events:
            callback = self._callbacks.get(event.request)
            if event.completion is not None:
                self._unfinished[event.request] -= 1
                if not self._unfinished[event.request]:
                    del self._unfinished[event.request]
                    self._callbacks.pop(event.request, None)
            if callback is not None:
                callback(event)
        return events

    def _advance(self, sample: _Sample) -> list[Event]:
        """Reads a sample's prompt, or gives it a token."""
        completion, request = sample.completion, sample.request
        if not sample.prompt_read:
            sample.prompt_read = True
            completion.prompt_depths = [self.iterations] * len(completion.prompt)
            return []
        token = sample.next_token(self.config.vocab_size, self.iterations, self.eos_ids)
        completion.tokens.append(token)
        self._tokens += 1
        events = [Event(sample.number, sample.sample, token=token)]
        stopped = token.id in request.stop_ids
        if stopped or len(completion.tokens) >= request.max_new_tokens:
            del self.resident[sample.number, sample.sample]
            completion.stop_id = token.id if stopped else None
            events.append(self._end(sample, "stop" if stopped else "length"))
        return events

    def _end(self, sample: _Sample, reason: FinishReason) -> Event:
        sample.completion.finish_reason = reason
        return Event(sample.number, sample.sample, completion=sample.completion)

    @property
    def statistics(self) -> dict[str, int]:
        """Returns the counts of :attr:`adaponder.inference.Engine.statistics`; a page is a resident sequence."""
        counts = {"ticks": self._ticks, "rows": self._tokens, "tokens": self._tokens, "waiting": len(self.waiting)}
        counts |= {"resident": len(self.resident), "most_resident": self._most_resident}
        return dict.fromkeys(_COUNTS, 0) | counts | {"pages": self.lanes, "pages_held": len(self.resident)}


def engine_rate(engine: Engine | SleepingEngine, requests: list[Request]) -> float:
    """Returns an engine's tokens per second from when every request had begun until the first one ended.

    It is to an engine what :func:`benchmarks.serve_client.steady_rate` is to a server.
    """
    numbers = [engine.submit(request) for request in requests]
    begun: set[int] = set()
    since, tokens, rate = None, 0, 0.0
    while engine.busy:
        events = engine.step()
        now = time.perf_counter()
        if since is not None and not rate:
            tokens += sum(event.token is not None for event in events)
            if any(event.completion is not None for event in events):
                rate = tokens / (now - since)
        begun |= {event.request for event in events if event.token is not None}
        if since is None and len(begun) == len(numbers):
            since = now
    return rate


def stand_in_model() -> AdaPonderForCausalLM:
    """Builds the tiny model that validates requests."""
    method, backbone = SHAPES["tiny"]
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 4096}
    config = AdaPonderConfig(backbone_config=backbone | sizes, method=method, iterations=ITERATIONS)
    return build(config, device=torch.device("cpu"), dtype=torch.float32, seed=0)


def stand_in_worker(lanes: int, tick: float):
    """Builds a worker whose engine gives ``lanes`` tokens every ``tick`` seconds; its words are pieces of Python."""
    from adaponder.serving.served import Served
    from adaponder.serving.worker import Worker

    model = stand_in_model()
    documents = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_bpe(model.config.vocab_size, documents), eos_token=END)
    served = Served(model, tokenizer, name="stand-in")
    return Worker(partial(SleepingEngine, model, lanes=lanes, tick=tick), served)


def main() -> None:
    """Serves on a free port of 127.0.0.1 until it is ended."""
    from adaponder.serving.routes import make_app
    from adaponder.serving.server import address_of, listen, run
    from adaponder.serving.settings import Settings

    lanes, tick = int(sys.argv[1]), float(sys.argv[2]) / 1e3
    settings = Settings(lanes=lanes)
    listening = listen("127.0.0.1", 0)
    worker = stand_in_worker(lanes, tick)
    app = make_app(worker, settings)
    run(app, worker, listening, settings.limits, started=lambda: print(address_of(listening), flush=True))


if __name__ == "__main__":
    main()
