"""A wheel has the sample checkpoint in it, and what is installed from the wheel opens it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OPENS = """
import adaponder
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(adaponder.sample_path())
print(adaponder.sample_path())
print(model.num_parameters())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("setuptools")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, str(out)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = out.glob("*.whl")
    return made


def test_a_wheel_is_small_and_has_every_file_of_the_sample(wheel):
    assert wheel.stat().st_size < 8_000_000
    with zipfile.ZipFile(wheel) as archive:
        packed = {name.rpartition("/")[2]: name for name in archive.namelist() if name.startswith("adaponder/sample/")}
        here = ROOT / "src" / "adaponder" / "sample"
        assert set(packed) == {path.name for path in here.iterdir()}
        for name, path in packed.items():
            assert archive.read(path) == (here / name).read_bytes(), name


def test_what_is_installed_from_the_wheel_opens_the_sample_without_a_network(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", OPENS], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    path, parameters = done.stdout.split()
    assert path == str(tmp_path / "site" / "adaponder" / "sample")
    assert parameters == "3902979"
