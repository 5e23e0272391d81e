"""Tests prompts: templates render as in transformers, within limits, and a tokenizer's panic is an error."""

import os

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from adaponder.errors import InputError
from adaponder.text import prompts
from adaponder.text.prompts import chat_text, encode

MESSAGES = [{"role": "user", "content": "é\n\u2028🙂"}, {"role": "assistant", "content": "begun"}]
GOOD = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
GOOD += "{% if add_generation_prompt %}assistant:{% endif %}"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(x='ab') %}{% for i in range(50) %}{% set n.x = n.x + n.x %}{% endfor %}"
HOSTILE = {
    "an endless loop": (LOOP, "processor time"),
    "a number without end": ("{{ 10 ** (10 ** 8) }}", "processor time"),
    "doubling": (DOUBLING, "64 MiB"),
    "a wide format": ("{{ '%0999999999d'|format(1) }}", "64 MiB"),
    "a long text": ("{{ 'ten chars.' * 100001 }}", "1,000,000 characters"),
    "its own error": ("{{ raise_exception('not that') }}", "refuses this: not that"),
}


def tokenizer(template=None, split=None) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    if split is not None:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(split), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<unk>", chat_template=template)


def test_a_template_renders_as_in_transformers():
    chat = tokenizer(GOOD)
    expected = chat.apply_chat_template(MESSAGES[:1], tokenize=False, add_generation_prompt=True)
    assert chat_text("messages", chat, MESSAGES[:1]) == expected
    expected = chat.apply_chat_template(MESSAGES, tokenize=False, continue_final_message=True)
    assert chat_text("messages", chat, MESSAGES, answers=False) == expected


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_beyond_a_limit_is_an_error_in_one_line_and_the_next_one_renders(name):
    template, expected = HOSTILE[name]
    with pytest.raises(InputError, match=rf"^messages: .*{expected}") as refusal:
        chat_text("messages", tokenizer(template), MESSAGES)
    assert "\n" not in str(refusal.value)
    assert chat_text("messages", tokenizer("{{ messages[0].role }}"), MESSAGES) == "user"


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files by Linux's /proc")
def test_a_template_beyond_a_limit_leaves_no_file_open():
    chat_text("messages", tokenizer(GOOD), MESSAGES)
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InputError, match="processor time"):
        chat_text("messages", tokenizer(LOOP), MESSAGES)
    chat_text("messages", tokenizer(GOOD), MESSAGES)
    assert len(os.listdir("/proc/self/fd")) == opened


def test_no_process_is_started_where_no_template_is_rendered(monkeypatch):
    monkeypatch.setattr(prompts.subprocess, "Popen", None)
    assert encode(tokenizer(GOOD), "a") == [1]
    with pytest.raises(InputError, match="no chat template"):
        chat_text("messages", tokenizer(), MESSAGES)


@pytest.mark.parametrize("prompt", ["caf\udce9", "\ud800"])
def test_a_prompt_that_is_not_utf_8_is_refused(prompt):
    with pytest.raises(InputError, match=r"^prompt is not UTF-8 text"):
        encode(tokenizer(), prompt)


def test_a_panic_of_the_tokenizer_is_an_error_in_one_line(monkeypatch, capfd):
    monkeypatch.setattr("threading.active_count", lambda: 1)  # test runners have threads of their own
    with pytest.raises(BaseException, match="retry-limit") as refusal:
        encode(tokenizer(split=r"(a+)+$"), "a" * 40 + "b")
    assert isinstance(refusal.value, InputError)
    assert str(refusal.value).startswith("prompt: the tokenizer cannot encode it: ")
    assert "\n" not in str(refusal.value)
    assert capfd.readouterr().err == ""
