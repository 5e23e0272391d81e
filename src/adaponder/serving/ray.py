"""The same app in several processes or on several machines, as a deployment of Ray Serve.

Each replica is a process with its own model, engine and app: keys, limits and drain are the app's and hold behind Ray
as they do without. Ray's proxy listens, and sends each request to the replica with fewer under way, of two drawn at
random.

Ray is imported when it is asked for and nowhere else.
"""

# Ray is an extra of its own, which a checker may not find installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from adaponder.errors import InputError
from adaponder.serving.proxy import VARIABLE
from adaponder.serving.settings import Limits, Settings

Scope = MutableMapping[str, Any]
ASGIApp = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]

APPLICATION = "adaponder"
# What Ray reads when it is imported, here and in the processes that it starts: no figures are sent anywhere, and the
# proxy asks :func:`adaponder.serving.proxy.layers` what to put before every app.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "adaponder.serving.proxy:layers",
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where replicas run and who hears them.

    Attributes:
        host: the address that the proxy listens on.
        port: its port; 0: a free one.
        replicas: how many, or the fewest where ``most_replicas`` is given.
        most_replicas: as many as this when requests pile up, and fewer again later; ``None``: always ``replicas``.
        gpus: GPUs of each replica.
        cpus: processor cores that Ray sets aside for each replica.
        lanes: sequences that a replica runs at a time; with that many requests under way it is busy.
        waiting: requests that may wait, in a replica and at the proxy; one more is answered 429.
        address: a Ray cluster that runs already (``auto``: the one of this machine); ``None``: one is started here.
        drain_seconds: how long a replica that is to go may finish what it has begun.
        retry_seconds: what ``Retry-After`` says.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    replicas: int = 1
    most_replicas: int | None = None
    gpus: float = 0.0
    cpus: float = 1.0
    lanes: int = 64
    waiting: int = 512
    address: str | None = None
    drain_seconds: float = 30.0
    retry_seconds: int = 1

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise InputError(f"--replicas {self.replicas}: at least one is needed")
        if self.most_replicas is not None and self.most_replicas < self.replicas:
            raise InputError(f"--max-replicas {self.most_replicas}: fewer than --replicas {self.replicas}; raise it")


def run(make: Callable[[], ASGIApp], cluster: Cluster, settings: Settings) -> None:
    """Deploys, says the address, and serves until SIGTERM or Ctrl-C.

    Args:
        make: makes the app; called in each replica, so it must be picklable.
        cluster: where.
        settings: those of the app; what bounds headers, waiting requests and the drain holds at the proxy, too.
    """
    ended, serves = threading.Event(), False
    handlers = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)}

    def end(*_: Any) -> None:
        ended.set()
        if not serves:
            raise _EndedError

    def listen() -> None:
        for kind in handlers:
            signal.signal(kind, end)

    try:
        listen()
        url = deploy(make, cluster, limits=settings.limits, connected=listen)
        listen()
        serves = True
        print(f"serving on {url} with {cluster.replicas} replicas", flush=True)
        ended.wait()
    except _EndedError:
        print("ended before it served", flush=True)
    finally:
        serves = True
        for kind, handler in handlers.items():
            signal.signal(kind, handler)
        stop(started=cluster.address is None)


class _EndedError(Exception):
    """SIGTERM or Ctrl-C came while replicas were starting."""


def deploy(
    make: Callable[[], ASGIApp],
    cluster: Cluster,
    *,
    limits: Limits | None = None,
    connected: Callable[[], None] = lambda: None,
) -> str:
    """Starts Ray where none is named, deploys the app and returns its address once every replica is ready.

    ``connected`` is called when Ray runs, which by then has put handlers of its own in place of those of signals: they
    dump a stack and die.
    """
    bounds = limits or Limits()
    os.environ[VARIABLE] = f"{bounds.header_bytes},{bounds.header_seconds}"
    if cluster.address is None:
        _secure()
    ray, serve = _import_ray()
    _connect(ray, cluster)
    connected()
    port = cluster.port or _free_port(cluster.host)
    http = {"host": cluster.host, "port": port}
    location = "HeadOnly" if cluster.address is None else "EveryNode"
    quiet = {"enable_access_log": False, "log_level": "WARNING"}
    serve.start(proxy_location=location, http_options=http, logging_config=quiet)
    _refuse_other_address(cluster.host, port)
    serve.run(_application(make, cluster, quiet), name=APPLICATION, route_prefix="/")
    name = f"[{cluster.host}]" if ":" in cluster.host else cluster.host
    return f"http://{name}:{port}"


