"""Completions over HTTP equal those of the engine, in OpenAI's format, whole and streamed."""

from __future__ import annotations

import json

import pytest

from adaponder import Engine, Request
from adaponder.serving.answers import text_cost
from serving_support import TEMPLATE, serving, text_of, tiny_served
from support import tiny
from word_support import small_tokenizer


@pytest.fixture(scope="module")
def server():
    with serving(tiny_served(template=TEMPLATE)) as running:
        yield running


@pytest.fixture(scope="module")
def solo():
    """Completions of an engine that has nothing else to do."""
    engine = Engine(tiny(), lanes=1)
    return lambda prompt, **settings: engine.generate([Request(small_tokenizer()(prompt).input_ids, **settings)])[0]


def events(response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def ask(server, **body):
    response = server.post("/v1/completions", {"model": "tiny", "prompt": "ab", "seed": 5} | body)
    assert response.status_code == 200, response.text
    return response


def test_a_completion_is_what_the_engine_says(server, solo):
    (alone,) = solo("ab", max_new_tokens=8, seed=5, log_probabilities=2)
    answer = ask(server, max_tokens=8, logprobs=2, adaponder={"depth": True}).json()
    (choice,) = answer["choices"]
    assert choice["text"] == text_of(alone.ids)
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [token.log_probability for token in alone.tokens]
    assert [token["depth"] for token in choice["adaponder"]["tokens"]] == [token.depth for token in alone.tokens]
    assert choice["adaponder"]["prompt_depths"] == alone.prompt_depths
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 8, 10)
    assert usage["adaponder"]["mean_depth"] == pytest.approx(alone.mean_depth)
    assert 0 < usage["adaponder"]["flops"] < usage["adaponder"]["flops_full_depth"]


def test_what_an_earlier_request_has_read_costs_nothing_again(server):
    prompt = [number % 50 + 3 for number in range(40)]
    first, again = (ask(server, prompt=prompt, max_tokens=4, n=2, adaponder={"depth": True}).json() for _ in range(2))
    assert first["choices"] == again["choices"]
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 16 <= cached < 40
    served, depths = server.worker.served, first["choices"][0]["adaponder"]["prompt_depths"][:cached]
    for name, read in (("flops", depths), ("flops_full_depth", [3] * cached)):
        spent, less = first["usage"]["adaponder"][name], again["usage"]["adaponder"][name]
        assert spent - less == text_cost(served, read, logits=0, policy=None, max_iterations=None).flops > 0
    for name in ("mean_depth", "kv_bytes"):
        assert first["usage"]["adaponder"][name] == again["usage"]["adaponder"][name]


def test_a_stream_says_the_same_as_the_whole(server):
    how = {"max_tokens": 12, "logprobs": 1, "adaponder": {"depth": True, "gates": True, "iteration_top": 2}}
    whole = ask(server, **how).json()
    told = events(ask(server, **how, stream=True, stream_options={"include_usage": True}))
    assert told[-1]["choices"] == []
    assert told[-1]["usage"] == whole["usage"]
    parts = [one["choices"][0] for one in told[:-1]]
    (choice,) = whole["choices"]
    assert "".join(part["text"] for part in parts) == choice["text"]
    assert [token for part in parts for token in part["adaponder"]["tokens"]] == choice["adaponder"]["tokens"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for part in parts if part["logprobs"] for one in part["logprobs"][name]] == choice["logprobs"][name]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert parts[-1]["adaponder"]["prompt_depths"] == choice["adaponder"]["prompt_depths"]


def test_several_prompts_and_samples_are_choices_in_order(server, solo):
    answer = ask(server, prompt=[[1, 2], [1, 2, 3]], n=2, max_tokens=5).json()
    expected = [
        text_of(sample.ids) for prompt in ("ab", "abc") for sample in solo(prompt, max_new_tokens=5, seed=5, samples=2)
    ]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    streamed = ["", "", "", ""]
    for one in events(ask(server, prompt=[[1, 2], [1, 2, 3]], n=2, max_tokens=5, stream=True)):
        streamed[one["choices"][0]["index"]] += one["choices"][0]["text"]
    assert streamed == expected
    assert answer["usage"]["prompt_tokens"] == 5


