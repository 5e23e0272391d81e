"""The server with a stand-in engine behind it: ``python -m adaponder.bench.serve_standin_server LANES TICK_MS``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from adaponder.bench.serve_standin import SleepingEngine, stand_in_model
from adaponder.data.tokenizers import END, train_bpe
from adaponder.serving.app import make_app
from adaponder.serving.served import Served
from adaponder.serving.server import address_of, listen, run
from adaponder.serving.settings import Settings
from adaponder.serving.worker import Worker


def stand_in_worker(lanes: int, tick: float) -> Worker:
    """A worker whose engine gives ``lanes`` tokens every ``tick`` seconds; its words are pieces of Python."""
    model = stand_in_model()
    served = Served.of(model, _words(model.config.vocab_size), name="stand-in")
    return Worker(partial(SleepingEngine, model, lanes=lanes, tick=tick), served)


def _words(entries: int) -> PreTrainedTokenizerFast:
    documents = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return PreTrainedTokenizerFast(tokenizer_object=train_bpe(entries, documents), eos_token=END)


def main() -> None:
    """Serves on a free port of 127.0.0.1 until it is ended."""
    lanes, tick = int(sys.argv[1]), float(sys.argv[2]) / 1e3
    settings = Settings(lanes=lanes)
    listening = listen("127.0.0.1", 0)
    worker = stand_in_worker(lanes, tick)
    run(
        make_app(worker, settings),
        worker,
        listening,
        settings.limits,
        started=lambda: print(address_of(listening), flush=True),
    )


if __name__ == "__main__":
    main()
