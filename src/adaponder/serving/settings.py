"""Defines the limits of requests and of the server, and its access rules."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from adaponder.errors import InputError, shown
from adaponder.fields import check_fields, setting
from adaponder.inference.request import MOST_BIASES, MOST_SAMPLES, MOST_TOP
from adaponder.text.stream import LONGEST_STOP, MOST_STOPS

SHORTEST_KEY = 16
_COUNT, _SECONDS, _SAMPLES = "[1, 1e12]", "[0.001, 1e12]", f"[1, {MOST_SAMPLES}]"
_KEY = re.compile(r"[\x21-\x7e]+")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
# Without this secret, addresses could be found from their hashes in /metrics.
_SECRET = secrets.token_bytes(16)
_ORIGIN = re.compile(r"https?://[a-z0-9.\[\]:-]{1,255}")
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on one request, on waiting requests, and on the time that clients may take."""

    body_bytes: int = setting(1 << 20, "Longest body of a request.", _COUNT)
    body_seconds: float = setting(20.0, "Time in which a body must arrive.", _SECONDS)
    header_bytes: int = setting(1 << 15, "Longest request line and headers together.", _COUNT)
    header_seconds: float = setting(10.0, "Time in which the headers must arrive.", _SECONDS)
    connections: int = setting(2048, "Connections open at a time; each client gets a share.", _COUNT)
    waiting: int = setting(512, "Sequences that may wait for a lane; further requests are answered 429.", "[0, 1e12]")
    texts: int = setting(64, "Texts that may wait to be tokenised; further ones are answered 429.", "[0, 1e12]")
    jobs: int = setting(32, "Texts that may wait to be scored; further ones are answered 429.", _COUNT)
    prompts: int = setting(64, "Prompts of one request.", _COUNT)
    n: int = setting(16, "Completions of one prompt.", _SAMPLES)
    best_of: int = setting(16, "Completions of one prompt from which the best are returned.", _SAMPLES)
    max_tokens: int | None = setting(None, "Tokens of one completion; None: as many as the positions allow.", _COUNT)
    prompt_characters: int = setting(1 << 18, "Longest text of a prompt.", _COUNT)
    messages: int = setting(256, "Messages of a chat.", _COUNT)
    stops: int = setting(16, "Stop strings of one request.", f"[1, {MOST_STOPS}]")
    stop_characters: int = setting(256, "Longest stop string.", f"[1, {LONGEST_STOP}]")
    logit_bias: int = setting(300, "Entries of a request's logit_bias.", f"[1, {MOST_BIASES}]")
    logprobs: int = setting(MOST_TOP, "Most likely tokens returned with a token or an iteration.", f"[1, {MOST_TOP}]")
    buffer_bytes: int = setting(1 << 20, "Streamed text that may wait for a client that does not read.", _COUNT)
    stall_seconds: float = setting(30.0, "A client that reads nothing for this long is disconnected.", _SECONDS)
    drain_seconds: float = setting(30.0, "Time for running requests when the server stops.", "[0, 1e12]")
    retry_seconds: int = setting(1, "Minimum value of Retry-After.", "[1, 3600]")

    def __post_init__(self) -> None:
        check_fields(self)

    def of_connections(self) -> dict[str, float]:
        """Returns the limits of one connection, named as in :class:`adaponder.serving.server.BoundedConnection`."""
        return {name: getattr(self, name) for name in ("header_bytes", "header_seconds", "stall_seconds")}


class Client(NamedTuple):
    """The sender of a request.

    Attributes:
        name: hash of the API key or, without keys, of the address; each name gets a fair share of the server.
        salt: prefix-cache namespace, so that only requests with the same key share cached rows.
    """

    name: str
    salt: str = ""


