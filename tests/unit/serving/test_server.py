"""``adaponder serve``: limits on headers, options, and the shutdown at SIGTERM."""

import asyncio
import logging
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner
from uvicorn.server import ServerState

from adaponder import Engine, cli
from adaponder.commands import serve
from adaponder.errors import InputError
from adaponder.serving.routes import make_app
from adaponder.serving.server import Server, address_of, bounded, listen, run
from adaponder.serving.settings import Access, Limits, Settings
from adaponder.serving.worker import Worker
from serving_support import connect, serving, tiny_served
from support import tiny
from word_support import small_tokenizer

SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "little"
    tiny().save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


def streamed_over_sigterm(process: subprocess.Popen, client: httpx.Client, body: dict) -> str:
    """Returns the events of a stream during which the server gets SIGTERM."""
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        chunks = response.iter_text()
        text = next(chunks)
        process.send_signal(signal.SIGTERM)
        with suppress(httpx.RemoteProtocolError):  # disconnected without a reason
            text += "".join(chunks)
    return text


def test_sigterm_lets_running_requests_finish(checkpoint):
    key = {"authorization": "Bearer a-key-of-this-environment"}
    process = subprocess.Popen(
        [sys.executable, "-m", "adaponder", "serve", str(checkpoint), "--port", "0", "--lanes", "2"],
        env={"PYTHONPATH": str(SOURCE), **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        | {"ADAPONDER_API_KEY": "a-key-of-this-environment"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        address = re.search(r"http://[\w.:]+", first)
        assert address, first + process.stdout.read()
        with httpx.Client(base_url=address.group(), timeout=30, verify=False) as client:
            assert client.get("/v1/models").status_code == 401
            client.headers.update(key)
            while client.get("/ready").status_code == 503:
                time.sleep(0.02)
            port = client.base_url.port
            listening = Path(f"/proc/{process.pid}/net/tcp").read_text()
            assert f"0100007F:{port:04X} 00000000:0000 0A" in listening  # on this machine only
            body = {"model": "little", "prompt": "ab", "max_tokens": 60, "n": 2}
            body |= {"adaponder": {"gates": True, "iteration_top": 20}}
            text = streamed_over_sigterm(process, client, body)
        assert process.wait(20) == 0
    finally:
        process.kill()
        output = process.communicate()[0]
    assert text.endswith("data: [DONE]\n\n")
    assert text.count('"finish_reason": "length"') == 2
    with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.1", port)):
        pass
    assert "Traceback" not in output
    assert "iterations a token\n" in output  # no line is broken in two on its way to a file


def test_requests_that_outlast_the_drain_get_an_error(monkeypatch):
    """The server runs in this thread, its clients in others; a text that is converted for ever delays nothing."""
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    settings = Settings(lanes=2, limits=Limits(drain_seconds=0.1))
    served, forever = tiny_served(), threading.Event()
    monkeypatch.setattr("adaponder.serving.routes.tokens_of", lambda *text: forever.wait())
    worker, answers = Worker(lambda: Engine(served.model, lanes=2), served), {}

    def talk() -> None:
        process = SimpleNamespace(send_signal=lambda number: answers.update(began=kill(number)))
        with httpx.Client(base_url=address_of(listening), timeout=30, verify=False) as client:
            while client.get("/ready").status_code == 503:
                time.sleep(0.02)
            stuck.start()
            while not worker.texts.running:
                time.sleep(0.01)
            body = {"model": "tiny", "prompt": ["ab"] * 8, "max_tokens": 60, "n": 16}
            answers["stream"] = streamed_over_sigterm(process, client, body)

    def kill(number: int) -> float:
        os.kill(os.getpid(), number)
        return time.monotonic()

    def tokenize() -> None:
        url = f"{address_of(listening)}/tokenize"
        answers["text"] = httpx.post(url, json={"prompt": "a" * 2000}, timeout=30, verify=False).status_code

    client, stuck = threading.Thread(target=talk), threading.Thread(target=tokenize)
    with listen("127.0.0.1", 0) as listening:
        run(make_app(worker, settings), worker, listening, settings, started=client.start)
    assert time.monotonic() - answers["began"] < 0.1 + 3
    for thread in (client, stuck):
        thread.join(20)
    forever.set()
    assert '"message":"engine: the server is stopping"' in answers["stream"].rstrip().rpartition("data: ")[2]
    assert answers["text"] == 503


def test_second_signal_ends_at_once(monkeypatch):
    monkeypatch.setattr("adaponder.serving.server.os._exit", sys.exit)
    worker = SimpleNamespace(state="ready")
    server = Server(uvicorn.Config(lambda: None), worker, lambda: None)
    server.handle_exit(signal.SIGTERM, None)
    server.deadline.cancel()
    assert (server.should_exit, worker.state) == (True, "draining")
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        server.handle_exit(signal.SIGTERM, None)


def test_shutdown_that_does_not_end_is_cut_off(monkeypatch):
    codes: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr("adaponder.serving.server.os._exit", codes.put)
    monkeypatch.setattr("adaponder.serving.server._LAST_SECONDS", 0.01)
    for number, code in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        server = Server(uvicorn.Config(lambda: None), SimpleNamespace(state="ready"), lambda: None, drain_seconds=0.01)
        server.handle_exit(number, None)
        assert codes.get(timeout=10) == code


def refusal(*arguments: str, code: int = 2) -> str:
    result = CliRunner().invoke(cli.app, ["serve", *arguments])
    problem = result.exception
    assert isinstance(problem, InputError) or result.exit_code == code
    return str(problem) if isinstance(problem, InputError) else result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--host no.such.host.invalid --no-auth", "--host"),
        ("--host 192.0.2.1 --no-auth", "--host 192.0.2.1: this machine has no such address"),
        ("--host a..b --no-auth", "--host a..b: there is no such address"),
        ("--host 0.0.0.0", "--no-auth"),
        ("--port 70000", "65535"),
        ("--name a/b --port 0", "--name"),
        ("--replicas 2", "--replicas"),
        ("--api-key-file missing", "is missing"),
    ],
)
def test_invalid_options_are_refused(checkpoint, monkeypatch, options, words):
    monkeypatch.delenv("ADAPONDER_API_KEY", raising=False)
    assert words in refusal(str(checkpoint), *options.split())


def test_port_in_use_is_one_line(checkpoint):
    with listen("127.0.0.1", 0) as taken:
        message = refusal(str(checkpoint), "--port", str(taken.getsockname()[1]))
    assert re.fullmatch("--port .* in use.*", message)


def test_key_file(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("ADAPONDER_API_KEY", raising=False)
    keys = tmp_path / "keys"
    for content, words in (("# nothing\n", "no key"), ("short\n", "at least 16")):
        keys.write_text(content)
        assert words in refusal(str(checkpoint), "--api-key-file", str(keys))
    keys.write_text("a-long-enough-key # mine\n\na-second-longer-key\n")
    for mode, warned in ((0o644, True), (0o640, True), (0o600, False)):
        keys.chmod(mode)
        serve.keys_of(keys)
        assert ("chmod 600" in capsys.readouterr().err) == warned
    assert "--no-auth" in refusal(str(checkpoint), "--api-key-file", str(keys), "--no-auth")
    access = serve.access_of("0.0.0.0", serve.keys_of(keys), allow_host=("A.Test",))
    assert [access.key_of(key) for key in ("a-long-enough-key", "a-second-longer-key")] == [*access.keys]
    assert (access.knows_host("a.test"), access.knows_host("b.test")) == (True, False)


def test_loopback_hosts_and_default_names():
    hosts = ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::")
    assert [serve.is_local(host) for host in hosts] == [True, True, True, False, False]
    names = {"runs/demo": "demo", "runs/demo/final": "demo", "a/b c!": "b-c", "org/model": "model"}
    names["runs/demo/checkpoints/step-00001000"] = "step-00001000"
    for path, name in names.items():
        assert serve.default_name(path) == name


def test_nothing_is_unpickled_no_code_is_trusted_and_one_socket_listens():
    """CVE-2026-3059, CVE-2026-3060, CVE-2026-22807 and CVE-2026-27893."""
    text = "".join(path.read_text() for path in (SOURCE / "adaponder/serving").glob("*.py") if path.name != "ray.py")
    assert not re.search(r"\b(pickle|marshal|dill|cloudpickle|torch\.load|zmq|eval\(|exec\(|trust_remote_code)", text)
    assert len(re.findall(r"socket\.(socket|create_server)\(", text)) == 1


@pytest.fixture(scope="module")
def server():
    limits = Limits(body_seconds=0.2, header_seconds=0.2)
    with serving(settings=Settings(lanes=2, limits=limits)) as running:
        yield running


def talk(server, *parts: bytes) -> bytes:
    """Sends bytes to the socket and returns the answer until it is closed."""
    answer = b""
    with connect(server) as connection, suppress(OSError):
        for part in parts:
            connection.sendall(part)
        while part := connection.recv(65536):
            answer += part
    return answer


def test_huge_header_is_refused_while_it_arrives(server):
    """CVE-2025-48956."""
    line = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    many = b"".join(b"X-%d: 1\r\n" % n for n in range(5000))
    for head in (line + b"X-Long: " + b"a" * (1 << 16), line + many, b"GET /" + b"a" * (1 << 16)):
        assert talk(server, head + b"\r\n\r\n").startswith(b"HTTP/1.1 431 ")
    endless = talk(server, line + b"X-Long: ", *[b"a" * (1 << 16)] * 64)
    assert endless == b"" or endless.startswith(b"HTTP/1.1 431 ")  # or reset, as it goes on sending
    assert server.get("/health").status_code == 200


def test_slow_clients_are_408(server):
    began = time.monotonic()
    assert talk(server, b"GET /health HTTP/1.1\r\nHost: loc").startswith(b"HTTP/1.1 408 ")
    assert talk(server).startswith(b"HTTP/1.1 408 ")  # a connection that says nothing
    head = b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n"
    assert talk(server, head + b'{"prompt"').startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - began < 8
    assert server.get("/health").status_code == 200


def test_upgrade_is_ignored_without_advice(server, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [caplog.handler])
    caplog.set_level("WARNING", logger="uvicorn.error")
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade, close\r\n\r\n"
    assert talk(server, head).startswith(b"HTTP/1.1 200 ")
    assert not caplog.records


@pytest.mark.parametrize("head", ["Content-Length: -1", "Content-Length: 5\r\nTransfer-Encoding: chunked", "Bad X: x"])
def test_malformed_heads_are_refused(server, head):
    answer = talk(server, f"POST /score HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n0\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 4")
    assert server.get("/health").status_code == 200


def test_client_that_stops_reading_is_disconnected():
    async def main() -> None:
        config, aborted = uvicorn.Config(lambda scope: None), asyncio.Event()
        connection = bounded(Settings(limits=Limits(stall_seconds=0.05)))(config, ServerState(), {})
        connection.connection_made(SimpleNamespace(abort=aborted.set, get_extra_info=lambda name: None))
        connection.pause_writing()
        connection.resume_writing()
        await asyncio.sleep(0.1)
        assert not aborted.is_set()
        connection.pause_writing()
        await asyncio.wait_for(aborted.wait(), 5)

    asyncio.run(main())


class Transport:
    """The server's side of a connection from an address."""

    def __init__(self, address: str):
        self.address, self.answer, self.ended, self.closed = address, b"", False, False

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return (self.address, 1) if name == "peername" else None

    def write(self, data: bytes) -> None:
        self.answer += data

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.ended = self.closed = True

    def is_closing(self) -> bool:
        return self.closed


@pytest.mark.parametrize("network", ["2001:db8::{}", "::ffff:192.0.2.1"])
def test_connections_of_a_client_count_until_they_close(network):
    async def main() -> None:
        access = Access(proxies=("10.0.0.1", "fd00::/8"))
        connection_class = bounded(Settings(limits=Limits(connections=18, header_seconds=0.05), access=access))
        config, state = uvicorn.Config(lambda scope: None), ServerState()

        def connected(address: str) -> tuple[Any, Transport]:
            connection, transport = connection_class(config, state, {}), Transport(address)
            connection.connection_made(transport)
            return connection, transport

        for proxy in ("10.0.0.1", "::ffff:10.0.0.1", "fd12::1") * 9:
            assert connected(proxy)[1].answer == b"", "a proxy may hold more than all"
        proxies = len(state.connections)
        open_connections = [connected(network.format(number)) for number in range(16)]
        assert not [transport for _, transport in open_connections if transport.ended]
        refused = [connected(network.format(number)) for number in range(3)]
        assert [transport.answer[:13] for _, transport in refused] == 3 * [b"HTTP/1.1 429 "]
        assert len(state.connections) - proxies == 16, "uvicorn counts refused ones no longer, though they are open yet"
        other, transport = connected("2001:db8:0:1::1")
        assert not transport.ended
        for connection, _ in refused:
            connection.connection_lost(None)
        open_connections[0][0].connection_lost(ConnectionResetError())
        open_connections[1][0].data_received(b"GET / HTTP/1.1\r\n" + b"a" * (1 << 16))  # answered 431
        await asyncio.sleep(0.1)  # the others are answered 408
        assert all(transport.ended for _, transport in open_connections[1:])
        for connection, _ in open_connections[1:]:
            connection.connection_lost(None)
        other.connection_lost(None)
        assert (connection_class.places.total, connection_class.places.held) == (0, {})
        again = [connected(network.format(number))[1].ended for number in range(17)]
        assert again == 16 * [False] + [True]

    asyncio.run(main())
