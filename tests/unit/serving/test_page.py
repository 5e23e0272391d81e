"""The explorer's files hold no inline code, name no other host, and put nothing from outside into markup."""

import re
from pathlib import Path

import adaponder.serving

PAGE, LOCAL = (Path(adaponder.serving.__file__).parent / name for name in ("page", "local"))
INDEX = (PAGE / "index.html").read_text()
MODULES = {path.name: path.read_text() for path in sorted(PAGE.glob("*.js"))}
# Of a page without a server, which has its own api.js.
LOCAL_MODULES = {f"local/{path.name}": path.read_text() for path in sorted(LOCAL.glob("*.js"))}
ATTRIBUTES = re.findall(r"\s([\w-]+)=\"([^\"]*)\"", INDEX)


def test_there_is_no_inline_script_style_or_listener():
    assert not re.search(r"<style|\s(style|on\w+)\s*=|<script[^>]*>\s*[^<\s]", INDEX)


def test_every_file_that_is_named_is_there_and_every_file_is_named():
    links = [value for name, value in ATTRIBUTES if name in ("src", "href") and not value.startswith("#")]
    assert all(value.startswith("page/") for value in links)
    named = {"index.html", *(value.removeprefix("page/") for value in links)}
    for name, text in MODULES.items():
        imported = re.findall(r"from \"\./([\w.]+)\"", text)
        assert len(imported) == len(re.findall(r"^import [{*]", text, re.M)), name
        named |= set(imported)
    assert named == {path.name for path in PAGE.iterdir()}
    text = "".join(LOCAL_MODULES.values())
    named = {"api.js", *re.findall(r"(?:from \"\./|new URL\(\")([\w.]+\.js)\"", text)}
    assert named == {path.name for path in LOCAL.iterdir()} | {"failure.js"}


def test_no_other_host_is_named():
    for path in [*PAGE.iterdir(), *LOCAL.iterdir()]:
        hosts = set(re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z0-9.-]+[^\s\"'`)]*", path.read_text()))
        assert hosts <= {"http://www.w3.org/2000/svg"}, path.name


def test_nothing_is_made_from_markup_or_run_from_text():
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc|setHTML"
        r"|createContextualFragment|javascript:|cssText"
    )
    assert not {name: match for name, text in (MODULES | LOCAL_MODULES).items() if (match := forbidden.search(text))}


def test_every_label_has_its_field_and_every_control_its_name():
    ids = [value for name, value in ATTRIBUTES if name == "id"]
    assert len(ids) == len(set(ids)) > 20
    assert {value for name, value in ATTRIBUTES if name in ("aria-labelledby", "aria-describedby", "for")} <= set(ids)
    used = {name for text in MODULES.values() for name in re.findall(r"byId\(\"([\w-]+)\"\)", text)}
    assert used - {"match"} <= set(ids)  # the dial creates that element
