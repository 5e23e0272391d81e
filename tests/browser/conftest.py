"""One browser and one server for the tests of a file; without a browser they are left out, and it is said which.

A browser is closed before tests of other files begin: while one is open, asyncio cannot run in that thread.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from explorer_support import Explorer
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LEFT_OUT = (
    "all of tests/browser is left out: {} is missing; install Chromium (Debian: apt install chromium) and the extras "
    "serve and dev, then run pytest tests/browser"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next((path for name in NAMES if (path := shutil.which(name))), None)
    missing = [name for name in ("playwright", "fastapi", "uvicorn") if find_spec(name) is None]
    if path is None or missing:
        pytest.skip(LEFT_OUT.format(", ".join(missing) or "a browser"))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Without its sandbox, which containers forbid: it opens our own page only.
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(browser: Browser) -> Iterator[str]:
    """Where the server of a small model answers."""
    from explorer_support import serving

    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def new_tab(browser: Browser, address: str) -> Iterator[Callable[[], Explorer]]:
    """Makes tabs that share nothing with others."""
    from explorer_support import Explorer

    contexts = []

    def make() -> Explorer:
        contexts.append(browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce"))
        contexts[-1].set_default_timeout(15_000)
        return Explorer(contexts[-1], address)

    yield make
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def shared(new_tab: Callable[[], Explorer]) -> Explorer:
    """The tab that most tests use one after another."""
    explorer = new_tab().open()
    explorer.check()
    return explorer


@pytest.fixture
def explorer(shared: Explorer) -> Iterator[Explorer]:
    """The page with no text, wide and light; during a test it must stay silent and ask nobody else."""
    shared.reset()
    yield shared
    shared.check()
