"""What is released: the source archive is whole and builds the wheel, which has every file of the package."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from adaponder import __version__

ROOT = Path(__file__).parents[3]
REPOSITORY = "https://example.org/somebody/adaponder"


def tracked(folder: str = ".") -> list[str]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return listed.splitlines()


def build(kind: str, source: Path, out: Path) -> Path:
    """Returns an archive of ``source``, made as a build front end makes it."""
    code = f"from setuptools.build_meta import {kind} as make; make({str(out)!r})"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["ADAPONDER_REPOSITORY"] = REPOSITORY
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (archive,) = out.iterdir()
    return archive


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
def test_a_wheel_is_small_and_has_every_file_of_the_package(wheel):
    """``make release`` installs it and tries it."""
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


def test_version_citation_and_changelog_agree():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    newest = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == __version__
