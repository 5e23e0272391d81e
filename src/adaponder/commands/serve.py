"""adaponder serve: serves a checkpoint at OpenAI's routes, and a page that shows depth."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from adaponder.commands import shared
from adaponder.commands.shared import opt
from adaponder.errors import InputError
from adaponder.terminal import console, errors

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from adaponder.serving.settings import Access, Key, Settings
    from adaponder.serving.worker import Worker

VARIABLE = "ADAPONDER_API_KEY"
_engine, _limit, _ray = (partial(opt, panel=panel) for panel in ("Engine", "Limits", "Ray"))
_seconds = partial(_limit, metavar="SECONDS", check=shared.within("(0, 86400]"))
_KEYS = (
    "API keys, one per line (# begins a comment); or the variable ADAPONDER_API_KEY. "
    "Clients send Authorization: Bearer KEY; the page asks for it."
)
_STALL = "Cut off a client that reads nothing for this long."
_DRAIN = "On shutdown, wait this long for running requests."
_WAITING = "Completions that may wait for a lane; further ones get status 429."
_TOKENS = "Maximum tokens of a completion; default: the backbone's positions."
_LONGEST = "Maximum length of a sequence; default: the backbone's positions."
_DRAFTS = "Draft at most N tokens ahead, as --drafts of generate."
_HOST = "Address to listen on; all but loopback addresses need a key or --no-auth."
_PROXY = "Proxy (address or network) whose X-Forwarded-For names clients; may be repeated."
_START = "Time limit for a replica to open its engine, and for its health checks: Ray has one limit for both."
_ROWS = "Rows of the KV cache; default: as many as can be used and fit in memory."


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Options for the limits of requests; their names are the fields of :class:`adaponder.serving.settings.Limits`."""

    waiting: Annotated[int, _limit(_WAITING, "N", min=0, flag="--max-waiting")] = 512
    max_tokens: Annotated[int | None, _limit(_TOKENS, "N", min=1, flag="--max-new-tokens")] = None
    n: Annotated[int, _limit("Maximum completions of a prompt.", "N", min=1, max=128, flag="--max-n")] = 16
    prompts: Annotated[int, _limit("Maximum prompts of a request.", "N", min=1, max=1024, flag="--max-prompts")] = 64
    body_bytes: Annotated[int, _limit("Maximum body of a request.", "BYTES", min=1024, flag="--max-body")] = 1 << 20
    stall_seconds: Annotated[float, _seconds(_STALL, flag="--stall")] = 30.0
    drain_seconds: Annotated[float, _seconds(_DRAIN, flag="--drain")] = 30.0


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options for the engine's size, in one server or in each replica on Ray."""

    lanes: Annotated[int, _engine("Sequences decoded at the same time.", "N", min=1, max=4096)] = 64
    tokens: Annotated[int | None, _engine(_LONGEST, "N", min=2, flag="--max-length")] = None
    rows: Annotated[int | None, _engine(_ROWS, "N", min=64)] = None
    drafts: Annotated[int | None, _engine(_DRAFTS, "N", min=0)] = None


