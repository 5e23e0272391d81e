"""Every number that bounds a request or the server, and who may come in."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from adaponder.errors import InputError, shown
from adaponder.inference.request import MOST_BIASES, MOST_SAMPLES, MOST_TOP
from adaponder.text.stops import LONGEST_STOP, MOST_STOPS

SHORTEST_KEY = 16
_KEY = re.compile(r"[\x21-\x7e]+")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_ORIGIN = re.compile(r"https?://[a-z0-9.\[\]:-]{1,255}")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a request may ask for, and how long the server waits for whom.

    Attributes:
        body_bytes: longest body of a request.
        body_seconds: time in which a body must have come.
        header_bytes: longest request line and headers together.
        header_seconds: time in which headers must have come.
        connections: connections that are open at a time.
        waiting: sequences that may wait for a lane; one request more is answered 429.
        jobs: texts that may wait to be scored; one more is answered 429.
        prompts: prompts of one request.
        n: completions of one prompt.
        best_of: completions of one prompt that are made to choose from.
        max_tokens: tokens of one completion; ``None``: as far as the positions reach.
        prompt_characters: longest text of a prompt.
        messages: messages of a chat.
        stops: stop strings of one request.
        stop_characters: longest stop string.
        logit_bias: entries of a request's ``logit_bias``.
        logprobs: likeliest tokens that are named beside each token, after each iteration too.
        buffer_bytes: text that may wait for a client that does not read.
        stall_seconds: a client that reads nothing for so long is cut off.
        drain_seconds: at the end, time for the requests that are under way.
        retry_seconds: what ``Retry-After`` says.
    """

    body_bytes: int = 1 << 20
    body_seconds: float = 20.0
    header_bytes: int = 1 << 15
    header_seconds: float = 10.0
    connections: int = 2048
    waiting: int = 512
    jobs: int = 32
    prompts: int = 64
    n: int = 16
    best_of: int = 16
    max_tokens: int | None = None
    prompt_characters: int = 1 << 18
    messages: int = 256
    stops: int = 16
    stop_characters: int = 256
    logit_bias: int = 300
    logprobs: int = MOST_TOP
    buffer_bytes: int = 1 << 20
    stall_seconds: float = 30.0
    drain_seconds: float = 30.0
    retry_seconds: int = 1

    def __post_init__(self) -> None:
        highest = {
            "n": MOST_SAMPLES,
            "best_of": MOST_SAMPLES,
            "stops": MOST_STOPS,
            "stop_characters": LONGEST_STOP,
            "logit_bias": MOST_BIASES,
            "logprobs": MOST_TOP,
        }
        for one in fields(self):
            value, most = getattr(self, one.name), highest.get(one.name, 1 << 40)
            if one.name == "max_tokens" and value is None:
                continue
            least = 0 if one.name in ("waiting", "drain_seconds") else 1e-3 if isinstance(value, float) else 1
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise InputError(f"{one.name}={shown(value)}: a number is needed")
            if not least <= value <= most:
                raise InputError(f"{one.name}={shown(value)}: from {least:g} to {most:g}")


@dataclass(frozen=True)
class Key:
    """One API key, of which only digests are kept.

    Attributes:
        digest: SHA-256 of the key: what a request's key is compared with.
        cookie: what a browser that has shown the key is known by; the key cannot be found from it.
        salt: prefixes of prompts are shared only among requests of one key.
    """

    digest: bytes
    cookie: str
    salt: str

    @classmethod
    def of(cls, text: str) -> Key:
        if len(text) < SHORTEST_KEY or not _KEY.fullmatch(text):
            raise InputError(f"API key: at least {SHORTEST_KEY} printable characters without spaces are needed")
        secret = text.encode("ascii")
        derived = [hmac.digest(secret, purpose, "sha256").hex() for purpose in (b"adaponder page", b"adaponder salt")]
        return cls(hashlib.sha256(secret).digest(), *derived)


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may come in.

    Attributes:
        keys: API keys, one of which every route but ``/health`` asks for; none: everybody may come in.
        hosts: names that a ``Host`` header may say beside ``localhost`` and addresses, in lower case; ``*``: any.
        origins: ``scheme://host[:port]`` of pages elsewhere that may call the server from a browser.
    """

    keys: tuple[Key, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for host in self.hosts:
            if host != "*" and not _NAME.fullmatch(host):
                raise InputError(f"host={shown(host)}: a host's name in lower case, without port, is needed")
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise InputError(f"origin={shown(origin)}: scheme://host[:port] in lower case is needed")

    def key_of(self, given: str) -> Key | None:
        """The key that this text is, whichever it is found in the same time."""
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        return _chosen(self.keys, [hmac.compare_digest(key.digest, digest) for key in self.keys])

    def key_of_cookie(self, given: str) -> Key | None:
        """The key that a browser with this cookie has shown."""
        value = given.encode("utf-8", "surrogateescape")
        return _chosen(self.keys, [hmac.compare_digest(key.cookie.encode(), value) for key in self.keys])

    def knows_host(self, name: str) -> bool:
        """Whether a request may be addressed to this host, a name or an address without port."""
        if name == "localhost" or "*" in self.hosts or name in self.hosts:
            return True
        try:
            # A page of somebody else's can make a name of its own mean this machine, never an address.
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


def _chosen(keys: Sequence[Key], equal: Sequence[bool]) -> Key | None:
    return next((key for key, same in zip(keys, equal, strict=True) if same), None)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All that an app is told beside its model; ``lanes`` are its engine's."""

    lanes: int = 64
    limits: Limits = field(default_factory=Limits)
    access: Access = field(default_factory=Access)
