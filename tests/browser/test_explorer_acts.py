"""The dial, comparison, keyboard, writing on, addresses, exports and errors of the page."""

from __future__ import annotations

import json
import math
import struct
import urllib.parse
import xml.etree.ElementTree as ElementTree

import pytest
from explorer_support import HOSTILE, ITERATIONS, TEXT, post, score, spans


def test_the_dial_moves_depth(explorer):
    explorer.fill(TEXT)
    depths = []
    for place in (0.0, 0.05, 0.5, 1.0):
        explorer.dial(place)
        tau = float(explorer.rule().split()[1])
        answer = score(explorer.address, TEXT, policy=f"gate:{tau}")
        assert explorer.tokens() == spans(answer)
        assert explorer.stat("Mean depth") == f"{answer['mean_depth']:.2f}"
        depths.append(answer["mean_depth"])
    assert depths == sorted(depths)
    assert depths[0] < depths[-1]
    explorer.page.select_option("#A-rule", "fixed")
    explorer.settle()
    explorer.page.focus("#A-dial")
    for key in ("Home", "ArrowRight", "ArrowRight"):
        explorer.page.keyboard.press(key)
    explorer.settle()
    assert explorer.rule() == "depth 3"
    assert set(explorer.columns()) == {3}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("word", ["entropy", "kl", "change", "random"])
def test_every_rule_on_offer_is_taken(explorer, word):
    explorer.fill(TEXT)
    explorer.page.select_option("#A-rule", word)
    explorer.settle()
    value = explorer.rule().split()[-1]
    extra = {"seed": 1} if word == "random" else {}
    assert explorer.tokens() == spans(score(explorer.address, TEXT, policy=f"{word}:{value}", **extra))


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
    first, second = (
        score(explorer.address, TEXT, policy="gate:0.5"),
        score(explorer.address, TEXT, policy=f"random:{keep}", seed=1),
    )
    assert abs(first["mean_depth"] - second["mean_depth"]) < 0.1
    explorer.until(f"document.querySelectorAll('#copy .token').length === {len(spans(second))}")
    assert explorer.tokens("#copy") == spans(second)
    assert explorer.columns("#grid-b") == [token["depth"] for token in second["tokens"]]
    gaps = [b["depth"] - a["depth"] for a, b in zip(first["tokens"], second["tokens"], strict=True)]
    more, less = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    said = page.inner_text("#differs")
    assert f"reads {more} tokens more" in said
    assert f"{less} less" in said
    marked = page.eval_on_selector_all("#copy .token", "all => all.map((one) => one.dataset.differs ?? '')")
    assert marked == ["more" if gap > 0 else "less" if gap < 0 else "" for gap in gaps]
    page.click("#by-difference")
    backs = page.eval_on_selector_all(
        "#copy .token", "all => all.map((one) => [one.dataset.differs ?? '', getComputedStyle(one).backgroundColor])"
    )
    assert len({back for _, back in backs}) == len({kind for kind, _ in backs})
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
        assert f"{'gain' if gain > 0 else 'lose'} {abs(gain):.2f} nats" in page.inner_text("#inspector .verdict")
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
    answer = post(
        explorer.address, "v1/completions", model="small", prompt=TEXT, max_tokens=40, temperature=0,
        adaponder={"policy": "gate:0.5", "depth": True},
    )  # fmt: skip
    explorer.page.evaluate("""() => { window.lengths = new Set();
        new MutationObserver(() => window.lengths.add(document.querySelectorAll("#mirror .token").length))
          .observe(document.getElementById("mirror"), {childList: true}); }""")
    write(explorer, 40)
    explorer.settle()
    choice = answer["choices"][0]
    assert explorer.text() == TEXT + choice["text"]
    assert explorer.page.evaluate("window.lengths.size") > 3, "all came at once"
    made = choice["adaponder"]["tokens"]
    depths = choice["adaponder"]["prompt_depths"] + [token["depth"] for token in made[1:]]
    # The last token is read by the score that follows, all others have the depths they were written with.
    assert explorer.columns()[: len(depths)] == depths
    assert "tokens/s" in explorer.page.inner_text("#pace")
    assert f"{len(made)} tokens" in explorer.page.inner_text("#pace")
    before = explorer.text()
    explorer.page.fill("#temperature", "1")
    explorer.page.click("#again")
    explorer.until("document.getElementById('seed').value === '2'")
    explorer.page.wait_for_timeout(50)
    explorer.settle()
    assert explorer.text().startswith(TEXT)
    assert explorer.text() != before
    assert explorer.page.is_enabled("#again")
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
    found = urllib.parse.parse_qs(explorer.fragment())
    ids = [int(part) for part in found["ids"][0].split(".")]
    assert ids[:7] == [token["id"] for token in tokens[:6]] + [number]
    assert len(ids) == 15
    assert found["forced"] == ["5-4"]
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


