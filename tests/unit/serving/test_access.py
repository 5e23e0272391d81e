"""Every route but /health asks for a key, whatever headers say; hosts and pages of elsewhere are turned away."""

import http.client
import json
import time
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from adaponder.errors import InputError
from adaponder.serving.access import CONTENT_POLICY, COOKIE
from adaponder.serving.settings import Access, Key, Settings
from serving_support import serving

KEY, OTHER = "a-key-of-the-tests-1", "a-key-of-the-tests-2"
GETS = ("/", "/v1/models", "/v1/models/tiny", "/ready", "/metrics", "/openapi.json", "/page/index.html", "/nowhere")
POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/score", "/health/../v1/completions")
ROUTES = [("GET", path) for path in (*GETS, "/health/", "//health", "/%2e%2e/metrics")]
ROUTES += [("POST", path) for path in POSTS]


@pytest.fixture(scope="module")
def server():
    access = Access(keys=(Key.of(KEY), Key.of(OTHER)), hosts=("models.test",), origins=("https://friend.test",))
    with serving(settings=Settings(lanes=2, access=access)) as running:
        yield running


@pytest.fixture(scope="module")
def open_server():
    with serving(settings=Settings(lanes=2)) as running:
        yield running


def raw(server, method: str, path: str, headers: list[tuple[str, str]], body: bytes = b""):
    """Sends a request with these headers only; returns status, headers and body."""
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=10)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in headers:
        connection.putheader(name, value)
    connection.endheaders(body)
    with closing(connection), connection.getresponse() as response:
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_is_closed_without_a_key(server, method, path):
    for headers in ([], [("Cookie", f"{COOKIE}=wrong")]):
        status, _, body = raw(server, method, path, [("Host", "localhost"), *headers])
        assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")


def test_health_alone_is_open_and_keys_open_by_header(server):
    status, headers, body = raw(server, "GET", "/health", [("Host", "localhost")])
    assert (status, json.loads(body)) == (200, {"status": "alive"})
    assert headers["content-security-policy"] == CONTENT_POLICY
    for authorization, status in ((f"bearer {OTHER}", 200), ("Bearer wrong", 401), (f"Basic {OTHER}", 401)):
        headers, began = [("Host", "localhost"), ("Authorization", authorization)], time.monotonic()
        assert raw(server, "GET", "/v1/models", headers)[0] == status
        assert status == 200 or time.monotonic() - began > 0.19, "guessing keys is not slowed down"


@pytest.mark.parametrize("host", ["localhost/health", "localhost/health?", "x@localhost", "localhost:80/#", "a b"])
def test_a_host_header_opens_nothing(server, host):
    """CVE-2026-48746: a path in the Host header must not replace the requested path."""
    assert raw(server, "GET", "/v1/models", [("Host", host)])[0] == 400
    forwarded = [("Host", "localhost"), ("X-Forwarded-Host", "x/health")]
    forwarded += [(f"X-{name}", "/health") for name in ("Forwarded-Path", "Original-URL", "Rewrite-URL")]
    assert raw(server, "GET", "/v1/models", forwarded)[0] == 401


def test_hosts_are_this_server_s_names_only(server, open_server):
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:9", "192.168.0.7"):
        assert raw(open_server, "GET", "/v1/models", [("Host", host)])[0] == 200, host
    for host in ("evil.test", "localhost.evil.test", "127.0.0.1.evil.test", "models.test"):
        assert raw(open_server, "GET", "/v1/models", [("Host", host)])[0] == 421, host
    for hosts in ([], [("Host", "localhost")] * 2):
        assert raw(open_server, "GET", "/v1/models", hosts)[0] == 400
    assert raw(server, "GET", "/v1/models", [("Host", "models.test"), ("Authorization", f"Bearer {KEY}")])[0] == 200


def test_pages_elsewhere_may_not_call(open_server):
    for origin in ("https://evil.test", "null", "http://localhost.evil.test", "file://", "http://localhost:1"):
        status, headers, _ = raw(open_server, "GET", "/v1/models", [("Host", "localhost"), ("Origin", origin)])
        assert status == 403, origin
        assert "access-control-allow-origin" not in headers
    same = [("Host", "localhost:8000"), ("Origin", "http://localhost:8000")]
    assert raw(open_server, "GET", "/v1/models", same)[0] == 200


