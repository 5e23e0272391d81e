"""Completions over HTTP equal those of the engine, in OpenAI's format, whole and streamed."""

import json

import pytest

from adaponder import Engine, Request
from adaponder.evaluation.token_scores import ScoreSettings
from adaponder.policies import LearnedGate
from adaponder.serving import answers
from adaponder.serving.answers import ScoreWriter, text_cost
from serving_support import TEMPLATE, serving, text_of, tiny_served
from support import tiny
from word_support import small_tokenizer

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "seed": 5}


@pytest.fixture(scope="module")
def server():
    with serving(tiny_served(template=TEMPLATE)) as running:
        yield running


@pytest.fixture(scope="module")
def solo():
    engine = Engine(tiny(), lanes=1)
    return lambda prompt, **how: engine.generate([Request(small_tokenizer()(prompt).input_ids, seed=5, **how)])[0]


def events(response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def complete(server, **body):
    response = server.post("/v1/completions", {"model": "tiny", "prompt": "ab", "seed": 5} | body)
    assert response.status_code == 200, response.text
    return response


def test_cached_prompt_tokens_cost_no_flops(server):
    prompt = [number % 50 + 3 for number in range(40)]
    body = {"prompt": prompt, "max_tokens": 4, "n": 2, "adaponder": {"depth": True}}
    first, again = (complete(server, **body).json() for _ in range(2))
    assert first["choices"] == again["choices"]
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 16 <= cached < 40
    assert 0 < again["usage"]["adaponder"]["flops"] < again["usage"]["adaponder"]["flops_full_depth"]
    served, depths = server.worker.served, first["choices"][0]["adaponder"]["prompt_depths"][:cached]
    for name, read in (("flops", depths), ("flops_full_depth", [3] * cached)):
        spent, less = first["usage"]["adaponder"][name], again["usage"]["adaponder"][name]
        assert spent - less == text_cost(served, read, Request(prompt), logits=0).flops > 0
    for name in ("mean_depth", "kv_bytes"):
        assert first["usage"]["adaponder"][name] == again["usage"]["adaponder"][name]


def test_stream_equals_the_whole_answer(server):
    body = {"max_tokens": 12, "logprobs": 1, "adaponder": {"depth": True, "gates": True, "iteration_top": 2}}
    whole = complete(server, **body).json()
    chunks = events(complete(server, **body, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert {chunk["usage"] for chunk in chunks[:-1]} == {None}
    deltas = [chunk["choices"][0] for chunk in chunks[:-1]]
    (choice,) = whole["choices"]
    assert "".join(delta["text"] for delta in deltas) == choice["text"]
    assert [token for delta in deltas for token in delta["adaponder"]["tokens"]] == choice["adaponder"]["tokens"]
    for name, values in choice["logprobs"].items():
        assert [value for delta in deltas if delta["logprobs"] for value in delta["logprobs"][name]] == values
    assert [delta["finish_reason"] for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert deltas[-1]["adaponder"]["prompt_depths"] == choice["adaponder"]["prompt_depths"]


def test_prompts_and_samples_are_choices_in_order(server, solo):
    body = {"prompt": [[1, 2], [1, 2, 3]], "n": 2, "max_tokens": 5}
    answer = complete(server, **body).json()
    expected = [text_of(sample.ids) for prompt in ("ab", "abc") for sample in solo(prompt, max_new_tokens=5, samples=2)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    streamed = ["", "", "", ""]
    for chunk in events(complete(server, **body, stream=True)):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == expected
    assert answer["usage"]["prompt_tokens"] == 5


def test_stop_string_ends_the_text_and_frees_the_rows(server, solo):
    (alone,) = solo("ab", max_new_tokens=20)
    text = text_of(alone.ids)
    stop = text[6:8]
    choice = complete(server, max_tokens=20, stop=[stop]).json()["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert server.settled()["resident"] == 0


def test_echo_returns_the_prompt_with_its_log_probabilities(server, solo):
    (alone,) = solo("abc", max_new_tokens=1, log_probabilities=1, prompt_log_probabilities=1)
    choice = complete(server, prompt=[1, 2, 3], echo=True, max_tokens=1, logprobs=1).json()["choices"][0]
    assert choice["text"] == "abc" + text_of(alone.ids)
    expected = [token.log_probability for token in (*alone.prompt_log_probabilities, *alone.tokens)]
    assert choice["logprobs"]["token_logprobs"] == expected
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert choice["logprobs"]["top_logprobs"][0] is None
    tops = choice["logprobs"]["top_logprobs"][1:3]
    assert [max(top.values()) for top in tops] == [token.top[0][1] for token in alone.prompt_log_probabilities[1:]]
    choice = complete(server, prompt=[1, 2, 3], echo=True, max_tokens=0, logprobs=1).json()["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["token_logprobs"] == expected[:-1]
    streamed = events(complete(server, prompt=[1, 2, 3], echo=True, max_tokens=1, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "abc" + text_of(alone.ids)


@pytest.mark.parametrize(
    ("route", "body"),
    [("/v1/completions", {"prompt": "ab", "model": "tiny", "seed": 5}), ("/v1/chat/completions", CHAT)],
)
def test_max_tokens_0_counts_no_tokens(server, route, body):
    none, one = (server.post(route, body | {"n": 2, "max_tokens": most}).json()["usage"] for most in (0, 1))
    assert none["completion_tokens"] == 0
    assert none["total_tokens"] == none["prompt_tokens"] == one["prompt_tokens"]
    assert none["adaponder"] == one["adaponder"], "the prompt was read all the same"
    streamed = server.post(route, body | {"max_tokens": 0, "stream": True, "stream_options": {"include_usage": True}})
    assert events(streamed)[-1]["usage"]["completion_tokens"] == 0


def test_best_of_returns_the_most_likely(server, solo):
    samples = solo("ab", max_new_tokens=6, samples=4, log_probabilities=0)
    best = max(samples, key=lambda sample: sum(token.log_probability for token in sample.tokens) / len(sample.tokens))
    answer = complete(server, best_of=4, n=1, max_tokens=6).json()
    assert [choice["text"] for choice in answer["choices"]] == [text_of(best.ids)]
    assert answer["usage"]["completion_tokens"] == 24


def test_chat_uses_the_tokenizer_s_template(server, solo):
    (alone,) = solo("u hi a ", max_new_tokens=6)
    content = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    body = CHAT | {"max_tokens": 6, "messages": [{"role": "user", "content": content}]}
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text_of(alone.ids), "refusal": None}


def test_depth_options_reach_the_engine(server, solo):
    for options, settings in (
        ({"policy": "fixed:2"}, {"depths": [2] * 7}),
        ({"max_iterations": 1}, {"max_iterations": 1}),
        ({"tau": 0.0}, {"tau": 0.0}),
        ({"depths": {"1": 3, "2": 1}}, {"depths": {1: 3, 2: 1}}),
    ):
        (alone,) = solo("ab", max_new_tokens=6, **settings)
        choice = complete(server, max_tokens=6, adaponder=options | {"depth": True}).json()["choices"][0]
        assert choice["text"] == text_of(alone.ids)
        assert [token["depth"] for token in choice["adaponder"]["tokens"]] == [token.depth for token in alone.tokens]
        assert choice["adaponder"]["prompt_depths"] == alone.prompt_depths


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("top_k", 2, "top_k"),
        ("top_k", -1, ""),
        ("min_p", 0.9, "min_p"),
        ("repetition_penalty", 5.0, "repetition_penalty"),
        ("min_tokens", 9, "min_new_tokens"),
        ("stop_token_ids", [7, 11, 15, 19, 23], "stop_ids"),
    ],
)
def test_fields_of_vllm_mean_what_they_mean_there(server, solo, field, value, name):
    """The stop ids are drawn; a value may be given under both spellings."""
    (plain,) = solo("ab", max_new_tokens=9)
    if field == "stop_token_ids":
        value = [plain.ids[3]]
    (alone,) = solo("ab", max_new_tokens=9, **({name: value} if name else {}))
    assert (alone.ids != plain.ids) == (name not in ("", "min_new_tokens"))
    twice = {"adaponder": {field: value}} if name and name != "stop_ids" else {}
    body = {"max_tokens": 9, field: value, "ignore_eos": False, "logprobs": 0}
    (choice,) = complete(server, **body, **twice).json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(alone.ids)
    assert choice["finish_reason"] == alone.finish_reason
    assert choice["text"] == text_of(alone.ids[:-1] if alone.finish_reason == "stop" else alone.ids)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("completions", {"prompt": "ab", "max_tokens": 6}),
        ("chat/completions", {"messages": CHAT["messages"], "max_completion_tokens": 6}),
    ],
)
def test_continuous_usage_counts_each_choice(server, route, body):
    """The bodies are those that guidellm sends."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body |= {"model": "tiny", "n": 2, "stop": None, "ignore_eos": True, "stream": True, "stream_options": options}
    chunks = events(server.post(f"/v1/{route}", body))
    last = {chunk["choices"][0]["index"]: chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]}
    assert last == {0: 6, 1: 6}
    assert all(chunk["usage"]["completion_tokens"] <= 6 for chunk in chunks[:-1])
    total = chunks[-1]["usage"]
    assert total["total_tokens"] - total["prompt_tokens"] == total["completion_tokens"] == 12


def test_without_a_seed_completions_differ(server):
    assert len({complete(server, seed=None).json()["choices"][0]["text"] for _ in "abc"}) == 3


TEXT = [7, 3, 9, 4, 4, 8, 2, 6, 5, 1, 7, 7]
OPTIONS = (
    {"gates": False, "top": 0, "full_depth": False},
    {"gates": True, "top": 2, "full_depth": True},
    {"gates": True, "top": 3, "full_depth": False},
)


def scored(writer: ScoreWriter, ids: list[int], *, top: int, **options) -> dict:
    """Returns the numbers and texts of an answer by path, without seconds and cached tokens."""

    def parts():
        answers.append((yield from writer(ids, ScoreSettings(LearnedGate(0.4), top=top), **options)))

    answers: list[bytes] = []
    list(parts())
    answer = json.loads(answers[0])
    answer.pop("seconds")
    answer["usage"].pop("cached_tokens")
    return flat(answer)


def flat(value) -> dict:
    if isinstance(value, dict):
        return {f"{key}.{path}": leaf for key, item in value.items() for path, leaf in flat(item).items()}
    if isinstance(value, list):
        return flat({str(number): item for number, item in enumerate(value)})
    return {"": value}


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "full depth", "top"])
def test_scores_after_edits_equal_those_of_a_new_text(monkeypatch, options):
    monkeypatch.setattr(answers, "_CHUNK", 5)
    served = tiny_served()
    edited = ScoreWriter(served)
    for end in ([], [3], [3, 5], [5, 1, 2], []):
        expected = scored(ScoreWriter(served), TEXT + end, **options)
        assert scored(edited, TEXT + end, **options) == pytest.approx(expected, abs=1e-12)


def test_unchanged_tokens_are_written_once(monkeypatch):
    written = []
    plain = answers._json
    monkeypatch.setattr(answers, "_json", lambda value: written.append(value) or plain(value))
    writer = ScoreWriter(tiny_served())
    scored(writer, TEXT, top=0, gates=True, full_depth=False)
    first = len(written)
    scored(writer, [*TEXT, 5], top=0, gates=True, full_depth=False)
    assert len(written) - first == 4  # the frame, the new token, and the token before it, which has a next token now
    assert first == 2 * len(TEXT)
