"""Measures how soon the page colours an edited text, in a real Chromium, with shipped models on a CPU.

The time is from the keystroke to the frame in which the token has its colour: an edit at the end of 500 tokens, and a
paste of 500. ``server_ms`` is the server's share. The page without a server is measured at the end of a puzzle, and
while it writes 200 tokens. ``python tests/serving/page_check.py`` runs it; ``--record`` writes ``page_check.json``
beside this file.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    folders = ("src", "", "tests", "tests/browser")
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder) for folder in folders]

from explorer_support import chromium, hosted, shipped_checkpoint

import adaponder
from adaponder.serving.folder import write_page
from soak_support import call, run_parts, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

RECORD = Path(__file__).with_suffix(".json")
TOKENS = 500
TYPED = "x = self.path[1"
# Notes when a keystroke came, and when the frame was drawn in which its answer is shown.
_WATCH = """() => {
  window.times = [];
  let began = 0;
  document.getElementById("text").addEventListener("beforeinput", () => { began = performance.now(); }, true);
  new MutationObserver(() => {
    if (document.documentElement.dataset.shown !== "read" || !began) return;
    const from = began;
    began = 0;
    requestAnimationFrame(() => setTimeout(() => window.times.push(performance.now() - from), 0));
  }).observe(document.documentElement, { attributes: true, attributeFilter: ["data-shown"] });
}"""


def text_of(url: str) -> str:
    """Returns Python code of :data:`TOKENS` tokens, or one more."""
    source, length = inspect.getsource(argparse)[20_000:], 1000
    while count(url, source[:length]) < TOKENS:
        length += 10
    return source[:length]


def count(url: str, text: str) -> int:
    return json.loads(call(url, "POST", "/tokenize", {"prompt": text})[2])["count"]


def wait_until_shown(page: Page, number: int) -> None:
    deadline = time.monotonic() + 60
    while page.evaluate("window.times.length") < number:
        assert time.monotonic() < deadline, "the page shows no answer"
        page.wait_for_timeout(5)


def rested(page: Page) -> None:
    page.wait_for_selector("html[data-shown=detailed]", timeout=60_000)
    page.wait_for_timeout(100)


def measured(page: Page, text: str) -> dict[str, Any]:
    """Returns the milliseconds of pastes of new texts, and of keystrokes at the end."""
    answers: list[Any] = []
    page.on("response", lambda response: answers.append(response) if response.url.endswith("/score") else None)
    page.evaluate(_WATCH)
    pastes = []
    for number in range(3):
        page.evaluate("() => { window.times = []; }")
        page.focus("#text")
        page.keyboard.press("Control+a")
        page.keyboard.insert_text(f"# {number}\n{text}")
        wait_until_shown(page, 1)
        pastes += page.evaluate("window.times")
        rested(page)
    page.keyboard.press("Control+End")
    answers.clear()
    page.evaluate("() => { window.times = []; }")
    for number, character in enumerate(TYPED):
        page.keyboard.type(character)
        wait_until_shown(page, number + 1)
        page.wait_for_timeout(60)
    edits = page.evaluate("window.times")
    return {
        "edit_ms": round(median(edits), 1),
        "edits_ms": [round(milliseconds, 1) for milliseconds in edits],
        "server_ms": round(1000 * median(answer.json()["seconds"] for answer in answers), 1),
        "paste_ms": round(median(pastes), 1),
        "pastes_ms": [round(milliseconds, 1) for milliseconds in pastes],
    }


def machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "load_before": round(os.getloadavg()[0], 2)}


def edits(options: argparse.Namespace) -> dict[str, Any]:
    found = machine()
    with serving(folder=Path(adaponder.sample_path())) as server, chromium() as browser:
        text = text_of(server.url)
        page = browser.new_page()
        page.goto(f"{server.url}/")
        rested(page)
        found |= {"tokens": count(server.url, text)} | measured(page, text)
    assert found["edit_ms"] < options.most, f"an edit takes {found['edit_ms']} ms in the median: {found}"
    assert found["paste_ms"] < options.most_paste, f"a paste takes {found['paste_ms']} ms in the median: {found}"
    return found


@contextmanager
def static_page(browser: Browser, name: str, fragment: str = "") -> Iterator[Page]:
    """Writes the page of a shipped checkpoint, hosts the folder and opens it."""
    with tempfile.TemporaryDirectory() as out:
        write_page(shipped_checkpoint(name), Path(out) / "page", source=name)
        with hosted(Path(out) / "page") as address:
            page = browser.new_page()
            page.goto(f"{address}/{fragment}")
            rested(page)
            yield page


def without_a_server(options: argparse.Namespace) -> dict[str, Any]:
    found = machine()
    with chromium() as browser:
        with static_page(browser, "sample-hops") as page:
            page.focus("#text")
            page.keyboard.press("Control+End")
            page.evaluate(_WATCH)
            for number in range(15):
                page.keyboard.press("Backspace" if number % 2 else "c")
                wait_until_shown(page, number + 1)
                page.wait_for_timeout(60)
            times = page.evaluate("window.times")
            found |= {"puzzle_edit_ms": round(median(times), 1), "puzzle_edits_ms": [round(ms, 1) for ms in times]}
        with static_page(browser, "sample", "#text=def%20__init__(self&most=200") as page:
            began = time.monotonic()
            page.click("#continue")
            page.wait_for_selector("html[data-writing]")
            page.wait_for_selector("html:not([data-writing])", timeout=60_000)
            found |= {"new_tokens": 200, "new_tokens_seconds": round(time.monotonic() - began, 2)}
            found["pace"] = page.inner_text("#pace")
    assert found["puzzle_edit_ms"] < options.most_local, f"an edit takes {found['puzzle_edit_ms']} ms: {found}"
    assert found["new_tokens_seconds"] < options.most_writing, (
        f"200 tokens take {found['new_tokens_seconds']} s: {found}"
    )
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--most", type=float, default=100.0, help="milliseconds of an edit, in the median")
    parser.add_argument("--most-paste", type=float, default=1000.0, help="milliseconds of a paste, in the median")
    parser.add_argument("--most-local", type=float, default=50.0, help="the same of an edit without a server")
    parser.add_argument("--most-writing", type=float, default=3.0, help="seconds of 200 tokens without a server")


if __name__ == "__main__":
    packages = ("playwright", "fastapi", "starlette", "uvicorn")
    sys.exit(
        run_parts({"edits": edits, "without a server": without_a_server}, RECORD, add_options, __doc__ or "", packages)
    )
