"""Serves the same app in several processes or on several machines, as a deployment of Ray Serve.

Each replica is a process with its own model, engine and app; keys, limits and draining work as without Ray.
Ray's proxy listens, and sends each request to the less busy of two random replicas. The proxy imports this module to
call :func:`layers`, so the module imports Ray inside functions only, and torch not at all.
"""

# Ray is an optional extra, so a type checker may not find it.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adaponder.errors import InputError, in_one_line

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from adaponder.serving.settings import Settings

_log = logging.getLogger("adaponder.serving")
APPLICATION = "adaponder"
# Environment variable for the proxy's process: the limits of connections as JSON.
PROXY_LIMITS = "ADAPONDER_PROXY_LIMITS"
# Read by Ray when it is imported, here and in the processes that it starts: disables usage statistics and log output,
# and makes the proxy add :func:`layers` to every app.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "adaponder.serving.ray:layers",
}
_QUIET = {"enable_access_log": False, "log_level": "WARNING"}
# Headers with which a client could keep its request running after it disconnects, or set Ray's timeout.
_RAY_HEADERS = frozenset({b"x-request-disconnect-disabled", b"x-request-timeout-seconds"})
# Time to wait after each failed try of a request.
_TRY_AGAIN_SECONDS = (0.05, 0.2, 0.5, 1.0)
_ERROR = {"message": "no replica answers; try again", "type": "server_error", "param": None, "code": "unavailable"}
_UNAVAILABLE = json.dumps({"error": _ERROR}).encode()


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Number and resources of the replicas, and the addresses of Ray and its proxy.

    Attributes:
        host, port: address on which the proxy listens; port 0 takes a free one.
        replicas: number of replicas, or the minimum if ``most_replicas`` is given.
        most_replicas: maximum number of replicas under load; ``None``: always ``replicas``.
        gpus, cpus: numbers of GPUs and CPU cores that Ray reserves for each replica.
        start_seconds: time in which a replica must open its engine, and later answer a health check.
        address: address of a running Ray cluster, or ``auto`` for the one on this machine; ``None``: start Ray here.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    replicas: int = 1
    most_replicas: int | None = None
    gpus: float = 0.0
    cpus: float = 1.0
    start_seconds: float = 30.0
    address: str | None = None

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise InputError(f"--replicas {self.replicas} must be at least 1")
        if self.most_replicas is not None and self.most_replicas < self.replicas:
            raise InputError(f"--max-replicas {self.most_replicas} must be at least --replicas {self.replicas}")


class _StoppedError(Exception):
    """Raised in :func:`run` by SIGTERM or Ctrl-C."""


def run(make: Callable[[], ASGIApp], cluster: Cluster, settings: Settings) -> None:
    """Deploys the app, prints its address, and serves until SIGTERM or Ctrl-C.

    ``make`` builds the app in each replica, so it must be picklable.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    farewell = "stopped before it served"

    def on_signal(*_: Any) -> None:
        raise _StoppedError

    def handle_signals() -> None:
        for number in handlers:
            signal.signal(number, on_signal)

    try:
        handle_signals()
        connect(cluster, settings)
        handle_signals()  # ray.init installs its own
        url = deploy(make, cluster, settings)
        handle_signals()
        print(f"serving on {url} with {cluster.replicas} replicas", flush=True)
        farewell = "stopping"
        threading.Event().wait()
    except _StoppedError:
        print(farewell, flush=True)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        stop(started=cluster.address is None)


def connect(cluster: Cluster, settings: Settings) -> None:
    """Starts Ray, or connects to ``cluster.address``; raises :class:`InputError` if that fails.

    The proxy of a Ray that is started here applies the connection limits of ``settings``, which it reads from an
    environment variable; the proxy of a running cluster does not.
    """
    os.environ[PROXY_LIMITS] = json.dumps(settings.limits.of_connections())
    if cluster.address is None:
        _require_token()
        # Enough cores for every replica and the proxy, even if the machine has fewer.
        cores = max(os.cpu_count() or 1, int((cluster.most_replicas or cluster.replicas) * cluster.cpus) + 1)
        options = {"include_dashboard": False, "num_cpus": cores, "_node_ip_address": "127.0.0.1"}
        failure = "Ray did not start"
    else:
        options, failure = {"address": cluster.address}, f"--ray-address {cluster.address}: no connection to Ray"
    ray, _ = _import_ray()
    try:
        ray.init(**options, log_to_driver=False, logging_level="error")
    except _StoppedError:
        raise
    except Exception as error:  # Ray also raises plain Exception
        raise InputError(f"{failure}: {' '.join(str(error).split())}") from error


def deploy(make: Callable[[], ASGIApp], cluster: Cluster, settings: Settings) -> str:
    """Deploys the app and returns its URL once every replica is ready.

    Raises :class:`InputError` if Ray Serve already runs on this cluster and listens on another address.
    """
    from adaponder.serving.server import listen, url_of

    _, serve = _import_ray()
    port = cluster.port
    if not port:
        with listen(cluster.host, 0) as probe:
            port = probe.getsockname()[1]
    serve.start(
        proxy_location="HeadOnly" if cluster.address is None else "EveryNode",
        http_options={"host": cluster.host, "port": port},
        logging_config=_QUIET,
    )
    serve.run(application(make, cluster, settings), name=APPLICATION, route_prefix="/")
    try:  # serve.start ignores http_options if Ray Serve runs already
        socket.create_connection((cluster.host, port), timeout=10).close()
    except OSError:
        raise InputError(
            f"--host {cluster.host} --port {port}: Ray Serve runs on this cluster already and listens elsewhere; use "
            "its address, or end it with serve shutdown"
        ) from None
    return url_of(cluster.host, port)


def stop(*, started: bool) -> None:
    """Removes the app once its requests are done, and disconnects; shuts Ray down if :func:`connect` started it."""
    ray, serve = _import_ray()
    if ray.is_initialized():
        if started:
            serve.shutdown()
        else:
            serve.delete(APPLICATION)
        ray.shutdown()


def _import_ray() -> tuple[Any, Any]:
    """Returns ``ray`` and ``ray.serve``; raises :class:`InputError` with the install command if they are missing."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise InputError(f"--ray: {error.name or 'ray'} is not installed; pip install 'adaponder[scale]'") from None
    return ray, serve


