"""Serves an engine whose tick only sleeps, so that the cost of the server can be measured without a model.

``python -m benchmarks.stand_in LANES TICK_MS`` listens on a free port of 127.0.0.1 and prints its address.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from adaponder.data.tokenizers import END, train_bpe
from adaponder.inference.config import eos_ids, max_tokens
from adaponder.inference.engine import Engine
from adaponder.inference.outputs import Completion, Event, FinishReason, Token
from adaponder.inference.request import Request, check_request
from adaponder.modeling import AdaPonderForCausalLM
from benchmarks.models import build, shape_config
from benchmarks.serve_client import Answer, steady_rate

Callback = Callable[[Event], None]
VOCABULARY = 768
# Smaller ids of a byte-level tokenizer are single bytes, which may not be complete characters.
FIRST_WORD = 257
_COUNTS = ("ticks", "rows", "tokens", "waiting", "resident", "most_resident", "preemptions", "pages", "pages_held")
_COUNTS += ("prefix_tokens_reused", "drafted", "accepted")


class SleepingEngine:
    """Implements the part of :class:`adaponder.inference.Engine` that a server uses, with ticks that only sleep.

    A tick takes ``tick`` seconds and gives each of the first ``lanes`` samples one token; a prompt takes one tick.
    Statistics count a page per resident sequence. ``model`` validates requests and is never run.
    """

    def __init__(self, model: AdaPonderForCausalLM, *, lanes: int = 64, tick: float = 0.008) -> None:
        self.model, self.config = model, model.config
        self.lanes, self.tick = lanes, tick
        self.tokens, self.iterations, self.eos_ids = max_tokens(model, None), model.config.iterations, eos_ids(model)
        self.longest_request = self.tokens + 1
        self.clients: dict[str, tuple[int, int]] = {}  # not counted
        # Unfinished samples by (request, sample), in the order in which they came, and the callback of each.
        self._samples: dict[tuple[int, int], tuple[Completion, Callback | None]] = {}
        self._events: list[tuple[Event, Callback | None]] = []
        self._numbers, self._counts = itertools.count(), Counter[str]()

    def submit(self, request: Request, on_event: Callback | None = None) -> int:
        check_request(request, self.model, positions=self.tokens, iterations=self.iterations, eos_ids=self.eos_ids)
        number = next(self._numbers)
        for sample in range(request.samples):
            self._samples[number, sample] = Completion(request, sample, list(request.prompt)), on_event
        return number

    def cancel(self, number: int, sample: int | None = None) -> None:
        for key in [key for key in self._samples if key[0] == number and sample in (None, key[1])]:
            self._end(key, "cancelled")

    @property
    def busy(self) -> bool:
        return bool(self._samples or self._events)

    def step(self) -> list[Event]:
        resident = list(itertools.islice(self._samples, self.lanes))
        self._counts["most_resident"] = max(self._counts["most_resident"], len(resident))
        self._counts["ticks"] += bool(resident)
        time.sleep(self.tick if resident else 0.0)
        for key in resident:
            self._advance(key)
        events, self._events = self._events, []
        for event, on_event in events:
            if on_event is not None:
                on_event(event)
        return [event for event, _ in events]

    def _advance(self, key: tuple[int, int]) -> None:
        """Prefills a sample's prompt, or generates its next token."""
        completion, on_event = self._samples[key]
        request, position = completion.request, len(completion.tokens)
        if not completion.prompt_depths:
            completion.prompt_depths = [self.iterations] * len(completion.prompt)
            return
        # A whole word, which depends on prompt, seed, sample and position alone.
        mixed = (sum(completion.prompt) + int(request.seed) + completion.sample) * 7919 + position * 104_729
        word = FIRST_WORD + mixed % (self.config.vocab_size - FIRST_WORD)
        completion.tokens.append(token := Token(id=word, depth=1 + position % self.iterations))
        self._counts["tokens"] += 1
        self._events.append((Event(*key, token=token), on_event))
        if word in request.stop_ids:
            completion.stop_id = word
            self._end(key, "stop")
        elif len(completion.tokens) >= request.max_new_tokens:
            self._end(key, "length")

    def _end(self, key: tuple[int, int], reason: FinishReason) -> None:
        """Removes a sample and queues its last event."""
        completion, on_event = self._samples.pop(key)
        completion.finish_reason = reason
        self._events.append((Event(*key, completion=completion), on_event))

    @property
    def statistics(self) -> dict[str, int]:
        resident, tokens = min(len(self._samples), self.lanes), self._counts["tokens"]
        counts = {"rows": tokens, "tokens": tokens, "waiting": len(self._samples) - resident, "resident": resident}
        return dict.fromkeys(_COUNTS, 0) | counts | self._counts | {"pages": self.lanes, "pages_held": resident}


def engine_rate(engine: Engine | SleepingEngine, bodies: Sequence[dict[str, Any]], **settings: Any) -> float:
    """Returns the :func:`steady_rate` of an engine on the requests in ``bodies``, without a server."""
    options: dict[str, Any] = {"ignore_eos": True, "seed": 0} | settings
    requests = [Request(prompt=body["prompt"], max_new_tokens=body["max_tokens"], **options) for body in bodies]
    answers = {engine.submit(request): Answer(due=0.0, status=200) for request in requests}
    while engine.busy:
        tokens = Counter(event.request for event in engine.step() if event.token is not None)
        now = time.perf_counter()
        for number, count in tokens.items():
            answers[number].arrivals.append((now, count))
    return steady_rate(list(answers.values()))


def stand_in_model() -> AdaPonderForCausalLM:
    """Builds the tiny model by which :class:`SleepingEngine` validates requests; it is never run."""
    config = shape_config("tiny", vocab_size=VOCABULARY, max_position_embeddings=4096)
    return build(config, device=torch.device("cpu"), dtype=torch.float32, seed=0)


def stand_in_worker(lanes: int, tick: float):
    """Builds a server's worker with a :class:`SleepingEngine` and a BPE tokenizer trained on this folder."""
    from adaponder.serving.served import Served
    from adaponder.serving.worker import Worker

    model = stand_in_model()
    documents = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_bpe(model.config.vocab_size, documents), eos_token=END)
    served = Served(model, tokenizer, name="stand-in")
    return Worker(partial(SleepingEngine, model, lanes=lanes, tick=tick), served)


def main() -> None:
    """Serves on a free port of 127.0.0.1 until the process ends."""
    from adaponder.serving.routes import make_app
    from adaponder.serving.server import address_of, listen, run
    from adaponder.serving.settings import Settings

    lanes, tick = int(sys.argv[1]), float(sys.argv[2]) / 1e3
    settings, listening, worker = Settings(lanes=lanes), listen("127.0.0.1", 0), stand_in_worker(lanes, tick)
    app = make_app(worker, settings)
    run(app, worker, listening, settings, started=lambda: print(address_of(listening), flush=True))


if __name__ == "__main__":
    main()
