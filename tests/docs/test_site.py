"""The documentation site builds without a warning, its links lead somewhere, and it shows every public name.

Building it takes half a minute, so make test-every does it; make docs alone finds warnings.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from typer.main import get_command

import adaponder
from adaponder.cli import app

ROOT = Path(__file__).parents[2]


class Page(HTMLParser):
    """Where a page leads to, and the anchors that others may lead to."""

    def __init__(self, path: Path):
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.targets += [value for name in ("href", "src") if (value := values.get(name))]
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}


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
    return {path: Page(path) for path in site.rglob("*.html")}


def broken(pages: dict[Path, Page]) -> Iterator[str]:
    """Every link, picture, style and script of the pages that is not there, and what would be loaded from elsewhere."""
    for path, page in pages.items():
        for target in page.targets:
            url = urlsplit(target)
            if url.scheme in ("http", "https", "data", "mailto"):
                continue
            aim = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not aim.exists():
                yield f"{path.name}: {target} is not there"
            elif url.fragment and aim in pages and unquote(url.fragment) not in pages[aim].anchors:
                yield f"{path.name}: {target} has no such anchor"


@pytest.mark.every
def test_every_link_of_the_site_leads_somewhere(site, pages):
    assert len(pages) > 15
    assert not list(broken(pages))


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "one.html").write_text(
        '<h1 id="top"></h1><a href="two.html">two</a><a href="#top">up</a><a href="#no">'
    )
    one = tmp_path / "one.html"
    assert list(broken({one: Page(one)})) == ["one.html: two.html is not there", "one.html: #no has no such anchor"]


@pytest.mark.every
def test_no_page_loads_anything_from_elsewhere(site):
    loads = re.compile(r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//|<link[^>]+href="(?:https?:)?//')
    assert not [path.name for path in site.rglob("*.html") if loads.search(path.read_text())]


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
