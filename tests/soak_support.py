"""What the checks of a running server share: a tiny checkpoint, a server for it, clients, and what a solo run says."""

import argparse
import asyncio
import copy
import datetime
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import torch

from adaponder.inference import Engine, Request
from benchmarks.harness import commit_of, device_name, versions
from benchmarks.serve_client import ServerProcess, started
from harness_support import VOCABULARY, reader, words

NAME = "tiny"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PACKAGES = ("fastapi", "starlette", "uvicorn", "httptools", "uvloop", "pydantic")


def write_checkpoint(folder: Path) -> Path:
    """Saves a float64 model whose gates disagree, with its tokenizer: its tokens do not depend on the batch."""
    model = reader()
    model.save_pretrained(folder)
    tokenizer = copy.deepcopy(words())
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def serving(*arguments: str, folder: Path | None = None, key: str | None = None) -> Iterator[ServerProcess]:
    """Runs ``adaponder serve`` on a free port, by default with the tiny checkpoint."""
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            folder = write_checkpoint(Path(temporary))
            with serving(*arguments, folder=folder, key=key) as server:
                yield server
        return
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | ({} if key is None else {"ADAPONDER_API_KEY": key})
    command = ["-m", "adaponder", "serve", str(folder), "--port", "0", "--name", NAME, *arguments]
    with started(command, environment=environment) as server:
        wait_for(lambda: get(server.url, "/ready", key=key)[0] == 200, "the server is ready", seconds=60)
        yield server


@contextmanager
def steady_memory(server: ServerProcess, mebibytes: int) -> Iterator[dict[str, int]]:
    """Yields a record of the server's memory, which may grow by so much within the block."""
    sizes = {"rss_before": server.rss()}
    yield sizes
    sizes["rss_after"] = server.rss()
    assert sizes["rss_after"] < sizes["rss_before"] + (mebibytes << 20), sizes


def wait_for(condition: Callable[[], bool], what: str, *, seconds: float = 20.0) -> float:
    """Returns the seconds until the condition holds; fails when it does not in time."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"after {seconds:g} s it is not so that {what}"
        time.sleep(0.02)
    return time.monotonic() - began


def call(
    url: str, method: str, path: str, body: Any = None, *, key: str | None = None, timeout: float = 60.0
) -> tuple[int, dict[str, str], bytes]:
    """Sends a request; returns status, headers and body. ``body`` is an object for JSON, or bytes."""
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    answer = httpx.request(method, url + path, content=data, headers=headers, timeout=timeout, trust_env=False)
    return answer.status_code, dict(answer.headers), answer.content


def get(url: str, path: str, *, key: str | None = None) -> tuple[int, dict[str, str], bytes]:
    return call(url, "GET", path, key=key)


def ready(url: str, *, key: str | None = None) -> dict[str, Any]:
    status, _, body = get(url, "/ready", key=key)
    assert status == 200, (status, body)
    return json.loads(body)


def at_rest(url: str, *, key: str | None = None) -> bool:
    """Returns whether no request runs or waits and no row is in use."""
    counts = ready(url, key=key)
    return not any(counts[name] for name in ("lanes_in_use", "waiting", "rows_in_use", "requests"))


def draw_body(draw: random.Random) -> dict[str, Any]:
    """Draws a streamed completion with any kind of sampling and depth."""
    new = draw.randint(4, 24)
    # Shorter than a block that the engine keeps for others: once all is done no row is in use.
    prompt = [draw.randrange(1, VOCABULARY) for _ in range(draw.randint(1, 15))]
    extension: dict[str, Any] = {"depth": True, "ignore_eos": draw.random() < 0.7}
    kind = draw.choice(["own", "own", "tau", "fixed", "iterations", "random"])
    if kind == "tau":
        extension["tau"] = draw.choice([0.2, 0.5, 0.8])
    elif kind == "fixed":
        extension["policy"] = f"fixed:{draw.randint(1, 3)}"
    elif kind == "iterations":
        extension["max_iterations"] = draw.randint(1, 3)
    elif kind == "random":
        extension["policy"] = "random:0.5"
    body = {"model": NAME, "prompt": prompt, "max_tokens": new, "stream": True, "seed": draw.randrange(2**31)}
    body |= draw.choice([{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}])
    if draw.random() < 0.2:
        body |= {"presence_penalty": 0.5, "frequency_penalty": 0.3}
    if draw.random() < 0.1:
        body |= {"logit_bias": {str(draw.randrange(VOCABULARY)): 5}}
    return body | {"adaponder": extension, "stream_options": {"include_usage": True}}


def solo(engine: Engine, body: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Returns token ids and depths of an engine that runs this body alone."""
    from adaponder.policies import parse_policy

    extension = body["adaponder"]
    policy = extension.get("policy")
    same = ("prompt", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed")
    request = Request(
        **{name: body[name] for name in same if name in body},
        max_new_tokens=body["max_tokens"],
        logit_bias={int(token): bias for token, bias in body.get("logit_bias", {}).items()},
        policy=None if policy is None else parse_policy(policy),
        tau=extension.get("tau"),
        max_iterations=extension.get("max_iterations"),
        ignore_eos=extension["ignore_eos"],
    )
    completion = engine.generate([request])[0][0]
    return completion.ids, [token.depth for token in completion.tokens]


class StreamedAnswer:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.depths: list[int] = []
        self.status = 0
        self.usage: dict[str, Any] = {}
        self.error: str | None = None
        self.done = False

    def take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            chunk = json.loads(line[6:])
            if "error" in chunk:
                self.error = json.dumps(chunk["error"])
                return
            self.usage = chunk.get("usage") or self.usage
            for choice in chunk["choices"]:
                for token in (choice.get("adaponder") or {}).get("tokens", ()):
                    self.ids.append(token["id"])
                    self.depths.append(token["depth"])


async def stream(url: str, body: dict, *, key: str | None = None, leave_after: float | None = None) -> StreamedAnswer:
    """Asks for a stream and reads it to its end, or hangs up ``leave_after`` seconds after asking."""
    answer, headers = StreamedAnswer(), {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(timeout=None, trust_env=False, verify=False) as client:  # there is no TLS to verify
        asked = client.stream("POST", f"{url}/v1/completions", json=body, headers=headers)
        with suppress(TimeoutError):
            async with asyncio.timeout(leave_after), asked as response:
                answer.status = response.status_code
                if "text/event-stream" not in response.headers["content-type"]:
                    answer.error = (await response.aread()).decode(errors="replace")
                async for line in response.aiter_lines():
                    answer.take(line)
    return answer


def run_parts(
    parts: dict[str, Callable[[argparse.Namespace], dict[str, Any]]],
    record: Path,
    options: Callable[[argparse.ArgumentParser], Any],
    about: str,
    packages: Sequence[str] = PACKAGES,
) -> int:
    """Runs the parts of a long check as its command line asks; prints their results and records them."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--record", action="store_true", help=f"write {record.name}")
    parser.add_argument("--seed", type=int, default=0)
    options(parser)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, part in parts.items():
        began = time.monotonic()
        print(f"{name} …", flush=True)
        found[name] = part(settings) | {"seconds": round(time.monotonic() - began, 1)}
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    if settings.record:
        from importlib.metadata import version

        head = {
            "date": datetime.date.today().isoformat(),
            "commit": commit_of(None, required=True),
            "hardware": device_name(torch.device("cpu")),
            "versions": versions() | {name: version(name) for name in packages},
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "seed": settings.seed,
        }
        record.write_text(json.dumps(head | {"parts": found}, indent=1) + "\n")
        print(f"the record is {record.name}")
    return 0
