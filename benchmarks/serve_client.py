"""Sends requests to a server when they are due, whether or not earlier ones are answered, and times the answers.

``python -m benchmarks.serve_client`` reads the arguments of :func:`send_all` from standard input and writes the answers
to standard output, both as JSON. It is a separate process, so that neither server nor benchmark slows it. ``python -m
benchmarks.serve_client echo TICK`` serves prepared events, to measure the client's own limit. Neither imports torch.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from adaponder.errors import EvaluationError, InputError
from benchmarks import child_environment, stop

KEY = "ADAPONDER_API_KEY"
PERCENTILES = ("p50", "p95", "p99")
_ADDRESS = re.compile(r"https?://(?:\[[0-9a-fA-F:]+\]|[\w.-]+):\d+")


@dataclass(frozen=True)
class ServerLoad:
    """Requests to a server: each has ``context`` random token ids below ``vocabulary`` and generates ``new`` tokens.

    The server's maximum is measured with ``streams`` requests at once. At each request rate, requests are sent for
    ``seconds``. A request that takes more than ``timeout`` seconds fails. ``settings`` are further fields of a
    request's body, such as ``{"adaponder": {"policy": "fixed:2"}}``.
    """

    model: str
    vocabulary: int
    context: int = 32
    new: int = 64
    settings: dict[str, Any] = field(default_factory=dict)
    streams: int = 64
    seconds: float = 10.0
    timeout: float = 120.0
    seed: int = 0
    url: str = ""
    key: str | None = None

    def bodies(self, count: int, *, part: int) -> list[dict[str, Any]]:
        """Returns the bodies of ``count`` streaming completions; each ``part`` has other random prompts."""
        common = {"model": self.model, "max_tokens": self.new, "stream": True, "temperature": 0}
        common |= {"stream_options": {"include_usage": True}} | self.settings
        draws = [random.Random(self.seed * 1_000_003 + part * 100_003 + index) for index in range(count)]
        prompts = ([draw.randrange(1, self.vocabulary) for _ in range(self.context)] for draw in draws)
        return [common | {"prompt": prompt} for prompt in prompts]

    def send(self, due: Sequence[float], *, part: int) -> list[Answer]:
        """Sends one request at each time in ``due`` (seconds from the start); returns the answers in this order."""
        return run_client(self.url, self.bodies(len(due), part=part), due, key=self.key, timeout=self.timeout)


def poisson_times(rate: float, seconds: float, *, seed: int) -> list[float]:
    """Returns random times in [0, ``seconds``) at which requests are due: ``rate`` per second, independent gaps."""
    draw, now, times = random.Random(seed), 0.0, []
    while (now := now + draw.expovariate(rate)) < seconds:
        times.append(now)
    return times


@dataclass
class Answer:
    """The answer to one request; ``due``, ``sent``, ``arrivals`` and ``ended`` are seconds since the load began.

    Attributes:
        status: the HTTP status; 0 without an answer.
        arrivals: the time and the number of tokens of each chunk of the stream.
        tokens, mean_depth: from the answer's ``usage``.
        error: why the answer is not complete, in one line.
        served_by: the header ``x-served-by`` (the server's process), if there is one.
    """

    due: float
    sent: float = 0.0
    status: int = 0
    arrivals: list[Sequence[Any]] = field(default_factory=list)
    tokens: int = 0
    mean_depth: float | None = None
    ended: float = 0.0
    error: str | None = None
    served_by: str | None = None

    @property
    def works(self) -> bool:
        return self.status == 200 and self.error is None

    def scaled(self) -> list[tuple[float, float]]:
        """Returns ``arrivals`` with counts scaled to sum to ``tokens``, because an event may hold several tokens."""
        counted = sum(count for _, count in self.arrivals)
        share = self.tokens / counted if counted and self.tokens else 1.0
        return [(when, count * share) for when, count in self.arrivals]

    def gaps(self, since: float = 0.0) -> list[float]:
        """Returns the seconds per token between arrivals after ``since``; tokens of a chunk share the gap before it."""
        gaps: list[float] = []
        for (before, _), (now, count) in pairwise(self.scaled()):
            if before >= since:
                gaps += [(now - before) / max(count, 1e-9)] * max(1, round(count))
        return gaps


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Returns the 50th, 95th and 99th percentile, by the nearest-rank method; ``None`` without values."""
    quantiles = np.percentile(values, (50, 95, 99), method="inverted_cdf").tolist() if values else [None] * 3
    return dict(zip(PERCENTILES, quantiles, strict=True))


def summary(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Summarises the answers of a load that lasted ``seconds``: tokens/s in its second half, latencies, mean depth, …

    The time to the first token counts from when the request was due, even if the client sent it late.
    """
    done = [answer for answer in answers if answer.works]
    within = sum(count for answer in done for when, count in answer.scaled() if seconds / 2 < when <= seconds)
    refused = sum(answer.status == 429 for answer in answers)  # the server's queue was full
    failed = (answer for answer in answers if not answer.works and answer.status != 429)
    failures = Counter(answer.error or f"status {answer.status}" for answer in failed)
    depths = [(answer.mean_depth, answer.tokens) for answer in done if answer.mean_depth is not None]
    weight = sum(tokens for _, tokens in depths)
    return {
        "requests": len(answers),
        "answered": len(done),
        "refused": refused,
        "failed": failures.total(),
        "failures": dict(failures),
        "tokens": sum(answer.tokens for answer in done),
        "tokens_per_second": within / (seconds / 2) if seconds else 0.0,
        "first_token": percentiles([answer.arrivals[0][0] - answer.due for answer in done if answer.arrivals]),
        "between_tokens": percentiles([gap for answer in done for gap in answer.gaps()]),
        "mean_depth": sum(depth * tokens for depth, tokens in depths) / weight if weight else None,
        "client_late": percentiles([answer.sent - answer.due for answer in answers])["p99"],
    }


def steady_rate(answers: Sequence[Answer]) -> float:
    """Returns tokens/s while all answers streamed: from the latest first token to the earliest last token."""
    arrivals = [answer.scaled() for answer in answers if answer.works and answer.arrivals]
    if not arrivals:
        return 0.0
    begin, end = max(times[0][0] for times in arrivals), min(times[-1][0] for times in arrivals)
    tokens = sum(count for times in arrivals for when, count in times if begin < when <= end)
    return tokens / (end - begin) if end > begin else 0.0


def run_client(
    url: str, bodies: Sequence[dict[str, Any]], due: Sequence[float], *, key: str | None, timeout: float
) -> list[Answer]:
    """Sends requests from a separate process and returns their answers."""
    plan = {"url": url, "bodies": list(bodies), "due": list(due), "key": key, "timeout": timeout}
    command = [sys.executable, "-m", "benchmarks.serve_client"]
    longest = (max(due) if due else 0.0) + timeout + 60.0
    pipes: dict[str, Any] = {"input": json.dumps(plan), "capture_output": True, "text": True, "timeout": longest}
    done = subprocess.run(command, check=False, env=child_environment(), **pipes)
    if done.returncode != 0:
        raise EvaluationError(f"the client of the load failed: {done.stderr.strip().splitlines()[-1:]}")
    return [Answer(**fields) for fields in json.loads(done.stdout)]


async def send_all(
    url: str, bodies: Sequence[dict[str, Any]], due: Sequence[float], *, key: str | None, timeout: float
) -> list[Answer]:
    """Sends each request when it is due; returns the answers in the order of the bodies."""
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=1024)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answers = [Answer(due=when) for when in due]
    async with httpx.AsyncClient(limits=limits, headers=headers, timeout=None, trust_env=False) as client:
        requests = [client.build_request("POST", f"{url.rstrip('/')}/v1/completions", json=body) for body in bodies]
        began, tasks = time.perf_counter(), []
        for request, answer in zip(requests, answers, strict=True):
            if (wait := began + answer.due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(_send(client, request, answer, began, timeout)))
        await asyncio.gather(*tasks)
    return answers


async def _send(client: Any, request: Any, answer: Answer, began: float, timeout: float) -> None:
    """Sends one request and fills in its answer; a request that takes more than ``timeout`` seconds has failed."""
    import httpx

    answer.sent = time.perf_counter() - began
    try:
        async with asyncio.timeout(timeout), aclosing(await client.send(request, stream=True)) as response:
            await _receive(response, answer, began)
    except TimeoutError:
        answer.error = f"no answer within {timeout:g} s"
    except (httpx.ConnectError, OSError) as problem:
        answer.error = f"no connection: {type(problem).__name__}"
    except (httpx.HTTPError, ValueError, LookupError, AttributeError, TypeError) as problem:
        answer.error = f"not a complete answer: {type(problem).__name__}: {problem}"[:200]
    answer.ended = time.perf_counter() - began


async def _receive(response: Any, answer: Answer, began: float) -> None:
    """Reads a streamed response to its end and records when its tokens arrive."""
    answer.status, answer.served_by, buffer = response.status_code, response.headers.get("x-served-by"), b""
    if response.status_code != 200:
        answer.error = f"status {response.status_code}: {(await response.aread())[:120].decode('utf-8', 'replace')}"
        return
    async for data in response.aiter_bytes():
        *events, buffer = (buffer + data).split(b"\n\n")
        tokens = sum(_tokens_of(json.loads(event[6:]), answer) for event in events if event.startswith(b"data: {"))
        if tokens:
            answer.arrivals.append((time.perf_counter() - began, tokens))
    if answer.error is None and not answer.tokens:
        answer.error = "the stream ended without usage"


def _tokens_of(chunk: dict[str, Any], answer: Answer) -> int:
    """Returns the number of tokens in a chunk of a stream; stores its usage or error in ``answer``."""
    if "error" in chunk:
        answer.error = str(chunk["error"])[:200]
        return 0
    if usage := chunk.get("usage"):
        answer.tokens = usage["completion_tokens"]
        answer.mean_depth = (usage.get("adaponder") or {}).get("mean_depth")
    details = [(option, (option.get("adaponder") or {}).get("tokens")) for option in chunk.get("choices", ())]
    return sum(len(tokens) if tokens else bool(option.get("text")) for option, tokens in details)


def get_json(url: str, path: str, key: str | None = None, *, patience: float = 0.0) -> Any:
    """Returns the JSON at a path; tries again for ``patience`` seconds while the status is 503 (not ready)."""
    import httpx

    address, until = f"{url.rstrip('/')}{path}", time.monotonic() + patience
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        while True:
            response = httpx.get(address, headers=headers, timeout=30.0, trust_env=False)
            if response.status_code != 503 or time.monotonic() >= until:
                break
            time.sleep(0.05)
    except (httpx.HTTPError, OSError) as problem:
        raise EvaluationError(f"no server answers at {url} ({type(problem).__name__})") from None
    except httpx.InvalidURL:
        raise InputError(f"--url {url} must be http://HOST:PORT") from None
    if response.status_code != 200:
        cure = f"; give its key in {KEY}" if response.status_code in (401, 403) else ""
        raise EvaluationError(f"{url}{path} returned status {response.status_code}{cure}")
    try:
        return response.json()
    except ValueError:
        raise EvaluationError(f"{url}{path} is not JSON") from None


@dataclass
class ServerProcess:
    """A running server: address, process, and the file with its output."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> list[str]:
        """Returns the last lines that the server printed."""
        return self.log.read_text(errors="replace").splitlines()[-40:]

    @property
    def usage(self) -> Any:
        """Returns psutil's view of the process."""
        import psutil  # here, since benchmarks of training run without it

        return psutil.Process(self.process.pid)

    def rss(self) -> int:
        """Returns the resident memory of the process in bytes."""
        return self.usage.memory_info().rss


@contextmanager
def started(
    arguments: Sequence[str], *, patience: float = 120.0, environment: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """Context manager that runs ``python ARGUMENTS``, a server that must print its address in ``patience`` seconds.

    On exit the server gets SIGTERM, and is killed if it still runs after 30 seconds.
    """
    with tempfile.NamedTemporaryFile() as log:
        command, variables = [sys.executable, *arguments], child_environment() | dict(environment or {})
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables)
        server, until = ServerProcess("", process, Path(log.name)), time.monotonic() + patience
        try:
            while (match := _ADDRESS.search("\n".join(server.output))) is None:
                if process.poll() is not None or time.monotonic() > until:
                    problem = "ended before it listened" if process.poll() is not None else "printed no address in time"
                    raise EvaluationError(f"the server {problem}: {' / '.join(server.output[-5:])}")
                time.sleep(0.02)
            server.url = match.group()
            yield server
        finally:
            stop(process, patience=30.0)


async def echo(tick: float) -> None:
    """Serves ``max_tokens`` prepared events per request, one every ``tick`` seconds, until the process ends."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    common = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1_700_000_000, "model": "echo"}

    def event(data: dict[str, Any]) -> bytes:
        line = b"data: " + json.dumps(common | data).encode() + b"\n\n"
        return b"%x\r\n%s\r\n" % (len(line), line)

    token = event({"choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": None}]})

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(request.partition(b"content-length:")[2].split(b"\r\n")[0])
                tokens = json.loads(await reader.readexactly(length))["max_tokens"]
                writer.write(head)
                for _ in range(tokens):
                    writer.write(token)
                    await asyncio.sleep(tick)
                usage = {"prompt_tokens": 1, "completion_tokens": tokens, "adaponder": {"mean_depth": 2.5}}
                writer.write(event({"choices": [], "usage": usage}) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    """Runs :func:`echo`, or :func:`send_all` with arguments from standard input; writes the answers as JSON."""
    if sys.argv[1:2] == ["echo"]:
        asyncio.run(echo(float(sys.argv[2])))
        return
    try:
        from uvloop import run
    except ImportError:
        from asyncio import run
    json.dump([asdict(answer) for answer in run(send_all(**json.load(sys.stdin)))], sys.stdout)


if __name__ == "__main__":
    main()
