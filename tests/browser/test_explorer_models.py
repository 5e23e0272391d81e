"""Models of another shape than the small one: many iterations, one iteration, no token that halts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from explorer_support import Explorer, serving, small_model

# An address from another model: its rule and its forced depth may be none of this one's.
FRAGMENT = "#text=def%20f(self)&a=gate:1e-5&forced=0-1&most=8"
# Neighbours of one kind that overlap, and buttons that stick out of the group that clips them.
_COLLISIONS = """() => {
  const found = [];
  for (const chart of document.querySelectorAll(".chart")) {
    for (const kind of [".tick:not(.end)", ".value"]) {
      const boxes = [...chart.querySelectorAll(kind)].map((one) => one.getBoundingClientRect());
      const across = (one, other) => other.left < one.right && other.top < one.bottom && one.top < other.bottom;
      boxes.slice(1).forEach((box, index) => across(boxes[index], box) && found.push(kind));
    }
  }
  const group = document.querySelector(".actions .segments").getBoundingClientRect();
  for (const button of document.querySelectorAll(".actions .segments button")) {
    if (button.getBoundingClientRect().right > group.right) found.push(button.textContent);
  }
  return found;
}"""


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
        assert page.evaluate(_COLLISIONS) == []
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
