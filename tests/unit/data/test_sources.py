"""Inputs become documents: the same ones in the same order, odd ones counted or refused by file and line."""

import bz2
import errno
import gzip
import json
import lzma
import os
import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adaponder.data import readers, sources
from adaponder.data.manifest import DataError
from adaponder.data.readers import Counts, Document, parse_hub
from adaponder.data.sources import documents
from adaponder.errors import AdaPonderError, InputError
from megatron_support import write_megatron

RECORDS = [{"text": "one", "source": "web"}, {"text": "zwei — 2"}, {"text": "drei\n\n3"}]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
TEXTS = [record["text"] for record in RECORDS]
BOM = b"\xef\xbb\xbf"


def refused(path: Path | str, error: type[AdaPonderError], match: str) -> None:
    with pytest.raises(error, match=match):
        list(documents([str(path)]))


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.py", b"x = 1\r\n", [Document("x = 1\r\n", "py")]),
        ("README", b"read me", [Document("read me", "text")]),
        ("bom.txt", BOM + "one \ufeff".encode(), [Document("one \ufeff", "txt")]),
        ("empty.txt", BOM, []),
        ("late-nul.txt", b"a" * 10_000 + b"\0b", [Document("a" * 10_000 + "\0b", "txt")]),
        ("latin.txt", "Füße über Äpfeln".encode("latin-1"), [Document("F\ufffd\ufffde \ufffdber \ufffdpfeln", "txt")]),
        ("windows.jsonl", BOM + LINES.replace(b"\n", b"\r\n"), TEXTS),
        ("blank.jsonl", BOM + b"\n" + LINES, TEXTS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_gives_its_text_or_its_records(tmp_path, name, data, expected):
    (tmp_path / name).write_bytes(data)
    actual = list(documents([str(tmp_path / name)]))
    assert (actual if name.partition(".")[2] != "jsonl" else [document.text for document in actual]) == expected


def test_a_folder_is_read_in_sorted_order_without_hidden_and_binary_files(tmp_path):
    for name in ("b/2.txt", "b/1.txt", "a.txt", "c/.hidden", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "picture").write_bytes(b"GIF\0\1\2")
    (tmp_path / "packed").write_bytes(bytes(range(128, 256)))
    (tmp_path / "d.jsonl").write_bytes(LINES)
    counts = Counts()
    actual = [document.text for document in documents([str(tmp_path)], counts=counts)]
    assert actual == ["a.txt", *TEXTS, "b/1.txt", "b/2.txt"]
    assert (counts.hidden, counts.binary, counts.documents) == (2, 2, 6)


@pytest.mark.parametrize("name", ["true.bin", "program", "notes.txt", "old.txt.gz"])
def test_a_binary_file_that_is_named_is_refused_with_the_cure(tmp_path, name):
    for data in (b"\x7fELF\2\1\1\0" + bytes(64), "in two bytes each".encode("utf-16")):
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        refused(tmp_path / name, InputError, name)


def compressed(data: bytes, compression: str) -> bytes:
    zstd = pa.Codec("zstd")
    compress = {
        "": bytes,
        ".gz": gzip.compress,
        ".xz": lzma.compress,
        ".bz2": bz2.compress,
        ".zst": lambda part: zstd.compress(part, asbytes=True),
    }[compression]
    # Two frames end to end, as parallel packers write.
    return compress(data[:20]) + compress(data[20:])


@pytest.mark.parametrize("compression", ["", ".gz", ".xz", ".bz2", ".zst", ".GZ"])
def test_text_and_records_are_the_same_however_they_are_compressed(tmp_path, compression):
    text = "a text of some length, of which parts are compressed"
    contents = {"notes.txt": text.encode(), "notes": text.encode(), "x.py": text.encode(), "part.jsonl": LINES}
    for name, data in (contents | {"picture": b"GIF\0 and twenty more bytes"}).items():
        (tmp_path / (name + compression)).write_bytes(compressed(data, compression.lower()))
    records = [Document("one", "web"), Document("zwei — 2", "part"), Document("drei\n\n3", "part")]
    assert list(documents([str(tmp_path / f"part.jsonl{compression}")])) == records
    assert list(documents([str(tmp_path / f"notes.txt{compression}")])) == [Document(text, "txt")]
    counts = Counts()
    actual = {document[:2] for document in documents([str(tmp_path)], counts=counts)}
    assert actual == {document[:2] for document in records} | {(text, source) for source in ("txt", "text", "py")}
    assert counts.binary == 1


@pytest.mark.parametrize("compression", [".gz", ".xz", ".bz2", ".zst"])
@pytest.mark.parametrize("name", ["part.jsonl", "part.txt"])
def test_a_truncated_compressed_file_is_never_taken_for_a_shorter_one(tmp_path, name, compression):
    path, line = tmp_path / (name + compression), b'{"text": "a text of some length"}\n'
    data = compressed(line * 9, compression)
    cuts = (1, 5, 9, (len(data) - len(compressed(b"", compression)) // 2) // 2)
    for damaged in (*(data[:-cut] for cut in cuts), b"this was never compressed at all"):
        path.write_bytes(damaged)
        refused(path, DataError, name + compression)


@pytest.mark.parametrize(
    ("name", "where"), [("a.jsonl", ", line 2"), ("a.jsonl.gz", ", line 2"), ("a.txt", ""), ("a.parquet", ", row 1")]
)
def test_a_document_beyond_the_limit_is_named(tmp_path, monkeypatch, name, where):
    path, rows = tmp_path / name, ["short", "x" * 200]
    lines = "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": rows}), path)
    else:
        path.write_bytes({".txt": rows[1].encode(), ".gz": gzip.compress(lines)}.get(path.suffix, lines))
    monkeypatch.setattr(readers, "LONGEST", 150)
    refused(path, DataError, f"{name}{where}: .*150")
    monkeypatch.setattr(readers, "LONGEST", 300)
    assert len(list(documents([str(path)]))[-1].text) == 200


