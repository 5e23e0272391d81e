"""Tokens, scores, model facts, metrics and the OpenAPI document, as the page and other programs read them."""

import asyncio
import math
import re
import threading
from itertools import pairwise

import pytest
import torch

from adaponder.evaluation.token_scores import ScoreSettings, TokenScorer
from adaponder.methods.cost import cost_of
from adaponder.policies import LearnedGate, choose_policy
from adaponder.serving import routes
from adaponder.serving.settings import Settings
from adaponder.text import pieces
from serving_support import serving, tiny_served
from support import METHODS, tiny
from word_support import small_tokenizer

PROFILES = {
    "budget-2": {"policy": "gate:0.5", "budget": 2.0, "depth": 2.1},
    "budget-1.5": {"policy": "gate:0.7,0.8", "budget": 1.5, "depth": 1.5},
    "half": {"policy": "random:0.5", "budget": 2.0, "depth": 1.9},
}


@pytest.fixture(scope="module")
def server():
    served = tiny_served()
    served.profiles = PROFILES
    with serving(served, Settings(lanes=2)) as running:
        yield running


def test_models_returns_facts_and_limits(server):
    (model,) = server.get("/v1/models").json()["data"]
    facts = model["adaponder"]
    exact = {"method": "adaponder", "iterations": 3, "tau": 0.5, "halts": True, "positions": 64, "vocabulary": 61}
    exact["parameters"] = sum(weight.numel() for weight in server.worker.served.model.parameters())
    assert {name: facts[name] for name in exact} == exact
    assert {"gate", "fixed", "entropy", "random"} <= set(facts["policies"])
    assert not {"router", "exit", "ranked-uniform"} & set(facts["policies"])
    assert [profile["name"] for profile in facts["profiles"]] == list(PROFILES)
    assert facts["limits"]["n"] == 16


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models/tiny", "/", "/page/style.css"])
def test_head_is_get_without_its_body(server, path):
    with server.client() as client:
        head, whole = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"]


def test_a_draining_server_is_not_ready(server, monkeypatch):
    assert server.get("/ready").json()["status"] == "ready"
    monkeypatch.setattr(server.worker, "state", "draining")
    for response in (server.get("/ready"), server.post("/score", {"prompt": "ab"})):
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert server.get("/health").status_code == 200


def test_tokenize_and_detokenize(server):
    answer = server.post("/tokenize", {"prompt": "ab c"}).json()
    assert [(token["id"], token["text"]) for token in answer["tokens"]] == [(1, "a"), (2, "b"), (27, " "), (3, "c")]
    assert answer["count"] == 4
    assert server.post("/tokenize", {"prompt": ""}).json() == {"tokens": [], "count": 0}
    assert server.post("/detokenize", {"tokens": [1, 2, 27, 3]}).json() == {"prompt": "ab c"}
    wrong = server.post("/detokenize", {"tokens": [1] * 5000 + [61]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "ab "}), ("/detokenize", {"tokens": [1, 2, 27]})])
def test_long_texts_do_not_block_the_event_loop(server, monkeypatch, path, body):
    threads = []

    def noting(tokenizer, ids):
        threads.append(threading.get_ident())
        return pieces(tokenizer, ids)

    async def event_loop_thread():
        return threading.get_ident()

    monkeypatch.setattr(routes, "pieces", noting)
    ((name, short),) = body.items()
    for times in (1, 2000):
        answer = server.post(path, {name: short * times}).json()
        assert answer.get("count", 3 * times) == 3 * times
        assert answer.get("prompt", "ab " * times) == "ab " * times
    loop = asyncio.run_coroutine_threadsafe(event_loop_thread(), server.loop).result(5)
    assert [thread == loop for thread in threads] == [True, False]


def test_scores_equal_the_model_s(server, monkeypatch):
    body = {"prompt": "abc de", "full_depth": True, "adaponder": {"gates": True, "iteration_top": 2, "tau": 0.4}}
    answer = server.post("/score", body).json()
    model = tiny()
    ids = small_tokenizer()("abc de").input_ids
    scores = TokenScorer(model).score(ids, ScoreSettings(LearnedGate(0.4), top=2))
    full = TokenScorer(model).score(ids, ScoreSettings().at_full_depth(model))
    tokens = answer["tokens"]
    assert "".join(token["text"] for token in tokens) == "abc de"
    assert [token["depth"] for token in tokens] == scores.depths
    assert tokens[0]["nll"] is None
    assert [token["nll"] for token in tokens[1:]] == pytest.approx(scores.nll, abs=1e-12)
    assert [token["nll_by_iteration"] for token in tokens[1:]] == [score.nll for score in scores.tokens[:-1]]
    assert [token["full_nll"] for token in tokens[1:]] == pytest.approx(full.nll, abs=1e-12)
    assert [len(token["gates"]) for token in tokens] == [min(depth, 2) for depth in scores.depths]
    assert [len(token["iteration_top"]) for token in tokens] == scores.depths
    assert answer["loss"] == pytest.approx(sum(scores.nll) / 5)
    assert answer["perplexity"] == pytest.approx(math.exp(answer["loss"]))
    assert answer["full_loss"] == pytest.approx(sum(full.nll) / 5)
    assert answer["policy"] == "gate:0.4"
    usage = answer["usage"]
    spent = cost_of(torch.tensor([scores.depths]), model.config, dtype=torch.float64)
    assert (usage["flops"], usage["kv_bytes"]) == (spent.flops, spent.kv_bytes)
    assert usage["iterations"] == sum(scores.depths)
    assert usage["kv_bytes_full_depth"] == usage["kv_bytes"] * 18 // usage["iterations"]
    again = server.post("/score", body).json()
    assert again["usage"]["cached_tokens"] == 6
    assert again["tokens"] == tokens
    assert answer["unknown_tokens"] == 0, "a byte tokenizer knows every text"
    monkeypatch.setattr(server.worker.served, "unknown_id", ids[2])
    assert server.post("/score", body).json()["unknown_tokens"] == ids.count(ids[2])
    single = server.post("/score", {"prompt": [5]}).json()
    assert (single["loss"], single["perplexity"], len(single["tokens"])) == (None, None, 1)


