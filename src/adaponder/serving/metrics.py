"""Defines the Prometheus metrics: requests, latencies, tokens by depth, and the engine's lanes, queue and rows."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaponder.inference.config import PAGE
from adaponder.serving.access import route_path
from adaponder.serving.worker import Worker

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics(Collector):
    """The metrics of one app, in a registry of their own; ``collect`` reads the engine's statistics."""

    def __init__(self, worker: Worker, lanes: int):
        self.worker, self.lanes = worker, lanes
        registry = self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="adaponder", registry=registry)
        times = partial(Histogram, namespace="adaponder", registry=registry, buckets=_SECONDS)
        self.requests = counter("requests", "Answered requests.", ("route", "status"))
        self.seconds = times("request_seconds", "From a request's headers to the end of its answer.", ("route",))
        self.first_token = times("time_to_first_token_seconds", "From a completion's arrival to its first token.")
        self.between_tokens = times("time_between_tokens_seconds", "Between two steps in which a request got tokens.")
        self.tokens = counter("tokens", "Tokens of prompts and completions.", ("of",))
        self.depths = counter("tokens_by_depth", "Tokens read, by depth.", ("depth",))
        self.disconnects = counter("disconnects", "Clients that left or were cut off before the end.", ("why",))
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yields the engine's statistics; the registry calls it whenever Prometheus collects the metrics."""
        counts, worker = self.worker.counts, self.worker
        for name, help_text, value in (
            ("lanes", "Lanes of the engine.", self.lanes),
            ("lanes_in_use", "Sequences that have a lane.", counts.get("resident", 0)),
            ("sequences", "Unfinished completions, waiting ones included.", worker.sequences),
            ("waiting", "Completions that wait for a lane.", counts.get("waiting", 0)),
            ("jobs", "Texts that are scored or wait to be.", worker.jobs),
            ("texts_running", "Texts that are being tokenised or converted otherwise.", len(worker.texts.running)),
            ("texts", "Texts that are being converted or wait to be.", worker.texts.places.total),
            ("rows", "Rows that fit in the KV cache.", counts.get("pages", 0) * PAGE),
            ("rows_in_use", "Rows on pages in use, cached prefixes included.", counts.get("pages_held", 0) * PAGE),
            ("ready", "Whether requests are accepted.", int(worker.state == "ready")),
        ):
            yield GaugeMetricFamily(f"adaponder_{name}", help_text, value=value)
        about = "Completions of a client, by the hash of its API key or address."
        clients = GaugeMetricFamily("adaponder_client_sequences", about, labels=("client", "state"))
        for client, numbers in worker.clients.items():
            for state, number in zip(("waiting", "running"), numbers, strict=True):
                clients.add_metric((client, state), number)
        yield clients
        about = "Converted texts, and the time of their threads."
        yield CounterMetricFamily("adaponder_texts_converted", about, value=worker.texts.finished)
        yield CounterMetricFamily("adaponder_texts_seconds", about, value=worker.texts.seconds)
        for name, help_text in (
            ("ticks", "Passes of the backbone."),
            ("rows", "Rows computed."),
            ("tokens", "Tokens generated."),
            ("preemptions", "Preempted sequences."),
            ("prefix_tokens_reused", "Prompt tokens whose rows came from the prefix cache."),
        ):
            yield CounterMetricFamily(f"adaponder_engine_{name}", help_text, value=counts.get(name, 0))


class RequestMetrics:
    """An ASGI layer that counts answers by route and status, and measures how long they take."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Collection[str]):
        self.app, self.metrics, self.routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 499  # 499: the client left before its answer began

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            path = route_path(scope)
            route = path if path in self.routes else "other"
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.monotonic() - began)
