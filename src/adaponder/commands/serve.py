"""adaponder serve: a checkpoint behind OpenAI's routes, and a page that shows depth."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from adaponder.commands import shared
from adaponder.commands.shared import opt
from adaponder.errors import InputError
from adaponder.terminal import console, line

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from adaponder.serving.settings import Access, Key, Settings
    from adaponder.serving.worker import Worker

VARIABLE = "ADAPONDER_API_KEY"
_ENGINE, _LIMITS, _RAY = "Engine", "Limits", "Ray"


def serve(
    checkpoint: shared.Checkpoint,
    *,
    host: Annotated[
        str, opt("Where to listen; any but this machine's own needs a key or --no-auth.", "ADDRESS")
    ] = "127.0.0.1",
    port: Annotated[int, opt("0: any that is free.", "N", min=0, max=65535)] = 8000,
    name: Annotated[
        str | None, opt("What requests call the model; default: the checkpoint's own name.", "NAME")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        opt(
            "API keys, one per line (# begins a comment); or the variable ADAPONDER_API_KEY. Clients send "
            "Authorization: Bearer KEY; the page asks for it.",
            "FILE",
        ),
    ] = None,
    no_auth: Annotated[bool, opt("Listen elsewhere than on this machine without any key.", flag="--no-auth")] = False,
    allow_host: Annotated[
        list[str] | None, opt("A name that clients may call this server by; may be repeated.", "NAME")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, opt("A page elsewhere that may call this server; may be repeated.", "URL")
    ] = None,
    max_waiting: Annotated[
        int, opt("Completions that may wait for a lane; beyond it, 429.", "N", min=0, panel=_LIMITS)
    ] = 512,
    max_tokens: Annotated[
        int | None, opt("Tokens of a completion; default: as far as the positions reach.", "N", min=1, panel=_LIMITS)
    ] = None,
    max_n: Annotated[int, opt("Completions of one prompt.", "N", min=1, max=128, panel=_LIMITS)] = 16,
    max_prompts: Annotated[int, opt("Prompts of one request.", "N", min=1, max=1024, panel=_LIMITS)] = 64,
    max_body: Annotated[int, opt("Longest body of a request.", "BYTES", min=1024, panel=_LIMITS)] = 1 << 20,
    stall: Annotated[
        float,
        opt(
            "Cut off a client that reads nothing for this long.",
            "SECONDS",
            check=shared.above_zero(86400),
            panel=_LIMITS,
        ),
    ] = 30.0,
    drain: Annotated[
        float,
        opt(
            "At the end, wait this long for requests under way.",
            "SECONDS",
            check=shared.above_zero(86400),
            panel=_LIMITS,
        ),
    ] = 30.0,
    lanes: Annotated[int, opt("Sequences computed at a time.", "N", min=1, max=4096, panel=_ENGINE)] = 64,
    tokens: Annotated[
        int | None,
        opt("Longest sequence; default: as far as the backbone's positions reach.", "N", min=2, panel=_ENGINE),
    ] = None,
    rows: Annotated[
        int | None,
        opt("Rows of keys and values; default: what memory allows, at most what is used.", "N", min=64, panel=_ENGINE),
    ] = None,
    drafts: Annotated[
        int | None, opt("Tokens begun before it is certain that they follow; see generate.", "N", min=0, panel=_ENGINE)
    ] = None,
    threads: Annotated[
        int | None, opt("Threads of a computation on the CPU; default: torch's.", "N", min=1, max=1024, panel=_ENGINE)
    ] = None,
    ray: Annotated[bool, opt("Run on Ray Serve (extra scale), --replicas times.", flag="--ray", panel=_RAY)] = False,
    replicas: Annotated[int, opt("Servers side by side.", "N", min=1, max=10000, panel=_RAY)] = 1,
    max_replicas: Annotated[
        int | None, opt("Grow to this many servers under load.", "N", min=1, max=10000, panel=_RAY)
    ] = None,
    ray_address: Annotated[str | None, opt("Of a running cluster; default: a new one.", "ADDRESS", panel=_RAY)] = None,
    weights: shared.Weights = None,
    tokenizer: shared.Tokenizer = None,
    device: shared.Device = "cpu",
    dtype: shared.Dtype = "auto",
) -> None:
    """Serve a checkpoint: OpenAI's routes at /v1, and at / a page that shows where it reads more often.

    Any OpenAI client works. What only this server has stands under [bold]adaponder[/] in requests and answers.

    [dim]adaponder serve runs/demo[/]

    [dim]curl localhost:8000/v1/completions -H "Content-Type: application/json" -d '{"model": "demo", "prompt":
    "import ", "adaponder": {"depth": true}}'[/]

    [dim]adaponder serve runs/demo --host 0.0.0.0 --api-key-file keys.txt --allow-host models.example.org[/]
    """
    try:
        import fastapi  # noqa: F401  (only whether it is there)
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as problem:
        raise InputError(f"serve needs {problem.name}: pip install 'adaponder[serve]'") from None
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", name):
        raise InputError(f"--name {name!r} must consist of letters, digits, dots, colons, dashes and underscores")
    if not ray:
        shared.refuse(
            "one server: add --ray", replicas=replicas > 1, max_replicas=max_replicas, ray_address=ray_address
        )
    from adaponder.serving.server import listen
    from adaponder.serving.settings import Limits, Settings

    limits = Limits(
        waiting=max_waiting,
        max_tokens=max_tokens,
        n=max_n,
        best_of=max_n,
        prompts=max_prompts,
        body_bytes=max_body,
        stall_seconds=stall,
        drain_seconds=drain,
    )
    access = access_of(host, keys_of(api_key_file), no_auth, allow_host or (), allow_origin or ())
    settings = Settings(lanes=lanes, limits=limits, access=access)
    opening = Opening(
        checkpoint=checkpoint,
        name=name,
        dtype=dtype,
        device=device,
        weights=weights,
        tokenizer=tokenizer,
        lanes=lanes,
        tokens=tokens,
        rows=rows,
        drafts=drafts,
        threads=threads,
    )
    if ray:
        from adaponder.serving import ray as on_ray

        cluster = on_ray.Cluster(
            host=host,
            port=port,
            replicas=replicas,
            most_replicas=max_replicas,
            gpus=1.0 if device.startswith("cuda") else 0.0,
            address=ray_address,
        )
        on_ray.run(partial(open_app, opening, settings), cluster, settings)
        return
    listening = listen(host, port)
    try:
        _serve(open_worker(opening), settings, listening)
    finally:
        listening.close()


@dataclass(frozen=True)
class Opening:
    """How a checkpoint and its engine are opened: by the server, or by each replica on Ray."""

    checkpoint: str
    name: str | None = None
    dtype: str = "auto"
    device: str = "cpu"
    weights: str | None = None
    tokenizer: str | None = None
    lanes: int = 64
    tokens: int | None = None
    rows: int | None = None
    drafts: int | None = None
    threads: int | None = None


def open_app(opening: Opening, settings: Settings) -> ASGIApp:
    """Builds the app with its model; each replica on Ray calls this."""
    from adaponder.serving.app import make_app

    return make_app(open_worker(opening), settings)


def _serve(worker: Worker, settings: Settings, listening: socket.socket) -> None:
    from adaponder.serving.app import make_app
    from adaponder.serving.server import address_of, run

    address = address_of(listening)

    def started() -> None:
        served, limits = worker.served, settings.limits
        facts = served.facts()
        # One plain line first: what starts the server from a script looks for it.
        print(f"Serving {served.name} at {address} (API: {address}/v1)", flush=True)
        times = "once" if served.iterations == 1 else f"{served.iterations} times"
        halting = f"up to {served.iterations} iterations a token" if facts["halts"] else f"every token read {times}"
        where = f"{str(served.model.dtype).removeprefix('torch.')} on {served.model.device}"
        model = f"Model: {facts['method']}, {facts['parameters']:,} parameters, {where}, {halting}"
        console.print(line(model), soft_wrap=True)
        console.print(
            f"Limits: {settings.lanes} lanes, {limits.waiting} completions waiting, {served.tokens} tokens a sequence, "
            f"n up to {limits.n}",
            soft_wrap=True,
        )
        console.print(f"API key: {'needed' if settings.access.keys else 'none needed'}; page: {address}/")
        console.print("Ctrl-C or SIGTERM stops it after the requests under way; a second one at once", style="dim")

    run(make_app(worker, settings), worker, listening, settings.limits, started=started)


def open_worker(opening: Opening) -> Worker:
    """Opens the checkpoint's model and tokenizer; the engine is opened in the worker's thread."""
    import torch

    from adaponder.conversion.open import load
    from adaponder.inference.engine import Engine
    from adaponder.serving.served import Served
    from adaponder.serving.worker import Worker

    if opening.threads is not None:
        torch.set_num_threads(opening.threads)
    with console.status(f"loading {opening.checkpoint} …"):
        model, folder = load(opening.checkpoint, dtype=opening.dtype, device=opening.device, weights=opening.weights)
        tokenizer = shared.open_tokenizer(model, folder, opening.tokenizer)
        name = opening.name or default_name(opening.checkpoint)
        served = Served(model, tokenizer, folder, name=name, tokens=opening.tokens)

    def engine() -> Engine:
        # Threads that torch computes with are a setting of each thread.
        if opening.threads is not None:
            torch.set_num_threads(opening.threads)
        return Engine(model, lanes=opening.lanes, rows=opening.rows, tokens=opening.tokens, drafts=opening.drafts)

    return Worker(engine, served)


def default_name(checkpoint: str) -> str:
    """Returns what requests call the model by default: the run's, folder's or hub's name."""
    parts = [part for part in Path(checkpoint).absolute().parts if part not in ("final", "checkpoints")]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", parts[-1]).strip("-.")[:128] or "model"


