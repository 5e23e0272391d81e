"""Conversations: the template writes them, what the assistant says is learned, and every guarantee of text holds."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from adaponder.data import DataError, Sampler, Shards
from adaponder.data.chat import ChatFormat, ConversationEncoder, own_template
from adaponder.data.prepare import prepare as prepared
from adaponder.data.tokenizers import SpecialTokens, load_tokenizer
from adaponder.errors import InputError

TEMPLATE = """{% for message in messages %}{% if message.role == "assistant" %}Answer: {{ message.content }}
{{ eos_token }}{% else %}{{ message.role }}: {{ message.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}"""
MARKED = """{% for message in messages %}{% if message.role == "assistant" %}Answer: {% generation %}\
{{ message.content | upper }}{{ eos_token }}{% endgeneration %}
{% else %}{{ message.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}"""


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def talk(number: int) -> list[dict[str, str]]:
    first = [turn("user", f"what is {number}?"), turn("assistant", f" it is  {number * number} é")]
    more = [turn("user", "and then?"), turn("assistant", "nothing more")]
    return [turn("system", "be brief"), *first, *more][number % 2 :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Conversations in every form, a tokenizer without a template, and templates."""
    folder = tmp_path_factory.mktemp("chat")
    rows = [{"messages": talk(number), "source": f"s{number % 2}"} for number in range(40)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "talks.jsonl").write_text(text)
    with gzip.open(folder / "packed.jsonl.gz", "wt") as file:
        file.write(text)
    pq.write_table(pa.Table.from_pylist(rows), folder / "talks.parquet")
    pairs = [{"prompt": f"what is {n}?", "completion": f"it is {n * n}"} for n in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    words = [message["content"] for row in rows for message in row["messages"]]
    tokenizer, _ = load_tokenizer("train-bpe:400", [*words, "Answer: user: system: ", *[" nothing more"] * 40])
    (folder / "words").mkdir()
    tokenizer.save(str(folder / "words" / "tokenizer.json"))
    (folder / "plain.jinja").write_text(TEMPLATE)
    (folder / "marked.jinja").write_text(MARKED)
    return folder


def make(folder: Path, out: Path, source: str = "talks.jsonl", **how):
    how = {"chat": ("messages",), "chat_template": folder / "plain.jinja", "validation": 0.2, "shard_tokens": 300} | how
    prepared([str(folder / source)], out=out, tokenizer=str(folder / "words"), **how)
    return Shards.open(out, "train")


@pytest.fixture(scope="module")
def shards(folder, tmp_path_factory) -> Shards:
    return make(folder, tmp_path_factory.mktemp("shards") / "it")


def pieces(shards: Shards) -> tuple[str, list[str]]:
    """(all text, the texts of the learned parts, one after another)."""
    words = PreTrainedTokenizerFast(tokenizer_file=str(shards.folder / "tokenizer.json"))
    tokens = shards.read(0, shards.tokens)
    learned = shards.learned_blocks(np.array([0]), shards.tokens)[0]
    edges = np.flatnonzero(np.diff(learned.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return words.decode(tokens), [words.decode(tokens[first:last]) for first, last in edges]


def test_only_the_assistants_words_and_the_end_of_its_turn_are_learned(shards, folder):
    text, learned = pieces(shards)
    assert len(shards.manifest.splits["train"]) > 1
    expected = set()
    for number in range(40):
        expected |= {f" it is  {number * number} é\n<|endoftext|>", "nothing more\n<|endoftext|>"}
    assert set(learned) <= expected
    assert len(set(learned)) > 20
    talk_39 = "user: what is 39?\nAnswer:  it is  1521 é\n<|endoftext|>user: and then?\nAnswer: nothing more\n"
    assert f"{talk_39}<|endoftext|>" in text
    assert shards.documents + Shards.open(shards.folder, "validation").documents == 40


def test_a_turn_begins_where_a_server_s_prompt_ends(shards, folder):
    """The prompt's own tokens come first, though a tokenizer would join its last with what follows."""
    words = PreTrainedTokenizerFast(tokenizer_file=str(shards.folder / "tokenizer.json"), eos_token="<|endoftext|>")
    words.chat_template = TEMPLATE
    prompt = words.apply_chat_template(talk(3)[:3], tokenize=False, add_generation_prompt=True)
    whole = words.apply_chat_template(talk(3), tokenize=False)
    before = words(prompt, add_special_tokens=False).input_ids
    assert words(whole, add_special_tokens=False).input_ids[: len(before)] != before
    encode = ConversationEncoder((shards.folder / "tokenizer.json").read_text(), shards.end_id)
    ids, learned = encode(whole, [(len(prompt), len(whole))])
    assert ids[: len(before)].tolist() == before
    assert learned == [len(before), len(ids) - len(before)]


def test_conversations_are_the_same_from_every_kind_of_file_and_by_any_number_of_workers(shards, folder, tmp_path):
    expected = pieces(shards)
    for name in ("packed.jsonl.gz", "talks.parquet"):
        assert pieces(make(folder, tmp_path / name, name)) == expected
    many = make(folder, tmp_path / "many", workers=2)
    assert many.content_hash() == shards.content_hash()


def test_pairs_are_a_question_and_its_answer(folder, tmp_path):
    text, learned = pieces(make(folder, tmp_path / "pairs", "pairs.jsonl", chat=("prompt", "completion")))
    assert "user: what is 3?\nAnswer: it is 9\n<|endoftext|>" in text
    assert all(part.startswith("it is") for part in learned)


def test_marks_of_a_template_decide_what_is_learned(folder, tmp_path):
    _, learned = pieces(make(folder, tmp_path / "marked", chat_template=folder / "marked.jinja"))
    assert {part for part in learned if "NOTHING" in part} == {"NOTHING MORE<|endoftext|>"}


def test_the_template_goes_with_the_tokenizer_and_is_used_when_none_is_named(shards, folder, tmp_path):
    files = shards.tokenizer_files()
    (tmp_path / "model").mkdir()
    for name, content in files.items():
        (tmp_path / "model" / name).write_text(content)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == TEMPLATE
    again = tmp_path / "again"
    prepared([str(folder / "talks.jsonl")], out=again, tokenizer=str(tmp_path / "model"), chat=("messages",))
    assert Shards.open(again).tokenizer_files() == files
    (folder / "one.txt").write_text("plain text\n")
    prepared([str(folder / "one.txt")], out=tmp_path / "text", tokenizer=str(tmp_path / "model"), validation=0)
    assert Shards.open(tmp_path / "text").tokenizer_files() == files
    assert Shards.open(tmp_path / "text").learned_blocks(np.array([0]), 2) is None


def test_batches_and_the_hash_of_the_data_contain_what_is_learned(shards, folder, tmp_path):
    sampler = Sampler(shards, sequence=16, global_batch=4, seed=0)
    batch = sampler.batch(3)
    starts = batch.windows * 17
    assert np.array_equal(batch.learned, shards.learned_blocks(starts, 17))
    assert 0 < batch.learned.mean() < 1
    table = pq.read_table(shards.folder / "train" / "docs-00000.parquet")
    assert all(sum(parts[1::2]) for parts in table.column("learned").to_pylist())
    longer = make(folder, tmp_path / "longer", chat_template=_marking(tmp_path, ending="{{ '.' }}{{ eos_token }}"))
    shorter = make(folder, tmp_path / "shorter", chat_template=_marking(tmp_path, after="{{ '.' }}{{ eos_token }}"))
    assert np.array_equal(longer.read(0, longer.tokens), shorter.read(0, shorter.tokens))
    assert longer.content_hash() != shorter.content_hash()


def _marking(tmp_path: Path, *, ending: str = "", after: str = "") -> Path:
    """A template that marks each message with its ``ending``, without what comes ``after``."""
    path = tmp_path / "marking.jinja"
    message = "{% generation %}{{ message.content }}" + ending + "{% endgeneration %}"
    path.write_text("{% for message in messages %}" + message + after + "{% endfor %}")
    return path


@pytest.mark.parametrize("learned", [[0, 10**6], [0], [2, 3, 1, 1]], ids=["beyond the end", "no pair", "not in order"])
def test_a_table_of_learned_parts_that_is_wrong_is_refused(shards, tmp_path, learned):
    out = Path(shutil.copytree(shards.folder, tmp_path / "copy"))
    path = out / "train" / "docs-00000.parquet"
    table = pq.read_table(path)
    rows = table.column("learned").to_pylist()
    rows[0] = learned
    column = table.schema.get_field_index("learned")
    field = table.schema.field(column)
    pq.write_table(table.set_column(column, field, pa.array(rows, field.type)), path)
    with pytest.raises(DataError, match="checksum"):
        Shards.open(out, "train")
    with pytest.raises(DataError, match="learned"):
        Shards.open(out, "train", verify=False)


def test_a_template_that_was_edited_is_refused(shards, tmp_path):
    out = Path(shutil.copytree(shards.folder, tmp_path / "copy"))
    (out / "chat_template.jinja").write_text(TEMPLATE + " ")
    with pytest.raises(DataError, match=r"chat_template\.jinja"):
        Shards.open(out, "train")


def test_a_finished_folder_of_conversations_is_not_taken_for_one_of_text(shards, folder, tmp_path):
    out = shards.folder
    for other in ({"chat": (), "chat_template": None}, {"chat_template": _marking(tmp_path)}):
        with pytest.raises(InputError, match="chat"):
            make(folder, out, **other)
    assert make(folder, out).content_hash() == shards.content_hash()


GREETING = [turn("assistant", "hello"), turn("user", "and?"), turn("assistant", "no more")]


def test_the_template_s_words_before_a_first_turn_of_the_assistant_are_not_learned():
    template = "{{ bos_token }}" + TEMPLATE
    form = ChatFormat(("messages",), template, SpecialTokens("<b>", "<e>", frozenset()))
    conversation = form.conversation(GREETING, "s", "p")
    assert conversation.text.startswith("<b>Answer: hello")
    assert [conversation.text[first:last] for first, last in conversation.learned] == ["hello\n<e>", "no more\n<e>"]


def test_a_template_that_needs_a_message_before_the_assistant_s_must_mark_its_words():
    needs = "{{ messages[0].role.upper() }}" + TEMPLATE
    form = ChatFormat(("messages",), needs, SpecialTokens("<b>", "<e>", frozenset()))
    with pytest.raises(DataError, match=r"^p: "):
        form.conversation(GREETING, "s", "p")


GOOD = talk(1)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": GOOD[:1]}, "line 2: .*assistant"),
        ({"messages": "hello"}, "line 2: messages"),
        ({"talk": GOOD}, "line 2: .*messages"),
        ({"messages": ["hello"]}, r"line 2: messages\[0\]"),
        ({"messages": [turn("user", "a"), {"role": "assistant"}]}, r"line 2: messages\[1\]\.content"),
        ({"messages": [turn("user", "x<|endoftext|>"), *GOOD]}, r"messages\[0\]\.content .* special token"),
        ({"messages": [turn("assistant", "")]}, "line 2: the template"),
        (None, "line 2: "),
    ],
)
def test_what_is_no_conversation_is_named_by_line_and_field(folder, tmp_path, record, message):
    path = tmp_path / "bad.jsonl"
    line = "{" if record is None else json.dumps(record)
    path.write_text(json.dumps({"messages": GOOD}) + "\n" + line + "\n")
    template = folder / "plain.jinja"
    if record == {"messages": [turn("assistant", "")]}:
        template = tmp_path / "quiet.jinja"
        template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(DataError, match=message) as error:
        make(folder, tmp_path / "out", str(path), chat_template=template)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[-1].content }}", "message 2"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% for", "template"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "processor time"),
        ("{{ '%0999999999d'|format(1) }}", "512 MiB"),
        ("{{ 'ten chars.' * 500000 }}", "4,194,304 characters"),
    ],
)
def test_a_template_that_cannot_serve_is_named(folder, tmp_path, template, message):
    (tmp_path / "bad.jinja").write_text(template)
    with pytest.raises(DataError, match=message):
        make(folder, tmp_path / "out", chat_template=tmp_path / "bad.jinja")