@dataclass(frozen=True)
class Key:
    """The digests of an API key; the key itself is not stored.

    Attributes:
        digest: SHA-256 of the key, compared with the digest of the key in a request.
        cookie: value that a browser sends after a login; the key cannot be derived from it.
        client: the client that sends the key.
    """

    digest: bytes
    cookie: str
    client: Client

    @classmethod
    def of(cls, text: str) -> Key:
        if len(text) < SHORTEST_KEY or not _KEY.fullmatch(text):
            raise InputError(f"API key must have at least {SHORTEST_KEY} printable characters and no spaces")
        secret = text.encode("ascii")
        purposes = (b"adaponder page", b"adaponder client", b"adaponder salt")
        cookie, name, salt = (hmac.digest(secret, purpose, "sha256").hex() for purpose in purposes)
        return cls(hashlib.sha256(secret).digest(), cookie, Client(name[:12], salt))


@dataclass(frozen=True, kw_only=True)
class Access:
    """Access rules of the server.

    Attributes:
        keys: API keys; every route but ``/health`` and ``/login`` requires one of them. Empty: no key is needed.
        hosts: names allowed in a ``Host`` header, in lower case, besides ``localhost`` and addresses; ``*``: any.
        origins: ``scheme://host[:port]`` of other sites whose pages may call the server from a browser.
        proxies: addresses or networks of proxies whose ``X-Forwarded-For`` is trusted.
    """

    keys: tuple[Key, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    proxies: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for proxy in self.proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as problem:
                raise InputError(f"trusted-proxy={shown(proxy)} must be an address or a network: {problem}") from None
        for host in self.hosts:
            if host != "*" and not _NAME.fullmatch(host):
                raise InputError(f"host={shown(host)} must be a host name in lower case, without port")
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise InputError(f"origin={shown(origin)} must be scheme://host[:port] in lower case")

    def key_of(self, text: str) -> Key | None:
        """Returns the key with this text, or ``None``; every key is compared in constant time."""
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
        return next(iter([key for key in self.keys if hmac.compare_digest(key.digest, digest)]), None)

    def key_of_cookie(self, cookie: str) -> Key | None:
        """Returns the key whose login set this cookie, or ``None``; every key is compared in constant time."""
        value = cookie.encode("utf-8", "surrogateescape")
        return next(iter([key for key in self.keys if hmac.compare_digest(key.cookie.encode(), value)]), None)

    def client_of(self, address: str, forwarded: Sequence[str]) -> Client:
        """Returns the client of a connection without a key, identified by the connection's ``address``.

        If ``address`` is a trusted proxy, the client is the last address in the ``X-Forwarded-For`` headers,
        ``forwarded``, that is no trusted proxy. IPv6 addresses are grouped by /64, since a client usually has a whole
        /64 network.
        """
        client = _address(address)
        for hop in reversed([hop.strip() for line in forwarded for hop in line.split(",")]):
            hop_address = _address(hop)
            if hop_address is None or not self._is_proxy(client):
                break
            client = hop_address
        group = int(client) >> 64 if client is not None and client.version == 6 else client
        return Client(hashlib.blake2b(str(group).encode(), key=_SECRET, digest_size=6).hexdigest())

    def holder_of(self, address: str) -> str | None:
        """Returns the client that a connection from ``address`` counts towards; ``None`` for a trusted proxy."""
        return None if self._is_proxy(_address(address)) else self.client_of(address, ()).name

    def _is_proxy(self, address: _Address | None) -> bool:
        return address is not None and any(address in ipaddress.ip_network(proxy) for proxy in self.proxies)

    def knows_host(self, name: str) -> bool:
        """Returns whether a ``Host`` header may be ``name``, a host name or IP address without a port."""
        # A foreign page can make a name of its own resolve to this machine (DNS rebinding), but not an address.
        is_address = _address(name.removeprefix("[").removesuffix("]")) is not None
        return is_address or name == "localhost" or "*" in self.hosts or name in self.hosts


def _address(text: str) -> _Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the app; ``lanes`` is the number of sequences that the engine runs at the same time."""

    lanes: int = 64
    limits: Limits = field(default_factory=Limits)
    access: Access = field(default_factory=Access)
