"""The explorer's files hold no inline code, ask no other host, and put nothing from outside into markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import adaponder.serving

PAGE = Path(adaponder.serving.__file__).parent / "page"
MODULES = sorted(PAGE.glob("*.js"))
LONGEST = 430


class Tags(HTMLParser):
    """Every tag with its attributes, and text inside ``script`` and ``style``."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style") and data.strip():
            self.inline.append(data)


@pytest.fixture(scope="module")
def tags() -> Tags:
    parser = Tags()
    parser.feed((PAGE / "index.html").read_text())
    return parser


def test_there_is_no_inline_script_style_or_listener(tags):
    assert tags.inline == []
    for tag, attributes in tags.tags:
        assert tag != "style"
        assert not [name for name in attributes if name == "style" or name.startswith("on")], (tag, attributes)


def test_every_file_that_is_named_is_there_and_every_file_is_named(tags):
    named = {"index.html"}
    for _, attributes in tags.tags:
        for name in ("src", "href"):
            if (value := attributes.get(name)) and not value.startswith("#"):
                assert value.startswith("page/"), value
                named.add(value.removeprefix("page/"))
    for module in MODULES:
        imported = re.findall(r"from \"\./([\w.]+)\"", module.read_text())
        assert len(imported) == len(re.findall(r"^import [{*]", module.read_text(), re.M)), module.name
        named |= set(imported)
    assert named == {path.name for path in PAGE.iterdir()}


def test_no_other_host_is_named():
    for path in PAGE.iterdir():
        hosts = set(re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z0-9.-]+[^\s\"'`)]*", path.read_text()))
        assert hosts <= {"http://www.w3.org/2000/svg"}, path.name


def test_nothing_is_made_from_markup_or_run_from_text():
    wanted = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc|setHTML"
        r"|createContextualFragment|javascript:|cssText"
    )
    for module in MODULES:
        assert not (found := wanted.search(module.read_text())), f"{module.name}: {found.group()}"


def test_every_label_has_its_field_and_every_control_its_name(tags):
    ids = [attributes["id"] for _, attributes in tags.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for name in ("aria-labelledby", "aria-describedby", "for"):
        assert {attributes[name] for _, attributes in tags.tags if name in attributes} <= set(ids)
    asked = {name for module in MODULES for name in re.findall(r"byId\(\"([\w-]+)\"\)", module.read_text())}
    assert asked - {"match"} <= set(ids)  # the dial makes that one


def test_every_module_says_what_it_is_and_can_be_read_in_one_sitting():
    for path in [*MODULES, PAGE / "style.css"]:
        text = path.read_text()
        assert text.startswith(("// ", "/* ")), path.name
        assert len(text.splitlines()) <= LONGEST, path.name