def access_of(
    host: str,
    keys: tuple[Key, ...] = (),
    no_auth: bool = False,
    allow_host: Sequence[str] = (),
    allow_origin: Sequence[str] = (),
) -> Access:
    """Builds access rules; refuses an unauthenticated public bind unless ``--no-auth`` is set."""
    from adaponder.serving.settings import Access

    if keys and no_auth:
        raise InputError("--no-auth: there is an API key too; leave one out")
    if not keys and not no_auth and not is_own(host):
        raise InputError(
            f"--host {host} is reachable by others: give --api-key-file FILE, or let everybody in with --no-auth"
        )
    hosts = {name.lower() for name in (*allow_host, *_own_names(host))}
    origins = tuple(origin.lower().rstrip("/") for origin in allow_origin)
    return Access(keys=keys, hosts=tuple(sorted(hosts)), origins=origins)


def _own_names(host: str) -> list[str]:
    """Returns the host names that clients may use for this server, beside ``localhost`` and addresses."""
    named = [] if is_own(host) else [socket.gethostname().lower()]
    with_name = [host.lower()] if re.fullmatch(r"[A-Za-z0-9.-]*[A-Za-z][A-Za-z0-9.-]*", host) else []
    return [name for name in (*named, *with_name) if re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name)]


def is_own(host: str) -> bool:
    """Returns whether only this machine can reach a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def keys_of(api_key_file: Path | None) -> tuple[Key, ...]:
    """Reads the API keys of ``--api-key-file`` and of the environment."""
    from adaponder.files import open_plain
    from adaponder.serving.settings import Key

    lines: list[str] = []
    if api_key_file is not None:
        try:
            with open_plain(api_key_file, InputError) as file:
                content = file.read(1 << 20).decode("utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise InputError(f"--api-key-file {api_key_file} cannot be read: {problem}") from None
        lines = [key for line in content.splitlines() if (key := line.partition("#")[0].strip())]
        if not lines:
            raise InputError(f"--api-key-file {api_key_file} holds no key")
    if key := os.environ.get(VARIABLE):
        lines.append(key.strip())
    try:
        return tuple(Key.of(text) for text in dict.fromkeys(lines))
    except InputError as problem:
        where = api_key_file if api_key_file is not None else VARIABLE
        raise InputError(f"--api-key-file {where}: {problem}") from None
