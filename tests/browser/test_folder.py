"""The page without a server gives the package's answers, for every method and rule, and asks nobody."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from explorer_support import TEXT, Explorer, byte_words, hosted, post, serving, shipped_checkpoint, small_model, spans

from adaponder.checkpoints.shipped import NAMES
from adaponder.evaluation.token_scores import ScoreSettings
from adaponder.policies import parse_policy
from adaponder.serving.answers import ScoreWriter
from adaponder.serving.folder import POLICIES, methods, write_page
from adaponder.serving.served import Served

if TYPE_CHECKING:
    from playwright.sync_api import Browser

RULES = ["gate:0.5", "gate:0.6,0.5,0.4", "fixed:3", "entropy:3", "kl:0.2", "change:0.5", "random:0.6", "exit:0.7"]
VERDICTS = "all => all.map((one) => one.dataset.verdict)"
ALPHABETS = [
    "😀👩‍👩‍👧‍👦🏳️‍🌈🇩🇪👍🏽❤️‍🔥½²Ⅷ٣",
    "e\u0301a\u0308n\u0303\u0323\u200d\u200b\ufeff\u00a0\u2003\u3000\u0085\u180e\u2028\u1680 ",
    "\r\n\t \x0b\x0c\x1c\x1f\x7f\x00a",
    "日本語テキスト한국어עבריתالعربيةहिन्दीไทย",
    "it's they'll 'TIS we've I'd 'sx 'LL |= <unknown> ",
    "𝔘𝔫𝔦𝐜𝐨𝐝𝐞𞤀𐐷𝟘🜁",
    "".join(map(chr, range(32, 127))),
]


@pytest.fixture(scope="module")
def visit(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Opens the page of a served model, from a folder that is written for it."""

    @contextmanager
    def opened(served: Served, fragment: str = "#text=a") -> Iterator[Explorer]:
        folder = tmp_path_factory.mktemp("page") / "out"
        write_page(served, folder, source="the model")
        with hosted(folder) as address:
            explorer = Explorer(browser, address)
            explorer.page.set_default_timeout(60_000)
            yield explorer.open(fragment)
            explorer.check()
            explorer.page.context.close()

    return opened


def small(method: str = "adaponder") -> Served:
    return Served(small_model(method, 1 if method == "vanilla" else 4), byte_words(), name="small")


