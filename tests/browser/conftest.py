"""The browser that the tests of the page drive."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LEFT_OUT = "{} is missing; install Chromium (Debian: apt install chromium) and the extras serve and dev"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for this file; it must close before other tests, as asyncio cannot run beside it in one thread."""
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
