"""What the page shows of a text is what the server says of it, at every keystroke."""

from __future__ import annotations

import itertools

import pytest
from explorer_support import HOSTILE, ITERATIONS, TEXT, Explorer, score, spans


def shows(explorer: Explorer, text: str, **adaponder) -> None:
    """Compares everything on the page with the server's answer."""
    answer = score(explorer.address, text, **adaponder)
    depths = [token["depth"] for token in answer["tokens"]]
    assert explorer.tokens() == spans(answer)
    assert explorer.columns() == depths
    assert explorer.stat("Mean depth") == f"{answer['mean_depth']:.2f}"
    assert explorer.stat("Loss") == f"{answer['loss']:,.3f}"
    usage = answer["usage"]
    for name, key in (("FLOPs saved", "flops"), ("K/V saved", "kv_bytes")):
        share = 1 - usage[key] / usage[f"{key}_full_depth"]
        assert abs(int(explorer.stat(name).split()[0]) - 100 * share) <= 0.5 + 1e-6
    counts = explorer.page.eval_on_selector_all(
        "#summary-a .histogram li", "all => all.map((one) => Number(one.dataset.count))"
    )
    assert counts == [depths.count(depth) for depth in range(1, ITERATIONS + 1)]


def test_typing_colours_each_token_as_the_server_says(explorer):
    assert explorer.tokens() == []
    explorer.page.type("#text", TEXT, delay=2)
    explorer.settle()
    assert explorer.text() == TEXT
    shows(explorer, TEXT, policy="gate:0.5")
    assert len({depth for _, depth in explorer.tokens()}) > 1


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
    names = page.eval_on_selector_all("#mirror .hidden", "all => all.map((one) => one.dataset.name)")
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
    """A caret that stands beside its letter: both layers are equally tall at any width, with any characters."""
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
        parts = (
            [int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
            if colour.startswith("rgb")
            else [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        )
        linear = [x / 12.92 if (x := part / 255) <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for part in parts]
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
        assert float(mark.removesuffix("px")) == marks[depth - 1]
        assert luminance(back) == pytest.approx(lights[depth - 1], abs=1e-3)
