"""What is released: the source archive builds the wheel; what is installed from that is whole and opens the sample."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from adaponder import __version__

ROOT = Path(__file__).parents[3]
REPOSITORY = "https://example.org/somebody/adaponder"
OPENS = """
import adaponder
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(adaponder.sample_path())
print(adaponder.sample_path())
print(model.num_parameters())
"""


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    """What a command prints, or its errors as the message of a failure."""
    shell = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run(command, cwd=folder, env=shell, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tracked(folder: str = ".") -> list[str]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return listed.splitlines()


def build(kind: str, source: Path, out: Path) -> Path:
    """An archive of ``source``, as a build front end would have it made."""
    code = f"from setuptools.build_meta import {kind} as make; make({str(out)!r})"
    run(sys.executable, "-c", code, folder=source, ADAPONDER_REPOSITORY=REPOSITORY)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel made from what the source archive holds, and from nothing else."""
    source = tmp_path_factory.mktemp("source")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    archive = build("build_sdist", source, tmp_path_factory.mktemp("sdist"))
    with tarfile.open(archive) as files:
        inside = {Path(name).relative_to(f"adaponder-{__version__}").as_posix() for name in files.getnames()}
    left_out = {name for name in tracked() if not name.startswith(".")} - inside
    assert not left_out, "tests, documents and records belong to the source"
    assert archive.name == f"adaponder-{__version__}.tar.gz"
    unpacked = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(archive, unpacked)
    return build("build_wheel", unpacked / f"adaponder-{__version__}", tmp_path_factory.mktemp("wheel"))


@pytest.mark.every  # building takes most of a minute
def test_a_wheel_is_small_and_has_every_file_of_the_package_and_works_when_installed(wheel, tmp_path):
    assert wheel.stat().st_size < 19_000_000
    with zipfile.ZipFile(wheel) as archive:
        for name in tracked("src/adaponder"):
            assert archive.read(name.removeprefix("src/")) == (ROOT / name).read_bytes(), name
        about = archive.read(f"adaponder-{__version__}.dist-info/METADATA").decode()
    assert "Language models that think longer on hard tokens" in about  # the README
    assert f"Project-URL: Changelog, {REPOSITORY}/blob/HEAD/CHANGELOG.md" in about
    targets = re.findall(r"\]\(([^)]+)\)", about)
    assert len(targets) > 15
    assert not [target for target in targets if not target.startswith(("https:", "http:", "#"))]
    assert f"]({REPOSITORY}/raw/HEAD/docs/page.png)" in about
    # What is installed from it opens the sample without a network.
    venv.create(tmp_path / "env")
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python, command = tmp_path / "env" / "bin" / "python", tmp_path / "env" / "bin" / "adaponder"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--no-compile"]
    run(*install, wheel, folder=tmp_path)
    path, parameters = run(python, "-c", OPENS, folder=tmp_path, HF_HUB_OFFLINE="1").split()
    assert path == str(site / "adaponder" / "sample")
    assert parameters == "2760706"
    assert __version__ in run(command, "--version", folder=tmp_path)


def test_version_citation_and_changelog_agree():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    newest = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == __version__
