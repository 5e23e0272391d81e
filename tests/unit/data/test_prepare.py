"""Equal arguments give equal bytes, whoever does the work; every token of every document is in its shard."""

import hashlib
import json
import multiprocessing
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from adaponder.commands import prepare as command
from adaponder.data import DataError, Manifest, Shards, tokenizers
from adaponder.data.encode import hash_and_size
from adaponder.data.prepare import Progress, prepare
from adaponder.data.sources import documents
from adaponder.data.tokenizers import load_tokenizer, vocabulary_size
from adaponder.errors import InputError
from fault_support import contents
from megatron_support import write_megatron

SENTENCE = "the same Transformer reads each token again and again until its gate says enough; so compute follows"
WORDS = SENTENCE.split()


def text_of(number: int) -> str:
    return " ".join(WORDS[number * step % len(WORDS)] for step in range(1, 5 + number % 30)) + f" {number}\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "part.jsonl"
    path.write_text("".join(json.dumps({"text": text_of(n), "source": f"s{n % 3}"}) + "\n" for n in range(120)))
    return path


@pytest.fixture(scope="module")
def tokenizer(corpus, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    load_tokenizer("train-bpe:300", [text_of(n) for n in range(120)])[0].save(str(path))
    return path


@pytest.fixture(scope="module")
def prepared(corpus, tokenizer, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("prepared")
    prepare([str(corpus)], out=out, tokenizer=str(tokenizer), validation=0.2, shard_tokens=900)
    return out


def test_every_document_is_in_its_shard_followed_by_the_end_token(prepared, corpus):
    words, end_id = load_tokenizer(str(prepared))
    assert end_id == 0
    placed = {}
    for split in ("train", "validation"):
        for path in sorted((prepared / split).glob("tokens-*.bin")):
            tokens = np.fromfile(path, "<u2")
            table = pq.read_table(path.with_name(path.name.replace("tokens", "docs").replace("bin", "parquet")))
            for row in table.to_pylist():
                *body, end = tokens[row["start"] : row["start"] + row["length"]].tolist()
                assert end == end_id
                text = words.decode(body)
                assert (row["hash"], row["utf8_bytes"]) == hash_and_size(text)
                placed[text] = (split, row["source"])
    assert len(placed) == 120
    assert min(shard.tokens for shard in Manifest.load(prepared).splits["train"][:-1]) >= 900
    for document in documents([str(corpus)]):
        share = int.from_bytes(hashlib.sha256(document.text.encode()).digest()[:8], "big") / 2**64
        assert placed[document.text] == ("validation" if share < 0.2 else "train", document.source)


def test_any_number_of_workers_gives_the_same_bytes(prepared, corpus, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("adaponder.data.prepare._CHUNK_DOCUMENTS", 7)
    prepare([str(corpus)], out=tmp_path / "out", tokenizer=str(tokenizer), validation=0.2, shard_tokens=900, workers=3)
    assert contents(tmp_path / "out") == contents(prepared)


@pytest.mark.parametrize(("share", "remark"), [(0.0, None), (1e-9, "to validation"), (1 - 2**-50, "to train")])
def test_repaired_documents_and_an_empty_split_are_remarked(tokenizer, tmp_path, share, remark):
    (tmp_path / "one.txt").write_bytes(b"caf\xe9 and more words\n" * 9)
    options = {"tokenizer": str(tokenizer), "validation": share}
    remarks = prepare([str(tmp_path / "one.txt")], out=tmp_path / "out", **options).remarks()
    assert "U+FFFD: 1" in remarks[0]
    assert remarks[1:] == [] if remark is None else remark in remarks[1]


def test_what_one_worker_refuses_several_refuse_too(tmp_path, tokenizer):
    (tmp_path / "nothing.txt").write_text("")
    write_megatron(tmp_path / "m", [[1, 2], [3, 999]])
    refused = {"nothing.txt": (InputError, "empty"), "m.bin": (InputError, r"m\.bin, document 1: token id 999 at 1 ")}
    for name, (error, says) in refused.items():
        with pytest.raises(error, match=says):
            prepare([str(tmp_path / name)], out=tmp_path / f"{name} out", tokenizer=str(tokenizer), workers=2)


def test_inputs_without_text_leave_the_output_folder_to_the_next_inputs(tmp_path, tokenizer):
    (tmp_path / "folder").mkdir()
    (tmp_path / "nothing.txt").write_text("")
    for name in ("folder", "nothing.txt"):
        with pytest.raises(InputError, match=f"{name}: no files, or only empty"):
            prepare([str(tmp_path / name)], out=tmp_path / "out", tokenizer=str(tokenizer))
    assert not (tmp_path / "out").exists()


def test_a_worker_that_dies_is_reported_and_the_others_end(corpus, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("adaponder.data.prepare._CHUNK_DOCUMENTS", 1)

    def end_one(now: Progress) -> None:
        for worker in multiprocessing.active_children()[:1]:
            worker.kill()
            worker.join()

    with pytest.raises(DataError, match="--workers"):
        prepare([str(corpus)], out=tmp_path / "out", tokenizer=str(tokenizer), workers=2, progress=end_one)
    assert not multiprocessing.active_children()


def test_other_arguments_are_refused_by_name(prepared, corpus, tokenizer, tmp_path):
    same = {"tokenizer": str(tokenizer), "validation": 0.2, "shard_tokens": 900}
    for name, value in {"validation": 0.3, "shard_tokens": 901, "tokenizer": "train-bpe:300", "end_token": "x"}.items():
        with pytest.raises(InputError, match=name):
            prepare([str(corpus)], out=prepared, **(same | {name: value}))
    (tmp_path / corpus.name).write_bytes(corpus.read_bytes() + b"\n")
    with pytest.raises(InputError, match=r"inputs was .*part\.jsonl.*, is .*part\.jsonl"):
        prepare([str(tmp_path / corpus.name)], out=prepared, **same)


def test_a_foreign_folder_and_one_inside_the_input_are_refused(corpus, tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(InputError, match="--out"):
        prepare([str(corpus)], out=tmp_path, tokenizer="train-bpe:300")
    with pytest.raises(InputError, match="--out"):
        prepare([str(tmp_path)], out=tmp_path / "out", tokenizer="train-bpe:300")
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"validation": 1.0}, "--validation"),
        ({"validation": float("nan")}, "--validation"),
        ({"workers": 0}, "--workers"),
        ({"workers": 10**9}, "--workers"),
        ({"shard_tokens": 0}, "--shard-tokens"),
        ({"tokenizer": "train-bpe:256"}, "--tokenizer"),
        ({"tokenizer": "train-bpe:" + "9" * 5000}, "--tokenizer"),
        ({"tokenizer": "./nowhere"}, "--tokenizer"),
        ({"end_token": "</s>"}, "--end-token"),
        ({"end_token": "\udcff"}, "--end-token '.udcff'"),
    ],
)
def test_nonsense_is_refused_and_the_right_command_still_works_after_it(corpus, tmp_path, change, named):
    right = {"out": tmp_path / "out", "tokenizer": "train-bpe:260"}
    if "end_token" in change:
        load_tokenizer("train-bpe:260", ["text"])[0].save(str(tmp_path / "t.json"))
        change = change | {"tokenizer": str(tmp_path / "t.json")}
    with pytest.raises(InputError, match=named):
        prepare([str(corpus)], **(right | change))
    assert not (tmp_path / "out").exists(), "what is wrong is found before anything is written"
    assert prepare([str(corpus)], **right).total("train", "documents") > 100


def test_the_vocabulary_decides_the_width_of_a_token(tmp_path):
    words = Tokenizer(models.WordLevel({"<|endoftext|>": 65_599, "a": 65_000, "[x]": 1}, unk_token="[x]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "wide.json"))
    assert vocabulary_size(words) == 65_600
    (tmp_path / "a.txt").write_text("a a b")
    manifest = prepare([f"{tmp_path}/a.txt"], out=tmp_path / "out", tokenizer=f"{tmp_path}/wide.json", validation=0)
    assert manifest.dtype == "uint32"
    assert Shards.open(tmp_path / "out").read(0, 4).tolist() == [65_000, 65_000, 1, 65_599]
    write_megatron(tmp_path / "m", [[1, 2]])
    with pytest.raises(InputError, match=r"uint16.*65600"):
        prepare([str(tmp_path / "m.idx")], out=tmp_path / "other", tokenizer=str(tmp_path / "wide.json"))


def test_megatron_documents_keep_their_tokens_and_end_once(tmp_path, tokenizer):
    write_megatron(tmp_path / "m", [[70, 71, 0], [72], [0]])
    manifest = prepare([str(tmp_path / "m")], out=tmp_path / "out", tokenizer=str(tokenizer), validation=0)
    assert Shards.open(tmp_path / "out").read(0, 6).tolist() == [70, 71, 0, 72, 0, 0]
    assert (manifest.total("train", "documents"), manifest.total("train", "tokens")) == (3, 6)
    with pytest.raises(InputError, match=r"m\.bin.*tokenizer"):
        prepare([str(tmp_path / "m")], out=tmp_path / "other", tokenizer="train-bpe:300")


def test_text_cannot_forge_the_end_of_its_document(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("says <|endoftext|> aloud")
    prepare([str(tmp_path / "a.txt")], out=tmp_path / "out", tokenizer=str(tokenizer), validation=0)
    tokens = Shards.open(tmp_path / "out")
    assert np.flatnonzero(tokens.read(0, tokens.tokens) == tokens.end_id).tolist() == [tokens.tokens - 1]


def test_the_command_prints_that_it_continues_only_after_a_complete_shard(
    prepared, corpus, tokenizer, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("adaponder.data.prepare._CHUNK_DOCUMENTS", 10)
    options = {"tokenizer": str(tokenizer), "workers": 1, "validation": 0.2, "shard_tokens": 900}

    def interrupted(out: Path, *, shards: int) -> str:
        """What the command shows that follows one which was interrupted after so many shards."""

        def stop(now: Progress) -> None:
            if now.stage == "tokens" and len(list(out.glob("*/tokens-*.bin"))) >= shards:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepare([str(corpus)], out=out, progress=stop, **options)
        assert len(list(out.glob("*/tokens-*.bin"))) == shards
        capsys.readouterr()
        record = tmp_path / "result.json"
        assert not command.prepare(inputs=[str(corpus)], out=out, json=record, **options)["finished_before"]
        assert contents(out) == contents(prepared)
        assert json.loads(record.read_text())["splits"]["train"]["documents"] > 50
        printed = " ".join(capsys.readouterr().out.split())
        assert printed.endswith(f"Next: adaponder train cpu/demo --set data.source={out}")
        return printed

    assert "is unfinished" not in interrupted(tmp_path / "none", shards=0)
    shown = interrupted(tmp_path / "one", shards=1)
    assert "is unfinished: resuming after its last complete shard" in shown
    assert "bytes/token" in shown
    assert command.prepare(inputs=[str(corpus)], out=prepared, **options)["finished_before"]
    assert "Nothing to do" in capsys.readouterr().out


def test_what_is_finished_needs_its_tokenizer_no_more(prepared, corpus, tmp_path, monkeypatch):
    """Prepared with a tokenizer of the hub, which is out of reach when the same command is given again."""
    monkeypatch.setattr(tokenizers, "_download", lambda name: prepared)
    manifest = prepare([str(corpus)], out=tmp_path / "out", tokenizer="somebody/words")
    monkeypatch.undo()
    before, seen = contents(tmp_path / "out"), []
    again = prepare([str(corpus)], out=tmp_path / "out", tokenizer="somebody/words", progress=seen.append)
    assert (again, contents(tmp_path / "out"), {now.stage for now in seen}) == (manifest, before, {"checksums"})
