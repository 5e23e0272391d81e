"""Ray Serve without Ray: what is refused, what its proxy lets through, and what is asked of its deployment."""

from __future__ import annotations

import ast
import asyncio
import builtins
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adaponder.errors import InputError
from adaponder.serving import ray as ours
from adaponder.serving.settings import Settings


def answered(app: Any, **scope: Any) -> tuple[int, dict[str, Any], bytes]:
    """Status of an ASGI app's answer, the scope that reached it, and the body."""
    told: list[Any] = []

    async def send(message: Any) -> None:
        told.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    asyncio.run(app({"type": "http", "headers": [], "query_string": b"", "raw_path": b"/"} | scope, receive, send))
    return (told[0]["status"], told[0], told[-1].get("body", b"")) if told else (0, {}, b"")


class Seen:
    """An app that notes what reaches it."""

    def __init__(self, status: int = 200) -> None:
        self.status, self.scopes = status, []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


def test_headers_that_would_steer_ray_do_not_reach_it():
    app = Seen()
    given = [(b"X-Request-Disconnect-Disabled", b"?1"), (b"x-request-timeout-seconds", b"9"), (b"x-session-id", b"a")]
    assert answered(ours.ProxyGuard(app, 1000), headers=given)[0] == 200
    assert app.scopes[0]["headers"] == [(b"x-session-id", b"a")]


def test_headers_and_addresses_that_are_too_long_are_refused_before_ray_sees_them():
    app = Seen()
    for scope in ({"headers": [(b"x", b"y" * 1000)]}, {"raw_path": b"/" * 1001}, {"query_string": b"q" * 1001}):
        status, _, body = answered(ours.ProxyGuard(app, 1000), **scope)
        assert status == 431
        assert b'"error"' in body
    assert not app.scopes
    assert answered(ours.ProxyGuard(app, 1000), headers=[(b"x", b"y" * 900)])[0] == 200


def test_nothing_but_http_gets_through():
    app = Seen()
    assert answered(ours.ProxyGuard(app, 1000), type="websocket")[0] == 0
    assert not app.scopes


def test_the_proxy_s_process_needs_no_torch_and_reads_bounded_headers():
    code = """
import sys
from adaponder.serving.ray import layers
layer, = layers()
import uvicorn
from adaponder.serving.server import BoundedConnection as Bounded
config = uvicorn.Config(lambda: None, factory=True, log_config=None)
config.load()
assert config.http_protocol_class is Bounded, config.http_protocol_class
assert (Bounded.header_bytes, Bounded.header_seconds) == (4096, 2.5)
assert layer.kwargs == {"header_bytes": 4096}
assert not {"torch", "transformers", "ray"} & set(sys.modules)
"""
    environment = os.environ | {"ADAPONDER_PROXY_HEADERS": "4096,2.5"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replicas": 0}, "--replicas 0"),
        ({"replicas": 3, "most_replicas": 2}, "--max-replicas 2"),
    ],
)
def test_clusters_that_make_no_sense_are_refused_by_name(options, said):
    with pytest.raises(InputError, match=said):
        ours.Cluster(**options)


def test_without_ray_the_cure_is_said(monkeypatch):
    real = builtins.__import__

    def missing(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "ray" or name.startswith("ray."):
            raise ImportError("no ray", name="ray")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    monkeypatch.setattr(ours, "_require_token", lambda: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(InputError, match=r"pip install 'adaponder\[scale\]'"):
        ours.deploy(Seen, ours.Cluster())


def test_a_cluster_of_our_own_wants_a_token(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    environment = dict(os.environ)
    monkeypatch.setattr(os, "environ", environment)
    ours._require_token()
    assert environment["RAY_AUTH_MODE"] == "token"
    assert len(environment["RAY_AUTH_TOKEN"]) == 64
    ours._require_token()
    environment.update(RAY_AUTH_MODE="disabled")
    ours._require_token()
    assert environment["RAY_AUTH_MODE"] == "disabled"


def test_a_replica_is_well_as_long_as_its_app_says_so():
    replica = ours._replica_class()()
    replica.app = SimpleNamespace(worker=SimpleNamespace(state="ready", alive=True))
    asyncio.run(replica.check_health())
    replica.app.worker.alive = False
    with pytest.raises(RuntimeError, match="engine"):
        asyncio.run(replica.check_health())


def test_a_replica_is_ready_when_its_engine_is():
    replica, worker = ours._replica_class()(), SimpleNamespace(state="starting", alive=True)
    replica.app = SimpleNamespace(worker=worker)

    async def main() -> None:
        asked = asyncio.create_task(replica.check_health())
        await asyncio.sleep(0.2)
        assert not asked.done()
        worker.state = "ready"
        await asyncio.wait_for(asked, 5)

    asyncio.run(main())


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_replicas_start_ends_it_in_order(monkeypatch, capsys, kind):
    """Ray puts a handler of its own in place of ours when it starts."""
    ended, before = [], signal.getsignal(kind)

    def deploy(make: Any, cluster: Any, *, limits: Any, connected: Any) -> str:
        signal.signal(kind, signal.SIG_IGN)
        connected()
        signal.raise_signal(kind)
        raise AssertionError("it goes on")

    monkeypatch.setattr(ours, "deploy", deploy)
    monkeypatch.setattr(ours, "stop", lambda *, started: ended.append(started))
    ours.run(Seen, ours.Cluster(), Settings())
    assert ended == [True]
    assert "stopped before it served" in capsys.readouterr().out
    assert signal.getsignal(kind) is before


def test_ray_is_imported_inside_functions_of_one_file_alone():
    folder = Path(ours.__file__).parents[1]
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {node: _imported(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)}
        found = [node for node, name in names.items() if name == "ray" or name.startswith("ray.")]
        assert not found or path == Path(ours.__file__), path
        assert not [node for node in found if node in tree.body], path


def _imported(node: ast.Import | ast.ImportFrom) -> str:
    return node.names[0].name if isinstance(node, ast.Import) else node.module or ""


@pytest.mark.parametrize(
    ("address", "error", "said"),
    [
        (None, Exception("timed out\nduring startup"), "^Ray did not start: timed out during startup$"),
        ("nonsense", ValueError("Invalid address"), "^--ray-address nonsense: no connection to Ray: Invalid"),
    ],
)
def test_where_ray_does_not_run_one_line_says_so(monkeypatch, address, error, said):
    def init(**how: Any) -> None:
        raise error

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(ours, "_import_ray", lambda: (SimpleNamespace(init=init), None))
    monkeypatch.setattr(ours, "_require_token", lambda: None)
    with pytest.raises(InputError, match=said):
        ours.deploy(lambda: Seen(), ours.Cluster(port=1, address=address, lanes=1))


def test_an_end_while_ray_starts_stays_one():
    def init(**how: Any) -> None:
        raise ours._StoppedError

    with pytest.raises(ours._StoppedError):
        ours._connect(SimpleNamespace(init=init), ours.Cluster(port=1, lanes=1))
