"""``adaponder serve``: limits on headers, one line for what is wrong, and an orderly end at SIGTERM."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

from adaponder import cli
from adaponder.commands import serve
from adaponder.errors import CheckpointError, InputError
from adaponder.serving.server import Server
from adaponder.serving.settings import Limits, Settings
from serving_support import connect, serving
from support import tiny
from word_support import small_tokenizer

SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "little"
    tiny().save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


class Process:
    """A server in a process of its own."""

    def __init__(self, checkpoint: Path, *options: str, **environment: str):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "adaponder", "serve", str(checkpoint), "--port", "0", "--lanes", "2", *options],
            env={"PYTHONPATH": str(SOURCE), **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self.first = self.process.stdout.readline()
        found = re.search(r"http://[\w.:]+", self.first)
        assert found, self.first + self.process.stdout.read()
        self.address = found.group()


def test_sigterm_lets_what_is_under_way_finish_and_ends_with_0(checkpoint):
    server = Process(checkpoint, ADAPONDER_API_KEY="a-key-of-this-environment")
    port = int(server.address.rpartition(":")[2])
    key = {"authorization": "Bearer a-key-of-this-environment"}
    try:
        with httpx.Client(base_url=server.address, timeout=30, verify=False) as client:
            assert client.get("/v1/models").status_code == 401
            while client.get("/ready", headers=key).status_code == 503:
                time.sleep(0.02)
            listening = Path(f"/proc/{server.process.pid}/net/tcp").read_text()
            assert f"0100007F:{port:04X} 00000000:0000 0A" in listening  # on this machine only
            body = {"model": "little", "prompt": "ab", "max_tokens": 60, "stream": True, "n": 2}
            body |= {"adaponder": {"gates": True, "iteration_top": 20}}
            with client.stream("POST", "/v1/completions", json=body, headers=key) as response:
                parts = response.iter_text()
                text = next(parts)
                server.process.send_signal(signal.SIGTERM)
                text += "".join(parts)
        assert text.endswith("data: [DONE]\n\n")
        assert text.count('"finish_reason": "length"') == 2
        assert server.process.wait(20) == 0
        with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.1", port)):
            pass
    finally:
        server.process.kill()
        output = server.process.communicate()[0]
    assert "Traceback" not in output
    assert "API key: needed" in output


def test_what_is_not_done_when_the_drain_is_over_is_told_so(checkpoint):
    server = Process(checkpoint, "--drain", "0.1")
    try:
        with httpx.Client(base_url=server.address, timeout=30, verify=False) as client:
            while client.get("/ready").status_code == 503:
                time.sleep(0.02)
            body = {"model": "little", "prompt": ["ab"] * 8, "max_tokens": 60, "stream": True, "n": 16}
            with client.stream("POST", "/v1/completions", json=body) as response:
                parts = response.iter_text()
                text = next(parts)
                server.process.send_signal(signal.SIGTERM)
                with suppress(httpx.RemoteProtocolError):  # it was cut: then it has not been told why
                    text += "".join(parts)
        assert '"message":"engine: the server is stopping"' in text.rstrip().rpartition("data: ")[2]
        assert server.process.wait(20) == 0
    finally:
        server.process.kill()
        output = server.process.communicate()[0]
    assert "Traceback" not in output
    assert "iterations a token\n" in output  # no line is broken in two on its way to a file


def test_a_second_signal_ends_at_once(monkeypatch):
    ended = []
    monkeypatch.setattr("adaponder.serving.server.os._exit", ended.append)
    worker = SimpleNamespace(state="ready")
    server = Server(uvicorn.Config(lambda: None), worker, lambda: None)
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit
    assert worker.state == "draining"
    assert not ended
    server.handle_exit(signal.SIGTERM, None)
    assert ended == [128 + signal.SIGTERM]


def refusal(*arguments: str, code: int = 2) -> str:
    result = CliRunner().invoke(cli.app, ["serve", *arguments])
    problem = result.exception
    assert isinstance(problem, InputError) or result.exit_code == code
    return str(problem) if isinstance(problem, InputError) else result.output


def test_what_is_wrong_is_one_line(checkpoint, tmp_path, monkeypatch):
    monkeypatch.delenv("ADAPONDER_API_KEY", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        said = refusal(str(checkpoint), "--port", str(taken.getsockname()[1]))
        assert said.startswith("--port ")
        assert "in use" in said
        assert "\n" not in said
    assert "--host" in refusal(str(checkpoint), "--host", "no.such.host.invalid", "--no-auth")
    for host in ("192.0.2.1", "a..b", "a" * 80):  # an address of nobody's, and names that cannot be any
        said = refusal(str(checkpoint), "--host", host, "--no-auth")
        assert said.startswith(f"--host {host}: ")
        assert "no such address" in said
    assert "--no-auth" in refusal(str(checkpoint), "--host", "0.0.0.0")
    assert "65535" in refusal(str(checkpoint), "--port", "70000")
    assert "--name" in refusal(str(checkpoint), "--name", "a/b", "--port", "0")
    assert "--replicas" in refusal(str(checkpoint), "--replicas", "2")
    keys = tmp_path / "keys"
    assert "is missing" in refusal(str(checkpoint), "--api-key-file", str(keys))
    keys.write_text("# nothing\n")
    assert "no key" in refusal(str(checkpoint), "--api-key-file", str(keys))
    keys.write_text("short\n")
    assert "at least 16" in refusal(str(checkpoint), "--api-key-file", str(keys))
    keys.write_text("a-long-enough-key # mine\n\na-second-longer-key\n")
    assert "--no-auth" in refusal(str(checkpoint), "--api-key-file", str(keys), "--no-auth")
    access = serve.access_of("0.0.0.0", serve.keys_of(keys), allow_host=("A.Test",))
    assert len(access.keys) == 2
    assert access.key_of("a-long-enough-key") is not None
    assert access.knows_host("a.test")
    assert not access.knows_host("b.test")


@pytest.mark.parametrize(
    ("path", "closed"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)]
)
def test_only_this_machine_s_addresses_are_its_own(path, closed):
    assert serve.is_own(path) is closed


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_a_checkpoint_that_names_code_is_refused_whatever_is_set(tmp_path, where, monkeypatch):
    """CVE-2026-22807 and CVE-2026-27893: no flag, file or answer makes the server run a checkpoint's code."""
    folder = tmp_path / "hostile"
    tiny().save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    mark = tmp_path / "mark"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Evil: pass\n")
    content = json.loads((folder / where).read_text())
    content |= {"auto_map": {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}}
    content |= {"trust_remote_code": True}
    (folder / where).write_text(json.dumps(content))
    (folder / "manifest.json").unlink(missing_ok=True)
    monkeypatch.setenv("HF_HUB_TRUST_REMOTE_CODE", "1")
    monkeypatch.setenv("TRUST_REMOTE_CODE", "1")
    with pytest.raises((CheckpointError, InputError)):
        serve.open_worker(serve.Opening(str(folder)))
    assert not mark.exists()
    for room in ("serving", "checkpoints", "conversion", "modeling"):
        for path in (SOURCE / "adaponder" / room).rglob("*.py"):
            keywords = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.keyword))
            given = [ast.unparse(node.value) for node in keywords if node.arg == "trust_remote_code"]
            assert set(given) <= {"False"}, path