def test_budget_is_a_profile_or_a_mean_depth(server):
    def depth(budget) -> float:
        body = {"prompt": list(range(1, 60)), "adaponder": {"budget": budget}}
        return server.post("/score", body).json()["mean_depth"]

    assert server.post("/score", {"prompt": "ab", "adaponder": {"budget": "half"}}).json()["policy"] == "random:0.5"
    depths = [depth(budget) for budget in (1, 1.5, 1.8, 2.6, 3)]
    assert depths == sorted(depths)
    assert (depths[0], depths[-1]) == (1.0, 3.0)
    assert choose_policy(3, budget=1.8, profiles=PROFILES).tau == pytest.approx((0.6, 0.65))
    for budget, word in ((0.5, "budget"), (3.5, "mean depth"), ("unknown", "budget-2")):
        response = server.post("/score", {"prompt": "ab", "adaponder": {"budget": budget}})
        assert response.status_code == 400
        assert word in response.json()["error"]["message"]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_served(method):
    with serving(tiny_served(tiny(method)), Settings(lanes=2)) as server:
        answer = server.post("/v1/completions", {"model": "tiny", "prompt": "ab", "adaponder": {"depth": True}}).json()
        assert len(answer["choices"][0]["adaponder"]["tokens"]) == 16
        assert answer["usage"]["adaponder"]["flops"] > 0
        scored = server.post("/score", {"prompt": "abcd", "full_depth": True, "adaponder": {"iteration_top": 1}})
        assert scored.status_code == 200, scored.text
        if not server.get("/v1/models").json()["data"][0]["adaponder"]["halts"]:
            refused = server.post("/score", {"prompt": "ab", "adaponder": {"policy": "fixed:1"}})
            assert refused.json()["error"]["param"] == "adaponder.policy"


def test_metrics_count_a_completion(server):
    before = server.metrics()
    body = {"model": "tiny", "prompt": "abcd", "max_tokens": 5, "adaponder": {"policy": "fixed:2"}}
    assert server.post("/v1/completions", body).status_code == 200
    after = server.metrics()
    for name, grown in {
        ("adaponder_tokens_total", "prompt"): 4,
        ("adaponder_tokens_total", "completion"): 5,
        ("adaponder_tokens_by_depth_total", "2"): 8,
        ("adaponder_engine_tokens_total",): 5,
        ("adaponder_requests_total", "/v1/completions", "200"): 1,
        ("adaponder_time_to_first_token_seconds_count",): 1,
    }.items():
        assert after[name] - before.get(name, 0) == grown, name
    assert (after["adaponder_lanes",], after["adaponder_ready",]) == (2, 1)
    assert after["adaponder_sequences",] == after["adaponder_lanes_in_use",] == 0


def test_metrics_count_prompt_tokens_as_read_once():
    """They are not counted again for a second sample, nor for a request that finds them in the prefix cache."""
    body = {"model": "tiny", "prompt": list(range(1, 14)), "max_tokens": 3, "n": 2, "adaponder": {"policy": "fixed:2"}}
    with serving(prefix_block=4) as server:
        read, answers = [0.0], []
        for _ in range(3):
            answers.append(server.post("/v1/completions", body | {"stream": len(answers) == 2}))
            read.append(server.metrics()["adaponder_tokens_by_depth_total", "2"])
        cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers[:2]]
        assert cached == [0, 12]
        # Two samples of three tokens, of which the last is not read.
        assert [after - before for before, after in pairwise(read)] == [13 + 4, 1 + 4, 1 + 4]
        assert server.metrics()["adaponder_tokens_total", "prompt"] == 39


def test_openapi_document_describes_every_route(server):
    document = server.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path in ("/v1/completions", "/v1/chat/completions", "/score", "/tokenize", "/detokenize"):
        operation = document["paths"][path]["post"]
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert schemas[reference.rpartition("/")[2]]["additionalProperties"] is False
        assert {"200", "400", "401", "413", "415", "429", "503"} <= set(operation["responses"])
        assert "422" not in operation["responses"]
    fields = schemas["CompletionBody"]["properties"]
    assert fields["model"]["enum"] == ["tiny"]
    assert {kind.get("maximum") for kind in fields["n"]["anyOf"]} == {16, None}
    ids = next(kind for kind in fields["prompt"]["anyOf"] if kind.get("items", {}).get("type") == "integer")
    assert (ids["items"]["maximum"], ids["maxItems"]) == (60, 64)
    assert {kind.get("maxItems") for kind in fields["prompt"]["anyOf"]} == {None, 64}
    limit = schemas["TokenizeBody"]["properties"]["prompt"]["maxLength"]
    assert limit == fields["prompt"]["anyOf"][0]["maxLength"] == 1 << 18
    pattern = schemas["Generation"]["properties"]["policy"]["anyOf"][0]["pattern"]
    for policy, valid in (("fixed:2", True), ("gate:0.1,1e-3", True), ("wild:1", False), ("fixed", False)):
        assert bool(re.search(pattern, policy)) == valid
