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
# Read by the proxy's process: longest headers in bytes, and seconds in which they must arrive, as in ``32768,10``.
HEADER_LIMITS = "ADAPONDER_PROXY_HEADERS"
# Read by Ray when it is imported, here and in the processes that it starts: no usage statistics are sent, and the proxy
# puts :func:`layers` before every app.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "adaponder.serving.ray:layers",
}
# Headers with which a client could make Ray go on after it has left, or set Ray's timeout.
_RAY_HEADERS = frozenset({b"x-request-disconnect-disabled", b"x-request-timeout-seconds"})


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where replicas run, and the address of the proxy.

    Attributes:
        host: address that the proxy listens on.
        port: its port; 0: a free one.
        replicas: number of replicas, or the fewest if ``most_replicas`` is given.
        most_replicas: replicas are added up to this number when requests pile up; ``None``: always ``replicas``.
        gpus: GPUs of each replica.
        cpus: processor cores that Ray reserves for each replica.
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
    stopped, serving = threading.Event(), False
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def on_signal(*_: Any) -> None:
        stopped.set()
        if not serving:
            raise _StoppedError

    def handle_signals() -> None:
        for number in handlers:
            signal.signal(number, on_signal)

    try:
        handle_signals()
        url = deploy(make, cluster, settings, connected=handle_signals)
        handle_signals()
        serving = True
        print(f"serving on {url} with {cluster.replicas} replicas", flush=True)
        stopped.wait()
    except _StoppedError:
        print("stopped before it served", flush=True)
    finally:
        serving = True
        for number, handler in handlers.items():
            signal.signal(number, handler)
        stop(started=cluster.address is None)


def deploy(
    make: Callable[[], ASGIApp],
    cluster: Cluster,
    settings: Settings,
    *,
    connected: Callable[[], None] = lambda: None,
) -> str:
    """Starts Ray unless a cluster is named, deploys the app and returns its address once every replica is ready.

    The limits of headers also hold at the proxy. ``connected`` is called when Ray runs, which has then replaced the
    signal handlers by its own.
    """
    limits = settings.limits
    os.environ[HEADER_LIMITS] = f"{limits.header_bytes},{limits.header_seconds}"
    if cluster.address is None:
        _require_token()
    ray, serve = _import_ray()
    _connect(ray, cluster)
    connected()
    port = cluster.port or _free_port(cluster.host)
    quiet = {"enable_access_log": False, "log_level": "WARNING"}
    serve.start(
        proxy_location="HeadOnly" if cluster.address is None else "EveryNode",
        http_options={"host": cluster.host, "port": port},
        logging_config=quiet,
    )
    _refuse_other_address(cluster.host, port)
    serve.run(_application(make, cluster, settings, quiet), name=APPLICATION, route_prefix="/")
    name = f"[{cluster.host}]" if ":" in cluster.host else cluster.host
    return f"http://{name}:{port}"


def stop(*, started: bool) -> None:
    """Removes the application after its requests are done; ends Ray if :func:`deploy` has started it."""
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


