"""The official ``openai`` client works with the server unchanged: sync and async, whole and streamed."""

from __future__ import annotations

import asyncio

import openai
import pytest

from adaponder import Engine, Request
from adaponder.serving.settings import Access, Key, Limits, Settings
from adaponder.text import pieces
from serving_support import TEMPLATE, serving, tiny_served
from support import tiny
from word_support import small_tokenizer

KEY = "a-key-of-the-contract"


@pytest.fixture(scope="module")
def server():
    settings = Settings(lanes=4, limits=Limits(n=4), access=Access(keys=(Key.of(KEY),)))
    with serving(tiny_served(template=TEMPLATE), settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def alone():
    """The text and log-probabilities that an engine gives with nothing else to do."""
    engine, tokenizer = Engine(tiny(), lanes=1), small_tokenizer()

    def complete(prompt: str, **settings):
        ((sample,),) = engine.generate([Request(tokenizer(prompt).input_ids, seed=3, max_new_tokens=9, **settings)])
        return "".join(pieces(tokenizer, sample.ids)), [token.log_probability for token in sample.tokens], sample

    return complete


HOW = {"model": "tiny", "max_tokens": 9, "seed": 3}


def test_models_and_facts(client):
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert model.adaponder["iterations"] == 3
    assert model.adaponder["policies"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_completions(client, alone):
    text, logprobs, sample = alone("ab", log_probabilities=2)
    answer = client.completions.create(prompt="ab", logprobs=2, extra_body={"adaponder": {"depth": True}}, **HOW)
    assert answer.choices[0].text == text
    assert answer.choices[0].logprobs.token_logprobs == logprobs
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 9)
    assert answer.usage.adaponder["mean_depth"] == pytest.approx(sample.mean_depth)
    depths = [token["depth"] for token in answer.choices[0].adaponder["tokens"]]
    assert depths == [token.depth for token in sample.tokens]


def test_streamed_completions(client, alone):
    text, _, _ = alone("ab")
    parts = list(client.completions.create(prompt="ab", stream=True, stream_options={"include_usage": True}, **HOW))
    assert "".join(part.choices[0].text for part in parts if part.choices) == text
    assert parts[-1].usage.total_tokens == 11
    assert len(parts) > 2  # it came in pieces


def test_a_stream_that_is_closed_ends_the_request(client, server):
    with client.completions.create(model="tiny", prompt="ab", max_tokens=60, n=4, stream=True) as stream:
        next(iter(stream))
    counts = server.settled()
    assert counts["resident"] == counts["waiting"] == 0


def test_chat(client, alone):
    text, logprobs, _ = alone("u hi a ", log_probabilities=3)
    messages = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=3, **HOW)
    assert answer.choices[0].message.content == text
    assert [one.logprob for one in answer.choices[0].logprobs.content] == logprobs
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
    assert bytes(answer.choices[0].logprobs.content[0].bytes).decode() == answer.choices[0].logprobs.content[0].token
    parts = list(client.chat.completions.create(messages=messages, stream=True, **HOW))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    assert parts[0].choices[0].delta.role == "assistant"
    stop = text[2:4]
    with client.chat.completions.stream(messages=messages, stop=stop, **HOW) as stream:
        assert stream.get_final_completion().choices[0].message.content == text[: text.index(stop)]


def test_async(server, alone):
    text, _, _ = alone("ab")

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0) as client:

            async def streamed() -> str:
                stream = await client.completions.create(prompt="ab", stream=True, **HOW)
                return "".join([part.choices[0].text async for part in stream])

            whole = await client.completions.create(prompt="ab", **HOW)
            return [whole.choices[0].text, *await asyncio.gather(*(streamed() for _ in range(6)))]

    assert asyncio.run(main()) == [text] * 7


def test_errors_are_the_client_s_own(client, server):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(prompt="ab", n=5, **HOW)
    assert refused.value.param == "n"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="ab")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    wrong = openai.OpenAI(base_url=f"{server.address}/v1", api_key="wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    server.worker.state = "draining"
    try:
        with pytest.raises(openai.InternalServerError) as draining:
            client.completions.create(prompt="ab", **HOW)
        assert draining.value.status_code == 503
    finally:
        server.worker.state = "ready"