def _require_token() -> None:
    """Makes Ray's processes require a random token, since anyone who reaches their ports could run code.

    Sets the ``RAY_AUTH_…`` environment variables, which Ray reads at import. Does nothing if Ray is already imported or
    ``RAY_AUTH_MODE`` is set.
    """
    if "ray" not in sys.modules and os.environ.get("RAY_AUTH_MODE") is None:
        os.environ["RAY_AUTH_MODE"] = "token"
        if not os.environ.get("RAY_AUTH_TOKEN") and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def application(make: Callable[[], ASGIApp], cluster: Cluster, settings: Settings) -> Any:
    """Returns the Ray Serve deployment, whose replicas build the app with ``make``."""
    _, serve = _import_ray()
    from ray.serve.config import AutoscalingConfig, BackpressureConfig

    limits = settings.limits
    options: dict[str, Any] = {"num_replicas": cluster.replicas}
    if cluster.most_replicas is not None:
        scaling = AutoscalingConfig(
            min_replicas=cluster.replicas,
            max_replicas=cluster.most_replicas,
            # Fewer than the lanes, so that a replica is added before requests wait.
            target_ongoing_requests=max(1.0, 0.75 * settings.lanes),
            upscale_delay_s=5.0,
            downscale_delay_s=120.0,
        )
        options = {"autoscaling_config": scaling}
    deployment = serve.deployment(
        name=APPLICATION,
        # A replica answers 429 when its own queue is full; Ray queues only requests for which no replica has room.
        max_ongoing_requests=settings.lanes + limits.waiting,
        max_queued_requests=limits.waiting,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=limits.retry_seconds),
        graceful_shutdown_timeout_s=limits.drain_seconds,
        graceful_shutdown_wait_loop_s=min(2.0, max(0.1, limits.drain_seconds)),
        health_check_period_s=5.0,
        health_check_timeout_s=cluster.start_seconds,
        ray_actor_options={"num_cpus": cluster.cpus, "num_gpus": cluster.gpus},
        logging_config=_QUIET,
        **options,
    )
    return deployment(serve.ingress(lambda: make())(Replica)).bind()  # Ray calls plain functions only


class Replica:
    """One process with the app; Ray replaces it when its engine has failed for good."""

    app: Any

    async def check_health(self) -> None:
        # Ray sends requests after the first check, which therefore waits until the engine is open.
        worker = self.app.worker
        while worker.state == "starting":
            await asyncio.sleep(0.05)
        if not worker.alive:
            raise RuntimeError("the engine does not run")


def layers() -> list[Any]:
    """Returns the middleware of Ray's proxy, and limits the proxy's connections.

    Ray 2.60 neither limits headers (CVE-2025-48956) nor has an option for the protocol class of its uvicorn server. The
    proxy calls this function before it creates that server, so uvicorn's default (``auto``) is replaced here.
    """
    import uvicorn.config
    from starlette.middleware import Middleware

    from adaponder.serving.server import BoundedConnection

    for name, value in json.loads(os.environ.get(PROXY_LIMITS, "{}")).items():
        setattr(BoundedConnection, name, value)
    uvicorn.config.HTTP_PROTOCOLS["auto"] = "adaponder.serving.server:BoundedConnection"
    return [Middleware(ProxyGuard)]


class ProxyGuard:
    """Middleware of Ray's proxy: removes headers that control Ray, drops websockets, repeats requests that Ray lost.

    If a replica is lost, Ray raises an exception, does not answer, or answers with its own error, which lacks the
    security headers of our app. The request is then sent again; after the last try the client gets a 503 in JSON.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return
        if scope["type"] != "http" or scope["path"].startswith("/-/"):  # Ray's own routes
            await self.app(scope, receive, send)
            return
        scope["headers"] = [pair for pair in scope["headers"] if pair[0].lower() not in _RAY_HEADERS]
        body: list[Message] = []
        for seconds in _TRY_AGAIN_SECONDS:
            if await self._try(scope, body, receive, send):
                return
            await asyncio.sleep(seconds)
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": _UNAVAILABLE})

    async def _try(self, scope: Scope, body: list[Message], receive: Receive, send: Send) -> bool:
        """Forwards a request once; returns whether our app answered or the client has left.

        ``body`` collects the messages of the request for a retry.
        """
        waiting, begun, answered, left = list(body), False, True, False

        async def receive_again() -> Message:
            nonlocal left
            if waiting:
                return waiting.pop(0)
            message = await receive()
            left = left or message["type"] == "http.disconnect"
            if not begun:
                body.append(message)
            return message

        async def send_answer(message: Message) -> None:
            nonlocal begun, answered
            begun = True
            if message["type"] == "http.response.start" and message["status"] >= 500:
                answered = any(name.lower() == b"x-content-type-options" for name, _ in message["headers"])
            if answered:
                await send(message)

        try:
            await self.app(dict(scope), receive_again, send_answer)
        except Exception as problem:  # Ray raises errors of many types for a lost replica
            if begun and answered:  # too late for another replica
                raise
            _log.warning("a request got no answer: %s", in_one_line(problem))
        return left or (begun and answered)
