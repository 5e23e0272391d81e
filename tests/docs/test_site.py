"""The documentation site builds without a warning, its links lead somewhere, and it shows every public name.

Building it takes half a minute, so make test-every does it; make docs alone finds warnings.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
from typer.main import get_command

import adaponder
from adaponder.cli import app

ROOT = Path(__file__).parents[2]


class Page(NamedTuple):
    targets: list[str]
    anchors: set[str]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    options = ["-q", "-W", "--keep-going", "-d", str(folder / "doctrees"), "-c", str(ROOT / "docs" / "site")]
    # In a process of its own: Sphinx imports the package's modules a second time, for their types.
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT), str(folder / "html")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    texts = {path: path.read_text() for path in site.rglob("*.html")}
    return {
        path: Page(re.findall(r'(?:href|src)="([^"]+)"', text), set(re.findall(r'(?:id|name)="([^"]+)"', text)))
        for path, text in texts.items()
    }


def broken(pages: dict[Path, Page]) -> Iterator[str]:
    """Yields every link, picture, style and script of the pages that is not there."""
    for path, page in pages.items():
        for target in map(unescape, page.targets):
            url = urlsplit(target)
            if url.scheme in ("http", "https", "data", "mailto"):
                continue
            aim = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not aim.exists():
                yield f"{path.name}: {target} is not there"
            elif url.fragment and aim in pages and unquote(url.fragment) not in pages[aim].anchors:
                yield f"{path.name}: {target} has no such anchor"


@pytest.mark.every
def test_every_link_of_the_site_leads_somewhere_and_no_page_loads_anything_from_elsewhere(site, pages):
    assert len(pages) > 15
    assert not list(broken(pages))
    loads = re.compile(r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//|<link[^>]+href="(?:https?:)?//')
    assert not [path.name for path in pages if loads.search(path.read_text())]


@pytest.mark.every
def test_the_reference_shows_every_public_name_and_every_command(site, pages):
    shown = pages[site / "docs" / "site" / "api.html"].anchors
    assert {name for name in adaponder.__all__ if f"adaponder.{name}" not in shown} == set()
    options = (site / "docs" / "site" / "options.html").read_text()
    for name in get_command(app).commands:
        assert f"adaponder {name}" in options
    assert "--max-iterations" in options


@pytest.mark.every
def test_examples_and_the_notebook_are_pages_with_their_code_and_pictures(site, pages):
    for path in (ROOT / "examples").glob("*.py"):
        page = site / "examples" / f"{path.stem}.html"
        assert "You learn" in page.read_text(), path.name
        assert "argparse" in page.read_text() or "sys" in page.read_text(), path.name
    pictures = [target for target in pages[site / "examples" / "the_algorithm.html"].targets if target.endswith(".png")]
    assert len(pictures) >= 5