def test_an_unreadable_folder_is_an_error_not_a_gap(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("text")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    refused(tmp_path, InputError, "closed")


def test_an_input_that_cannot_be_read_as_text_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused("hf:wiki", InputError, "pip install datasets")
    for name in ("a.tar.gz", "a.zip", "a.tgz", "a.parquet.gz", "a.TAR", "a.arrow"):
        (tmp_path / name).write_bytes(gzip.compress(b"x"))
        refused(tmp_path / name, InputError, re.escape(name))
    write_megatron(tmp_path / "m", [[1]])
    for name, match in (("a\0b", "a.b"), ("x" * 5000, "xxx"), (tmp_path / "nowhere", "nowhere"), (tmp_path / "m", "m")):
        refused(name, InputError, match)


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[]", "{}", '{"text": 3}', '{"text": "a", "source": 1}', "[" * 100_000),
        '{"text": "a", "n": ' + "9" * 5000 + "}",
    ],
    ids=lambda line: line[:20],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n\n' + line + "\n")
    refused(tmp_path / "a.jsonl", DataError, r"a\.jsonl, line 3: ")


def test_parquet_gives_its_text_column(tmp_path):
    path = tmp_path / "a.parquet"
    words = pa.array(["eins", "zwei"]).dictionary_encode()
    for texts in (["eins", "zwei"], words, pa.array(["eins", "zwei"], pa.large_string())):
        pq.write_table(pa.table({"n": [1, 2], "text": texts, "source": ["x", None]}), path)
        assert list(documents([str(path)])) == [Document("eins", "x"), Document("zwei", "a")]
    for table, match in (({"body": ["eins"]}, "'text'"), ({"text": ["a", None]}, "row 1"), ({"text": [1]}, "row 0")):
        pq.write_table(pa.table(table), path)
        refused(path, DataError, match)
    path.write_bytes(b"PAR1")
    refused(path, DataError, r"a\.parquet")


def test_a_saved_dataset_needs_no_library(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    table = pa.table({"text": ["eins", "zwei"], "id": [1, 2]})
    path = tmp_path / "train" / "data-0.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    (tmp_path / "train" / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    for folder in (tmp_path, tmp_path / "train"):
        assert list(documents([str(folder)])) == [Document("eins", "data-0"), Document("zwei", "data-0")]


@pytest.mark.parametrize(
    ("state", "named"),
    [
        *(("[]", "state"), ("[" * 99_999, "state"), ('{"_data_files": 5}', "state"), ('{"_data_files": [3]}', "state")),
        ('{"_data_files": [{"filename": {}}]}', "state"),
        ('{"_data_files": [{"filename": "../secret.arrow"}]}', "set/secret"),  # nothing outside its folder
    ],
    ids=lambda text: text[:40],
)
def test_a_saved_dataset_with_a_bad_list_is_refused_by_name(tmp_path, state, named):
    (tmp_path / "set").mkdir()
    (tmp_path / "secret.arrow").write_bytes(b"secret")
    (tmp_path / "set" / "state.json").write_text(state)
    refused(tmp_path / "set", DataError, named)


@pytest.mark.parametrize(
    ("argument", "parsed"),
    [
        ("hf:org/name", ("org/name", None, "train")),
        ("hf:org/name:validation", ("org/name", None, "validation")),
        ("hf:org/name::test", ("org/name", None, "test")),
        ("hf:org/name:de", ("org/name", "de", "train")),
        ("hf:org/name:de:dev", ("org/name", "de", "dev")),
    ],
)
def test_the_words_after_a_hub_name_are_config_and_split(argument, parsed):
    assert parse_hub(argument) == parsed
    with pytest.raises(InputError, match="hf:NAME"):
        parse_hub("hf::a")


def test_stdlib_is_the_running_interpreters_without_tests_and_leftovers(tmp_path, monkeypatch):
    parts = sources.find(["stdlib"], Counts())
    assert {"os.py", "json/decoder.py"} <= {part.name for part in parts}
    assert sum(part.size for part in parts) > 5_000_000
    names = ("os.py", "json/__init__.py", "json/tool.py", "test/test_os.py", "site-packages/x.py", "idlelib/a.py")
    for name in (*names, "_sysconfigdata_x.py", "os.pyc", "lib2to3/a.py", "unittest/test/t.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(sources, "stdlib_root", lambda: tmp_path)
    assert list(documents(["stdlib"])) == [Document(name, "stdlib") for name in names[:3]]


def megatron(path: Path) -> list[list[int]]:
    counts = Counts()
    return [document.tokens.tolist() for document in sources.read(sources.find([str(path)], counts), counts)]


def test_megatron_data_is_read_by_any_of_its_names(tmp_path):
    written = [[5, 6, 7], [8], [65535, 0]]
    write_megatron(tmp_path / "pile", written)
    for name in ("pile", "pile.bin", "pile.idx"):
        assert megatron(tmp_path / name) == written
    write_megatron(tmp_path / "wide", [[70000, 1]], dtype="<i4", code=4)
    assert megatron(tmp_path / "wide.idx") == [[70000, 1]]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("m.bin", lambda data: data[:-1]),
        ("m.idx", lambda data: data[:-1]),
        ("m.idx", lambda data: b"X" + data[1:]),
        ("m.idx", lambda data: data[:17] + bytes([7]) + data[18:]),  # floats
        ("m.idx", lambda data: data[:42] + bytes(8) + bytes([9]) + data[51:]),  # a pointer elsewhere
    ],
)
def test_damaged_megatron_data_is_named(tmp_path, name, damage):
    write_megatron(tmp_path / "m", [[1, 2], [3]])
    (tmp_path / name).write_bytes(damage((tmp_path / name).read_bytes()))
    with pytest.raises(DataError, match=name):
        megatron(tmp_path / "m")


def test_the_datasets_library_reads_a_folder_of_parquet_by_name(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "mine" / "data").mkdir(parents=True)
    for split, words in (("train", ["one", "two"]), ("validation", ["three"])):
        table = pa.table({"text": words, "source": ["numbers"] * len(words)})
        pq.write_table(table, tmp_path / "mine" / "data" / f"{split}-00000-of-00001.parquet")
    assert list(documents([f"hf:{tmp_path}/mine"])) == [Document("one", "numbers"), Document("two", "numbers")]
    assert list(documents([f"hf:{tmp_path}/mine:validation"])) == [Document("three", "numbers")]