def _connect(ray: Any, cluster: Cluster) -> None:
    """Starts Ray, or connects to the cluster that is named; says in one line what Ray says where that fails."""
    how: dict[str, Any] = {"address": cluster.address}
    failed = f"--ray-address {cluster.address}: no connection to Ray there"
    if cluster.address is None:
        how = {"include_dashboard": False, "num_cpus": _cores(cluster), "_node_ip_address": "127.0.0.1"}
        failed = "Ray did not start"
    try:
        ray.init(**how, log_to_driver=False, logging_level="error")
    except _EndedError:
        raise
    except Exception as error:  # Ray raises the bare class too
        raise InputError(f"{failed}: {' '.join(str(error).split())}") from error


def stop(*, started: bool) -> None:
    """Takes the application away, after its requests are done; ends Ray where :func:`deploy` has started it."""
    ray, serve = _import_ray()
    if ray.is_initialized():
        if started:
            serve.shutdown()
        else:
            serve.delete(APPLICATION)
        ray.shutdown()


def _application(make: Callable[[], ASGIApp], cluster: Cluster, logging: dict[str, Any]) -> Any:
    """The deployment, bound."""
    _, serve = _import_ray()
    from ray.serve.config import AutoscalingConfig, BackpressureConfig

    replica = serve.ingress(_as_function(make))(_replica_class())
    options: dict[str, Any] = {
        "name": APPLICATION,
        # A replica's own queue answers 429; Ray holds back only what no replica could take.
        "max_ongoing_requests": cluster.lanes + cluster.waiting,
        "max_queued_requests": cluster.waiting,
        "backpressure_config": BackpressureConfig(status_code=429, retry_after_s=cluster.retry_seconds),
        "graceful_shutdown_timeout_s": cluster.drain_seconds,
        "graceful_shutdown_wait_loop_s": min(2.0, max(0.1, cluster.drain_seconds)),
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
            # Below the lanes: another replica is asked for before requests wait.
            target_ongoing_requests=max(1.0, 0.75 * cluster.lanes),
            upscale_delay_s=5.0,
            downscale_delay_s=120.0,
        )
    return serve.deployment(replica).options(**options).bind()


def _replica_class() -> type:
    class Replica:
        """One process with the app; Ray replaces it when its engine has failed for good."""

        app: Any

        async def check_health(self) -> None:
            # Ray asks once before it sends requests: they come when there is an engine for them.
            worker = getattr(self.app, "worker", None)
            while worker is not None and worker.state == "starting":
                await asyncio.sleep(0.05)
            if await _status_of(self.app, "/health") != 200:
                raise RuntimeError("the engine does not run")

    return Replica


async def _status_of(app: ASGIApp, path: str) -> int:
    """The status with which an app answers a path that is open to all."""
    told: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            told.append(message["status"])

    scope: Scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "path": path}
    scope |= {"raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"", "client": None}
    await app(scope | {"headers": [(b"host", b"localhost")], "server": None}, receive, send)
    return told[0] if told else 0


def _as_function(make: Callable[[], ASGIApp]) -> Callable[[], ASGIApp]:
    """Ray calls plain functions alone."""

    def build() -> ASGIApp:
        return make()

    return build


def _import_ray() -> tuple[Any, Any]:
    """``ray`` and ``ray.serve``; raises with the cure where they are not installed."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise InputError(f"--ray: {error.name or 'ray'} is not installed; pip install 'adaponder[scale]'") from None
    return ray, serve


def _secure() -> None:
    """Whoever reaches the ports that Ray's own processes talk over must know a token; this cluster's is drawn here.

    Ray reads these variables once, when it is imported; who has imported it before has its own settings.
    """
    if "ray" not in sys.modules and os.environ.get("RAY_AUTH_MODE") is None:
        os.environ["RAY_AUTH_MODE"] = "token"
        if not os.environ.get("RAY_AUTH_TOKEN") and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _cores(cluster: Cluster) -> int:
    """Enough for every replica, and one for the proxy; more than the machine has where it must be."""
    most = cluster.most_replicas or cluster.replicas
    return max(os.cpu_count() or 1, int(most * cluster.cpus) + 1)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _refuse_other_address(host: str, port: int) -> None:
    """Raises where Ray Serve was running already and listens elsewhere, whatever it was told here."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    told = None if client is None else client.http_config
    if told is not None and (told.host, told.port) != (host, port):
        raise InputError(
            f"--host {host} --port {port}: Ray Serve runs on this cluster already, on {told.host}:{told.port}; "
            "name that address, or end it with serve shutdown"
        )
