"""adaponder serve: a checkpoint behind OpenAI's routes, and a page that shows depth."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from adaponder.commands.options.serving import ServeOptions
from adaponder.errors import InputError
from adaponder.files import open_plain
from adaponder.serving.served import Served
from adaponder.serving.server import address_of, listen
from adaponder.serving.server import run as run_server
from adaponder.serving.settings import Access, Key, Limits, Settings
from adaponder.serving.worker import Worker
from adaponder.terminal import console, line

if TYPE_CHECKING:
    from starlette.types import ASGIApp

VARIABLE = "ADAPONDER_API_KEY"


def run(options: ServeOptions) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    settings = settings_of(options)
    if options.ray:
        _run_on_ray(options, settings)
        return
    listening = listen(options.host, options.port)
    try:
        worker = open_worker(options)
        _serve(options, settings, worker, listening)
    finally:
        listening.close()


def open_app(options: ServeOptions, settings: Settings) -> ASGIApp:
    """The app of these options, with its model: what each replica on Ray makes for itself."""
    from adaponder.serving.app import make_app

    return make_app(open_worker(options), settings)


def _run_on_ray(options: ServeOptions, settings: Settings) -> None:
    from adaponder.serving import ray

    cluster = ray.Cluster(
        host=options.host,
        port=options.port,
        replicas=options.replicas,
        most_replicas=options.max_replicas,
        gpus=1.0 if options.device.startswith("cuda") else 0.0,
        lanes=options.lanes,
        waiting=options.max_waiting,
        address=options.ray_address,
        drain_seconds=options.drain,
    )
    ray.run(partial(open_app, options, settings), cluster, settings)


def _serve(options: ServeOptions, settings: Settings, worker: Worker, listening: socket.socket) -> None:
    from adaponder.serving.app import make_app

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
            f"Limits: {options.lanes} lanes, {limits.waiting} completions waiting, {served.tokens} tokens a sequence, "
            f"n up to {limits.n}",
            soft_wrap=True,
        )
        console.print(f"API key: {'needed' if settings.access.keys else 'none needed'}; page: {address}/")
        console.print("Ctrl-C, or SIGTERM, ends it when what is under way is done; a second one at once", style="dim")

    run_server(make_app(worker, settings), worker, listening, settings.limits, started=started)


def open_worker(options: ServeOptions) -> Worker:
    """The checkpoint's model and words, with an engine that is opened in the worker's thread."""
    import torch

    from adaponder.commands.subject import open_tokenizer
    from adaponder.conversion.open import load
    from adaponder.inference.engine import Engine

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with console.status(f"loading {options.checkpoint} …"):
        model, folder = load(options.checkpoint, dtype=options.dtype, device=options.device, weights=options.weights)
        tokenizer = open_tokenizer(model, folder, options.tokenizer)
        served = Served.of(model, tokenizer, folder, name=name_of(options, folder), tokens=options.tokens)

    def engine() -> Engine:
        # Threads that torch computes with are a setting of each thread.
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        return Engine(model, lanes=options.lanes, rows=options.rows, tokens=options.tokens, drafts=options.drafts)

    return Worker(engine, served)


def name_of(options: ServeOptions, folder: Path) -> str:
    """What requests call the model: as told, else the run's, folder's or hub's name."""
    if options.name is not None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", options.name):
            raise InputError(f"--name {options.name!r}: letters, digits, dots, colons, dashes and underscores")
        return options.name
    parts = [part for part in Path(options.checkpoint).absolute().parts if part not in ("final", "checkpoints")]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", parts[-1]).strip("-.")[:128] or "model"


def settings_of(options: ServeOptions) -> Settings:
    """Limits and access that the options say; raises where everybody could come in and nobody said so."""
    limits = Limits(
        waiting=options.max_waiting,
        max_tokens=options.max_tokens,
        n=options.max_n,
        best_of=options.max_n,
        prompts=options.max_prompts,
        body_bytes=options.max_body,
        stall_seconds=options.stall,
        drain_seconds=options.drain,
    )
    keys = keys_of(options)
    if keys and options.no_auth:
        raise InputError("--no-auth: there is an API key too; leave one out")
    if not keys and not options.no_auth and not is_own(options.host):
        raise InputError(
            f"--host {options.host}: others could come in; give --api-key-file FILE, or let everybody in by --no-auth"
        )
    names = {host.lower() for host in (*options.allow_host, *_own_names(options.host))}
    origins = tuple(origin.lower().rstrip("/") for origin in options.allow_origin)
    return Settings(
        lanes=options.lanes, limits=limits, access=Access(keys=keys, hosts=tuple(sorted(names)), origins=origins)
    )


def _own_names(host: str) -> list[str]:
    """Names by which clients may call a server that listens there, beside ``localhost`` and addresses."""
    named = [] if is_own(host) else [socket.gethostname().lower()]
    with_name = [host.lower()] if re.fullmatch(r"[A-Za-z0-9.-]*[A-Za-z][A-Za-z0-9.-]*", host) else []
    return [name for name in (*named, *with_name) if re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name)]


def is_own(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def keys_of(options: ServeOptions) -> tuple[Key, ...]:
    """The keys of ``--api-key-file`` and of the environment."""
    lines: list[str] = []
    if options.api_key_file is not None:
        try:
            with open_plain(options.api_key_file, InputError) as file:
                content = file.read(1 << 20).decode("utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise InputError(f"--api-key-file {options.api_key_file}: it cannot be read ({problem})") from None
        lines = [one for line in content.splitlines() if (one := line.partition("#")[0].strip())]
        if not lines:
            raise InputError(f"--api-key-file {options.api_key_file}: there is no key in it")
    if given := os.environ.get(VARIABLE):
        lines.append(given.strip())
    try:
        return tuple(Key.of(text) for text in dict.fromkeys(lines))
    except InputError as problem:
        where = options.api_key_file if options.api_key_file is not None else VARIABLE
        raise InputError(f"--api-key-file {where}: {problem}") from None
