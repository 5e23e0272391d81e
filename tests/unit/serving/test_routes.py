"""Tokens, scores, facts, figures and the OpenAPI document, as the page and other programs read them."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import starlette
import torch
from prometheus_client.parser import text_string_to_metric_families

from adaponder.errors import InputError
from adaponder.evaluation.token_scores import Reading, TokenScorer
from adaponder.methods.cost import cost_of
from adaponder.policies import LearnedGate, choose_policy
from adaponder.serving import routes
from adaponder.serving.settings import Settings
from adaponder.text import TokenSpeller, pieces
from serving_support import serving, tiny_served
from support import METHODS, tiny
from word_support import small_tokenizer

PROFILES = {
    "budget-2": {"policy": "gate:0.5", "budget": 2.0, "depth": 2.1},
    "budget-1.5": {"policy": "gate:0.7,0.8", "budget": 1.5, "depth": 1.5},
    "half": {"policy": "random:0.5", "budget": 2.0, "depth": 1.9},
}


def with_profiles(served):
    return replace(served, profiles=PROFILES)


@pytest.fixture(scope="module")
def server():
    with serving(with_profiles(tiny_served()), Settings(lanes=2)) as running:
        yield running


def test_models_say_what_the_page_needs(server):
    (model,) = server.get("/v1/models").json()["data"]
    facts = model["adaponder"]
    assert (facts["method"], facts["iterations"], facts["tau"], facts["halts"]) == ("adaponder", 3, 0.5, True)
    assert (facts["positions"], facts["vocabulary"]) == (64, 61)
    assert facts["parameters"] == sum(one.numel() for one in server.worker.served.model.parameters())
    assert {"gate", "fixed", "entropy", "random"} <= set(facts["policies"])
    assert not {"router", "exit", "ranked-uniform"} & set(facts["policies"])
    assert [one["name"] for one in facts["profiles"]] == list(PROFILES)
    assert facts["limits"]["n"] == 16


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models/tiny", "/", "/page/style.css"])
def test_head_is_get_without_its_body(server, path):
    with server.client() as client:
        head, whole = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("content-type", "content-length"):
        assert head.headers[name] == whole.headers[name]


def test_tokens_there_and_back(server):
    told = server.post("/tokenize", {"prompt": "ab c"}).json()
    assert [(token["id"], token["text"]) for token in told["tokens"]] == [(1, "a"), (2, "b"), (27, " "), (3, "c")]
    assert told["count"] == 4
    assert server.post("/tokenize", {"prompt": ""}).json() == {"tokens": [], "count": 0}
    assert server.post("/detokenize", {"tokens": [1, 2, 27, 3]}).json() == {"prompt": "ab c"}
    assert server.post("/detokenize", {"tokens": [61]}).json()["error"]["param"] == "tokens"


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "ab "}), ("/detokenize", {"tokens": [1, 2, 27]})])
def test_who_sends_much_text_keeps_nobody_waiting(server, monkeypatch, path, body):
    threads = []

    def noting(tokenizer, ids):
        threads.append(threading.get_ident())
        return pieces(tokenizer, ids)

    async def of_the_event_loop():
        return threading.get_ident()

    monkeypatch.setattr(routes, "pieces", noting)
    ((name, few),) = body.items()
    for times in (1, 2000):
        told = server.post(path, {name: few * times}).json()
        assert told.get("count", 3 * times) == 3 * times
        assert told.get("prompt", "ab " * times) == "ab " * times
    loop = asyncio.run_coroutine_threadsafe(of_the_event_loop(), server.loop).result(5)
    assert [thread == loop for thread in threads] == [True, False]
    wrong = server.post("/detokenize", {"tokens": [1] * 5000 + [61]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")


def test_scores_are_those_of_the_model(server):
    body = {"prompt": "abc de", "full_depth": True, "adaponder": {"gates": True, "iteration_top": 2, "tau": 0.4}}
    told = server.post("/score", body).json()
    model = tiny()
    ids = small_tokenizer()("abc de").input_ids
    scores = TokenScorer(model).score(ids, Reading(LearnedGate(0.4), top=2))
    full = TokenScorer(model).score(ids, Reading().at_full_depth(model))
    tokens = told["tokens"]
    assert "".join(token["text"] for token in tokens) == "abc de"
    assert [token["depth"] for token in tokens] == scores.depths
    assert tokens[0]["nll"] is None
    assert [token["nll"] for token in tokens[1:]] == pytest.approx(scores.nll, abs=1e-12)
    assert [token["nll_by_iteration"] for token in tokens[1:]] == [score.nll for score in scores.tokens[:-1]]
    assert [token["full_nll"] for token in tokens[1:]] == pytest.approx(full.nll, abs=1e-12)
    assert [len(token["gates"]) for token in tokens] == [min(depth, 2) for depth in scores.depths]
    assert [len(token["iteration_top"]) for token in tokens] == scores.depths
    assert told["loss"] == pytest.approx(sum(scores.nll) / 5)
    assert told["perplexity"] == pytest.approx(math.exp(told["loss"]))
    assert told["full_loss"] == pytest.approx(sum(full.nll) / 5)
    assert told["policy"] == "gate:0.4"
    usage, config = told["usage"], model.config
    spent = cost_of(torch.tensor([scores.depths]), config, dtype=torch.float64)
    assert (usage["flops"], usage["kv_bytes"]) == (spent.flops, spent.kv_bytes)
    assert usage["iterations"] == sum(scores.depths)
    assert usage["kv_bytes_full_depth"] == usage["kv_bytes"] * 18 // usage["iterations"]
    again = server.post("/score", body).json()
    assert again["usage"]["cached_tokens"] == 6
    assert again["tokens"] == tokens
    one = server.post("/score", {"prompt": [5]}).json()
    assert (one["loss"], one["perplexity"], len(one["tokens"])) == (None, None, 1)


def test_budgets_are_profiles_or_depths_between_them(server):
    def depth(budget) -> float:
        body = {"prompt": list(range(1, 60)), "adaponder": {"budget": budget}}
        return server.post("/score", body).json()["mean_depth"]

    assert server.post("/score", {"prompt": "ab", "adaponder": {"budget": "half"}}).json()["policy"] == "random:0.5"
    assert depth(1) == 1.0
    assert depth(3) == 3.0
    depths = [depth(budget) for budget in (1.2, 1.5, 1.8, 2.1, 2.6)]
    assert depths == sorted(depths)
    assert choose_policy(LearnedGate(0.5), 3, budget=2.1, profiles=PROFILES) == LearnedGate((0.5, 0.5))
    assert choose_policy(LearnedGate(0.5), 3, budget=1.8, profiles=PROFILES).tau == pytest.approx((0.6, 0.65))
    for budget, word in ((0.5, "budget"), (3.5, "mean depth"), ("nobody", "budget-2")):
        response = server.post("/score", {"prompt": "ab", "adaponder": {"budget": budget}})
        assert response.status_code == 400
        assert word in response.json()["error"]["message"]
    with pytest.raises(InputError, match="calibrate"):
        choose_policy(LearnedGate(0.5), 3, budget=2.0)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_served(method):
    with serving(tiny_served(tiny(method)), Settings(lanes=2)) as server:
        answer = server.post("/v1/completions", {"model": "tiny", "prompt": "ab", "adaponder": {"depth": True}}).json()
        assert len(answer["choices"][0]["adaponder"]["tokens"]) == 16
        assert answer["usage"]["adaponder"]["flops"] > 0
        told = server.post("/score", {"prompt": "abcd", "full_depth": True, "adaponder": {"iteration_top": 1}})
        assert told.status_code == 200, told.text
        if not server.get("/v1/models").json()["data"][0]["adaponder"]["halts"]:
            refused = server.post("/score", {"prompt": "ab", "adaponder": {"policy": "fixed:1"}})
            assert refused.json()["error"]["param"] == "adaponder.policy"


def figures(server) -> dict[tuple, float]:
    """What ``/metrics`` says, by name and labels."""
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


def test_figures_follow_what_happens(server):
    before = figures(server)
    body = {"model": "tiny", "prompt": "abcd", "max_tokens": 5, "adaponder": {"policy": "fixed:2"}}
    assert server.post("/v1/completions", body).status_code == 200
    after = figures(server)

    def grown(*name) -> float:
        return after.get(name, 0) - before.get(name, 0)

    assert grown("adaponder_tokens_total", "prompt") == 4
    assert grown("adaponder_tokens_total", "completion") == 5
    assert grown("adaponder_tokens_by_depth_total", "2") == 8
    assert grown("adaponder_engine_tokens_total") == 5
    assert grown("adaponder_requests_total", "/v1/completions", "200") == 1
    assert grown("adaponder_time_to_first_token_seconds_count") == 1
    assert after["adaponder_lanes",] == 2
    assert after["adaponder_sequences",] == after["adaponder_lanes_in_use",] == 0
    assert after["adaponder_ready",] == 1


def test_figures_count_a_prompt_s_tokens_as_read_once():
    """Not again for a second sample, nor for a request that finds them kept."""
    body = {"model": "tiny", "prompt": list(range(1, 14)), "max_tokens": 3, "n": 2, "adaponder": {"policy": "fixed:2"}}
    with serving(prefix_block=4) as server:
        read, told = [0.0], []
        for _ in range(3):
            told.append(server.post("/v1/completions", body | {"stream": len(told) == 2}))
            read.append(figures(server)["adaponder_tokens_by_depth_total", "2"])
        cached = [one.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for one in told[:2]]
        assert cached == [0, 12]
        # Two samples of three tokens, of which the last is not read.
        assert [after - before for before, after in pairwise(read)] == [13 + 4, 1 + 4, 1 + 4]
        assert figures(server)["adaponder_tokens_total", "prompt"] == 39


def test_the_document_tells_every_route(server):
    document = server.get("/openapi.json").json()
    for path in ("/v1/completions", "/v1/chat/completions", "/score", "/tokenize", "/detokenize"):
        told = document["paths"][path]["post"]
        reference = told["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert document["components"]["schemas"][reference.rpartition("/")[2]]["additionalProperties"] is False
        assert {"200", "400", "401", "413", "415", "429", "503"} <= set(told["responses"])
        assert "422" not in told["responses"]
    fields = document["components"]["schemas"]["CompletionBody"]["properties"]
    assert fields["model"]["enum"] == ["tiny"]
    assert {kind.get("maximum") for kind in fields["n"]["anyOf"]} == {16, None}
    ids = next(kind for kind in fields["prompt"]["anyOf"] if kind.get("items", {}).get("type") == "integer")
    assert ids["items"]["maximum"] == 60
    names = set(_references(document))
    assert names <= set(document["components"]["schemas"])


def _references(part):
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"].rpartition("/")[2]
        for value in part.values():
            yield from _references(value)
    elif isinstance(part, list):
        for value in part:
            yield from _references(value)


def test_ready_says_what_is_under_way(server):
    told = server.get("/ready").json()
    assert told["status"] == "ready"
    assert told["requests"] == told["lanes_in_use"] == told["waiting"] == told["jobs"] == 0
    server.worker.state = "draining"
    try:
        response = server.get("/ready")
        assert (response.status_code, response.json()["status"]) == (503, "draining")
        assert response.headers["retry-after"]
        assert server.get("/health").status_code == 200
        refused = server.post("/score", {"prompt": "ab"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    finally:
        server.worker.state = "ready"


def test_tokens_are_spelled_as_text_or_as_bytes():
    spelling = TokenSpeller(small_tokenizer())
    assert spelling(1) == ("a", [97])
    assert spelling(27) == (" ", [32])
    assert spelling(0).text == "<|endoftext|>"
    assert spelling(60).text == ""  # an id of the model that has no word


def test_the_page_s_files_are_those_of_the_package_only(server):
    for name in ("../app.py", "..%2fapp.py", "/etc/passwd", "%00", "index.html%00.js", "__init__.py"):
        assert server.get(f"/page/{name}").status_code == 404


def test_starlette_has_no_quadratic_ranges():
    """CVE-2025-62727."""
    assert tuple(int(part) for part in starlette.__version__.split(".")[:3]) >= (0, 49, 1)