@shared.command
def serve(
    checkpoint: shared.Checkpoint,
    *,
    host: Annotated[str, opt(_HOST, "ADDRESS")] = "127.0.0.1",
    port: Annotated[int, opt("Port to listen on; 0: any free port.", "N", min=0, max=65535)] = 8000,
    name: Annotated[str | None, opt("Name of the model in requests; default: the checkpoint's.", "MODEL")] = None,
    api_key_file: Annotated[Path | None, opt(_KEYS, "FILE")] = None,
    no_auth: Annotated[bool, opt("Accept requests from other machines without a key.", flag="--no-auth")] = False,
    allow_host: Annotated[list[str] | None, opt("Host name that clients may use; may be repeated.", "NAME")] = None,
    allow_origin: Annotated[list[str] | None, opt("Origin of pages that may call; may be repeated.", "URL")] = None,
    trusted_proxy: Annotated[list[str] | None, opt(_PROXY, "ADDRESS")] = None,
    limits: LimitOptions,
    engine: EngineOptions,
    threads: Annotated[int | None, _engine("Threads on the CPU; default: torch's.", "N", min=1, max=1024)] = None,
    ray: Annotated[bool, _ray("Run --replicas servers on Ray Serve (extra scale).", flag="--ray")] = False,
    replicas: Annotated[int, _ray("Number of servers.", "N", min=1, max=10000)] = 1,
    max_replicas: Annotated[int | None, _ray("Grow to this many servers under load.", "N", min=1, max=10000)] = None,
    ray_address: Annotated[str | None, _ray("Address of a running cluster; default: a new one.", "ADDRESS")] = None,
    ray_start: Annotated[float, _ray(_START, "SECONDS", check=shared.within("(0, 86400]"))] = 30.0,
    opening: shared.NarrowOpening,
) -> None:
    """Serve a checkpoint at OpenAI's routes (/v1), with a page (/) that shows the depth of each token.

    Any OpenAI client works. Fields that OpenAI lacks are under [bold]adaponder[/] in requests and answers.

    [dim]adaponder serve runs/demo[/]
    [dim]curl localhost:8000/v1/completions --json '{"model": "demo", "prompt": "def", "adaponder": {"depth": true}}'[/]
    [dim]adaponder serve runs/demo --host 0.0.0.0 --api-key-file keys.txt --allow-host models.example.org[/]
    """
    try:
        import fastapi  # noqa: F401  (checks that it is installed)
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise InputError(f"serve needs {error.name}: pip install 'adaponder[serve]'") from None
    require_name(name)
    if not ray:
        shared.refuse(
            "one server: add --ray", replicas=replicas > 1, max_replicas=max_replicas, ray_address=ray_address
        )
    from adaponder.serving.server import listen
    from adaponder.serving.settings import Limits, Settings

    access = access_of(host, keys_of(api_key_file), no_auth, allow_host or (), allow_origin or (), trusted_proxy or ())
    settings = Settings(lanes=engine.lanes, limits=Limits(**vars(limits), best_of=limits.n), access=access)
    open_model = partial(open_worker, checkpoint, name=name, threads=threads, engine=engine, opening=opening)
    if ray:
        from adaponder.serving import ray as on_ray

        cluster = on_ray.Cluster(
            host=host,
            port=port,
            replicas=replicas,
            most_replicas=max_replicas,
            gpus=1.0 if opening.device.startswith("cuda") else 0.0,
            start_seconds=ray_start,
            address=ray_address,
        )
        on_ray.run(partial(open_app, open_model, settings), cluster, settings)
        return
    listening = listen(host, port)
    try:
        _serve(open_model(), settings, listening)
    finally:
        listening.close()


def open_app(open_model: Callable[[], Worker], settings: Settings) -> ASGIApp:
    """Opens the model and builds the app in a replica on Ray."""
    from adaponder.serving.routes import make_app

    return make_app(open_model(), settings)


def _serve(worker: Worker, settings: Settings, listening: socket.socket) -> None:
    from adaponder.serving.routes import make_app
    from adaponder.serving.server import address_of, run

    address = address_of(listening)

    def started() -> None:
        served, limits = worker.served, settings.limits
        facts = served.facts()
        # One plain line first, which scripts that start the server can look for.
        print(f"Serving {served.name} at {address} (API: {address}/v1)", flush=True)
        times = "once" if served.iterations == 1 else f"{served.iterations} times"
        halting = f"up to {served.iterations} iterations a token" if facts["halts"] else f"every token read {times}"
        placement = f"{str(served.model.dtype).removeprefix('torch.')} on {served.model.device}"
        model = f"Model: {facts['method']}, {facts['parameters']:,} parameters, {placement}, {halting}"
        console.print(model, soft_wrap=True)
        console.print(
            f"Limits: {settings.lanes} lanes, {limits.waiting} completions waiting, {served.tokens} tokens a sequence, "
            f"n up to {limits.n}",
            soft_wrap=True,
        )
        console.print(f"API key: {'needed' if settings.access.keys else 'none needed'}; page: {address}/")
        console.print("Ctrl-C or SIGTERM stops it when running requests are done; a second one, at once", style="dim")

    run(make_app(worker, settings), worker, listening, settings, started=started)


