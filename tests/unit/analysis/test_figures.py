"""Figures are pure functions of a trace, and their captions say what the data shows, whichever way it goes."""

import io
import re
import warnings
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from adaponder.analysis.figures import (
    PLATES,
    ActiveTokens,
    DepthByDifficulty,
    DepthByPlace,
    ForgoneGain,
    GainByIteration,
    GateValues,
    LossByDepth,
    TokenGrid,
    choose,
    difficulty,
    halting,
    tokens,
)
from adaponder.analysis.figures.plate import listed, percent
from adaponder.analysis.figures.words import for_figure, for_html, on_one_line, visible
from adaponder.analysis.report import facts
from adaponder.analysis.style import DARK, LIGHT, depth_colours, house
from adaponder.analysis.tables import (
    FEW,
    adds_up,
    geometric_bins,
    means,
    numbers,
    quantile_bins,
    rank_correlation,
    spearman,
)
from adaponder.analysis.trace import Trace
from adaponder.errors import AdaPonderError, InputError
from trace_support import made_up


@pytest.fixture(scope="module")
def trace() -> Trace:
    return made_up()


def caption(plate, trace: Trace) -> str:
    return plate.measure(trace).caption()


def ranks(values: list[float]) -> np.ndarray:
    """Mid-ranks by definition: below, plus half of the equals and oneself."""
    return np.array([sum(b < a for b in values) + (sum(b == a for b in values) + 1) / 2 for a in values])


def test_one_iteration_is_named_as_one():
    once = made_up(tokens=40, deepest=1, halts=False)
    assert caption(ActiveTokens, once).startswith("In iteration 1 100.0% of the tokens")


def test_shares_times_means_add_up_to_the_loss(trace):
    found = LossByDepth.measure(trace)
    assert float(found.groups.share @ found.groups.mean) == pytest.approx(trace.loss, rel=1e-12)
    table = found.table()
    assert table["share x mean"].sum() == pytest.approx(trace.loss, rel=1e-12)
    with pytest.raises(AdaPonderError):
        adds_up(found.groups.share, found.groups.mean, trace.loss * (1 + 1e-6))
    with pytest.raises(AdaPonderError):
        adds_up(found.groups.share[:-1], found.groups.mean[:-1], trace.loss)


def test_figures_of_losses_show_what_is_learned_and_figures_of_depth_show_all():
    plain = made_up(600)
    asked = np.arange(600) % 3 > 0
    frame = plain.frame.assign(learned=~asked)
    frame.loc[asked, [name for name in frame if "nll" in name]] = 1e6
    mixed, learned = Trace(frame, plain.about), Trace(plain.frame[~asked], plain.about)
    assert mixed.loss == learned.loss < 10
    for plate in PLATES:
        as_learned, as_all = (plate.measured(one).table() for one in (learned, plain))
        assert plate.measured(mixed).table().equals(as_learned if plate.of_losses else as_all), plate.name
        assert not as_learned.equals(as_all), plate.name
    found = numbers(mixed)
    assert (found.tokens, found.scored, found.bits_per_byte) == (600, 200, None)
    assert found.iterations == plain["depth"].mean()
    assert "600 predictions of 12 documents, 200 of them learned and scored" in facts(mixed, found)["text"]
    assert all("1000000" not in excerpt.remark for excerpt in tokens.hardest(mixed))


def test_each_column_of_the_density_map_holds_its_depths_tokens(trace):
    found = LossByDepth.measure(trace)
    width = found.clip / halting.BINS
    for depth in range(1, 5):
        inside = (trace["nll"] <= found.clip)[trace["depth"] == depth].mean()
        assert found.density[:, depth - 1].sum() * width == pytest.approx(inside, abs=1e-9)


def test_spearman_is_the_correlation_of_mid_ranks():
    draw = np.random.default_rng(0)
    for levels in (3, 5, 1000):
        x, y = draw.integers(levels, size=60), draw.integers(4, size=60)
        expected = np.corrcoef(ranks(x.tolist()), ranks(y.tolist()))[0, 1]
        assert spearman(x, y) == pytest.approx(expected, abs=1e-12)
        times = draw.integers(4, size=60)
        drawn = np.repeat(np.arange(60), times)
        assert spearman(x, y, times) == pytest.approx(spearman(x[drawn], y[drawn]), abs=1e-12)
    line = np.arange(9.0)
    assert spearman(line, line**3) == pytest.approx(1.0)
    assert spearman(line, -line) == pytest.approx(-1.0)
    assert spearman(line, np.ones(9)) is None