def test_a_friend_s_page_may_call_with_a_key(server):
    friend = [("Host", "localhost"), ("Origin", "https://friend.test")]
    status, headers, _ = raw(server, "OPTIONS", "/v1/completions", [*friend, ("Access-Control-Request-Method", "POST")])
    assert status == 200
    assert headers["access-control-allow-origin"] == "https://friend.test"
    status, headers, _ = raw(server, "GET", "/v1/models", [*friend, ("Authorization", f"Bearer {KEY}")])
    assert (status, headers["access-control-allow-origin"]) == (200, "https://friend.test")
    assert raw(server, "GET", "/v1/models", friend)[0] == 401


def test_the_page_asks_for_the_key_and_a_cookie_that_is_not_the_key_remembers_it(server):
    html = [("Host", "localhost"), ("Accept", "text/html")]
    status, headers, body = raw(server, "GET", "/", html)
    assert (status, b'name="key"' in body, b"<script" in body) == (401, True, False)
    form = [("Host", "localhost"), ("Content-Type", "application/x-www-form-urlencoded")]

    def login(text: bytes):
        return raw(server, "POST", "/login", [*form, ("Content-Length", str(len(text)))], text)

    assert login(b"key=wrong")[0] == login(b"")[0] == login(b"a=1&" * 20)[0] == login(b"key=" + b"x" * 5000)[0] == 401
    status, headers, _ = login(b"key=" + KEY.encode())
    assert status == 303
    cookie = headers["set-cookie"]
    assert ("HttpOnly" in cookie, "SameSite=strict" in cookie, KEY in cookie) == (True, True, False)
    value = cookie.partition(";")[0]
    for others in ("", 'settings={"a": [1]}; ', "x[y]=1; a b; "):  # cookies of other programs on this host
        assert raw(server, "GET", "/v1/models", [("Host", "localhost"), ("Cookie", others + value)])[0] == 200
    evil = [("Host", "localhost"), ("Cookie", value), ("Origin", "https://evil.test")]
    assert raw(server, "GET", "/v1/models", evil)[0] == 403


def test_a_prefix_is_shared_within_one_key_only(server):
    prompt = list(range(1, 40))
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "seed": 1}

    def reused(key: str) -> int:
        before = server.settled()["prefix_tokens_reused"]
        response = server.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 200
        return server.settled()["prefix_tokens_reused"] - before

    assert [reused(KEY), reused(KEY), reused(OTHER), reused(OTHER)] == [0, 32, 0, 32]

    def cached(key: str) -> int:
        response = server.post("/score", {"prompt": prompt}, headers={"authorization": f"Bearer {key}"})
        return response.json()["usage"]["cached_tokens"]

    assert [cached(KEY), cached(KEY), cached(OTHER)] == [0, 39, 0]


def test_request_ids_come_back_if_they_are_plain(open_server):
    assert open_server.get("/health", headers={"x-request-id": "job-7.a_B"}).headers["x-request-id"] == "job-7.a_B"
    for bad in ("a b", "x" * 200, "<script>", "é".encode()):
        answer = open_server.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert (answer.isalnum(), len(answer)) == (True, 32)


def test_answers_carry_headers_that_keep_browsers_careful(open_server):
    for path in ("/v1/models", "/nowhere", "/"):
        headers = open_server.get(path).headers
        assert (headers["content-security-policy"], headers["x-content-type-options"]) == (CONTENT_POLICY, "nosniff")
    assert "unsafe" not in CONTENT_POLICY


def test_keys_are_compared_without_a_hint(monkeypatch):
    """Whole digests go to the constant-time comparison, and every key is compared whichever matches."""
    compared = []

    def compare(left, right):
        compared.append((len(left), len(right)))
        return left == right

    monkeypatch.setattr("adaponder.serving.settings.hmac.compare_digest", compare)
    access = Access(keys=(Key.of(KEY), Key.of(OTHER)))
    assert access.key_of(KEY) is access.keys[0]
    assert access.key_of("x") is None
    assert access.key_of_cookie(access.keys[1].cookie) is access.keys[1]
    assert compared[:4] == [(32, 32)] * 4
    assert len(compared) == 6


def test_nonsense_is_refused_at_the_start():
    for key in ("short", "with space in it and long", "ümlaut-is-not-plain-ascii", ""):
        with pytest.raises(InputError, match="API key"):
            Key.of(key)
    with pytest.raises(InputError, match="host"):
        Access(hosts=("a/b",))
    with pytest.raises(InputError, match="origin"):
        Access(origins=("friend.test",))
