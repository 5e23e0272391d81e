"""Prompts of chats: templates come from the tokenizer only and run in a sandbox; max_tokens defaults to the room."""

from __future__ import annotations

import pytest
from tokenizers import Regex, decoders, pre_tokenizers

from adaponder.serving.settings import Limits, Settings
from serving_support import TEMPLATE, serving, tiny_served
from word_support import small_tokenizer

HOSTILE = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch {path}') }}",
    "{% for x in messages.append(1) %}{% endfor %}",
    "{{ raise_exception('roles must alternate') }}",
    "{{ messages.nothing.at.all }}",
    "{% for x in range(100000000) %}{% endfor %}",
]


@pytest.fixture(scope="module")
def server():
    with serving(tiny_served(template=TEMPLATE)) as running:
        yield running


def chat(server, content="hi", **body):
    body |= {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    return server.post("/v1/chat/completions", body)


@pytest.mark.parametrize("template", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_template_is_an_error(server, monkeypatch, template, tmp_path):
    """CVE-2026-5760: templates of checkpoints are not trusted either."""
    mark = tmp_path / "mark"
    monkeypatch.setattr(server.worker.served.tokenizer, "chat_template", template.replace("{path}", str(mark)))
    response = chat(server)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "messages"
    assert server.get("/health").status_code == 200
    assert not mark.exists()


def test_template_in_a_message_is_text(server, monkeypatch):
    monkeypatch.setattr(server.worker.served.tokenizer, "chat_template", "{{ messages[0].content }}")
    usage = chat(server, "{{ 7 * 7 }}ab", max_tokens=1).json()["usage"]
    assert usage["prompt_tokens"] == len(small_tokenizer()("{{ 7 * 7 }}ab").input_ids)


def test_without_a_template_the_error_names_the_other_route(server, monkeypatch):
    monkeypatch.setattr(server.worker.served, "template", False)
    error = chat(server).json()["error"]
    assert error["code"] == "no_chat_template"
    assert "/v1/completions" in error["message"]


@pytest.mark.parametrize(
    ("rows", "most", "tokens"),
    [(None, None, 53), (None, 20, 20), (128, None, 19)],
    ids=["positions", "limit", "rows"],
)
def test_max_tokens_defaults_to_the_room(rows, most, tokens):
    settings = Settings(lanes=2, limits=Limits(max_tokens=most))
    with serving(tiny_served(template=TEMPLATE), settings, rows=rows) as server:
        response = chat(server, "the cat", adaponder={"ignore_eos": True})
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == tokens
        if rows:
            refused = chat(server, "the cat " * 5)
            assert refused.status_code == 400
            assert "more rows" in refused.json()["error"]["message"]


def test_a_panic_of_the_tokenizer_is_an_error_in_json():
    served = tiny_served()
    served.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a+)+$"), "isolated")
    prompt, completion = "a" * 40 + "b", {"model": "tiny", "max_tokens": 1}
    with serving(served) as server:
        routes = [("/v1/completions", completion, 1), ("/tokenize", {}, 1), ("/v1/completions", completion, 30)]
        for route, fields, length in routes:
            response = server.post(route, {**fields, "prompt": prompt * length})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt"), response.text
        assert server.post("/v1/completions", {**completion, "prompt": "b"}).status_code == 200


def test_a_panic_while_decoding_is_an_error_in_json_before_and_within_an_answer():
    served, bad = tiny_served(), 5
    backend = served.tokenizer.backend_tokenizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace(backend.id_to_token(bad), "a" * 40 + "b"), decoders.Replace(Regex(r"(a+)+$"), "")]
    )
    completion = {"model": "tiny", "max_tokens": 2, "logit_bias": {str(bad): 100}, "prompt": [7]}
    with serving(served) as server:
        for route, body in (
            ("/detokenize", {"tokens": [bad]}),
            ("/v1/completions", {**completion, "prompt": [bad]}),
            ("/v1/completions", completion),
        ):
            response = server.post(route, body)
            assert response.status_code == 500, response.text
            assert "cannot decode its tokens" in response.json()["error"]["message"]
        streamed = server.post("/v1/completions", {**completion, "stream": True})
        assert "cannot decode its tokens" in streamed.text
        assert server.post("/v1/completions", {**completion, "logit_bias": {"7": 100}}).status_code == 200