def test_of_a_tokenizer_s_list_of_templates_the_one_named_default_is_used(tmp_path):
    """An entry that is no object is skipped: it was a traceback."""
    (tmp_path / "tokenizer.json").write_text("{}")
    named = [{"name": name, "template": name} for name in ("tools", "default")]
    for templates, expected in ((["text", *named], "default"), (["text"], None)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
        assert own_template(str(tmp_path)) == expected


def test_contradicting_options_are_refused(folder, tmp_path):
    for how, named in (({"chat_template": None}, "-template"), ({"chat": ()}, ""), ({"chat": tuple("abc")}, " a,b,c")):
        with pytest.raises(InputError, match=f"--chat{named}"):
            make(folder, tmp_path / "a", **how)
    (folder / "text.txt").write_text("hello")
    with pytest.raises(InputError, match="records"):
        make(folder, tmp_path / "d", "text.txt")


def test_a_turn_ends_with_its_first_end_token_and_gets_one_where_the_template_has_none(folder):
    words, _ = load_tokenizer(str(folder / "words"))
    words.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    im_end = words.token_to_id("<|im_end|>")
    encode = ConversationEncoder(words.to_str(), im_end)
    text = "user: a<|im_end|>\nAnswer: b<|im_end|>\n"
    ids, (first, length) = encode(text, [(text.index("b"), len(text))])
    assert ids[first + length - 1] == ids[-1] == im_end
    assert words.decode(ids[first : first + length], skip_special_tokens=False) == "b<|im_end|>"
    ids, (first, length) = encode("a b", [(1, 3)])
    assert (first, length) == (1, len(ids) - 1)
    assert ids[-1] == im_end
    ids, (first, length) = encode("a bc", [(1, 2)])
    assert length < len(ids) - 1, "a question at the end is not answered with an end"
