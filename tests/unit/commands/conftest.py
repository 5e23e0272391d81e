"""A tiny checkpoint that reads words, and records of tasks, for every test of the commands."""

import functools

import pytest

from adaponder.conversion import open as opening
from harness_support import reader, words, write_records


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("reader") / "ada"
    reader().save_pretrained(folder)
    words().save_pretrained(folder)
    return str(folder)


load_once = functools.cache(opening.load)


@pytest.fixture(autouse=True)
def checkpoints_opened_once(monkeypatch):
    """Each checkpoint is opened once for all commands of all tests."""
    monkeypatch.setattr(opening, "load", load_once)


@pytest.fixture(scope="session")
def records(tmp_path_factory):
    return write_records(tmp_path_factory.mktemp("records"))
