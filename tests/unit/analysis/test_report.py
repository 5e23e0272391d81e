"""The report needs nothing but itself, trusts no text, and is the same when it is drawn again without the model."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import Mock

import pytest

import lab_support
from adaponder.analysis.report import write_report
from adaponder.analysis.style import DARK, LIGHT, PAGE
from adaponder.analysis.trace import read_trace
from adaponder.commands import analyze
from adaponder.errors import AdaPonderError, InputError
from adaponder.evaluation import scoring
from lab_support import opinionated, saved
from trace_support import made_up

# Each plate is drawn in test_figures; these show text from data.
SHOWN = ("grid", "excerpts")
HOSTILE = "runs/</title><script>\x1b[31m\u202e\u061c\udcff\n&"


class Page(HTMLParser):
    """What a browser would find: elements with their attributes, and the text between them."""

    def __init__(self, path: Path):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    trace = made_up(200, checkpoint=HOSTILE, data=HOSTILE, policy=HOSTILE)
    return write_report(trace, out, only=SHOWN), Page(out / "report.html"), out


def test_a_figure_is_written_as_picture_table_and_section(written):
    report, page, out = written
    names = {plate.name for plate in report.drawn}
    assert names | {"excerpts"} == set(SHOWN)
    overall = report.numbers
    for value in (f"{overall.iterations:.3f}", "75.0%", "50.0%", "2.90 x", f"{overall.loss:.4f} nats per token"):
        assert value in page.text, value
    for plate in report.drawn:
        assert (out / "figures" / f"{plate.name}.png").read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in (out / "figures" / f"{plate.name}.svg").read_bytes()
        assert (out / "tables" / f"{plate.name}.csv").read_text().count("\n") > 1
        assert plate.caption() in page.text
    assert {section["id"] for section in page.all("section")} == set(SHOWN)
    assert {link["href"] for link in page.all("a")} == {f"#{name}" for name in SHOWN}


def test_pictures_are_light_and_dark_have_words_and_scroll_on_a_narrow_screen(written):
    report, page, out = written
    images = page.all("img")
    assert [image["class"] for image in images] == ["on-light", "on-dark"] * len(report.drawn)
    assert all(len(image["alt"] or "") > 40 for image in images)
    regions = [region for region in page.all("div") if (region.get("aria-label") or "").startswith("Figure: ")]
    assert [(region["class"], region["tabindex"]) for region in regions] == [("scroll", "0")] * len(report.drawn)
    style = (out / "report.html").read_text()
    width = re.search(r"figure img \{[^}]*min-width: (\d+)rem", style)
    # The smallest label, 7 points of a figure of 7 inches, is at least 9 pixels high at 16 pixels a rem.
    assert 7 / 72 / PAGE * int(width[1]) * 16 >= 9
    for image, theme in zip(images[:2], (LIGHT, DARK), strict=True):
        assert theme.paper.lower() in base64.b64decode((image["src"] or "").split(",")[1]).decode().lower()
        for name, colour in (("paper", theme.paper), ("ink", theme.ink), ("muted", theme.muted), ("line", theme.grid)):
            assert f"--{name}: {colour}" in style


def test_tokens_and_names_that_spell_a_script_are_text_and_the_page_loads_nothing(written):
    _, page, out = written
    assert len(page.all("script")) == len(page.all("title")) == 1
    assert "<script>alert(1)</script>" in page.text
    assert page.text.count("runs/</title><script>\\x1b[31m\\u202e\\u061c\\udcff↵") == 5
    for tag, attributes in page.found:
        for name in ("src", "href", "srcset", "data", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), (tag, name)
    source = (out / "report.html").read_text()
    assert not any(word in re.sub(r'src="data:[^"]*"', "", source) for word in ("@import", "url("))
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e\u061c]", source)
    policy = next(meta["content"] for meta in page.all("meta") if meta.get("http-equiv"))
    script = re.search(r"<script>(.*?)</script>", source, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in str(policy)


def test_figures_left_out_are_named_and_stale_ones_removed(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "gates.png").write_text("of another checkpoint")
    (tmp_path / "figures" / "mine.png").write_text("not ours")
    trace = made_up(60, halts=False, deepest=1)
    report = write_report(trace, tmp_path)
    assert "ponder has no gates" in Page(tmp_path / "report.html").text
    assert report.left_out["gates"] == "ponder has no gates"
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["halting.png", "halting.svg", "mine.png"]
    json.dumps(report.as_dict(trace), allow_nan=False)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders of tiny checkpoints by method, and a text in the words of their tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    models = {method: opinionated(method, iterations=3) for method in ("adaponder", "loop")}
    paths = {method: str(saved(folder / method, model)) for method, model in models.items()}
    return paths | {"text": str(lab_support.written(folder / "text.jsonl"))}


def test_analyze_traces_a_checkpoint_and_redraws_without_it(checkpoints, tmp_path):
    # Longer than the backbone's 64 positions: read in windows.
    asked = {"data": checkpoints["text"], "only": ["active", "excerpts"], "json": tmp_path / "result.json"}
    out = tmp_path / "out"
    report = analyze.analyze(checkpoint=checkpoints["adaponder"], out=out, max_tokens=150, **asked)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["numbers"]["tokens"] == 150
    assert result["captions"]["active"] == report.drawn[0].caption()
    assert result["about"]["windows"] == "disjoint windows of 64"
    page = (out / "report.html").read_bytes()
    (out / "report.html").unlink()
    analyze.analyze(checkpoint=str(out), only=["active", "excerpts"])
    assert (out / "report.html").read_bytes() == page
    analyze.analyze(checkpoint=str(out / "trace.parquet"), out=tmp_path / "elsewhere", only=["excerpts"])
    assert "Hardest" in Page(tmp_path / "elsewhere" / "report.html").text


@pytest.mark.parametrize(
    ("method", "options", "word"),
    [
        ("loop", {"only": ["gates"]}, "--only gates: loop has no gates"),
        ("loop", {"window": 65}, "--window 65"),
        ("loop", {"out": None}, "--out is needed"),
        ("loop", {"tau": 0.1}, "loop"),
        ("adaponder", {"tokenizer": "nowhere/at/all"}, "--tokenizer nowhere/at/all"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_written(checkpoints, tmp_path, method, options, word):
    asked = {"data": checkpoints["text"], "out": tmp_path / "out"} | options
    with pytest.raises(AdaPonderError, match=re.escape(word)):
        analyze.analyze(checkpoint=checkpoints[method], **asked)
    assert not (tmp_path / "out").exists()


def test_a_trace_takes_no_option_that_it_would_ignore(tmp_path):
    with pytest.raises(InputError, match="no such trace"):
        analyze.analyze(checkpoint=str(tmp_path / "trace.parquet"))
    (tmp_path / "trace.parquet").write_text("anything")
    file, folder = str(tmp_path / "trace.parquet"), str(tmp_path)
    for at, options, says in ((file, {"data": "a"}, "--data"), (folder, {"tau": 1}, "--tau"), (folder, {}, "Parquet")):
        with pytest.raises(InputError, match=says):
            analyze.analyze(checkpoint=at, **options)


def test_an_interrupted_trace_resumes_and_ends_the_same(checkpoints, tmp_path, monkeypatch, capsys):
    settings = {"data": checkpoints["text"], "only": ["excerpts"], "batch_size": 1, "max_tokens": 160}
    monkeypatch.setattr(scoring, "BATCHES", 1)
    whole, out, honest, calls = tmp_path / "whole", tmp_path / "out", scoring.score, []

    def analyze_into(folder: Path, **options) -> None:
        analyze.analyze(checkpoint=checkpoints["adaponder"], out=folder, **settings, **options)

    def score_until(limit: int):
        def counted(*args, **options):
            if len(calls) == limit:
                raise KeyboardInterrupt
            calls.append(1)
            return honest(*args, **options)

        monkeypatch.setattr(scoring, "score", counted)

    analyze_into(whole)
    score_until(3)
    with pytest.raises(KeyboardInterrupt):
        analyze_into(out)
    assert f"3 finished portions are saved in {out / 'unfinished'}; run the same command" in capsys.readouterr().err
    with pytest.raises(InputError, match="policy was"):
        analyze_into(out, tau=0.9)
    score_until(6)
    with monkeypatch.context() as patch:
        patch.setattr("adaponder.analysis.report.write_report", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            analyze_into(out)
    assert len(calls) == 6
    assert f"adaponder analyze {out} draws its report" in capsys.readouterr().err
    analyze_into(out)  # scores nothing again, or it would be interrupted
    assert not (out / "unfinished").exists()
    assert read_trace(out / "trace.parquet").frame.equals(read_trace(whole / "trace.parquet").frame)
    assert (out / "report.html").read_bytes() == (whole / "report.html").read_bytes()
