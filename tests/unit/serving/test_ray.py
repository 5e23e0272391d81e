"""Ray Serve without Ray: refused settings, the layer in its proxy, health of a replica, signals and errors."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from adaponder.errors import InputError
from adaponder.serving import ray as ours
from adaponder.serving.settings import Settings


def test_headers_that_control_ray_and_websockets_do_not_pass_the_proxy():
    passed: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope)
        await receive()

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    headers = [(b"X-Request-Disconnect-Disabled", b"?1"), (b"x-request-timeout-seconds", b"9"), (b"x-session-id", b"a")]
    for kind in ("http", "websocket"):
        asyncio.run(ours.ProxyGuard(app)({"type": kind, "path": "/", "headers": headers}, receive, None))
    assert passed == [{"type": "http", "path": "/", "headers": [(b"x-session-id", b"a")]}]


OURS = [(b"x-content-type-options", b"nosniff")]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([(200, OURS)], (200, 1)),
        ([(500, OURS)], (500, 1)),
        ([(429, [])], (429, 1)),
        ([(500, []), (503, []), (200, OURS)], (200, 3)),
        ([(500, [])] * 4, (503, 4)),
        ([None, RuntimeError("the replica died"), (200, OURS)], (200, 3)),
    ],
    ids=["answered", "error of the app", "refusal of Ray", "another replica", "no replica", "no answer"],
)
def test_request_that_a_lost_replica_had_is_sent_again(monkeypatch, caplog, answers, expected):
    monkeypatch.setattr(ours, "_TRY_AGAIN_SECONDS", (0,) * 4)
    parts = [{"type": "http.request", "body": part, "more_body": part == b"a"} for part in (b"a", b"b")]
    sent: list[Any] = []
    bodies: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        answer = answers[len(bodies)]
        bodies.append((await receive())["body"] + (await receive())["body"])
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            return
        status, headers = answer
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"text"})

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(ours.ProxyGuard(app)({"type": "http", "path": "/score", "headers": []}, receive, send))
    status, tries = expected
    assert ([message.get("status") for message in sent], bodies) == ([status, None], [b"ab"] * tries)
    assert ("the replica died" in caplog.text) == any(isinstance(answer, Exception) for answer in answers)
    if status == 503:
        assert dict(sent[0]["headers"])[b"retry-after"] == b"1"
        assert json.loads(sent[1]["body"])["error"]["code"] == "unavailable"


def test_proxy_needs_no_torch_and_bounds_headers():
    code = """
import sys
from adaponder.serving.ray import layers
layer, = layers()
import uvicorn
from adaponder.serving.server import BoundedConnection as Bounded
config = uvicorn.Config(lambda: None, factory=True, log_config=None)
config.load()
assert config.http_protocol_class is Bounded, config.http_protocol_class
assert (Bounded.header_bytes, Bounded.header_seconds, Bounded.stall_seconds) == (4096, 2.5, 30)
assert not {"torch", "transformers", "ray"} & set(sys.modules)
"""
    environment = os.environ | {ours.PROXY_LIMITS: '{"header_bytes": 4096, "header_seconds": 2.5}'}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_invalid_clusters_are_refused():
    for options, name in (({"replicas": 0}, "--replicas 0"), ({"replicas": 3, "most_replicas": 2}, "--max-replicas 2")):
        with pytest.raises(InputError, match=name):
            ours.Cluster(**options)


@pytest.fixture
def environment(monkeypatch) -> dict[str, str]:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        os.environ.pop(name, None)
    return os.environ


def test_without_ray_the_error_names_the_extra(monkeypatch, environment):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'adaponder\[scale\]'"):
        ours.connect(ours.Cluster(), Settings())


def test_new_cluster_requires_a_token(monkeypatch, environment):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    ours._require_token()
    assert environment["RAY_AUTH_MODE"] == "token"
    assert len(environment["RAY_AUTH_TOKEN"]) == 64
    environment.update(RAY_AUTH_MODE="disabled")
    ours._require_token()
    assert environment["RAY_AUTH_MODE"] == "disabled"


def test_replica_is_healthy_while_its_engine_is():
    replica, worker = ours.Replica(), SimpleNamespace(state="starting", alive=True)
    replica.app = SimpleNamespace(worker=worker)

    async def main() -> None:
        check = asyncio.create_task(replica.check_health())
        await asyncio.sleep(0.1)
        assert not check.done()
        worker.state = "ready"
        await asyncio.wait_for(check, 5)
        worker.alive = False
        with pytest.raises(RuntimeError, match="engine"):
            await replica.check_health()

    asyncio.run(main())


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_replicas_start_stops_them(monkeypatch, capsys, kind):
    """Ray replaces our signal handler by its own when it starts."""
    ended, before = [], signal.getsignal(kind)

    def deploy(*arguments: Any) -> str:
        signal.raise_signal(kind)
        raise AssertionError("it goes on")

    monkeypatch.setattr(ours, "connect", lambda *arguments: signal.signal(kind, signal.SIG_IGN))
    monkeypatch.setattr(ours, "deploy", deploy)
    monkeypatch.setattr(ours, "stop", lambda *, started: ended.append(started))
    ours.run(object, ours.Cluster(), Settings())
    assert ended == [True]
    assert "stopped before it served" in capsys.readouterr().out
    assert signal.getsignal(kind) is before


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        (None, Exception("timed out\nduring startup"), "^Ray did not start: timed out during startup$"),
        ("nonsense", ValueError("Invalid address"), "^--ray-address nonsense: no connection to Ray: Invalid"),
        (None, ours._StoppedError(), None),
    ],
)
def test_errors_of_ray_are_one_line(monkeypatch, environment, address, error, message):
    def init(**options: Any) -> None:
        raise error

    monkeypatch.setattr(ours, "_import_ray", lambda: (SimpleNamespace(init=init), None))
    with pytest.raises(InputError if message else ours._StoppedError, match=message):
        ours.connect(ours.Cluster(address=address), Settings())
