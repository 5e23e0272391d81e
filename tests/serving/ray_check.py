"""Ray Serve with its real proxy, routing and processes: throughput by replicas, a killed replica, keys and limits.

``python tests/serving/ray_check.py`` runs it; ``--record`` writes ``benchmarks/records/serve-ray-cpu.json``. The
replicas' engines sleep (``benchmarks.stand_in``), so two of them can be twice as fast on any machine whose
proxy keeps up; the last part runs a real, tiny model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from soak import same_as_alone

from adaponder.serving import ray as ours
from adaponder.serving.settings import Access, Key, Settings
from benchmarks.serve_client import Answer, ServerLoad, run_client, summary
from soak_support import call, get, ready, run_parts, serving, stream, wait_for

RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "records" / "serve-ray-cpu.json"
KEY = "a-key-of-this-check-0123456789"
LANES, TICK = 16, 0.1
PORT = 8917


class NamesItsProcess:
    """Adds the number of its process to each answer of the app."""

    def __init__(self, app: Any) -> None:
        self.app, self.worker = app, app.worker

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_with_process(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-served-by", str(os.getpid()).encode())]
            await send(message)

        await self.app(scope, receive, send_with_process if scope["type"] == "http" else send)


def stand_in(lanes: int, tick: float) -> Any:
    """Returns the app with a key over an engine that sleeps."""
    from adaponder.serving.routes import make_app
    from benchmarks.stand_in import stand_in_worker

    settings = Settings(lanes=lanes, access=Access(keys=(Key.of(KEY),)))
    return NamesItsProcess(make_app(stand_in_worker(lanes, tick), settings))


def deployed(replicas: int) -> str:
    """Returns the address of so many replicas, on a cluster that is started once; those that run already stay."""
    cluster, settings = ours.Cluster(port=PORT, replicas=replicas, cpus=0.5), Settings(lanes=LANES)
    if "ray" not in sys.modules:
        ours.connect(cluster, settings)
    return ours.deploy(lambda: stand_in(LANES, TICK), cluster, settings)


def load_of(new: int, **more: Any) -> ServerLoad:
    return ServerLoad("stand-in", 700, context=4, new=new, settings={"adaponder": {"ignore_eos": True}}, **more)


def middle_rate(answers: list[Answer]) -> float:
    """Returns the tokens per second between a sixth and four sixths of all tokens: every lane is busy."""
    came = sorted((when, count) for answer in answers for when, count in answer.scaled())
    total, so_far, marks = sum(count for _, count in came), 0.0, []
    for when, count in came:
        so_far += count
        if total / 6 <= so_far <= 4 * total / 6:
            marks.append((when, so_far))
    return (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0])


def replicas(settings: argparse.Namespace) -> dict[str, Any]:
    """Measures tokens/s at saturation of one replica and of several."""
    rows = []
    for count in settings.replicas:
        url = deployed(count)
        warm = load_of(8, streams=LANES * count)
        run_client(url, warm.bodies(warm.streams, part=0), [0.0] * warm.streams, key=KEY, timeout=60)
        load = load_of(25, seed=settings.seed)
        # A quarter more than the replicas can do, evenly, for fourteen seconds.
        rate = 1.25 * count * LANES / TICK / load.new
        requests = round(14 * rate)
        due = [number / rate for number in range(requests)]
        answers = run_client(url, load.bodies(requests, part=count), due, key=KEY, timeout=120)
        found = summary(answers, max(answer.ended for answer in answers))
        assert found["answered"] == requests, found["failures"]
        by = Counter(answer.served_by for answer in answers)
        assert len(by) == count, f"{len(by)} of {count} replicas answered"
        rows.append({"replicas": count, "tokens_per_second": middle_rate(answers), "requests": requests})
        rows[-1]["requests_by_replica"] = sorted(by.values())
        rows[-1] |= {"first_token": found["first_token"], "between_tokens": found["between_tokens"]}
        rows[-1]["engine_tokens_per_second"] = count * LANES / TICK
        print(f"  {count} replicas: {rows[-1]['tokens_per_second']:,.0f} tokens/s, {sorted(by.values())}", flush=True)
    single, double = rows[0]["tokens_per_second"], rows[1]["tokens_per_second"]
    assert double >= 1.8 * single, f"two replicas make {double / single:.2f} times the tokens/s of one"
    return {"lanes": LANES, "tick_seconds": TICK, "rows": rows, "two_over_one": double / single}


def killed(settings: argparse.Namespace) -> dict[str, Any]:
    """Kills a replica while it streams: only streams that have begun are lost, and another replica takes its place."""
    url = deployed(2)
    load = load_of(150, seed=settings.seed)
    victim: list[str] = []

    def kill() -> None:
        requests = 0
        while not requests:  # the client has started
            _, headers, body = get(url, "/ready", key=KEY)
            requests = json.loads(body)["requests"]
        victim.append(headers["x-served-by"])
        time.sleep(3.0)
        os.kill(int(victim[0]), signal.SIGKILL)

    timer = threading.Thread(target=kill)
    timer.start()
    # Twenty long streams at once, and from then on a short request every tenth of a second.
    long = [(0.0, body) for body in load.bodies(20, part=0)]
    short = [(0.1 * number, body) for number, body in enumerate(load_of(3).bodies(150, part=1))]
    plan = sorted([*long, *short], key=lambda pair: pair[0])
    answers = run_client(url, [body for _, body in plan], [when for when, _ in plan], key=KEY, timeout=120)
    timer.join()
    lost = [answer for answer in answers if not answer.works]
    begun_there = [answer for answer in lost if answer.served_by == victim[0]]
    # A request that the replica had not begun to answer is answered by another; nothing sent later may fail.
    assert begun_there, "nothing was under way in the killed replica"
    assert lost == begun_there, [vars(answer) for answer in lost]
    late = [answer for answer in answers if answer.sent > 3.5]

    def two_again() -> bool:
        now = {call(url, "GET", "/v1/models", key=KEY)[1].get("x-served-by") for _ in range(8)}
        return victim[0] not in now and len(now) == 2

    back = wait_for(two_again, "a replica has taken the place of the killed one", seconds=120)
    return {
        "requests": len(answers),
        "lost_in_flight": len(lost),
        "of_which_had_begun": len(begun_there),
        "requests_after_the_kill": len(late),
        "failed_after_the_kill": 0,
        "seconds_until_replaced": round(max(answer.ended for answer in answers) - 3.0 + back, 1),
    }


def left(settings: argparse.Namespace) -> dict[str, Any]:
    """Disconnects clients of the proxy, one with a header by which Ray would finish its request."""
    url = deployed(2)
    body = load_of(2000).bodies(1, part=1)[0] | {"max_tokens": 2000}

    async def leave() -> None:
        await asyncio.gather(*(stream(url, body, key=KEY, leave_after=1.0) for _ in range(12)))

    asyncio.run(leave())
    host = url.partition("//")[2]
    with socket.create_connection(("127.0.0.1", PORT)) as raw:
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n"
        head += "Content-Type: application/json\r\nX-Request-Disconnect-Disabled: ?1\r\n"
        raw.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        raw.recv(1000)
    seconds = wait_for(lambda: not any(ready(url, key=KEY)["requests"] for _ in range(12)), "all are cancelled")
    return {"clients": 13, "cancelled_after_seconds": round(seconds, 2)}


def security(settings: argparse.Namespace) -> dict[str, Any]:
    """Checks keys, hosts and limits behind the proxy, and that nothing else listens."""
    url = deployed(1)
    assert get(url, "/v1/models")[0] == 401
    assert get(url, "/v1/models", key="wrong-key-of-this-check-012345")[0] == 401
    assert get(url, "/v1/models", key=KEY)[0] == 200
    assert get(url, "/health")[0] == 200
    answers = {
        "another host": _raw(b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n"),
        "headers of 100 kB": _raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n"),
        "endless headers": _raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: bbbbbbbb\r\n" * 20_000),
        "a body of 2 MB": call(url, "POST", "/v1/completions", b"[" * (2 << 20), key=KEY)[0],
        "deep JSON": call(url, "POST", "/v1/completions", b"[" * 100_000, key=KEY)[0],
        "n=1000000": call(url, "POST", "/v1/completions", load_of(5).bodies(1, part=0)[0] | {"n": 10**6}, key=KEY)[0],
    }
    assert 400 <= answers["another host"] < 500
    assert answers["headers of 100 kB"] == answers["endless headers"] == 431, answers
    assert answers["a body of 2 MB"] == 413
    assert answers["deep JSON"] == answers["n=1000000"] == 400
    others = {address[4][0] for address in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in others - {"127.0.0.1"}:
        with socket.socket() as probe:
            probe.settimeout(2)
            assert probe.connect_ex((address, PORT)) != 0, f"the proxy listens on {address}"
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", 8265)) != 0, "Ray's dashboard listens"
    assert os.environ.get("RAY_AUTH_MODE") == "token"
    return {"refused": answers, "bound_to": "127.0.0.1", "dashboard": False}


def _raw(data: bytes) -> int:
    """Returns the status of the answer to these bytes, or 0 if there is none."""
    with socket.create_connection(("127.0.0.1", PORT), timeout=20) as raw:
        with suppress(OSError):  # it may be refused before all has been sent
            raw.sendall(data)
        try:
            answer = raw.recv(4096)
        except OSError:
            return 0
    return int(answer.split(b" ")[1]) if answer.startswith(b"HTTP/") else 0


def command(settings: argparse.Namespace) -> dict[str, Any]:
    """Runs ``adaponder serve CKPT --ray --replicas 2``: streams equal solo runs, SIGTERM ends every process."""
    ours.stop(started=True)
    before = set(_rays())
    with serving("--ray", "--replicas", "2", key=KEY) as server:
        found = same_as_alone(server.url, 24, settings.seed, key=KEY)
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(90)
    assert code == 0, server.output
    wait_for(lambda: not set(_rays()) - before, "no process of Ray is left", seconds=30)
    return found | {"exit_code": code, "processes_left": 0}


def _rays() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if b"raylet" in words or b"gcs_server" in words or words.startswith(b"ray::"):
            found.append(int(path.parent.name))
    return found


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2], help="the first two are compared")


def main() -> int:
    parts = [security, replicas, left, killed, command]
    began = time.monotonic()
    try:
        return run_parts(
            {part.__name__: part for part in parts}, RECORD, options, __doc__ or "", packages=("ray", "uvicorn")
        )
    finally:
        ours.stop(started=True)
        print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
