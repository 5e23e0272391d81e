"""Servers with another model than the small one, or with a key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from explorer_support import Explorer, byte_tokenizer, serving, small_model

# An address from another model: its rule and its forced depth may be none of this one's.
FRAGMENT = "#text=def%20f(self)&a=gate:1e-5&forced=0-1&most=8"
KEY = "a-key-of-many-characters"


@contextmanager
def page_of(browser, model) -> Iterator[Explorer]:
    with serving(model) as address:
        context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        context.set_default_timeout(15_000)
        explorer = Explorer(context, address)
        yield explorer.open(FRAGMENT)
        explorer.check()
        context.close()


def test_sixteen_iterations_have_room(browser):
    with page_of(browser, small_model(iterations=16)) as explorer:
        page = explorer.page
        deepest = max(range(len(explorer.columns())), key=explorer.columns().__getitem__)
        page.click(f"#a-{deepest}")
        assert page.locator(".actions [data-force]").count() == 17
        page.click("#compare")
        page.wait_for_selector("#summary-b li[data-count='0']")
        empty = page.eval_on_selector_all("li[data-count='0'] .bar", "all => all.map((one) => one.clientWidth)")
        assert set(empty) == {0}


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("method", "iterations"), [("ponder", 4), ("vanilla", 1)])
def test_a_model_that_halts_no_token_is_shown(browser, method, iterations):
    with page_of(browser, small_model(method, iterations)) as explorer:
        assert set(explorer.columns()) == {iterations}
        page, text = explorer.page, explorer.text()
        assert page.is_hidden("#notice")
        assert page.is_hidden("#compare")
        page.click("#a-1")
        assert page.locator(".actions .segments").count() == 0
        page.click("#continue")
        page.wait_for_selector("#pace:not(:empty)")
        explorer.settle()
        assert len(explorer.text()) > len(text)


def test_tokens_that_stand_for_unknown_text_are_counted(browser, monkeypatch):
    bracket = byte_tokenizer().convert_tokens_to_ids("(")
    monkeypatch.setattr("adaponder.serving.served.unknown_id", lambda tokenizer, end: bracket)
    with page_of(browser, small_model()) as explorer:
        assert explorer.stat("Unknown") == "1"


def test_the_page_opens_once_the_key_was_given(browser):
    context = browser.new_context()
    context.set_default_timeout(15_000)
    with serving(key=KEY) as address:
        explorer = Explorer(context, address)
        page = explorer.page
        assert page.goto(address).status == 401
        page.fill("#key", "not-the-key-of-this-server")
        page.click("button")
        assert page.get_by_role("status").inner_text() == "That is not a key of this server."
        page.fill("#key", KEY)
        page.click("button")
        explorer.settle()
        assert page.url.split("#")[0] == f"{address}/"
        [cookie] = context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert KEY not in cookie["value"]
        # What a browser says of the two refusals, and nothing else (its advice on forms is of the kind "verbose").
        assert all("401" in line for line in explorer.heard if not line.startswith("verbose")), explorer.heard
    context.close()
