"""What the page shows of a text is the server's answer, at every keystroke, for every rule and several models."""

from __future__ import annotations

import itertools
import json
import math
import re
import struct
import urllib.parse
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from explorer_support import (
    HOSTILE,
    ITERATIONS,
    TEXT,
    Explorer,
    byte_words,
    post,
    score,
    serving,
    small_model,
    spans,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# A link from another model: the served one may have neither its rule nor its forced depth.
FRAGMENT = "#text=def%20f(self)&a=gate:1e-5&forced=0-1&most=8"
KEY = "a-key-of-many-characters"


@pytest.fixture(scope="module")
def address(browser: Browser) -> Iterator[str]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def shared(browser: Browser, address: str) -> Explorer:
    explorer = Explorer(browser, address).open()
    explorer.check()
    return explorer


@pytest.fixture
def explorer(shared: Explorer) -> Iterator[Explorer]:
    """The page with no text, wide and light; during a test it must stay silent and send requests to its server only."""
    shared.reset()
    yield shared
    shared.check()


def shows(explorer: Explorer, text: str, **adaponder) -> None:
    """Compares everything on the page with the server's answer."""
    answer = score(explorer.address, text, **adaponder)
    depths = [token["depth"] for token in answer["tokens"]]
    assert (explorer.tokens(), explorer.columns()) == (spans(answer), depths)
    shown = explorer.stat("Mean depth"), explorer.stat("Loss")
    assert shown == (f"{answer['mean_depth']:.2f}", f"{answer['loss']:,.3f}")
    usage = answer["usage"]
    for name, key in (("FLOPs saved", "flops"), ("KV cache saved", "kv_bytes")):
        share = 1 - usage[key] / usage[f"{key}_full_depth"]
        assert abs(int(explorer.stat(name).split()[0]) - 100 * share) <= 0.5 + 1e-6
    counts = explorer.page.eval_on_selector_all(
        "#summary-a .histogram li", "all => all.map((one) => Number(one.dataset.count))"
    )
    assert counts == [depths.count(depth) for depth in range(1, ITERATIONS + 1)]


def test_an_edit_in_the_middle_keeps_the_caret_and_the_rest_of_the_colours(explorer):
    explorer.fill(TEXT)
    place = TEXT.index("return")
    explorer.page.evaluate("place => document.getElementById('text').setSelectionRange(place, place)", place)
    for letter in "x = 1; ":
        explorer.page.keyboard.type(letter)
        explorer.page.wait_for_timeout(15)
        # No token before the edit loses its colour while the answer is on its way.
        coloured = sum(len(text) for text, depth in explorer.tokens() if depth)
        assert coloured >= place - 8
    explorer.settle()
    assert explorer.page.evaluate("document.getElementById('text').selectionStart") == place + 7
    edited = TEXT.replace("return", "x = 1; return")
    assert explorer.text() == edited
    shows(explorer, edited, policy="gate:0.5")
    explorer.page.keyboard.press("Control+z")
    explorer.settle()
    assert len(explorer.text()) < len(edited)


def test_only_the_newest_answer_is_shown(explorer):
    explorer.page.evaluate("""() => {
        const fetched = window.fetch;
        window.fetch = async (...given) => {
          window.fetch = fetched;
          const answer = await fetched(...given);
          await new Promise((resolve) => setTimeout(resolve, 300));
          return answer;
        };
        window.counts = new Set();
        new MutationObserver(() => window.counts.add(document.querySelectorAll("#grid-a .column").length))
          .observe(document.getElementById("grid-a"), {childList: true}); }""")
    explorer.page.fill("#text", "self self self self")
    explorer.page.wait_for_timeout(80)
    explorer.fill("def f")
    shows(explorer, "def f", policy="gate:0.5")
    assert explorer.page.evaluate("[...window.counts]") == [len(explorer.columns())]


@pytest.mark.parametrize("width", [1280, 390])
def test_a_hostile_text_stays_text(explorer, width):
    explorer.page.set_viewport_size({"width": width, "height": 900})
    explorer.fill(HOSTILE)
    shows(explorer, HOSTILE, policy="gate:0.5")
    page = explorer.page
    assert "".join(text for text, _ in explorer.tokens()) == HOSTILE
    assert page.eval_on_selector_all("script", "all => all.length") == 1
    assert page.eval_on_selector_all("#mirror img, #inspector img, #grid-a img", "all => all.length") == 0
    names = page.eval_on_selector_all("#mirror .hidden", "all => all.map((span) => span.dataset.name)")
    assert names == ["SOH", "DEL", "RLO", "PDF", "LRI", "ZWSP"]
    labels = page.eval_on_selector_all("#grid-a .label", "all => all.map((one) => one.textContent)")
    for name in names:
        assert f"‹{name}›" in labels
    # Nothing that turns or hides text leaves the text area and its mirror.
    elsewhere = page.evaluate("""() => ["inspector", "grid-a", "summary-a", "spoken"]
        .map((id) => document.getElementById(id).textContent).join("")""")
    assert not set(elsewhere) & set("\x01\x7f\u202e\u202c\u2066\u200b")
    slot = next(i for i, token in enumerate(score(explorer.address, HOSTILE)["tokens"]) if token["text"] == "\u202e")
    page.evaluate(f"document.querySelector('#grid-a [data-slot=\"{slot}\"]').click()")
    assert page.inner_text("#inspector h2") == "‹RLO›"
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_mirror_and_text_area_break_lines_alike(explorer):
    """The caret stands beside its letter: both layers are equally tall at any width, with any characters."""
    for width in (390, 1280):
        explorer.page.set_viewport_size({"width": width, "height": 900})
        for text in (HOSTILE, "a" * 500, "word " * 90, "\n\n\tx\n\n", "日本語 " * 30):
            explorer.page.fill("#text", text)
            heights = explorer.page.evaluate("""() => {
                const area = document.getElementById("text"), mirror = document.getElementById("mirror");
                area.style.height = "0"; area.style.alignSelf = "start";
                const needed = area.scrollHeight;
                area.style.height = ""; area.style.alignSelf = "";
                const free = mirror.style.alignSelf; mirror.style.alignSelf = "start";
                const tall = mirror.getBoundingClientRect().height; mirror.style.alignSelf = free;
                return [needed, tall]; }""")
            assert abs(heights[0] - heights[1]) < 2, (width, text[:12], heights)


@pytest.mark.parametrize("dark", [False, True])
def test_ink_is_readable_on_every_depth_and_depth_is_told_without_colour(explorer, dark):
    explorer.page.emulate_media(color_scheme="dark" if dark else "light")
    explorer.fill(TEXT)
    ink, paper, colours, marks = explorer.page.evaluate(
        """async (deepest) => {
        const palette = await import(new URL("page/palette.js", location.href));
        const style = getComputedStyle(document.getElementById("text"));
        const backs = palette.colours(deepest, palette.isDark());
        return [style.color, getComputedStyle(document.body).backgroundColor, backs,
                backs.map((_, index) => palette.mark(index + 1, deepest))]; }""",
        ITERATIONS,
    )

    def luminance(colour: str) -> float:
        channels = [int(digits) for digits in re.findall(r"\d+", colour)]  # rgb(1, 2, 3)
        if colour.startswith("#"):
            channels = [*bytes.fromhex(colour[1:])]
        linear = [x / 12.92 if (x := value / 255) <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for value in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lights = [luminance(colour) for colour in colours]
    for light in [luminance(paper), *lights]:
        high, low = max(light, luminance(ink)), min(light, luminance(ink))
        assert (high + 0.05) / (low + 0.05) >= 4.5
    steps = [after - before for before, after in itertools.pairwise(lights)]
    assert all(step > 0.005 for step in steps) if dark else all(step < -0.02 for step in steps)
    assert marks == sorted(set(marks))
    shown = explorer.page.evaluate("""() => [...document.querySelectorAll("#mirror .token[data-depth]")].map((one) =>
        [Number(one.dataset.depth), one.style.getPropertyValue("--mark"), getComputedStyle(one).backgroundColor])""")
    for depth, mark, back in shown:
        assert (float(mark[:-2]), luminance(back)) == (marks[depth - 1], pytest.approx(lights[depth - 1], abs=1e-3))


def test_the_dial_moves_depth(explorer):
    explorer.fill(TEXT)
    depths = []
    for place in (0.0, 0.05, 0.5, 1.0):
        explorer.dial(place)
        tau = float(explorer.rule().split()[1])
        shows(explorer, TEXT, policy=f"gate:{tau}")
        depths.append(float(explorer.stat("Mean depth")))
    assert depths == sorted(depths)
    assert depths[0] < depths[-1]
    explorer.page.select_option("#A-rule", "fixed")
    explorer.settle()
    explorer.page.focus("#A-dial")
    for key in ("Home", "ArrowRight", "ArrowRight"):
        explorer.page.keyboard.press(key)
    explorer.settle()
    assert (explorer.rule(), set(explorer.columns())) == ("depth 3", {3})


def test_two_rules_side_by_side_and_what_differs(explorer):
    explorer.fill(TEXT)
    page = explorer.page
    page.click("#compare")
    page.select_option("#B-rule", "random")
    page.wait_for_selector("#grid-b .column")
    page.click("#match")
    page.wait_for_selector("#match:not([disabled])")
    explorer.settle()
    keep = explorer.rule("B").split()[1]
    rules = {"policy": "gate:0.5"}, {"policy": f"random:{keep}", "seed": 1}
    first, second = (score(explorer.address, TEXT, **rule) for rule in rules)
    assert abs(first["mean_depth"] - second["mean_depth"]) < 0.1
    explorer.until(f"document.querySelectorAll('#copy .token').length === {len(spans(second))}")
    assert explorer.tokens("#copy") == spans(second)
    assert explorer.columns("#grid-b") == [token["depth"] for token in second["tokens"]]
    gaps = [b["depth"] - a["depth"] for a, b in zip(first["tokens"], second["tokens"], strict=True)]
    more, less = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    summary = page.inner_text("#differs")
    assert f"reads {more} tokens more" in summary
    assert f"{less} less" in summary
    page.click("#by-difference")
    script = "all => all.map((span) => [span.dataset.differs ?? '', getComputedStyle(span).backgroundColor])"
    marks, backs = zip(*page.eval_on_selector_all("#copy .token", script), strict=True)
    assert [*marks] == ["more" if gap > 0 else "less" if gap < 0 else "" for gap in gaps]
    assert len(set(backs)) == len(set(marks))
    # A phone shows all of it without scrolling sideways.
    page.set_viewport_size({"width": 390, "height": 844})
    deepest = explorer.columns().index(ITERATIONS)
    page.evaluate(f"document.querySelector('#grid-a [data-slot=\"{deepest}\"]').click()")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    widths = "all => all.map((label) => label.getBoundingClientRect().width)"
    assert min(page.eval_on_selector_all("#inspector .chart text", widths)) > 0
    page.click("#inspector .close")
    assert page.is_hidden("#inspector")
    page.click("#compare")
    assert page.is_hidden("#pane-b")


def test_arrow_keys_move_through_tokens_and_the_inspector_follows(explorer):
    explorer.fill(TEXT)
    page, tokens = explorer.page, score(explorer.address, TEXT, policy="gate:0.5", iteration_top=5)["tokens"]
    page.focus("#text")
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "grid-a":
            break
    assert page.evaluate("document.activeElement.id") == "grid-a"
    for keys, slot in (([], 0), (["ArrowRight"] * 4, 4), (["ArrowLeft"], 3), (["End"], len(tokens) - 1), (["Home"], 0)):
        for key in keys:
            page.keyboard.press(key)
        assert page.get_attribute("#grid-a", "aria-activedescendant") == f"a-{slot}"
        label = page.get_attribute(f"#a-{slot}", "aria-label")
        assert f"token {slot + 1}, read" in label
        assert ("read once" if tokens[slot]["depth"] == 1 else f"read {tokens[slot]['depth']} times") in label
        assert f"token {slot + 1} of {len(tokens)} · id {tokens[slot]['id']}" in page.inner_text("#inspector .facts")
        assert page.get_attribute("#mirror .token.selected", "data-slot") == str(slot)
    assert f"{len(tokens)} tokens, mean depth" in page.inner_text("#spoken")


def test_the_inspector_tells_gates_guesses_and_what_more_depth_would_gain(explorer):
    explorer.fill(TEXT)
    page = explorer.page
    tokens = score(explorer.address, TEXT, policy="gate:0.5", iteration_top=5)["tokens"]
    slot = next(slot for slot, token in enumerate(tokens[:-1]) if 1 < token["depth"] < ITERATIONS)
    token, after = tokens[slot], tokens[slot + 1]
    page.evaluate(f"document.querySelector('#grid-a [data-slot=\"{slot}\"]').click()")
    ids = page.eval_on_selector_all(
        "#inspector .tops li",
        "all => all.map((row) => [...row.querySelectorAll('button')].map((one) => Number(one.dataset.id)))",
    )
    assert ids == [
        [guess["id"] for guess in top[: 5 if top is token["iteration_top"][-1] else 3]]
        for top in token["iteration_top"]
    ]
    charts = page.eval_on_selector_all("#inspector .chart", "all => all.map((one) => one.ariaLabel)")
    gates, losses = (chart.replace("−", "-") for chart in charts)
    assert [float(part.split(": ")[1]) for part in gates.split(";")[0].removeprefix("Gates, ").split(", ")] == (
        pytest.approx(token["gates"], rel=6e-3)
    )
    assert "threshold 0.5" in gates
    shown = [float(part.split(": ")[1].split(";")[0]) for part in losses.split("nats, ")[1].split(", ")]
    assert shown == pytest.approx(after["nll_by_iteration"], abs=0.0051)
    gain = after["nll"] - after["full_nll"]
    if abs(gain) >= 0.005:
        verdict = f"{'lower' if gain > 0 else 'raise'} this loss by {abs(gain):.2f} nats"
        assert verdict in page.inner_text("#inspector .verdict")
    # The pointer looks at another token for as long as it stays there.
    box = page.locator("#mirror .token[data-slot='0']").bounding_box()
    page.mouse.move(box["x"] + 3, box["y"] + 8)
    assert "token 1 of" in page.inner_text("#inspector .facts")
    page.mouse.move(5, 5)
    assert f"token {slot + 1} of" in page.inner_text("#inspector .facts")


def write(explorer, most: int) -> None:
    explorer.page.fill("#most", str(most))
    explorer.page.fill("#temperature", "0")
    explorer.page.click("#continue")
    explorer.page.wait_for_selector("html[data-writing]", state="attached")


def test_writing_streams_coloured_tokens_and_ends_as_the_server_would(explorer):
    explorer.fill(TEXT)
    body = {"model": "small", "prompt": TEXT, "max_tokens": 40, "temperature": 0}
    body |= {"adaponder": {"policy": "gate:0.5", "depth": True}}
    (choice,) = post(explorer.address, "v1/completions", **body)["choices"]
    explorer.page.evaluate("""() => { window.lengths = new Set();
        new MutationObserver(() => window.lengths.add(document.querySelectorAll("#mirror .token").length))
          .observe(document.getElementById("mirror"), {childList: true}); }""")
    write(explorer, 40)
    explorer.settle()
    assert explorer.text() == TEXT + choice["text"]
    assert explorer.page.evaluate("window.lengths.size") > 3, "all came at once"
    new = choice["adaponder"]["tokens"]
    depths = choice["adaponder"]["prompt_depths"] + [token["depth"] for token in new[1:]]
    # The last token is read by the score that follows, all others have the depths they were written with.
    assert explorer.columns()[: len(depths)] == depths
    pace = explorer.page.inner_text("#pace")
    assert ("tokens/s" in pace, f"{len(new)} tokens" in pace) == (True, True)
    before = explorer.text()
    explorer.page.fill("#temperature", "1")
    explorer.page.click("#again")
    explorer.until("document.getElementById('seed').value === '2'")
    explorer.page.wait_for_timeout(50)
    explorer.settle()
    assert explorer.text().startswith(TEXT)
    assert (explorer.text() != before, explorer.page.is_enabled("#again")) == (True, True)
    explorer.fill(TEXT + "typed")
    assert explorer.page.is_disabled("#again")


def test_writing_stops_when_told(explorer):
    explorer.fill(TEXT)
    write(explorer, 700)
    explorer.until(f"document.querySelectorAll('#mirror .token').length > {len(TEXT) + 3}")
    explorer.page.click("#continue")
    explorer.settle()
    assert "stopped" in explorer.page.inner_text("#pace")
    assert len(explorer.columns()) < 600
    assert explorer.page.inner_text("#continue") == "Continue"


def test_a_token_is_forced_to_a_depth_or_replaced(explorer):
    explorer.fill(TEXT)
    page = explorer.page
    page.evaluate("document.querySelector('#grid-a [data-slot=\"5\"]').click()")
    for depth in (1, 4):
        page.click(f"#inspector [data-force='{depth}']")
        explorer.settle()
        answer = score(explorer.address, TEXT, policy="gate:0.5", depths={"5": depth})
        assert answer["tokens"][5]["depth"] == depth
        assert explorer.tokens() == spans(answer)
        assert page.get_attribute("#mirror .forced", "data-slot") == "5"
    page.fill("#most", "8")
    tokens = score(explorer.address, TEXT)["tokens"]
    guess = page.locator("#inspector .guess:not(.true)").first
    number = int(guess.get_attribute("data-id"))
    guess.click()
    page.wait_for_selector("html[data-writing]", state="attached")
    explorer.settle()
    link = urllib.parse.parse_qs(explorer.fragment())
    ids = [int(text) for text in link["ids"][0].split(".")]
    assert ids[:7] == [token["id"] for token in tokens[:6]] + [number]
    assert (len(ids), link["forced"]) == (15, ["5-4"])
    assert explorer.tokens() == spans(score(explorer.address, ids, policy="gate:0.5", depths={"5": 4}))


def test_a_predicted_part_of_a_character_is_not_written_as_its_name(explorer):
    explorer.fill(TEXT)
    tokens = score(explorer.address, TEXT, policy="gate:0.5", iteration_top=5)["tokens"]
    [slot, *_] = [n for n, one in enumerate(tokens) if any("bytes:" in top["text"] for top in one["iteration_top"][-1])]
    explorer.page.click(f"#a-{slot}")
    explorer.page.fill("#most", "4")
    explorer.page.locator("#inspector .guess", has_text="bytes:").last.click()
    explorer.until(f"document.getElementById('text').value !== {json.dumps(TEXT)}")
    explorer.settle()
    assert "bytes:" not in explorer.text()


def test_the_address_brings_everything_back(explorer, browser):
    explorer.fill(f"{TEXT}é <b> # & % + \t\u202e\n")
    explorer.page.evaluate("document.querySelector('#grid-a [data-slot=\"3\"]').click()")
    explorer.page.click("#inspector [data-force='2']")
    explorer.page.click("#compare")
    explorer.page.click("#by-difference")
    explorer.page.fill("#seed", "7")
    explorer.page.keyboard.press("Tab")
    explorer.dial(0.3)
    fragment = explorer.fragment()
    other = Explorer(browser, explorer.address).open(f"#{fragment}")
    other.page.wait_for_selector("#grid-b .column")
    for where in ("#mirror", "#copy"):
        assert other.tokens(where) == explorer.tokens(where)
    assert (other.text(), other.rule(), other.rule("B")) == (explorer.text(), explorer.rule(), explorer.rule("B"))
    assert other.page.get_attribute("#mirror .forced", "data-slot") == "3"
    assert other.page.input_value("#seed") == "7"
    assert "token 4 of" in other.page.inner_text("#inspector .facts")
    assert other.fragment() == fragment
    other.check()


def test_what_is_exported_can_be_read(explorer):
    explorer.fill(HOSTILE + TEXT)
    page, answer = explorer.page, score(explorer.address, HOSTILE + TEXT, policy="gate:0.5", iteration_top=5)
    saved = {}
    for kind in ("svg", "png", "json"):
        page.click("#export summary")
        with page.expect_download() as download:
            page.click(f"#export-{kind}")
        saved[kind] = download.value.path().read_bytes()
    svg = ElementTree.fromstring(saved["svg"])
    words = "".join(svg.itertext())
    assert [text in words for text in ("<script>alert(1)</script>", "‹RLO›", "\u202e")] == [True, True, False]
    assert not [one for one in svg.iter() if one.tag.endswith(("script", "image", "foreignObject"))]
    width, height = struct.unpack(">II", saved["png"][16:24])
    assert saved["png"].startswith(b"\x89PNG")
    assert (width, height) == tuple(2 * int(svg.attrib[name]) for name in ("width", "height"))
    numbers = json.loads(saved["json"])
    assert (numbers["text"], numbers["a"]["rule"], numbers["b"]) == (HOSTILE + TEXT, "gate:0.5", None)
    assert numbers["a"]["tokens"] == answer["tokens"]
    assert math.isclose(numbers["a"]["loss"], answer["loss"])


def test_errors_are_shown_and_the_text_stays(browser, address):
    explorer = Explorer(browser, address).open()
    page = explorer.page
    page.route("**/score", lambda route: route.abort())
    page.fill("#text", TEXT)
    page.wait_for_selector("#notice:not([hidden])")
    assert (page.inner_text("#notice").count("Trying again"), explorer.text()) == (1, TEXT)
    page.unroute("**/score")
    explorer.settle()
    assert page.is_hidden("#notice")
    assert explorer.tokens() == spans(score(explorer.address, TEXT, policy="gate:0.5"))
    page.fill("#text", "x " * 900)
    page.wait_for_selector("#notice:not([hidden])")
    assert "768" in page.inner_text("#notice")
    explorer.fill("x = 1")
    assert page.is_hidden("#notice")


@contextmanager
def page_of(browser, model) -> Iterator[Explorer]:
    with serving(model) as address:
        explorer = Explorer(browser, address).open(FRAGMENT)
        yield explorer
        explorer.check()
        explorer.page.context.close()


@pytest.mark.every
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
    bracket = byte_words().convert_tokens_to_ids("(")
    monkeypatch.setattr("adaponder.serving.served.unknown_id", lambda tokenizer, end: bracket)
    with page_of(browser, small_model()) as explorer:
        assert explorer.stat("Unknown") == "1"


def test_the_page_opens_once_the_key_was_given(browser):
    with serving(key=KEY) as address:
        explorer = Explorer(browser, address)
        page = explorer.page
        assert page.goto(address).status == 401
        page.fill("#key", "not-the-key-of-this-server")
        page.click("button")
        assert page.get_by_role("status").inner_text() == "That is not a key of this server."
        page.fill("#key", KEY)
        page.click("button")
        explorer.settle()
        assert page.url.split("#")[0] == f"{address}/"
        [cookie] = page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert KEY not in cookie["value"]
        # What a browser says of the two refusals, and nothing else (its advice on forms is of the kind "verbose").
        assert all("401" in line for line in explorer.heard if not line.startswith("verbose")), explorer.heard
        page.context.close()
