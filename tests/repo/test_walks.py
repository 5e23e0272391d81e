"""The ways through the package are shorter than before its root was sorted into folders: see tests/repo/walks.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from walks import count

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def today(tmp_path_factory) -> dict[str, dict[str, int]]:
    """Today's figures, from a process of its own: what other tests have cached would shorten a walk."""
    path = tmp_path_factory.mktemp("walks") / "walks.json"
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1] / "src")}
    subprocess.run([sys.executable, HERE / "walks.py", "--json", path], env=environment, check=True)
    return json.loads(path.read_text())


@pytest.mark.every
@pytest.mark.parametrize("walk", ["input_ids", "recipe"])
def test_a_walk_makes_fewer_moves_than_before_and_fewer_of_them_upwards(today, walk):
    before = json.loads((HERE / "walks.json").read_text())[walk]
    for kind in ("rooms", "rooms_up", "files_up"):
        assert today[walk][kind] < before[kind], kind
    # Walks that were not recorded would be short, too.
    assert today[walk]["rooms"] > 10


def test_moves_are_counted_by_room_and_by_file():
    moves = {("b/x.py", "a.py"), ("b/y.py", "a.py"), ("b/x.py", "b/y.py"), ("a.py", "b/x.py")}
    found = count(moves, ["a", "b"])
    assert found._asdict() == {"rooms": 2, "rooms_up": 1, "files": 4, "files_up": 1}
