"""Files from elsewhere are read as plain data, or refused in one line, at once."""

import hashlib
import os
import socket

import pytest

from adaponder.errors import CheckpointError, InputError
from adaponder.files import JSON_DEPTH, read_bytes, read_json, sha256_of


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


def test_the_checksum_is_that_of_the_bytes(tmp_path):
    (tmp_path / "some").write_bytes(b"abc" * 100_000)
    assert sha256_of(tmp_path / "some") == hashlib.sha256(b"abc" * 100_000).hexdigest()