def test_an_interval_needs_documents(trace):
    hard, depth = trace["full_nll_1"], trace["depth"]
    found = rank_correlation(trace, hard, depth)
    assert found.interval is not None
    assert found.rho is not None
    assert found.interval.low < found.rho < found.interval.high
    few = made_up(documents=FEW - 1)
    assert rank_correlation(few, few["full_nll_1"], few["depth"]).interval is None
    assert np.isnan(means(few, few["nll"], np.zeros(len(few), int), 1).low).all()
    assert numbers(few).interval is None


def test_means_are_of_their_groups(trace):
    label = trace["depth"].astype(int) - 1
    found = means(trace, trace["nll"], label, 5)
    for group in range(4):
        assert found.mean[group] == pytest.approx(trace["nll"][label == group].mean())
        assert found.low[group] < found.mean[group] < found.high[group]
    assert found.tokens.tolist() == [*np.bincount(label), 0]
    assert np.isnan(found.mean[4])


def test_four_halting_numbers_are_four(trace):
    found, depth = numbers(trace), trace["depth"]
    assert found.iterations == pytest.approx(depth.mean())
    assert found.halted == pytest.approx((depth < 4).mean())
    assert found.gates_closed == pytest.approx(np.mean([depth <= gate for gate in (1, 2, 3)]))
    assert found.flops_ratio == 2.9
    assert len({round(x, 6) for x in (found.iterations, found.halted, found.gates_closed, found.flops_ratio)}) == 4
    assert numbers(made_up(halts=False)).gates_closed is None
    assert "iterations per token" in caption(ActiveTokens, trace)


def test_bins_hold_what_they_say():
    values = np.array([1, 2, 3, 4, 7, 8, 15, 16])
    assert geometric_bins(values).tolist() == [0, 1, 1, 2, 2, 3, 3, 4]
    label = quantile_bins(np.arange(100.0), 10)
    assert np.bincount(label).tolist() == [10] * 10
    tied = quantile_bins(np.repeat([1.0, 2.0], [95, 5]), 10)
    assert np.bincount(tied).tolist() == [95, 5]
    assert quantile_bins(np.ones(7), 10).tolist() == [0] * 7


def test_the_caption_says_which_way_difficulty_goes():
    assert "harder tokens get more depth" in caption(DepthByDifficulty, made_up(difficulty_decides=1.0))
    assert "harder tokens get less depth" in caption(DepthByDifficulty, made_up(difficulty_decides=-1.0))
    assert "not significantly different from zero" in caption(
        DepthByDifficulty, made_up(difficulty_decides=0.0, seed=3)
    )
    assert "too few documents for an interval" in caption(DepthByDifficulty, made_up(documents=2))


def test_the_caption_says_whether_halted_tokens_are_easier():
    assert "tokens that halt early are the easier ones" in caption(LossByDepth, made_up(difficulty_decides=1.0))
    assert "tokens that halt early are the harder ones" in caption(LossByDepth, made_up(difficulty_decides=-1.0))


def test_the_check_mark_is_called_so_only_where_it_is():
    trace = made_up()

    def shaped(*levels: float) -> str:
        nll = np.array(levels)[trace["depth"] - 1]
        return caption(LossByDepth, Trace(trace.frame.assign(nll=nll), trace.about))

    # Whoever has not read the paper is told what it is.
    mark = "the paper's check mark (✓), where loss falls to a middle depth and is highest at the last"
    assert f"This is {mark}: lowest at depth 2, highest at depth 4." in shaped(1.8, 1.0, 1.7, 2.5)
    assert f"This is not {mark}: lowest at depth 4, highest at depth 2" in shaped(1.8, 2.0, 1.7, 1.0)
    assert f"without {mark}." in shaped(1.0, 1.5, 2.0, 2.5)


