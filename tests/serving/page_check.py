"""Measures how soon the page colours an edited text, in a real Chromium, with the shipped model on a CPU.

The time is from the keystroke to the frame in which the token has its colour: an edit at the end of 500 tokens, and a
paste of 500. ``server_ms`` is the server's share; the page's share is the processor time of its main thread. ``python
tests/serving/page_check.py`` runs it; ``--record`` writes ``page_check.json`` beside this file.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shutil
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder) for folder in ("src", "", "tests")]

import adaponder
from soak_support import call, run_parts, serving

if TYPE_CHECKING:
    from playwright.sync_api import CDPSession, Page

RECORD = Path(__file__).with_suffix(".json")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
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


def main_thread_seconds(session: CDPSession) -> float:
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")


def rested(page: Page) -> None:
    page.wait_for_selector("html[data-shown=detailed]", timeout=60_000)
    page.wait_for_timeout(100)


def measured(page: Page, text: str) -> dict[str, Any]:
    """Returns the milliseconds of pastes of new texts, and of keystrokes at the end."""
    answers: list[Any] = []
    page.on("response", lambda response: answers.append(response) if response.url.endswith("/score") else None)
    page.evaluate(_WATCH)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
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
    before = main_thread_seconds(session)
    for number, character in enumerate(TYPED):
        page.keyboard.type(character)
        wait_until_shown(page, number + 1)
        page.wait_for_timeout(60)
    edits = page.evaluate("window.times")
    page.wait_for_timeout(100)
    spent = main_thread_seconds(session) - before
    return {
        "edit_ms": round(median(edits), 1),
        "edits_ms": [round(milliseconds, 1) for milliseconds in edits],
        "server_ms": round(1000 * median(answer.json()["seconds"] for answer in answers), 1),
        "page_processor_ms_per_edit": round(1000 * spent / len(TYPED), 1),
        "paste_ms": round(median(pastes), 1),
        "pastes_ms": [round(milliseconds, 1) for milliseconds in pastes],
    }


def edits(options: argparse.Namespace) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    browser_path = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    assert browser_path is not None, f"none of {', '.join(BROWSERS)} is on the path"
    load = os.getloadavg()[0]
    with serving(folder=Path(adaponder.sample_path())) as server, sync_playwright() as playwright:
        text = text_of(server.url)
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto(f"{server.url}/")
        rested(page)
        found = measured(page, text)
        browser.close()
        found = {"tokens": count(server.url, text), "cores": os.cpu_count(), "load_before": round(load, 2)} | found
    assert found["edit_ms"] < options.most, f"an edit takes {found['edit_ms']} ms in the median: {found}"
    assert found["paste_ms"] < options.most_paste, f"a paste takes {found['paste_ms']} ms in the median: {found}"
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--most", type=float, default=100.0, help="milliseconds of an edit, in the median")
    parser.add_argument("--most-paste", type=float, default=1000.0, help="milliseconds of a paste, in the median")


if __name__ == "__main__":
    packages = ("playwright", "fastapi", "starlette", "uvicorn")
    sys.exit(run_parts({"edits": edits}, RECORD, add_options, __doc__ or "", packages))