def _connect(ray: Any, cluster: Cluster) -> None:
    """Starts Ray, or connects to the named cluster; raises :class:`InputError` in one line where that fails."""
    if cluster.address is None:
        # Enough cores for every replica and the proxy, even if the machine has fewer.
        cores = int((cluster.most_replicas or cluster.replicas) * cluster.cpus) + 1
        options = {"include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, cores)}
        options["_node_ip_address"] = "127.0.0.1"
        failure = "Ray did not start"
    else:
        options, failure = {"address": cluster.address}, f"--ray-address {cluster.address}: no connection to Ray"
    try:
        ray.init(**options, log_to_driver=False, logging_level="error")
    except _StoppedError:
        raise
    except Exception as error:  # Ray raises the bare class, too
        raise InputError(f"{failure}: {' '.join(str(error).split())}") from error


def _application(make: Callable[[], ASGIApp], cluster: Cluster, settings: Settings, logging: dict[str, Any]) -> Any:
    """Returns the bound deployment."""
    _, serve = _import_ray()
    from ray.serve.config import AutoscalingConfig, BackpressureConfig

    limits = settings.limits
    replica = serve.ingress(lambda: make())(_replica_class())  # Ray calls plain functions only
    options: dict[str, Any] = {
        "name": APPLICATION,
        # A replica's own queue answers 429; Ray holds back only what no replica could take.
        "max_ongoing_requests": settings.lanes + limits.waiting,
        "max_queued_requests": limits.waiting,
        "backpressure_config": BackpressureConfig(status_code=429, retry_after_s=limits.retry_seconds),
        "graceful_shutdown_timeout_s": limits.drain_seconds,
        "graceful_shutdown_wait_loop_s": min(2.0, max(0.1, limits.drain_seconds)),
        "health_check_period_s": 5.0,
        "health_check_timeout_s": 30.0,
        "ray_actor_options": {"num_cpus": cluster.cpus, "num_gpus": cluster.gpus},
        "logging_config": logging,
    }
    if cluster.most_replicas is None:
        options["num_replicas"] = cluster.replicas
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=cluster.replicas,
            max_replicas=cluster.most_replicas,
            # Below the lanes, so that a replica is added before requests wait.
            target_ongoing_requests=max(1.0, 0.75 * settings.lanes),
            upscale_delay_s=5.0,
            downscale_delay_s=120.0,
        )
    return serve.deployment(replica).options(**options).bind()


def _replica_class() -> type:
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

    return Replica


def _free_port(host: str) -> int:
    from adaponder.serving.server import listen

    with listen(host, 0) as probe:
        return probe.getsockname()[1]


def _refuse_other_address(host: str, port: int) -> None:
    """Raises if Ray Serve was running already and listens elsewhere, in which case it ignores its options."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    running = None if client is None else client.http_config
    if running is not None and (running.host, running.port) != (host, port):
        raise InputError(
            f"--host {host} --port {port}: Ray Serve runs on this cluster already, on {running.host}:{running.port}; "
            "use that address, or end it with serve shutdown"
        )


# --- in the proxy's process ---------------------------------------------------------------------------------------


def layers() -> list[Any]:
    """Returns the ASGI layers that Ray's proxy puts before every app, and bounds its connections.

    Ray 2.x does not let one choose the protocol of its uvicorn server, which takes the one called ``auto``. This
    function runs before the server is made.
    """
    import uvicorn.config
    from starlette.middleware import Middleware

    from adaponder.serving.server import BoundedConnection as Connection

    limits = os.environ.get(HEADER_LIMITS, f"{Connection.header_bytes},{Connection.header_seconds}")
    longest, _, seconds = limits.partition(",")
    Connection.header_bytes, Connection.header_seconds = int(longest), float(seconds)
    uvicorn.config.HTTP_PROTOCOLS["auto"] = "adaponder.serving.server:BoundedConnection"
    return [Middleware(ProxyGuard, header_bytes=Connection.header_bytes)]


class ProxyGuard:
    """Refuses long headers, also where another kind of server has read them, and removes those that steer Ray."""

    def __init__(self, app: ASGIApp, header_bytes: int) -> None:
        self.app, self.header_bytes = app, header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return  # no route takes one
        if scope["type"] == "http":
            size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
            if size + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > self.header_bytes:
                await self._refuse(send)
                return
            scope["headers"] = [pair for pair in scope["headers"] if pair[0].lower() not in _RAY_HEADERS]
        await self.app(scope, receive, send)

    async def _refuse(self, send: Send) -> None:
        message = f"the headers are longer than {self.header_bytes} bytes"
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": "headers_too_large"}
        body = json.dumps({"error": error}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 431, "headers": [*headers, (b"connection", b"close")]})
        await send({"type": "http.response.body", "body": body})