def test_a_shape_that_may_be_chance_is_said_to_be():
    assert "it may be chance, intervals overlap" in caption(LossByDepth, made_up(difficulty_decides=0.0))
    assert "it may be chance, there are too few documents" in caption(LossByDepth, made_up(documents=2))
    assert "may be chance" not in caption(LossByDepth, made_up(difficulty_decides=1.0))
    assert "At iterations 2, 3 and 4 there are too few documents to tell" in caption(
        GainByIteration, made_up(documents=2)
    )
    assert "At iterations 2, 3 and 4 halted tokens would gain less than" in caption(GainByIteration, made_up())


def test_what_halting_gave_up_is_weighed_against_chance():
    good, bad, none = (made_up(difficulty_decides=x, seed=5) for x in (1.0, -1.0, 0.0))
    assert "better than chance, avoiding" in caption(ForgoneGain, good)
    assert "worse than chance" in caption(ForgoneGain, bad)
    assert "not differ significantly from chance" in caption(ForgoneGain, none)
    found = ForgoneGain.measure(good)
    losses, depth = good.by_iteration("full_nll"), good["depth"].astype(int)
    first = depth == 1
    assert found.groups.mean[0] == pytest.approx((losses[:, 0] - losses[:, 3])[first].mean())
    assert found.random[0] == pytest.approx((losses[:, 0] - losses[:, 3]).mean())
    assert found.halted == pytest.approx((losses[np.arange(len(good)), depth - 1] - losses[:, 3]).mean())


def test_gains_add_up_to_the_whole_way(trace):
    found = GainByIteration.measure(trace)
    losses = trace.by_iteration("full_nll")
    assert found.gains[0].mean.sum() == pytest.approx((losses[:, 0] - losses[:, -1]).mean())
    everyone, read, halted = found.gains
    np.testing.assert_allclose(read.share * read.mean + halted.share * halted.mean, everyone.mean)


def test_gates_are_counted_once_each(trace):
    found = GateValues.measure(trace)
    np.testing.assert_allclose((found.deciding + found.later).sum(axis=1), 1.0)
    np.testing.assert_allclose(found.deciding.sum(axis=1), [(trace["depth"] > i).mean() for i in range(3)])
    np.testing.assert_allclose(found.closed, [(trace["depth"] == i + 1).mean() for i in range(3)])
    assert found.lines == (1e-4, 1e-4, 1e-4)
    extremes = trace.frame.assign(gate_1=0.0, gate_2=1.0)
    found = GateValues.measure(Trace(extremes, trace.about))
    np.testing.assert_allclose((found.deciding + found.later).sum(axis=1), 1.0)


def test_depth_is_told_by_frequency_place_and_source(trace):
    found = DepthByPlace.measure(trace)
    for curve in (found.frequency, found.position, found.window, found.source):
        assert curve.depth.tokens.sum() == len(trace)
        assert float(curve.depth.share @ curve.depth.mean) == pytest.approx(trace["depth"].mean())
    many = DepthByPlace.measure(made_up(documents=40, sources=30)).source
    assert many.where[-1] == "20 others"
    assert len(many.where) == difficulty.SOURCES + 1


def test_the_busiest_stretch_is_found():
    draw = np.random.default_rng(0)
    depth, document = draw.integers(1, 5, size=90), np.repeat([0, 1, 2], 30)

    def mixture(first: int) -> float:
        share = np.bincount(depth[first : first + 12])[1:] / 12
        return -sum(p * np.log(p) for p in share if p)

    allowed = [first for first in range(79) if document[first] == document[first + 11]]
    first, length = tokens.busiest(depth, document, 12)
    assert length == 12
    assert first in allowed
    assert mixture(first) == pytest.approx(max(map(mixture, allowed)))
    assert tokens.busiest(depth, np.arange(90), 12) == (0, 12)


def test_the_grid_names_every_depth_within_the_page():
    depths = np.arange(32) % 12 + 1
    measured = TokenGrid(["word"] * 32, depths, first=0, deepest=12, after="halted: K/V reused")
    with house() as theme:
        figure = measured.draw(theme)
        FigureCanvasAgg(figure).draw()
        box = figure.legends[0].get_window_extent()
        names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [*(f"computed, depth {depth}" for depth in range(1, 13)), measured.after]
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width