def test_the_address_brings_everything_back(explorer, new_tab):
    explorer.fill(f"{TEXT}é <b> # & % + \t\u202e\n")
    explorer.page.evaluate("document.querySelector('#grid-a [data-slot=\"3\"]').click()")
    explorer.page.click("#inspector [data-force='2']")
    explorer.page.click("#compare")
    explorer.page.click("#by-difference")
    explorer.page.fill("#seed", "7")
    explorer.page.keyboard.press("Tab")
    explorer.dial(0.3)
    fragment = explorer.fragment()
    other = new_tab()
    other.open(f"#{fragment}")
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
        page.click("#keep summary")
        with page.expect_download() as download:
            page.click(f"#export-{kind}")
        saved[kind] = download.value.path().read_bytes()
    svg = ElementTree.fromstring(saved["svg"])
    words = "".join(svg.itertext())
    assert "<script>alert(1)</script>" in words
    assert "‹RLO›" in words
    assert "\u202e" not in words
    assert not [one for one in svg.iter() if one.tag.endswith(("script", "image", "foreignObject"))]
    width, height = struct.unpack(">II", saved["png"][16:24])
    assert saved["png"].startswith(b"\x89PNG")
    assert (width, height) == tuple(2 * int(svg.attrib[name]) for name in ("width", "height"))
    numbers = json.loads(saved["json"])
    assert numbers["text"] == HOSTILE + TEXT
    assert numbers["a"]["rule"] == "gate:0.5"
    assert numbers["b"] is None
    assert numbers["a"]["tokens"] == answer["tokens"]
    assert math.isclose(numbers["a"]["loss"], answer["loss"])


def test_what_goes_wrong_is_said_and_what_was_typed_stays(new_tab):
    explorer = new_tab()
    explorer.open()
    page = explorer.page
    page.route("**/score", lambda route: route.abort())
    page.fill("#text", TEXT)
    page.wait_for_selector("#notice:not([hidden])")
    assert "does not answer" in page.inner_text("#notice")
    assert "Trying again" in page.inner_text("#notice")
    assert explorer.text() == TEXT
    page.unroute("**/score")
    explorer.settle()
    assert page.is_hidden("#notice")
    assert explorer.tokens() == spans(score(explorer.address, TEXT, policy="gate:0.5"))
    page.fill("#text", "x " * 900)
    page.wait_for_selector("#notice:not([hidden])")
    assert "768" in page.inner_text("#notice")
    explorer.fill("x = 1")
    assert page.is_hidden("#notice")


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_all_of_it_without_scrolling_sideways(explorer, dark):
    page = explorer.page
    page.emulate_media(color_scheme="dark" if dark else "light")
    page.set_viewport_size({"width": 390, "height": 844})
    explorer.fill(TEXT)
    page.click("#compare")
    page.wait_for_selector("#grid-b .column")
    page.evaluate("document.querySelector('#grid-a [data-slot=\"5\"]').click()")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.click("#inspector .close")
    assert page.is_hidden("#inspector")