def test_a_stop_string_ends_the_text_and_frees_the_rows(server, solo):
    (alone,) = solo("ab", max_new_tokens=20, seed=5)
    text = text_of(alone.ids)
    stop = text[6:8]
    answer = ask(server, max_tokens=20, stop=[stop]).json()["choices"][0]
    assert answer["text"] == text[: text.index(stop)]
    assert answer["finish_reason"] == "stop"
    assert server.settled()["resident"] == 0


def test_echo_repeats_the_prompt_with_its_log_probabilities(server, solo):
    (alone,) = solo("abc", max_new_tokens=1, seed=5, log_probabilities=1, prompt_log_probabilities=1)
    choice = ask(server, prompt=[1, 2, 3], echo=True, max_tokens=1, logprobs=1).json()["choices"][0]
    assert choice["text"] == "abc" + text_of(alone.ids)
    said = [token.log_probability for token in (*alone.prompt_log_probabilities, *alone.tokens)]
    assert choice["logprobs"]["token_logprobs"] == said
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert choice["logprobs"]["top_logprobs"][0] is None
    tops = choice["logprobs"]["top_logprobs"][1:3]
    assert [max(top.values()) for top in tops] == [token.top[0][1] for token in alone.prompt_log_probabilities[1:]]
    none = ask(server, prompt=[1, 2, 3], echo=True, max_tokens=0, logprobs=1).json()
    assert none["choices"][0]["text"] == "abc"
    assert none["choices"][0]["logprobs"]["token_logprobs"] == said[:-1]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": "ab", "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 2}),
    ],
)
def test_no_tokens_are_counted_where_none_were_asked_for(server, route, body):
    body = {"model": "tiny", "seed": 5} | body
    none, one = (server.post(route, body | {"max_tokens": most}).json()["usage"] for most in (0, 1))
    assert none["completion_tokens"] == 0
    assert none["total_tokens"] == none["prompt_tokens"] == one["prompt_tokens"]
    assert none["adaponder"] == one["adaponder"], "the prompt was read all the same"
    streamed = server.post(route, body | {"max_tokens": 0, "stream": True, "stream_options": {"include_usage": True}})
    assert events(streamed)[-1]["usage"]["completion_tokens"] == 0


def test_best_of_returns_the_likeliest(server, solo):
    samples = solo("ab", max_new_tokens=6, seed=5, samples=4, log_probabilities=0)
    best = max(samples, key=lambda one: sum(token.log_probability for token in one.tokens) / len(one.tokens))
    answer = ask(server, best_of=4, n=1, max_tokens=6).json()
    assert [choice["text"] for choice in answer["choices"]] == [text_of(best.ids)]
    assert answer["usage"]["completion_tokens"] == 24


def test_a_chat_is_the_tokenizer_s_template(server, solo):
    (alone,) = solo("u hi a ", max_new_tokens=6, seed=5, log_probabilities=2)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "seed": 5, "max_tokens": 6}
    answer = server.post("/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 2}).json()
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": text_of(alone.ids), "refusal": None}
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == [t.log_probability for t in alone.tokens]
    assert [len(one["top_logprobs"]) for one in choice["logprobs"]["content"]] == [2] * 6
    parts = [one["choices"][0] for one in events(server.post("/v1/chat/completions", body | {"stream": True}))]
    assert parts[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(part["delta"].get("content", "") for part in parts) == text_of(alone.ids)
    parted = body | {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    assert server.post("/v1/chat/completions", parted).json()["choices"][0]["message"] == choice["message"]


def test_depth_can_be_told(server, solo):
    for how, settings in (
        ({"policy": "fixed:2"}, {"depths": [2] * 7}),
        ({"max_iterations": 1}, {"max_iterations": 1}),
        ({"tau": 0.0}, {"tau": 0.0}),
        ({"depths": {"1": 3, "2": 1}}, {"depths": {1: 3, 2: 1}}),
    ):
        (alone,) = solo("ab", max_new_tokens=6, seed=5, **settings)
        choice = ask(server, max_tokens=6, adaponder=how | {"depth": True}).json()["choices"][0]
        assert choice["text"] == text_of(alone.ids)
        assert [token["depth"] for token in choice["adaponder"]["tokens"]] == [token.depth for token in alone.tokens]


def test_without_a_seed_no_two_are_alike(server):
    texts = {
        server.post("/v1/completions", {"model": "tiny", "prompt": "ab"}).json()["choices"][0]["text"] for _ in "abc"
    }
    assert len(texts) == 3
