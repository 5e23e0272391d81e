"""Serves the same app in several processes or on several machines, as a deployment of Ray Serve.

Each replica is a process with its own model, engine and app: keys, limits and drain are the app's and hold behind Ray
as they do without. Ray's proxy listens, and of two random replicas sends each request to the less busy one.

Ray is imported inside functions only. Ray's proxy imports this module for :func:`layers`, without torch.
"""

# Ray is an extra of its own, which a type checker may not find installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adaponder.errors import InputError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from adaponder.serving.settings import Settings

APPLICATION = "adaponder"
# Read by the proxy's process: the limits of its connections as JSON.
PROXY_LIMITS = "ADAPONDER_PROXY_LIMITS"
# Read by Ray when it is imported, here and in the processes that it starts: no usage statistics are sent, and the proxy
# puts :func:`layers` before every app.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "adaponder.serving.ray:layers",
}
_QUIET = {"enable_access_log": False, "log_level": "WARNING"}
# Headers with which a client could make Ray go on after it has left, or set Ray's timeout.
_RAY_HEADERS = frozenset({b"x-request-disconnect-disabled", b"x-request-timeout-seconds"})


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where replicas run, and the address of the proxy.

    Attributes:
        host, port: where the proxy listens; port 0 takes a free one.
        replicas: number of replicas, or the fewest if ``most_replicas`` is given.
        most_replicas: replicas are added up to this number when requests pile up; ``None``: always ``replicas``.
        gpus, cpus: what Ray reserves for each replica.
        address: a running Ray cluster (``auto``: the one of this machine); ``None``: start one here.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    replicas: int = 1
    most_replicas: int | None = None
    gpus: float = 0.0
    cpus: float = 1.0
    address: str | None = None

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise InputError(f"--replicas {self.replicas} must be at least 1")
        if self.most_replicas is not None and self.most_replicas < self.replicas:
            raise InputError(f"--max-replicas {self.most_replicas} must be at least --replicas {self.replicas}")


class _StoppedError(Exception):
    """SIGTERM or Ctrl-C came while replicas were starting."""


def run(make: Callable[[], ASGIApp], cluster: Cluster, settings: Settings) -> None:
    """Deploys, prints the address, and serves until SIGTERM or Ctrl-C.

    ``make`` makes the app in each replica, so it must be picklable.
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
        handle_signals()  # Ray has replaced them by its own
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
    """Starts Ray, or connects to the named cluster; raises :class:`InputError` in one line where that fails.

    The limits of connections also hold at the proxy of a Ray that is started here.
    """
    os.environ[PROXY_LIMITS] = json.dumps(settings.limits.of_connections())
    if cluster.address is None:
        _require_token()
        # Enough cores for every replica and the proxy, even if the machine has fewer.
        cores = int((cluster.most_replicas or cluster.replicas) * cluster.cpus) + 1
        options = {"include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, cores)}
        options["_node_ip_address"] = "127.0.0.1"
        failure = "Ray did not start"
    else:
        options, failure = {"address": cluster.address}, f"--ray-address {cluster.address}: no connection to Ray"
    ray, _ = _import_ray()
    try:
        ray.init(**options, log_to_driver=False, logging_level="error")
    except _StoppedError:
        raise
    except Exception as error:  # Ray raises the bare class, too
        raise InputError(f"{failure}: {' '.join(str(error).split())}") from error


def deploy(make: Callable[[], ASGIApp], cluster: Cluster, settings: Settings) -> str:
    """Deploys the app and returns its address once every replica is ready."""
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
    try:  # Ray Serve ignores the options where it is running already
        socket.create_connection((cluster.host, port), timeout=10).close()
    except OSError:
        raise InputError(
            f"--host {cluster.host} --port {port}: Ray Serve runs on this cluster already and listens elsewhere; use "
            "its address, or end it with serve shutdown"
        ) from None
    return url_of(cluster.host, port)


def stop(*, started: bool) -> None:
    """Removes the application after its requests are done; ends Ray if :func:`connect` has started it."""
    ray, serve = _import_ray()
    if ray.is_initialized():
        if started:
            serve.shutdown()
        else:
            serve.delete(APPLICATION)
        ray.shutdown()


def _import_ray() -> tuple[Any, Any]:
    """Returns ``ray`` and ``ray.serve``; raises :class:`InputError` with the cure where they are not installed."""
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

    Ray reads these variables once, when it is imported; if it has been imported already, its settings stay.
    """
    if "ray" not in sys.modules and os.environ.get("RAY_AUTH_MODE") is None:
        os.environ["RAY_AUTH_MODE"] = "token"
        if not os.environ.get("RAY_AUTH_TOKEN") and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def application(make: Callable[[], ASGIApp], cluster: Cluster, settings: Settings) -> Any:
    """Returns the bound deployment."""
    _, serve = _import_ray()
    from ray.serve.config import AutoscalingConfig, BackpressureConfig

    limits = settings.limits
    options: dict[str, Any] = {"num_replicas": cluster.replicas}
    if cluster.most_replicas is not None:
        scaling = AutoscalingConfig(
            min_replicas=cluster.replicas,
            max_replicas=cluster.most_replicas,
            # Below the lanes, so that a replica is added before requests wait.
            target_ongoing_requests=max(1.0, 0.75 * settings.lanes),
            upscale_delay_s=5.0,
            downscale_delay_s=120.0,
        )
        options = {"autoscaling_config": scaling}
    deployment = serve.deployment(
        name=APPLICATION,
        # A replica's own queue answers 429; Ray holds back only what no replica could take.
        max_ongoing_requests=settings.lanes + limits.waiting,
        max_queued_requests=limits.waiting,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=limits.retry_seconds),
        graceful_shutdown_timeout_s=limits.drain_seconds,
        graceful_shutdown_wait_loop_s=min(2.0, max(0.1, limits.drain_seconds)),
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        ray_actor_options={"num_cpus": cluster.cpus, "num_gpus": cluster.gpus},
        logging_config=_QUIET,
        **options,
    )
    return deployment(serve.ingress(lambda: make())(Replica)).bind()  # Ray calls plain functions only


class Replica:
    """One process with the app; Ray replaces it when its engine has failed for good."""

    app: Any

    async def check_health(self) -> None:
        # Ray checks once before it sends requests: they come when the engine is open.
        worker = self.app.worker
        while worker.state == "starting":
            await asyncio.sleep(0.05)
        if not worker.alive:
            raise RuntimeError("the engine does not run")


# --- in the proxy's process ---------------------------------------------------------------------------------------


def layers() -> list[Any]:
    """Returns the ASGI layer that Ray's proxy puts before every app, and bounds the proxy's connections.

    Ray 2.60 neither bounds headers (CVE-2025-48956) nor lets one choose the protocol of its uvicorn server, which takes
    the one called ``auto``. This function runs before the server is made.
    """
    import uvicorn.config
    from starlette.middleware import Middleware

    from adaponder.serving.server import BoundedConnection

    for name, value in json.loads(os.environ.get(PROXY_LIMITS, "{}")).items():
        setattr(BoundedConnection, name, value)
    uvicorn.config.HTTP_PROTOCOLS["auto"] = "adaponder.serving.server:BoundedConnection"
    return [Middleware(ProxyGuard)]


class ProxyGuard:
    """Removes the headers that control Ray, and drops websockets, which no route takes."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["headers"] = [pair for pair in scope["headers"] if pair[0].lower() not in _RAY_HEADERS]
        if scope["type"] != "websocket":
            await self.app(scope, receive, send)
