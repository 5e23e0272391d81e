"""Files from elsewhere are read as plain data, or refused in one line, at once; ours are written whole."""

import os
import socket
import threading
from pathlib import Path

import pytest

from adaponder import files
from adaponder.errors import CheckpointError, InputError
from adaponder.files import JSON_DEPTH, lock, read_bytes, read_json, replacing, replacing_folder, sha256_of, write_whole
from adaponder.terminal import write_json
from fault_support import full_disk


def nested(depth: int) -> str:
    return '{"a":' * depth + "{}" + "}" * depth


BAD = {
    "empty": b"",
    "cut": b'{"a": ',
    "list": b"[]",
    "not-utf8": b'{"a": "\xff"}',
    "nested-past-the-stack": b"[" * 200_000,
    "nested-too-deeply": nested(JSON_DEPTH).encode(),
    "nested-lists": b'{"a": ' + b"[" * JSON_DEPTH + b"]" * JSON_DEPTH + b"}",
    "digits-past-the-interpreter": b'{"a": ' + b"9" * 5000 + b"}",
    "digits": b'{"a": ' + b"9" * 50 + b"}",
}


@pytest.mark.parametrize("kind", BAD)
def test_json_that_cannot_be_trusted_is_refused_in_one_line_with_its_path(tmp_path, kind):
    path = tmp_path / "config.json"
    path.write_bytes(BAD[kind])
    with pytest.raises(CheckpointError, match=r"config\.json") as refusal:
        read_json(path)
    assert "\n" not in str(refusal.value)
    with pytest.raises(InputError):
        read_json(path, InputError)


def test_json_within_the_limits_is_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(nested(JSON_DEPTH - 1))
    assert "a" in read_json(path)
    path.write_text('{"n": 18446744073709551615, "x": -1.5e-3, "s": "é"}', encoding="utf-8")
    assert read_json(path) == {"n": 2**64 - 1, "x": -0.0015, "s": "é"}


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device", "missing"])
@pytest.mark.parametrize("read", [read_json, sha256_of, read_bytes])
def test_what_is_no_ordinary_file_is_refused_without_waiting(tmp_path, monkeypatch, kind, read):
    monkeypatch.chdir(tmp_path)  # the path of a socket may have 107 bytes
    path = {"device": "/dev/zero"}.get(kind, "it.json")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        os.mkdir(path)
    elif kind == "socket":
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(path)
        listening.close()
    with pytest.raises(CheckpointError, match=path):
        read(path)


def test_a_file_beyond_its_limit_is_not_read_whole(tmp_path):
    (tmp_path / "large").write_bytes(bytes(100))
    assert len(read_bytes(tmp_path / "large", limit=100)) == 100
    with pytest.raises(CheckpointError, match="99 bytes"):
        read_bytes(tmp_path / "large", limit=99)


FAILURES = {"flush": (files, "flush"), "rename": (os, "replace"), "write": (Path, "write_bytes")}


@pytest.mark.parametrize("failing", FAILURES)
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch, failing):
    path = tmp_path / "result.json"
    write_whole(path, b"before")
    monkeypatch.setattr(*FAILURES[failing], full_disk)
    with pytest.raises(InputError, match=r"result\.json could not be written: No space left on device; .*make room"):
        write_whole(path, b"after", InputError)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"after": 1})
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]
    assert path.read_bytes() == b"before"


def test_a_file_takes_its_place_only_after_its_bytes_are_on_the_disk(tmp_path, monkeypatch):
    order, path = [], tmp_path / "trace"
    monkeypatch.setattr(files, "flush", lambda path: order.append(("flushed", path.name)))
    monkeypatch.setattr(os, "replace", lambda old, new: order.append(("renamed", Path(new).name)))
    with replacing(path) as temporary:
        temporary.write_bytes(b"rows")
        assert order == []
    assert order == [("flushed", temporary.name), ("renamed", "trace"), ("flushed", tmp_path.name)]


def cut_short(writing, name: str) -> None:
    with writing as temporary:
        (temporary / name).write_bytes(b"half")
        raise KeyboardInterrupt


def test_a_block_that_raises_puts_nothing_in_place(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt):
        cut_short(replacing(tmp_path / "trace"), "")
    folders = (tmp_path / "model", tmp_path / "model.partial")
    with pytest.raises(KeyboardInterrupt):
        cut_short(replacing_folder(*folders, overwrite=True), "weights")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "weights").read_bytes() == b"before"


def test_a_new_folder_replaces_an_empty_one_and_no_other_unless_told(tmp_path):
    folder, partial = tmp_path / "model", tmp_path / "model.partial"
    for content, settings in ((b"first", {}), (b"second", {"overwrite": True})):
        with replacing_folder(folder, partial, **settings):
            (partial / "weights").write_bytes(content)
        assert (folder / "weights").read_bytes() == content
        with pytest.raises(OSError, match="not empty"), replacing_folder(folder, partial):
            (partial / "weights").write_bytes(b"unwanted")
        assert (folder / "weights").read_bytes() == content
        assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_cannot_be_put_in_place_leaves_the_old_one(tmp_path, monkeypatch):
    folder, partial, rename = tmp_path / "model", tmp_path / "model.partial", Path.rename
    folder.mkdir()
    (folder / "weights").write_bytes(b"before")
    monkeypatch.setattr(Path, "rename", lambda path, to: full_disk() if path == partial else rename(path, to))
    with pytest.raises(OSError, match="No space"), replacing_folder(folder, partial, overwrite=True):
        (partial / "weights").write_bytes(b"after")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert (folder / "weights").read_bytes() == b"before"


def test_a_lock_is_one_holders_until_it_closes_and_the_file_keeps_its_text(tmp_path):
    (tmp_path / ".lock").write_text("process 1")
    for path in (tmp_path, tmp_path / ".lock"):
        one, other = (os.open(path, os.O_RDONLY) for _ in range(2))
        assert lock(one)
        assert not lock(other)
        os.close(one)
        assert lock(other)
        os.close(other)
    assert (tmp_path / ".lock").read_text() == "process 1"


def test_a_lock_that_is_waited_for_comes_when_its_holder_ends(tmp_path):
    one, other = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    assert lock(one)
    waiting = threading.Thread(target=lambda: lock(other, wait=True))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    os.close(one)
    waiting.join(10)
    assert not waiting.is_alive()
    os.close(other)
