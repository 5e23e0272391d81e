"""What Prometheus is told: queue, lanes, tokens, depths, rows and latencies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from adaponder.inference.config import PAGE
from adaponder.serving.worker import Worker

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The figures of one app, in a registry of its own."""

    def __init__(self, worker: Worker, lanes: int):
        self.registry = CollectorRegistry()
        self.requests = Counter("adaponder_requests", "Answered requests.", ("route", "status"), registry=self.registry)
        self.seconds = Histogram(
            "adaponder_request_seconds",
            "From a request's headers to the end of its answer.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_token = Histogram(
            "adaponder_time_to_first_token_seconds",
            "From a completion's arrival to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.between_tokens = Histogram(
            "adaponder_time_between_tokens_seconds",
            "Between two steps in which a request got tokens.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.tokens = Counter("adaponder_tokens", "Tokens of prompts and completions.", ("of",), registry=self.registry)
        self.depths = Counter("adaponder_tokens_by_depth", "Tokens read so often.", ("depth",), registry=self.registry)
        self.disconnects = Counter(
            "adaponder_disconnects",
            "Clients that left, or were cut off, before their answer's end.",
            ("why",),
            registry=self.registry,
        )
        self.registry.register(_Engine(worker, lanes))

    def read(self, depths: Iterable[int], *, prompt: int, completion: int) -> None:
        """Tokens of these depths were read for an answer."""
        self.tokens.labels("prompt").inc(prompt)
        self.tokens.labels("completion").inc(completion)
        counts: dict[int, int] = {}
        for depth in depths:
            counts[depth] = counts.get(depth, 0) + 1
        for depth, count in counts.items():
            self.depths.labels(str(depth)).inc(count)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Engine(Collector):
    """What the engine says of itself at the moment it is asked."""

    def __init__(self, worker: Worker, lanes: int):
        self.worker, self.lanes = worker, lanes

    def collect(self) -> Iterator[Metric]:
        counts, worker = self.worker.counts, self.worker
        gauges = {
            "adaponder_lanes": ("Lanes of the engine.", self.lanes),
            "adaponder_lanes_in_use": ("Sequences that have a lane.", counts.get("resident", 0)),
            "adaponder_sequences": ("Completions under way, waiting ones included.", worker.sequences),
            "adaponder_waiting": ("Completions that wait for a lane.", counts.get("waiting", 0)),
            "adaponder_jobs": ("Texts that are scored or wait to be.", worker.jobs),
            "adaponder_rows": ("Rows that the pools hold.", counts.get("pages", 0) * PAGE),
            "adaponder_rows_in_use": (
                "Rows on pages in use, kept prefixes included.",
                counts.get("pages_held", 0) * PAGE,
            ),
            "adaponder_ready": ("Whether requests are taken.", int(worker.state == "ready")),
        }
        for name, (about, value) in gauges.items():
            yield GaugeMetricFamily(name, about, value=value)
        for name, about in (
            ("ticks", "Passes of the backbone."),
            ("rows", "Rows computed."),
            ("tokens", "Tokens generated."),
            ("preemptions", "Sequences that gave their rows back and began again."),
            ("prefix_tokens_reused", "Prompt tokens whose rows were shared."),
        ):
            yield CounterMetricFamily(f"adaponder_engine_{name}", about, value=counts.get(name, 0))