def test_a_stretch_of_equal_depths_is_not_said_to_be_chosen_for_variety():
    measured = TokenGrid(["word"] * 2, np.array([2, 2]), first=0, deepest=2, after="reused")
    assert measured.caption() == (
        "Tokens 0 to 1 of the text: 4 of 4 rows are computed (100.0%), 0 of 2 tokens halt early."
    )


@pytest.mark.parametrize("depth", [1, 4])
def test_collapse_to_one_depth_is_called_by_its_name(depth):
    trace = made_up(300, depth=np.full(300, depth))
    assert len(choose(trace.about)[0]) == len(PLATES)
    for plate in (LossByDepth, DepthByDifficulty, DepthByPlace):
        assert "Every token has depth" in caption(plate, trace)
    assert ("nothing was given up" in caption(ForgoneGain, trace)) == (depth == 4)
    assert all(caption(plate, trace) for plate in PLATES)


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_text_of_one_token_has_figures_too(tokens):
    trace = made_up(tokens, documents=1, sources=1)
    for plate in PLATES:
        found = plate.measure(trace)
        assert found.caption().endswith(".")
        assert len(found.table())
        if tokens == 1:
            _drawn(plate, trace, dark=True)


def _drawn(plate, trace: Trace, *, dark: bool = False):
    with warnings.catch_warnings(), house(dark=dark) as theme:
        warnings.simplefilter("error")
        figure = plate.measure(trace).draw(theme)
        FigureCanvasAgg(figure).draw()
    return figure


@pytest.mark.parametrize("deepest", [4, 16])
@pytest.mark.parametrize("plate", PLATES, ids=lambda plate: plate.name)
def test_no_label_overlaps_its_neighbour_and_nothing_warns(plate, deepest):
    figure = _drawn(plate, made_up(deepest=deepest))
    for axes in figure.axes:
        for axis, ends in ((axes.xaxis, ("x0", "x1")), (axes.yaxis, ("y0", "y1"))):
            boxes = [
                label.get_window_extent()
                for label in axis.get_ticklabels()
                if label.get_text() and not label.get_rotation() and label.get_visible()
            ]
            places = sorted((getattr(box, ends[0]), getattr(box, ends[1])) for box in boxes)
            inside = [place for place in places if place[0] >= -1]
            assert all(before[1] <= after[0] for before, after in pairwise(inside)), (plate.name, axis)
        if axes.get_visible() and axes.axison and plate.name != "grid":
            assert axes.get_ylabel() or axes.get_xlabel() or axes.get_shared_x_axes(), plate.name


@pytest.mark.parametrize("depth", [1, 4])
def test_rounding_errors_do_not_fill_an_axis(depth):
    trace = made_up(300, depth=np.full(300, depth))
    noise = 3.0 + 1e-7 * np.random.default_rng(0).normal(size=(300, 4))
    trace.frame[[f"full_nll_{i}" for i in range(1, 5)]] = noise
    for plate in (ForgoneGain, GainByIteration):
        for axes in _drawn(plate, trace).axes:
            low, high = axes.get_ylim()
            assert low < 0 < high
            assert high - low > 3e-4
            assert not axes.yaxis.get_offset_text().get_text()


@pytest.mark.parametrize(
    ("depth", "groups"),
    [(1, ["all tokens", "tokens that had halted"]), (4, ["all tokens", "tokens still active"])],
)
def test_a_group_of_no_tokens_is_not_in_the_legend(depth, groups):
    right = _drawn(GainByIteration, made_up(300, depth=np.full(300, depth))).axes[1]
    assert [entry.get_text() for entry in right.get_legend().get_texts()] == groups


def test_a_loss_that_rounds_to_nothing_has_no_sign():
    trace = made_up()
    trace.frame[["nll", "full_nll_1", "full_nll_4"]] = -1e-9
    (excerpt,) = tokens.easiest(trace, 1)
    assert "NLL 0.000 after one iteration, 0.000 at its depth, 0.000 with" in excerpt.remark
    assert "-0.00" not in tokens.as_html(excerpt)


