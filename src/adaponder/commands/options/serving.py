"""Options of ``adaponder serve``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from adaponder.commands.options import values
from adaponder.commands.options.option import Option
from adaponder.commands.options.shared import CHECKPOINT, TOKENIZER, Device, Dtype, NarrowWeights


@dataclass(frozen=True, kw_only=True)
class _Engine:
    """How the engine is opened."""

    lanes: Annotated[int, Option(metavar="N", min=1, max=4096, help="Sequences that are computed at a time.")] = 64
    tokens: Annotated[
        int | None,
        Option(metavar="N", min=2, help="Longest sequence; default: as far as the backbone's positions reach."),
    ] = None
    rows: Annotated[
        int | None,
        Option(metavar="N", min=64, help="Rows of keys and values; default: what memory allows, at most what is used."),
    ] = None
    drafts: Annotated[
        int | None, Option(metavar="N", min=0, help="Tokens begun before it is certain that they follow; see generate.")
    ] = None
    threads: Annotated[
        int | None, Option(metavar="N", min=1, max=1024, help="Threads of a computation on the CPU; default: torch's.")
    ] = None
    tokenizer: Annotated[str | None, TOKENIZER] = None


@dataclass(frozen=True, kw_only=True)
class _Bounds:
    """What one request may take."""

    max_waiting: Annotated[
        int, Option(metavar="N", min=0, help="Completions that may wait for a lane; beyond it, 429.")
    ] = 512
    max_tokens: Annotated[
        int | None, Option(metavar="N", min=1, help="Tokens of a completion; default: as far as the positions reach.")
    ] = None
    max_n: Annotated[int, Option(metavar="N", min=1, max=128, help="Completions of one prompt.")] = 16
    max_prompts: Annotated[int, Option(metavar="N", min=1, max=1024, help="Prompts of one request.")] = 64
    max_body: Annotated[int, Option(metavar="BYTES", min=1024, help="Longest body of a request.")] = 1 << 20
    stall: Annotated[
        float,
        Option(
            metavar="SECONDS",
            help="Cut off a client that reads nothing for so long.",
            check=values.above(0, most=86400),
        ),
    ] = 30.0
    drain: Annotated[
        float,
        Option(
            metavar="SECONDS", help="At the end, wait so long for what is under way.", check=values.above(0, most=86400)
        ),
    ] = 30.0


@dataclass(frozen=True, kw_only=True)
class _Cluster:
    """Several servers side by side."""

    ray: Annotated[bool, Option(flags=("--ray",), help="Run it on Ray Serve (extra scale), --replicas times.")] = False
    replicas: Annotated[int, Option(metavar="N", min=1, max=10000, help="With --ray: servers side by side.")] = 1
    max_replicas: Annotated[
        int | None, Option(metavar="N", min=1, max=10000, help="With --ray: as many where load asks for them.")
    ] = None
    ray_address: Annotated[
        str | None, Option(metavar="ADDRESS", help="With --ray: of a cluster that runs; default: one of its own.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions(_Bounds, _Engine, _Cluster, Device, NarrowWeights, Dtype):
    """``adaponder serve``."""

    checkpoint: Annotated[str, CHECKPOINT]
    host: Annotated[
        str, Option(metavar="ADDRESS", help="Where to listen; any but this machine's own needs a key or --no-auth.")
    ] = "127.0.0.1"
    port: Annotated[int, Option(metavar="N", min=0, max=65535, help="0: any that is free.")] = 8000
    name: Annotated[
        str | None, Option(metavar="NAME", help="What requests call the model; default: the checkpoint's own name.")
    ] = None
    api_key_file: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="API keys, one per line (# begins a comment); or the variable ADAPONDER_API_KEY. Clients say "
            "Authorization: Bearer KEY; the page asks for it.",
        ),
    ] = None
    no_auth: Annotated[
        bool, Option(flags=("--no-auth",), help="Listen elsewhere than on this machine without any key.")
    ] = False
    allow_host: Annotated[
        Sequence[str],
        Option(several=True, metavar="NAME", help="A name that clients may call this server by; may be repeated."),
    ] = ()
    allow_origin: Annotated[
        Sequence[str],
        Option(several=True, metavar="URL", help="A page elsewhere that may call this server; may be repeated."),
    ] = ()
