"""The official ``openai`` client works with the server unchanged, whole and streamed."""

from __future__ import annotations

import openai
import pytest

from adaponder.serving.settings import Access, Key, Limits, Settings
from serving_support import TEMPLATE, serving, tiny_served

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


HOW = {"model": "tiny", "max_tokens": 9, "seed": 3}
CHAT = HOW | {"messages": [{"role": "user", "content": "hi"}]}
VOLATILE = {"id": None, "created": None}


def plain(server, route: str, body: dict) -> dict:
    """Returns the server's answer without a client in between."""
    return server.post(f"/v1/{route}", body, headers={"authorization": f"Bearer {KEY}"}).json()


def test_models_and_facts(client):
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert model.adaponder["iterations"] == 3
    assert client.models.retrieve("tiny").id == "tiny"


def test_completions(client, server):
    body, extension = HOW | {"prompt": "ab", "logprobs": 2}, {"adaponder": {"depth": True}}
    answer = client.completions.create(**body, extra_body=extension)
    assert answer.to_dict() | VOLATILE == plain(server, "completions", body | extension) | VOLATILE
    parts = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts if part.choices) == answer.choices[0].text
    assert parts[-1].usage.total_tokens == 11
    assert len(parts) > 2  # it came in pieces


def test_chat(client, server):
    body = CHAT | {"logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(**body)
    assert answer.to_dict() | VOLATILE == plain(server, "chat/completions", body) | VOLATILE
    text, first = answer.choices[0].message.content, answer.choices[0].logprobs.content[0]
    assert (len(first.top_logprobs), bytes(first.bytes).decode()) == (3, first.token)
    parts = list(client.chat.completions.create(**CHAT, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    assert parts[0].choices[0].delta.role == "assistant"
    stop = text[2:4]
    with client.chat.completions.stream(**CHAT, stop=stop) as stream:
        assert stream.get_final_completion().choices[0].message.content == text[: text.index(stop)]


def test_errors_are_the_client_s_own(client, server):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(prompt="ab", n=5, **HOW)
    assert refused.value.param == "n"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="ab")
    assert unknown.value.code == "model_not_found"
    wrong = openai.OpenAI(base_url=f"{server.address}/v1", api_key="wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()