def test_a_depth_without_tokens_has_no_line_across_it():
    trace = made_up(300, depth=np.tile([1, 2, 4], 100))
    line = _drawn(LossByDepth, trace).axes[0].containers[0][0]
    assert np.isnan(line.get_ydata()).tolist() == [False, False, True, False]


@pytest.mark.parametrize("dark", [False, True])
def test_the_colours_of_depths_mean_depths_alone(trace, dark):
    depths = {to_hex(colour) for colour in depth_colours(4)}
    figure = _drawn(LossByDepth, trace, dark=dark)
    assert [to_hex(bar.get_facecolor()) for bar in figure.axes[1].patches] == [to_hex(c) for c in depth_colours(4)]
    shades = figure.axes[2].images[0].cmap(np.linspace(0, 1, 256))
    assert to_hex(shades[0]) == to_hex((DARK if dark else LIGHT).paper)
    assert depths.isdisjoint(map(to_hex, shades))
    bars = {to_hex(bar.get_facecolor()) for bar in _drawn(ActiveTokens, trace, dark=dark).axes[0].patches}
    assert len(bars) == 1
    assert depths.isdisjoint(bars)


def test_an_axis_of_frequencies_has_numbers_however_few_they_are(trace):
    for counts in ([130, 260], [1, 3], [5, 5000], [7, 7]):
        panel = _drawn(DepthByPlace, Trace(trace.frame.assign(count=np.resize(counts, 1200)), trace.about)).axes[0]
        low, high = panel.get_xlim()
        assert sum(low <= place <= high for place in panel.get_xticks()) > 1, counts


@pytest.mark.parametrize("depth", [[4], [1], [1, 4], [3, 4, 4, 4, 4, 4, 4, 4]], ids=str)
def test_no_axis_shows_a_mean_depth_that_cannot_be(depth):
    trace = made_up(240, depth=np.resize(depth, 240))
    with house() as theme:
        left, panels = (plate.measure(trace).draw(theme).axes for plate in (DepthByDifficulty, DepthByPlace))
    limits = [left[0].get_ylim(), *(panel.get_ylim() for panel in panels[:3]), panels[3].get_xlim()]
    assert all(1.0 <= low < high <= 4.0 for low, high in limits)
    curves = [left[0], *panels[:3]]
    for panel, (low, high) in zip(curves, limits[:4], strict=True):
        line = panel.containers[0][0]
        assert all(low <= mean <= high for mean in line.get_ydata())
        # A point on the edge is seen whole.
        assert not line.get_clip_on()


def test_intervals_are_promised_where_there_can_be_some(trace):
    for plate in PLATES:
        assert "95% intervals" not in plate.alt or "where there are documents enough" in plate.alt


def test_a_token_of_several_lines_has_a_closed_box_on_each():
    words = ["a", "\n\n    b", "c\n", "d"]
    html = tokens.as_html(tokens.Excerpt(words, [1, 2, 3, 4], [0.0] * 4, 1, "remark"))
    inside = re.search("<pre[^>]*>(.*)</pre>", html, re.DOTALL)
    assert inside is not None
    boxes = re.findall('<span class="([^"]*)"[^>]*>([^<]*)</span>', inside[1])
    assert boxes == [
        ("d1", "a"),
        ("d2 target", "↵"),
        ("d2 target", "↵"),
        ("d2 target", "    b"),
        ("d3", "c↵"),
        ("d4", "d"),
    ]
    assert re.sub("<[^>]*>|↵", "", inside[1]) == "".join(words)


def test_drawing_again_gives_the_same_bytes(trace):
    def svg() -> bytes:
        with house() as theme:
            file = io.BytesIO()
            figure = ActiveTokens.measure(trace).draw(theme)
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        return file.getvalue()

    before = trace.frame.copy()
    assert svg() == svg()
    assert before.equals(trace.frame)