def open_worker(
    checkpoint: str, *, name: str | None, threads: int | None, engine: EngineOptions, opening: shared.NarrowOpening
) -> Worker:
    """Opens the checkpoint's model and tokenizer; the engine is opened in the worker's thread."""
    import torch

    from adaponder.inference.engine import Engine
    from adaponder.serving.served import Served
    from adaponder.serving.worker import Worker

    def limit_threads() -> None:
        if threads is not None:
            torch.set_num_threads(threads)

    def open_engine() -> Engine:
        limit_threads()  # torch's number of threads is a setting of each thread
        return Engine(model, **vars(engine))

    limit_threads()
    model, folder, tokenizer = opening.generator(checkpoint)
    served = Served(model, tokenizer, folder, name=name or default_name(checkpoint), tokens=engine.tokens)
    return Worker(open_engine, served)


def require_name(name: str | None) -> None:
    """Raises unless ``name``, the value of ``--name``, is a valid name of a served model."""
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", name):
        raise InputError(f"--name {name!r} must consist of letters, digits, dots, colons, dashes and underscores")


def default_name(checkpoint: str) -> str:
    """Returns the default name of the model in requests: the name of the run, the folder or the hub repository."""
    parts = [part for part in Path(checkpoint).absolute().parts if part not in ("final", "checkpoints")]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", parts[-1]).strip("-.")[:128] or "model"


def access_of(
    host: str,
    keys: tuple[Key, ...] = (),
    no_auth: bool = False,
    allow_host: Sequence[str] = (),
    allow_origin: Sequence[str] = (),
    trusted_proxy: Sequence[str] = (),
) -> Access:
    """Builds access rules; refuses an unauthenticated public bind unless ``--no-auth`` is set."""
    from adaponder.serving.settings import Access

    if keys and no_auth:
        raise InputError("--no-auth cannot be combined with an API key; leave one out")
    if not keys and not no_auth and not is_local(host):
        raise InputError(
            f"--host {host} is reachable by others: give --api-key-file FILE, or --no-auth to serve without a key"
        )
    hosts = {name.lower() for name in (*allow_host, *_server_names(host))}
    origins = tuple(origin.lower().rstrip("/") for origin in allow_origin)
    return Access(keys=keys, hosts=tuple(sorted(hosts)), origins=origins, proxies=tuple(trusted_proxy))


def _server_names(host: str) -> list[str]:
    """Returns the host names, other than ``localhost`` and IP addresses, by which clients may address this server."""
    names = [] if is_local(host) else [socket.gethostname().lower()]
    if re.fullmatch(r"[A-Za-z0-9.-]*[A-Za-z][A-Za-z0-9.-]*", host):
        names.append(host.lower())
    return [name for name in names if re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name)]


def is_local(host: str) -> bool:
    """Returns whether only this machine can reach a server that listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def keys_of(api_key_file: Path | None) -> tuple[Key, ...]:
    """Returns the API keys of ``--api-key-file`` and of the variable ``ADAPONDER_API_KEY``."""
    from adaponder.files import read_bytes
    from adaponder.serving.settings import Key

    lines: list[str] = []
    if api_key_file is not None:
        try:
            content = read_bytes(api_key_file, InputError, limit=1 << 20).decode("utf-8")
        except (InputError, UnicodeDecodeError) as problem:
            raise InputError(f"--api-key-file {api_key_file} cannot be read: {problem}") from None
        lines = [key for line in content.splitlines() if (key := line.partition("#")[0].strip())]
        if not lines:
            raise InputError(f"--api-key-file {api_key_file} holds no key")
        if api_key_file.stat().st_mode & 0o044:
            errors.print(f"{api_key_file} can be read by other users; chmod 600 it", style="yellow", soft_wrap=True)
    if key := os.environ.get(VARIABLE):
        lines.append(key.strip())
    try:
        return tuple(Key.of(text) for text in dict.fromkeys(lines))
    except InputError as problem:
        source = VARIABLE if api_key_file is None else f"--api-key-file {api_key_file}"
        raise InputError(f"{source}: {problem}") from None