def test_nothing_is_unpickled_and_nothing_else_listens():
    """CVE-2026-3059 and CVE-2026-3060: the room of the server knows no pickle, and one socket."""
    text = "".join(
        path.read_text() for path in (SOURCE / "adaponder" / "serving").glob("*.py") if path.name != "ray.py"
    )
    assert not re.search(r"\b(pickle|marshal|dill|cloudpickle|torch\.load|zmq|eval\(|exec\()", text)
    assert text.count("socket.socket(") == 1


def test_the_name_is_the_run_s():
    for path, name in (("runs/demo", "demo"), ("runs/demo/final", "demo"), ("a/b c!", "b-c"), ("org/model", "model")):
        assert serve.default_name(path) == name
    for path in ("runs/demo/checkpoints/step-00001000",):
        assert serve.default_name(path) == "step-00001000"


def test_help_teaches():
    shown = CliRunner().invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    for word in ("--api-key-file", "--no-auth", "--allow-host", "--lanes", "curl", "/v1"):
        assert word in shown


@pytest.fixture(scope="module")
def server():
    limits = Limits(body_seconds=0.5, header_seconds=0.5)
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


def test_a_huge_header_is_refused_while_it_comes(server):
    """CVE-2025-48956."""
    line = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    whole = talk(server, line + b"X-Long: " + b"a" * (1 << 16) + b"\r\n\r\n")
    assert whole.startswith(b"HTTP/1.1 431 ")
    endless = talk(server, line + b"X-Long: ", *[b"a" * (1 << 16)] * 64)
    assert endless == b"" or endless.startswith(b"HTTP/1.1 431 ")  # or reset, as it goes on sending
    many = talk(server, line + b"".join(b"X-%d: 1\r\n" % n for n in range(5000)) + b"\r\n")
    assert many.startswith(b"HTTP/1.1 431 ")
    assert talk(server, b"GET /" + b"a" * (1 << 16) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(
        b"HTTP/1.1 431 "
    )
    assert server.get("/health").status_code == 200


def test_slow_writers_are_not_waited_for(server):
    began = time.monotonic()
    assert talk(server, b"GET /health HTTP/1.1\r\nHost: loc").startswith(b"HTTP/1.1 408 ")
    assert talk(server).startswith(b"HTTP/1.1 408 ")  # a connection that says nothing
    head = b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n"
    assert talk(server, head + b'{"prompt"').startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - began < 8
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x00" * 1000,
        b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /score HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nBad Header: x\r\n\r\n",
    ],
    ids=range(8),
)
def test_malformed_bytes_are_answered_and_harm_nobody(server, sent):
    answer = talk(server, sent)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert server.get("/health").status_code == 200
