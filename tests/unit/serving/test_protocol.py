"""Wrong and oversized bodies are answered 4xx at once, with the name of the field."""

import math
import time

import pytest

from adaponder.errors import AdaPonderError
from adaponder.serving.settings import Limits, Settings
from serving_support import TEMPLATE, connect, request_bytes, serving, tiny_served
from support import POSITIONS, VOCABULARY

LIMITS = Limits(body_bytes=1 << 18, body_seconds=0.5, header_seconds=0.5, waiting=2, n=4, best_of=4, prompts=3)


@pytest.fixture(scope="module")
def server():
    with serving(tiny_served(template=TEMPLATE), Settings(lanes=2, limits=LIMITS)) as running:
        yield running


BASE = {"model": "tiny", "prompt": "ab"}
REFUSED = [
    ("n", {"n": 10**6}, {"n": 2**70}),  # CVE-2026-34756
    ("best_of", {"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}),
    ("max_tokens", {"max_tokens": POSITIONS}),
    ("adaponder.repetition_penalty", {"adaponder": {"repetition_penalty": 5e-324}}),
    ("stop", {"stop": ["x"] * 17}),
    ("stop.0", {"stop": [""]}),
    ("logit_bias", {"logit_bias": {str(n): 1 for n in range(301)}}, {"logit_bias": {str(VOCABULARY): 1}}),
    ("logit_bias.x", {"logit_bias": {"x": 1}}),
    ("prompt", {"prompt": ""}, {"prompt": [VOCABULARY]}, {"prompt": ["a", "b", "c", "d"]}),
    ("prompt", {"prompt": [1] * (POSITIONS + 1)}),
    ("prompt.0", {"prompt": [2**80]}),
    ("temperature", {"temperature": 3}),
    ("logprobs", {"logprobs": 21}),
    ("echo", {"logprobs": 1, "echo": True, "stream": True}),
    ("seed", {"seed": 2**64}),
    ("adaponder.seed", {"seed": 1, "adaponder": {"seed": 2}}),
    ("suffix", {"suffix": "x"}),
    ("tools", {"tools": []}),
    ("nonsense", {"nonsense": 1}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("adaponder.policy", *({"adaponder": {"policy": rule}} for rule in ("wild:1", "fixed:9", "ranked-uniform:0.5"))),
    ("adaponder.tau", {"adaponder": {"policy": "fixed:1", "tau": 0.5}}),
    ("adaponder.budget", {"adaponder": {"budget": "../../secret"}}),
    ("adaponder.max_iterations", {"adaponder": {"max_iterations": 4}}),
    ("adaponder.depths.x", {"adaponder": {"depths": {"x": 1}}}),
    ("adaponder.depths", {"adaponder": {"depths": {"60": 1}}}),
    ("min_tokens", *({"max_tokens": 2} | fields for fields in ({"min_tokens": 3}, {"adaponder": {"min_tokens": 3}}))),
    ("adaponder.top_k", {"top_k": 3, "adaponder": {"top_k": 4}}),
    ("adaponder.ignore_eos", {"ignore_eos": True, "adaponder": {"ignore_eos": False}}),
    ("top_k", {"top_k": -2}),
    ("stop_token_ids", {"stop_token_ids": [VOCABULARY]}, {"stop_token_ids": [1] * 257}),
    ("adaponder.unknown", {"adaponder": {"unknown": 1}}),
]
USER = {"role": "user", "content": "x"}
REFUSED_IN_CHAT = [
    ("chat_template", {"chat_template": "{{ 7 * 7 }}"}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"chat_template": "x", "tokenize": True}}),  # CVE-2025-62426
    ("add_generation_prompt", {"add_generation_prompt": False}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("functions", {"functions": [{}]}),
    ("response_format.type", {"response_format": {"type": "json_object"}}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("max_tokens", {"max_tokens": 1, "max_completion_tokens": 1}),
    ("messages", {"messages": []}, {"messages": [USER] * 300}),
    ("messages.0.role", {"messages": [USER | {"role": "robot"}]}),
    ("messages.0.content.0.type", {"messages": [USER | {"content": [{"type": "image_url"}]}]}),
    ("store", {"store": True}),
]
BODIES = {"completions": BASE, "chat/completions": {"model": "tiny", "messages": [USER]}}
REFUSALS = [
    (route, change, field)
    for route, refused in zip(BODIES, (REFUSED, REFUSED_IN_CHAT), strict=True)
    for field, *changes in refused
    for change in changes
]


@pytest.mark.parametrize(("route", "change", "field"), REFUSALS, ids=lambda value: str(value)[:40])
def test_invalid_field_is_refused_by_name(server, route, change, field):
    began = time.perf_counter()
    response = server.post(f"/v1/{route}", BODIES[route] | change)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", field), error
    assert len(error["message"]) < 500
    assert time.perf_counter() - began < 1.0  # milliseconds on an idle machine
    assert server.worker.sequences == 0


def post_bytes(server, content, kind="application/json"):
    with server.client() as client:  # a refusal may close the connection
        return client.post("/v1/completions", content=content, headers={"content-type": kind})


NESTED = b"[" * 100_000 + b"]" * 100_000
INVALID = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
    b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
    b'{"model": "tiny", "prompt": "a", "top_p": -Infinity}',
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b'{"model": "tiny", "prompt": "\xff\xfe"}',
    b'{"model": "tiny", "prompt": "a", "n": ' + b"9" * 5000 + b"}",
    b'{"model": "tiny", "prompt": ' + NESTED + b"}",
    NESTED,
]


@pytest.mark.parametrize("body", INVALID, ids=lambda body: repr(body[:40]))
def test_invalid_json_is_refused(server, body):
    response = post_bytes(server, body)
    assert (response.status_code, bool(response.json()["error"]["message"])) == (400, True), response.text


def test_the_last_of_two_equal_names_counts(server):
    body = b'{"model": "wrong", "model": "tiny", "prompt": "a", "max_tokens": 900, "max_tokens": 2}'
    assert post_bytes(server, body).json()["usage"]["completion_tokens"] == 2


def test_long_body_is_413_before_it_is_read(server):
    assert server.post("/v1/completions", {"model": "tiny", "prompt": "a" * (1 << 18)}).status_code == 413
    assert post_bytes(server, (b" " * (1 << 14) for _ in range(64))).status_code == 413


def test_a_client_that_still_writes_a_refused_body_gets_the_answer(server):
    """A connection that is closed with unread data is reset, and its answer may be lost."""
    request = request_bytes(BASE | {"prompt": "a" * (1 << 18)})
    with connect(server) as connection:
        for start in range(0, len(request), 1 << 16):
            connection.sendall(request[start : start + (1 << 16)])
            time.sleep(0.05)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 413")


def test_other_content_types_are_415(server):
    for kind in ("text/plain", "application/xml", "multipart/form-data", ""):
        response = post_bytes(server, b"{}", kind)
        assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type"), kind


def test_unknown_models_routes_and_methods(server):
    response = server.post("/v1/completions", BASE | {"model": "gpt"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert server.get("/v1/models/gpt").status_code == 404
    assert server.get("/v1/models/tiny").json()["id"] == "tiny"
    pages = ("../app.py", "%2e%2e%2fapp.py", "app.py", "__init__.py", "/etc/passwd", "%00", "index.html%00.js")
    for path in ("/v1/nothing", "/docs", "/redoc", *(f"/page/{name}" for name in pages)):
        response = server.get(path)
        assert response.status_code == 404, path
        assert response.json()["error"]["message"]
    response = server.get("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


def test_range_headers_are_ignored(server):
    """CVE-2025-62727: many ranges cost nothing, as answers have none."""
    many = "bytes=" + ",".join(f"{n}-{n + 1}" for n in range(3000))
    for path in ("/", "/page/index.html", "/health"):
        response = server.get(path, headers={"range": many})
        assert (response.status_code, "content-range" in response.headers) == (200, False)


@pytest.mark.parametrize("wrong", [{"n": 0}, {"n": 129}, {"waiting": -1}, {"stall_seconds": math.nan}])
def test_limits_are_checked(wrong):
    with pytest.raises(AdaPonderError, match=next(iter(wrong))):
        Limits(**wrong)