def test_figures_of_what_a_method_has_not_are_left_out_by_name(trace):
    assert choose(trace.about) == (list(PLATES), {})
    plates, left_out = choose(made_up(50, halts=False).about)
    assert [plate.name for plate in plates] == ["halting", "gains"]
    assert left_out["gates"] == "ponder has no gates"
    assert set(left_out) == {"difficulty", "forgone", "active", "gates", "depth", "grid"}
    with pytest.raises(InputError, match="--only gates"):
        choose(made_up(50, halts=False).about, ["gates"])
    with pytest.raises(InputError, match="--only pie"):
        choose(made_up(50).about, ["pie"])
    assert [plate.name for plate in choose(made_up(50, deepest=1, halts=False).about)[0]] == ["halting"]
    assert [plate.name for plate in choose(made_up(50).about, ["grid", "excerpts"])[0]] == ["grid"]


def test_hardest_and_easiest_tokens_are_where_they_say(trace):
    hard, easy = tokens.hardest(trace), tokens.easiest(trace)
    row = int(np.argmax(trace["full_nll_1"]))
    first = hard[0]
    assert first.target is not None
    assert first.words[first.target] == trace.frame["target"].iloc[row]
    assert first.words[first.target - 1] == trace.frame["token"].iloc[row]
    assert first.depths[first.target - 1] == trace["depth"][row]
    assert f"NLL {trace['full_nll_1'][row]:.3f} after one iteration" in first.remark
    for found in (hard, easy):
        targets = [one.words[one.target] for one in found if one.target is not None]
        assert len(set(targets)) == len(targets) == 6
    assert len(tokens.passage(trace).words) <= tokens.PASSAGE


def test_the_last_word_is_not_computed():
    trace = made_up(40, documents=1)
    hardest = trace.frame.assign(full_nll_1=np.arange(40.0))
    found = tokens.hardest(Trace(hardest, trace.about), 1)[0]
    assert found.target == len(found.words) - 1
    assert found.depths[-1] == 0
    assert "not computed" in tokens.as_html(found)


def test_text_from_data_is_never_an_instruction():
    assert for_html('<script>"&\n') == "&lt;script&gt;&quot;&amp;↵\n"
    assert visible("a\x1b[31m\u202eb\x00\n") == "a\\x1b[31m\\u202eb\\x00\n"
    hidden = "\u061c\u180e\ufff9\U000e0041\U000f0000\udcff\u2028\u200b\xad\x85\r"
    assert visible(hidden).isascii()
    assert visible("é 中 \U0001f600\u0301") == "é 中 \U0001f600\u0301"
    assert on_one_line("a\nb") == "a↵b"
    assert for_figure("        x") == "␣×8x"
    assert for_figure("中") == "\\u4e2d"
    assert for_figure("\U00013000") == "\\U00013000"
    assert for_figure("a" * 30) == "a" * 9 + "…"
    text = tokens.as_text(tokens.Excerpt(["a\x1b]0;", " b"], [1, 2], [0.0, 0.0], 1, ""), 4)
    assert text.plain == "a\\x1b]0; b"


def test_small_shares_keep_their_digits():
    assert [percent(x) for x in (0.0, 1.0, 0.123, 0.0123, 0.00123)] == ["0.0%", "100.0%", "12.3%", "1.2%", "0.12%"]
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"


@pytest.mark.parametrize(
    ("method", "meaning", "thresholds", "after"),
    [
        ("adaponder", "gate s", (0.2, 0.3, 0.4), "halted: K/V reused"),
        ("mor", "router's sigmoid", (0.2, 0.3, 0.4), "halted: out of sight"),
        # A policy looks at the probability of having stayed, not at one loop's exit: its threshold is on another scale.
        ("ouro", "exit probability", (None, None, None), "halted: K/V reused"),
        ("a method that is not registered here", "gate", (0.2, 0.3, 0.4), "halted: K/V reused"),
    ],
)
def test_figures_use_the_words_of_the_method(method, meaning, thresholds, after):
    trace = made_up(method=method, tau=(0.2, 0.3, 0.4))
    assert GateValues.measure(trace).meaning == meaning
    assert GateValues.measure(trace).lines == thresholds
    assert TokenGrid.measure(trace).after == after


def test_a_router_halts_at_one_half():
    assert GateValues.measure(made_up(method="mor", tau=None, policy="router")).lines == (0.5, 0.5, 0.5)
