"""Inputs become documents: the same ones in the same order, the odd ones counted or refused by place."""

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import re
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adaponder.data import readers, sources
from adaponder.data.manifest import DataError
from adaponder.data.readers import Counts, Document, Opened, megatron, parse_hub
from adaponder.data.sources import documents
from adaponder.errors import InputError
from megatron_support import write_megatron

RECORDS = [{"text": "one", "source": "web"}, {"text": "zwei — 2"}, {"text": "drei\n\n3"}]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


def test_a_file_is_one_document_named_by_its_suffix(tmp_path):
    (tmp_path / "a.py").write_bytes(b"x = 1\r\n")
    (tmp_path / "README").write_text("read me")
    found = list(documents([str(tmp_path / "README"), str(tmp_path / "a.py")]))
    assert found == [Document("read me", "text"), Document("x = 1\r\n", "py")]


def test_lines_of_windows_are_records_like_any(tmp_path):
    for index, data in enumerate((b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf\n" + LINES)):
        (tmp_path / f"{index}.jsonl").write_bytes(data)
        found = [document.text for document in documents([str(tmp_path / f"{index}.jsonl")])]
        assert found == [record["text"] for record in RECORDS]


def test_the_mark_that_windows_writes_before_text_is_no_part_of_it(tmp_path):
    (tmp_path / "a.txt").write_text("one \ufeff", encoding="utf-8-sig")
    (tmp_path / "b.txt").write_text("", encoding="utf-8-sig")
    counts = Counts()
    assert list(documents([str(tmp_path)], counts=counts)) == [Document("one \ufeff", "txt")]
    assert counts.empty == 1


def test_a_folder_is_read_in_sorted_order_without_hidden_and_binary_files(tmp_path):
    for name in ("b/2.txt", "b/1.txt", "a.txt", "c/.hidden", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "picture").write_bytes(b"GIF\0\1\2")
    (tmp_path / "packed").write_bytes(bytes(range(128, 256)))
    (tmp_path / "d.jsonl").write_bytes(LINES)
    counts = Counts()
    found = [document.text for document in documents([str(tmp_path)], counts=counts)]
    assert found == ["a.txt", *(record["text"] for record in RECORDS), "b/1.txt", "b/2.txt"]
    assert (counts.hidden, counts.binary) == (2, 2)


@pytest.mark.parametrize("name", ["true.bin", "program", "notes.txt", "old.txt.gz"])
def test_a_binary_file_that_is_named_is_refused_with_the_cure(tmp_path, name):
    path = tmp_path / name
    for data in (b"\x7fELF\2\1\1\0" + bytes(64), "in two bytes each".encode("utf-16")):
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        with pytest.raises(InputError, match=rf"{name} looks binary"):
            list(documents([str(path)]))


def test_nul_far_from_the_start_and_an_old_encoding_are_still_text(tmp_path):
    late, latin = tmp_path / "late.txt", tmp_path / "latin.txt"
    late.write_bytes(b"a" * 10_000 + b"\0b")
    latin.write_bytes("Füße über Äpfeln".encode("latin-1"))
    first, second = documents([str(late), str(latin)])
    assert first.text == "a" * 10_000 + "\0b"
    assert second.text == "F\ufffd\ufffde \ufffdber \ufffdpfeln"


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
    path = tmp_path / f"part.jsonl{compression}"
    path.write_bytes(compressed(LINES, compression.lower()))
    wanted = [Document("one", "web"), Document("zwei — 2", "part"), Document("drei\n\n3", "part")]
    assert list(documents([str(path)])) == wanted
    text = "a text of some length, of which parts are compressed"
    for name in ("notes.txt", "notes", "x.py"):
        (tmp_path / (name + compression)).write_bytes(compressed(text.encode(), compression.lower()))
    (tmp_path / f"picture{compression}").write_bytes(compressed(b"GIF\0 and twenty more bytes", compression.lower()))
    counts = Counts()
    found = list(documents([str(tmp_path)], counts=counts))
    assert sorted(found) == sorted([*wanted, *(Document(text, source) for source in ("txt", "text", "py"))])
    assert counts.binary == 1
    assert list(documents([str(tmp_path / f"notes.txt{compression}")])) == [Document(text, "txt")]


@pytest.mark.parametrize("compression", [".gz", ".xz", ".bz2", ".zst"])
@pytest.mark.parametrize("name", ["part.jsonl", "part.txt"])
def test_a_compressed_file_that_was_cut_off_is_never_taken_for_a_shorter_one(tmp_path, name, compression):
    path = tmp_path / (name + compression)
    line = b'{"text": "a text of some length"}\n'
    data = compressed(line * 9, compression)
    first = len(compressed(line * 9, compression)) - len(compressed(b"", compression)) // 2
    for cut in (1, 5, 9, first // 2):
        path.write_bytes(data[:-cut])
        with pytest.raises(DataError, match=name + compression):
            list(documents([str(path)]))
    path.write_bytes(b"this was never compressed at all")
    with pytest.raises(DataError, match=name + compression):
        list(documents([str(path)]))


@pytest.mark.parametrize("name", ["a.tar.gz", "a.zip", "a.tgz", "a.parquet.gz", "a.TAR", "a.arrow"])
def test_a_container_is_not_read_as_text(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"x"))
    with pytest.raises(InputError, match=re.escape(name)):
        list(documents([str(tmp_path / name)]))


def write_long(path: Path) -> None:
    rows = ["short", "x" * 200]
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": rows}), path)
    elif path.suffix == ".txt":
        path.write_text(rows[1])
    else:
        data = "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.mark.parametrize(
    ("name", "where"),
    [("a.jsonl", ", line 2"), ("a.jsonl.gz", ", line 2"), ("a.txt", ""), ("a.parquet", ", row 1")],
)
def test_a_document_beyond_the_limit_is_named_with_the_cure(tmp_path, monkeypatch, name, where):
    monkeypatch.setattr(readers, "LONGEST", 150)
    write_long(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}{where}: longer than 150 bytes"):
        list(documents([str(tmp_path / name)]))
    monkeypatch.setattr(readers, "LONGEST", 300)
    assert len(list(documents([str(tmp_path / name)]))[-1].text) == 200


class Bounded(io.BytesIO):
    """A file that must not be asked for more than a bounded part of itself."""

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None
        assert 0 < size <= 8192
        return super().read(size)

    def readline(self, size: int | None = -1) -> bytes:
        assert size is not None
        assert 0 < size <= 151
        return super().readline(size)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_what_is_too_long_is_never_read_to_its_end(tmp_path, monkeypatch, name):
    monkeypatch.setattr(readers, "LONGEST", 150)
    monkeypatch.setattr(readers, "decompressed", lambda path: nullcontext(Opened(io.BytesIO(), Bounded(b"x" * 9999))))
    (tmp_path / name).write_text("x")
    with pytest.raises(DataError, match="longer than 150 bytes"):
        list(documents([str(tmp_path / name)]))


def test_an_unreadable_folder_is_an_error_not_a_gap(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("text")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(InputError, match="closed cannot be read"):
        list(documents([str(tmp_path)]))


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
def test_an_impossible_name_is_refused_in_one_line(name):
    with pytest.raises(InputError, match=r"no such file|cannot be read: File name too long"):
        list(documents([name]))


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"text": 3}',
        '{"text": "a", "source": 1}',
        "[" * 100_000,
        '{"text": "a", "n": ' + "9" * 5000 + "}",
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: "):
        list(documents([str(tmp_path / "a.jsonl")]))


def test_parquet_gives_its_text_column(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": [1, 2], "text": ["eins", "zwei"], "source": ["x", None]}), path)
    assert list(documents([str(path)])) == [Document("eins", "x"), Document("zwei", "a")]
    pq.write_table(pa.table({"body": ["eins"]}), path)
    with pytest.raises(DataError, match="no column 'text', it has body"):
        list(documents([str(path)]))
    pq.write_table(pa.table({"text": ["eins", None]}), path)
    with pytest.raises(DataError, match="row 1: text is null"):
        list(documents([str(path)]))
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"a\.parquet"):
        list(documents([str(path)]))


def test_a_saved_dataset_needs_no_library(tmp_path):
    """What ``datasets.save_to_disk`` leaves: Arrow streams, a state.json that lists them, a dict of splits."""
    (tmp_path / "train").mkdir()
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    table = pa.table({"text": ["eins", "zwei"], "id": [1, 2]})
    with (
        pa.OSFile(str(tmp_path / "train" / "data-0.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    (tmp_path / "train" / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    wanted = [Document("eins", "data-0"), Document("zwei", "data-0")]
    assert list(documents([str(tmp_path)])) == wanted
    assert list(documents([str(tmp_path / "train")])) == wanted


@pytest.mark.parametrize(
    "state", ["[]", "[" * 99_999, '{"_data_files": 5}', '{"_data_files": [3]}', '{"_data_files": [{"filename": {}}]}']
)
def test_a_saved_dataset_with_a_bad_list_is_refused_by_name(tmp_path, state):
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(DataError, match=r"state\.json"):
        list(documents([str(tmp_path)]))


def test_a_saved_dataset_reaches_nothing_outside_its_folder(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "secret.arrow").write_bytes(b"secret")
    (tmp_path / "set" / "state.json").write_text('{"_data_files": [{"filename": "../secret.arrow"}]}')
    with pytest.raises(DataError, match=r"set/secret\.arrow is missing"):
        list(documents([str(tmp_path / "set")]))


def test_a_hub_dataset_is_read_through_the_extra(monkeypatch):
    class Rows(list):
        column_names = ["text"]

    asked = []

    def load_dataset(*names, split):
        asked.append((*names, split))
        return Rows([{"text": "eins"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert list(documents(["hf:wiki:de:test"])) == [Document("eins", "wiki")]
    assert asked == [("wiki", "de", "test")]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        list(documents(["hf:wiki"]))


def test_the_words_after_a_hub_name_are_config_and_split():
    assert parse_hub("hf:org/name") == ("org/name", None, "train")
    assert parse_hub("hf:org/name:validation") == ("org/name", None, "validation")
    assert parse_hub("hf:org/name::test") == ("org/name", None, "test")
    assert parse_hub("hf:org/name:de") == ("org/name", "de", "train")
    assert parse_hub("hf:org/name:de:dev") == ("org/name", "de", "dev")
    with pytest.raises(InputError, match="hf:NAME"):
        parse_hub("hf::a")


def test_stdlib_is_the_running_interpreters_without_tests_and_leftovers(tmp_path, monkeypatch):
    names = ("os.py", "json/__init__.py", "json/tool.py", "test/test_os.py", "site-packages/x.py", "idlelib/a.py")
    for name in (*names, "_sysconfigdata_x.py", "os.pyc", "lib2to3/a.py", "unittest/test/t.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(sources, "stdlib_root", lambda: tmp_path)
    found = list(documents(["stdlib"]))
    assert [document.text for document in found] == ["os.py", "json/__init__.py", "json/tool.py"]
    assert {document.source for document in found} == {"stdlib"}


def test_the_real_stdlib_is_there():
    parts = sources.find(["stdlib"], Counts())
    assert {"os.py", "json/decoder.py"} <= {part.name for part in parts}
    assert sum(part.size for part in parts) > 5_000_000
    assert parts == sources.find(["stdlib"], Counts())


def test_megatron_gives_back_what_was_written(tmp_path):
    written = [[5, 6, 7], [8], [65535, 0]]
    write_megatron(tmp_path / "pile", written)
    for name in ("pile", "pile.bin", "pile.idx"):
        assert [tokens.tolist() for tokens in megatron(tmp_path / name)] == written
    write_megatron(tmp_path / "wide", [[70000, 1]], dtype="<i4", code=4)
    assert [tokens.tolist() for tokens in megatron(tmp_path / "wide.idx")] == [[70000, 1]]


def test_damaged_megatron_data_is_named(tmp_path):
    def broken(name: str, change) -> None:
        write_megatron(tmp_path / "m", [[1, 2], [3]])
        path = tmp_path / name
        path.write_bytes(change(path.read_bytes()))
        with pytest.raises(DataError, match=name):
            list(megatron(tmp_path / "m"))

    broken("m.bin", lambda data: data[:-1])
    broken("m.idx", lambda data: data[:-1])
    broken("m.idx", lambda data: b"X" + data[1:])
    broken("m.idx", lambda data: data[:17] + bytes([7]) + data[18:])  # floats
    broken("m.idx", lambda data: data[:42] + bytes(8) + bytes([9]) + data[51:])  # a pointer elsewhere


def test_an_input_that_is_nothing_is_named(tmp_path):
    with pytest.raises(InputError, match="nowhere: no such file"):
        list(documents([str(tmp_path / "nowhere")]))
    write_megatron(tmp_path / "m", [[1]])
    with pytest.raises(InputError, match="tokens, not text"):
        list(documents([str(tmp_path / "m.bin")]))


def test_the_datasets_library_itself_reads_a_folder_of_parquet_by_name(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "mine" / "data").mkdir(parents=True)
    for split, words in (("train", ["one", "two"]), ("validation", ["three"])):
        table = pa.table({"text": words, "source": ["numbers"] * len(words)})
        pq.write_table(table, tmp_path / "mine" / "data" / f"{split}-00000-of-00001.parquet")
    assert list(documents([f"hf:{tmp_path}/mine"])) == [Document("one", "numbers"), Document("two", "numbers")]
    assert list(documents([f"hf:{tmp_path}/mine:validation"])) == [Document("three", "numbers")]
