"""The browser that the tests of the page drive."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from explorer_support import browser_path, chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LEFT_OUT = "{} is missing; install Chromium (Debian: apt install chromium) and the extras serve and dev"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for this file; it must close before other tests, as asyncio cannot run beside it in one thread."""
    missing = [name for name in ("playwright", "fastapi", "uvicorn") if find_spec(name) is None]
    if browser_path() is None or missing:
        pytest.skip(LEFT_OUT.format(", ".join(missing) or "a browser"))
    with chromium() as opened:
        yield opened