def answers(explorer: Explorer, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the page's own questions are answered in the browser."""
    script = """async (bodies) => {
        const { score } = await import(new URL("page/api.js", location.href));
        const found = [];
        for (const body of bodies) found.push(await score(body));
        return found; }"""
    return explorer.page.evaluate(script, bodies)


def expected(served: Served, text: str, line: str | None, *, full: bool = True, **how: Any) -> dict[str, Any]:
    """The answer of the server's ``/score``."""
    ids = served.tokenizer(text).input_ids
    settings = ScoreSettings(policy=None if line is None else parse_policy(line), top=5, seed=3, **how)
    parts = ScoreWriter(served)(ids, settings, gates=True, full_depth=full)
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return json.loads(end.value)


def compare(actual: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Asserts equal tokens, depths, predictions and costs; gates and losses as float32 can have them."""
    for answer in (actual, wanted):
        for key in ("seconds", "perplexity"):
            del answer[key]
        del answer["usage"]["cached_tokens"]
        answer["policy"] = [float(number) for number in answer["policy"].split(":")[1].split(",")]
    depths = [[token["depth"] for token in answer["tokens"]] for answer in (actual, wanted)]
    assert depths[0] == depths[1]
    for ours, theirs in zip(wanted["tokens"], actual["tokens"], strict=True):
        for best, same in zip(ours.pop("iteration_top"), theirs.pop("iteration_top"), strict=True):
            _same_top(same, best)
    _near(actual, wanted)


def _same_top(actual: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Asserts equal best tokens; those of nearly equal probability may change places, or the last one its name."""
    _near([token["logprob"] for token in actual], [token["logprob"] for token in wanted])
    known = {token["id"]: token for token in wanted}
    for token in actual:
        _near(token["logprob"], known.get(token["id"], wanted[-1])["logprob"])
        assert token["text"] == known.get(token["id"], token)["text"]


def _near(actual: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert actual.keys() == wanted.keys()
        for key, value in wanted.items():
            _near(actual[key], value)
    elif isinstance(wanted, list):
        assert len(actual) == len(wanted)
        for one, other in zip(actual, wanted, strict=True):
            _near(one, other)
    else:
        assert actual == (pytest.approx(wanted, rel=1e-4, abs=2e-4) if isinstance(wanted, float) else wanted)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("method", methods())
def test_every_method_under_every_rule(visit, method):
    served = small(method)
    lines = [line for line in RULES if line.split(":")[0] in served.facts()["policies"]]
    with visit(served) as explorer:
        asked = [{"policy": line} for line in lines] + [{}]
        details = {"gates": True, "iteration_top": 5, "seed": 3}
        bodies = [{"prompt": TEXT, "full_depth": True, "adaponder": {**details, **how}} for how in asked]
        answered = answers(explorer, bodies)
    for answer, line in zip(answered, [*lines, None], strict=True):
        compare(answer, expected(served, TEXT, line))
    depths = {token["depth"] for answer in answered for token in answer["tokens"]}
    assert len(depths) == (served.iterations if lines else 1)


def drawn(count: int, *, words: list[str], seed: int = 0) -> list[str]:
    """Texts of this test's own code, of words of the vocabulary, and of characters that tokenizers stumble over."""
    chance, code = random.Random(seed), Path(__file__).read_text() * 2

    def text() -> str:
        kind, start = chance.random(), chance.randrange(len(code) // 2)
        piece = code[start : start + chance.randrange(1, 150)]
        if kind < 0.3:
            return piece if kind < 0.2 else piece.replace("\n", "\r\n")
        if kind < 0.6:
            return chance.choice([" ", "  ", "\n"]).join(chance.choices(words, k=chance.randrange(1, 40)))
        if kind < 0.8:
            numbers = (chance.choice([chance.randrange(0x3000), chance.randrange(0x1FFFF)]) for _ in range(40))
            return "".join(chr(number) for number in numbers if not 0xD800 <= number < 0xE000)
        return "".join(chance.choice(chance.choice(ALPHABETS)) for _ in range(chance.randrange(1, 80)))

    return [text() for _ in range(count)]


@pytest.mark.parametrize(
    ("name", "count"),
    [("sample-hops", 200), ("sample", 20)]
    + [pytest.param(name, 200, marks=pytest.mark.every) for name in sorted(NAMES) if name != "sample-hops"],
)
def test_a_shipped_checkpoint_on_many_texts_and_its_ids_on_ten_times_as_many(visit, name, count):
    served = shipped_checkpoint(name)
    words = [*served.tokenizer.get_vocab(), "<|endoftext|>", "zz"]
    texts = drawn(10 * count, words=words)
    with visit(served) as explorer:
        script = """async (texts) => {
            const { Tokenizer } = await import(new URL("page/tokenizer.js", location.href));
            const tokenizer = new Tokenizer(await (await fetch("model/tokenizer.json")).json());
            const ids = texts.map((text) => tokenizer.encode(text));
            return ids.map((all) => [all, tokenizer.pieces(all).join("")]); }"""
        found = explorer.page.evaluate(script, texts)
        wanted = [served.tokenizer(text).input_ids for text in texts]
        assert [ids for ids, _ in found] == wanted
        assert [text for _, text in found] == [served.tokenizer.decode(ids) for ids in wanted]
        short = [text for text, ids in zip(texts, wanted, strict=True) if 1 < len(ids) <= 40][:count]
        bodies = [{"prompt": text, "adaponder": {"gates": True, "iteration_top": 5}} for text in short]
        scores = answers(explorer, bodies)
    assert len(short) == count
    for answer, text in zip(scores, short, strict=True):
        compare(answer, expected(served, text, None, full=False))


def test_only_what_changed_is_computed_again(visit):
    served = small()
    lines = TEXT.splitlines(keepends=True) * 4
    with visit(served) as explorer:
        texts = ["".join(lines), "".join(lines) + "x", "".join(lines[:3]) + "y" + "".join(lines[3:])]
        details = {"policy": "gate:0.5", "gates": True, "iteration_top": 5}
        bodies = [{"prompt": text, "adaponder": details} for text in texts]
        bodies.append({**bodies[1], "adaponder": {**details, "depths": {"70": 4}}})
        answered = answers(explorer, bodies)
    counts = [len(served.tokenizer(text).input_ids) for text in texts]
    before = len(served.tokenizer("".join(lines[:3])).input_ids)
    kept = [answer["usage"]["cached_tokens"] for answer in answered]
    assert kept[:3] == [0, counts[0], before]
    assert before <= kept[3] <= 70
    for answer, text in zip(answered[:3], texts, strict=True):
        compare(answer, expected(served, text, "gate:0.5", full=False))
    compare(answered[3], expected(served, texts[1], "gate:0.5", full=False, depths={70: 4}))


def test_the_page_types_writes_and_links_without_a_network(visit):
    served = small()
    with visit(served) as explorer, serving(served.model) as reference:
        page = explorer.page
        words = page.eval_on_selector_all("#A-rule option", "all => all.map((one) => one.value)")
        assert set(words) <= set(POLICIES), "only rules that the browser computes are on offer"
        explorer.asked.clear()
        explorer.fill(TEXT)
        body = {"prompt": TEXT, "adaponder": {"policy": "gate:0.5"}}
        assert explorer.tokens() == spans(post(reference, "score", **body))
        # The same seed writes the same text as the server.
        body = {"model": "small", "max_tokens": 30, "temperature": 0.8, "seed": 7, **body}
        (choice,) = post(reference, "v1/completions", **body)["choices"]
        for field, value in (("most", 30), ("temperature", 0.8), ("seed", 7)):
            page.fill(f"#{field}", str(value))
            page.keyboard.press("Tab")
        page.click("#continue")
        explorer.until(f"document.getElementById('text').value !== {json.dumps(TEXT)}")
        explorer.settle()
        assert explorer.text() == TEXT + choice["text"]
        written = explorer.tokens()
        link = explorer.fragment()
        page.fill("#text", "x = " * 500)
        page.wait_for_selector("#count.over")
        assert page.inner_text("#count").endswith(f"/ {served.tokens} tokens")
        assert str(served.tokens) in page.inner_text("#notice")
        assert page.locator("#work.stale").count() == 1
        assert explorer.fragment() != link
        page.evaluate("hash => { location.hash = hash; }", link)
        explorer.settle()
        assert explorer.tokens() == written
        assert page.locator("#work.stale").count() == 0
        assert [url for url in explorer.asked if not url.endswith("icon.svg")] == []


def test_half_precision_and_sequential_layers(visit):
    """Weights that float16 holds exactly are decoded from it; attention and MLP follow one another."""
    torch.manual_seed(1)
    model = small_model("adaponder")
    model.wrapped.stock.config.use_parallel_residual = False
    layers: Any = model.wrapped.body.layers
    for layer in layers:
        layer.use_parallel_residual = False
    model.config.backbone_config.use_parallel_residual = False
    model.load_state_dict({name: value.half().float() for name, value in model.state_dict().items()})
    served = Served(model, byte_words(), name="small")
    with visit(served) as explorer:
        (answer,) = answers(explorer, [{"prompt": TEXT, "adaponder": {"gates": True, "iteration_top": 5, "seed": 3}}])
    compare(answer, expected(served, TEXT, None, full=False))


def test_the_page_of_the_sample_opens_on_its_own_texts(visit):
    served = shipped_checkpoint("sample")
    assert served.examples is not None
    with visit(served, "") as explorer:
        page = explorer.page
        names = page.eval_on_selector_all(".example", "all => all.map((one) => one.textContent)")
        assert names == [example["name"] for example in served.examples["examples"]]
        assert page.inner_text("#about") == served.examples["about"]
        texts = served.examples["examples"][0]["texts"]
        for text in [*texts, texts[0]]:
            explorer.until(f"document.getElementById('text').value === {json.dumps(text)}")
            page.click(f"text={names[0]}")


def test_both_texts_of_a_comparison_have_their_answers_marked(visit):
    with visit(shipped_checkpoint("sample-hops"), "") as explorer:
        page = explorer.page
        page.click("#compare")
        page.select_option("#B-rule", "fixed")
        page.evaluate("""() => { const dial = document.getElementById("B-dial");
            dial.value = 0; dial.dispatchEvent(new Event("input")); }""")
        explorer.until("document.querySelectorAll('#copy .token[data-depth=\"1\"]').length > 40")
        first, second = (page.eval_on_selector_all(f"{side} [data-verdict]", VERDICTS) for side in ("#mirror", "#copy"))
        assert len(first) == len(second) == 6
        assert second.count("right") < first.count("right")
        assert f"{second.count('right')} of 6 answers right" in page.inner_text("#summary-b")
        # A question that A answers right and B wrong: the inspector says both.
        wrong = next(slot for slot, pair in enumerate(zip(first, second, strict=True)) if pair == ("right", "wrong"))
        answer = page.locator("#mirror [data-verdict]").nth(wrong).get_attribute("data-slot")
        page.evaluate(f"document.querySelector('#grid-a [data-slot=\"{int(answer) - 1}\"]').click()")
        shown = page.inner_text("#inspector")
        assert ("right." in shown, "wrong." in shown) == (True, True)
        # What the model gave a letter that a puzzle draws at random is no finding.
        page.evaluate("document.querySelector('#grid-a [data-slot=\"3\"]').click()")
        assert "The model gave it" not in page.inner_text("#inspector")


def test_explanations_are_reached_by_touch_and_by_keyboard(browser, tmp_path):
    write_page(shipped_checkpoint("sample-hops"), tmp_path / "out", source="sample-hops")
    with hosted(tmp_path / "out") as address:
        explorer = Explorer(browser, address, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
        explorer.open("#text=b%20c%20.%20%7C%20b&a=fixed:4")
        page = explorer.page
        explorer.until("document.querySelectorAll('#summary-a li[data-tip]').length === 3")
        explained = [f".stat >> nth={n} >> dt > span" for n in range(4)]
        tips = set()
        for target in ("li[data-count='0'] >> nth=2", ".keys [data-tip]", *explained):
            assert page.is_hidden("#tip")
            page.tap(target)
            assert page.is_visible("#tip")
            tips.add(page.inner_text("#tip"))
            box = page.locator("#tip").bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 390
            page.tap("h1")
        assert len(tips) == 6
        page.select_option("#A-rule", "gate")
        page.tap("#dial-a output")
        assert "halts" in page.inner_text("#tip")
        page.keyboard.press("Escape")
        assert page.is_hidden("#tip")
        page.focus("#A-dial")
        page.keyboard.press("Tab")
        assert page.is_visible("#tip")
        explorer.check()
        page.context.close()


def test_the_page_of_puzzles_opens_on_one_and_marks_the_answers(visit):
    """Examples come with the checkpoint; right answers are computed from the text, and losses are of answers."""
    served = shipped_checkpoint("sample-hops")
    with visit(served, "") as explorer:
        page = explorer.page
        first = explorer.text()
        answer = expected(served, first, None)
        loss = [token["nll"] for token in answer["tokens"][first.split().index("|") + 2 :: 2]]
        verdicts = page.eval_on_selector_all("#mirror [data-verdict]", VERDICTS)
        assert (len(verdicts), explorer.stat("Loss")) == (6, f"{sum(loss) / 6:.3f}")
        assert f"{verdicts.count('right')} of 6 answers right" in page.inner_text("#summary-a")
        spent, full, plain = (answer["usage"][f"flops{name}"] for name in ("", "_full_depth", "_vanilla"))
        assert explorer.stat("FLOPs saved") == f"{100 * (1 - spent / full):.0f} %"
        assert f"vs. full depth; {spent / plain:.1f}× a plain model" in page.inner_text("#summary-a")
        page.click("text=New puzzle")
        explorer.until(f"document.getElementById('text').value !== {json.dumps(first)}")
        explorer.settle()
        # At depth 1 the model cannot know what takes four hops; words that it does not know are underlined.
        explorer.fill(first + " qq zz")
        page.select_option("#A-rule", "fixed")
        explorer.dial(0)
        assert "wrong" in page.eval_on_selector_all("#mirror [data-verdict]", VERDICTS)
        assert page.eval_on_selector_all("#mirror .unknown", "all => all.map((one) => one.textContent)") == ["qq", "zz"]
        page.set_viewport_size({"width": 390, "height": 844})
        page.evaluate("document.querySelector('#grid-a [data-slot=\"40\"]').click()")
        boxes = [page.locator(name).bounding_box() for name in ("#mirror", "#inspector")]
        assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"]
        ends = page.eval_on_selector_all(".example", "all => all.map((one) => one.getBoundingClientRect().right)")
        assert max(ends) <= 390
