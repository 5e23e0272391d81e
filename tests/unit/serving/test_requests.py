"""Prompts of chats: templates come from the tokenizer only and run in a sandbox, and what fits is generated."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize("template", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_template_runs_nothing_and_ends_as_an_error(template, tmp_path):
    """CVE-2026-5760: templates of checkpoints are not trusted either."""
    mark = tmp_path / "mark"
    with serving(tiny_served(template=template.replace("{path}", str(mark)))) as server:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        response = server.post("/v1/chat/completions", body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "messages"
        assert server.get("/health").status_code == 200
    assert not mark.exists()


def test_a_template_in_a_message_is_text():
    with serving(tiny_served(template="{{ messages[0].content }}")) as server:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "{{ 7 * 7 }}ab"}], "max_tokens": 1}
        answer = server.post("/v1/chat/completions", body).json()
        assert answer["usage"]["prompt_tokens"] == len(small_tokenizer()("{{ 7 * 7 }}ab").input_ids)


def test_without_a_template_the_error_says_what_to_use():
    with serving() as server:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        error = server.post("/v1/chat/completions", body).json()["error"]
        assert error["code"] == "no_chat_template"
        assert "/v1/completions" in error["message"]


@pytest.mark.parametrize(
    ("rows", "most", "tokens"),
    [(None, None, 53), (None, 20, 20), (128, None, 19), (128, 8, 8)],
    ids=["positions", "limit", "rows", "limit and rows"],
)
def test_without_max_tokens_there_are_as_many_as_there_is_room_for(rows, most, tokens):
    settings = Settings(lanes=2, limits=Limits(max_tokens=most))
    with serving(tiny_served(template=TEMPLATE), settings, rows=rows) as server:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}]}
        response = server.post("/v1/chat/completions", body | {"adaponder": {"ignore_eos": True}})
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == tokens


def test_a_conversation_that_leaves_no_room_is_refused_with_the_reason():
    with serving(tiny_served(template=TEMPLATE), rows=128) as server:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "the cat " * 5}]}
        response = server.post("/v1/chat/completions", body)
        assert response.status_code == 400
        assert "more rows" in response.json()["error"]["message"]
