"""A tiny checkpoint that reads words, and records of tasks, for every test of the commands."""

import pytest

from harness_support import reader, words, write_records


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("reader") / "ada"
    reader().save_pretrained(folder)
    words().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def records(tmp_path_factory):
    return write_records(tmp_path_factory.mktemp("records"))
