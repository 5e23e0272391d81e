"""Figures are pure functions of a trace, and their captions say what the data shows, whichever way it goes."""

import re
import warnings
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.colors import to_hex

from adaponder.analysis.figures import PLATES, choose, depths, losses, tokens
from adaponder.analysis.figures.depths import ActiveTokens, DepthByDifficulty, DepthByPlace, GateValues
from adaponder.analysis.figures.losses import ForgoneGain, GainByIteration, LossByDepth
from adaponder.analysis.figures.tokens import TokenGrid
from adaponder.analysis.figures.words import for_figure, for_html, on_one_line, visible
from adaponder.analysis.report import facts
from adaponder.analysis.style import DARK, LIGHT, depth_colours, house
from adaponder.analysis.tables import FEW, geometric_bins, means, numbers, quantile_bins, rank_correlation, spearman
from adaponder.analysis.trace import Trace
from adaponder.errors import InputError
from trace_support import made_up

OF_DEPTHS = ("active", "gates", "depth", "grid")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return made_up()


def changed(trace: Trace, **columns) -> Trace:
    return Trace(trace.frame.assign(**columns), trace.about)


def drawn(plate, trace: Trace, *, dark: bool = False):
    with warnings.catch_warnings(), house(dark=dark) as theme:
        warnings.simplefilter("error")
        figure = plate(trace).draw(theme)
        figure.draw_without_rendering()
    return figure


def test_losses_are_of_learned_tokens_and_depths_of_all():
    plain = made_up(300)
    asked = np.arange(300) % 3 > 0
    frame = plain.frame.assign(learned=~asked)
    frame.loc[asked, [name for name in frame if "nll" in name]] = 1e6
    mixed, learned = Trace(frame, plain.about), Trace(plain.frame[~asked], plain.about)
    assert mixed.loss == learned.loss < 10
    for plate in PLATES:
        of_learned, of_all = plate(learned).table(), plate(plain).table()
        assert plate(mixed).table().equals(of_all if plate.name in OF_DEPTHS else of_learned), plate.name
        assert not of_learned.equals(of_all), plate.name
    overall = numbers(mixed)
    assert (overall.tokens, overall.scored, overall.bits_per_byte) == (300, 100, None)
    assert overall.iterations == plain["depth"].mean()
    assert "300 predictions of 12 documents, 100 of them learned and scored" in facts(mixed, overall)["text"]
    assert all("1000000" not in excerpt.remark for excerpt in tokens.extremes(mixed, hardest=True))


def test_each_column_of_the_density_map_holds_its_depths_tokens(trace):
    plate = LossByDepth(trace)
    assert plate.table()["share x mean"].sum() == pytest.approx(trace.loss, rel=1e-12)
    width = plate.clip / losses.BINS
    for depth in range(1, 5):
        inside = (trace["nll"] <= plate.clip)[trace["depth"] == depth].mean()
        assert plate.density[:, depth - 1].sum() * width == pytest.approx(inside, abs=1e-9)


def test_spearman_is_the_correlation_of_mid_ranks():
    def ranks(values: list[float]) -> np.ndarray:
        """Mid-ranks by definition: the number of smaller values, plus half of the equal ones and itself."""
        return np.array([sum(b < a for b in values) + (sum(b == a for b in values) + 1) / 2 for a in values])

    draw = np.random.default_rng(0)
    for levels in (3, 5, 1000):
        x, y = draw.integers(levels, size=60), draw.integers(4, size=60)
        expected = np.corrcoef(ranks(x.tolist()), ranks(y.tolist()))[0, 1]
        assert spearman(x, y) == pytest.approx(expected, abs=1e-12)
        times = draw.integers(4, size=60)
        repeated = np.repeat(np.arange(60), times)
        assert spearman(x, y, times) == pytest.approx(spearman(x[repeated], y[repeated]), abs=1e-12)
    assert spearman(np.arange(9), np.ones(9, int)) is None


def test_intervals_need_documents(trace):
    correlation = rank_correlation(trace, trace["full_nll_1"], trace["depth"])
    assert correlation.interval.low < correlation.rho < correlation.interval.high
    few = made_up(documents=FEW - 1)
    assert rank_correlation(few, few["full_nll_1"], few["depth"]).interval is None
    assert np.isnan(means(few, few["nll"], np.zeros(len(few), int), 1).low).all()
    assert numbers(few).interval is None


def test_means_are_of_their_groups_and_four_numbers_of_all(trace):
    label = trace["depth"].astype(int) - 1
    groups = means(trace, trace["nll"], label, 5)
    for group in range(4):
        assert groups.mean[group] == pytest.approx(trace["nll"][label == group].mean())
        assert groups.low[group] < groups.mean[group] < groups.high[group]
    assert groups.tokens.tolist() == [*np.bincount(label), 0]
    assert np.isnan(groups.mean[4])
    overall, depth, active = numbers(trace), trace["depth"], ActiveTokens(trace)
    assert active.shares.sum() == pytest.approx(overall.iterations, rel=1e-12)
    assert overall.iterations == pytest.approx(depth.mean())
    assert overall.halted == pytest.approx((depth < 4).mean())
    assert overall.gates_closed == pytest.approx(np.mean([depth <= gate for gate in (1, 2, 3)]))
    assert overall.flops_ratio == 2.9
    assert numbers(made_up(halts=False)).gates_closed is None


def test_bins():
    assert geometric_bins(np.array([1, 2, 3, 4, 7, 8, 15, 16])).tolist() == [0, 1, 1, 2, 2, 3, 3, 4]
    assert np.bincount(quantile_bins(np.arange(100.0), 10)).tolist() == [10] * 10
    assert np.bincount(quantile_bins(np.repeat([1.0, 2.0], [95, 5]), 10)).tolist() == [95, 5]
    assert quantile_bins(np.ones(7), 10).tolist() == [0] * 7


def test_gains_are_differences_of_losses_at_full_depth():
    trace = made_up(seed=5)
    everyone, active, halted = GainByIteration(trace).gains
    losses, depth = trace.by_iteration("full_nll"), trace["depth"].astype(int)
    whole = losses[:, 0] - losses[:, 3]
    assert everyone.mean.sum() == pytest.approx(whole.mean())
    np.testing.assert_allclose(active.share * active.mean + halted.share * halted.mean, everyone.mean)
    forgone = ForgoneGain(trace)
    assert forgone.groups.mean[0] == pytest.approx(whole[depth == 1].mean())
    assert forgone.random[0] == pytest.approx(whole.mean())
    assert forgone.halted == pytest.approx((losses[np.arange(len(trace)), depth - 1] - losses[:, 3]).mean())


def test_gates_are_counted_once_each(trace):
    plate = GateValues(trace)
    np.testing.assert_allclose(plate.deciding.sum(axis=1), [(trace["depth"] > i).mean() for i in range(3)])
    np.testing.assert_allclose(plate.closed, [(trace["depth"] == i + 1).mean() for i in range(3)])
    for counts in (plate, GateValues(changed(trace, gate_1=0.0, gate_2=1.0))):
        np.testing.assert_allclose((counts.deciding + counts.later).sum(axis=1), 1.0)


def test_depth_by_frequency_place_and_source(trace):
    plate = DepthByPlace(trace)
    for _, depth in (*plate.curves.values(), plate.sources):
        assert depth.tokens.sum() == len(trace)
        assert float(depth.share @ depth.mean) == pytest.approx(trace["depth"].mean())
    names, _ = DepthByPlace(made_up(documents=40, sources=30)).sources
    assert names[-1] == "20 others"
    assert len(names) == depths.SOURCES + 1


@pytest.mark.parametrize(
    ("plate", "settings", "words"),
    [
        (DepthByDifficulty, {}, "harder tokens get more depth"),
        (DepthByDifficulty, {"difficulty_decides": -1.0}, "harder tokens get less depth"),
        (DepthByDifficulty, {"difficulty_decides": 0.0, "seed": 3}, "not significantly different from zero"),
        (DepthByDifficulty, {"documents": 2}, "too few documents"),
        (LossByDepth, {}, "tokens that halt early are the easier ones"),
        (LossByDepth, {"difficulty_decides": -1.0}, "tokens that halt early are the harder ones"),
        (LossByDepth, {"difficulty_decides": 0.0}, "it may be chance, intervals overlap"),
        (LossByDepth, {"documents": 2}, "it may be chance, there are too few documents"),
        (GainByIteration, {}, "At iterations 2, 3 and 4 halted tokens would gain less than"),
        (GainByIteration, {"documents": 2}, "At iterations 2, 3 and 4 there are too few documents to tell"),
        (ForgoneGain, {"seed": 5}, "better than chance"),
        (ForgoneGain, {"seed": 5, "difficulty_decides": -1.0}, "worse than chance"),
        (ForgoneGain, {"seed": 5, "difficulty_decides": 0.0}, "not differ significantly from chance"),
        (ActiveTokens, {"tokens": 40, "deepest": 1, "halts": False}, "In iteration 1 100.0% of the tokens"),
    ],
)
def test_captions_say_which_way_it_goes(plate, settings, words):
    assert words in plate(made_up(**settings)).caption()


def test_the_check_mark_is_named_only_where_it_is(trace):
    def shaped(*levels: float) -> str:
        return LossByDepth(changed(trace, nll=np.array(levels)[trace["depth"] - 1])).caption()

    mark = "the paper's check mark (✓), where loss falls to a middle depth and is highest at the last"
    assert f"This is {mark}: lowest at depth 2, highest at depth 4." in shaped(1.8, 1.0, 1.7, 2.5)
    assert f"This is not {mark}: lowest at depth 4, highest at depth 2" in shaped(1.8, 2.0, 1.7, 1.0)
    assert f"without {mark}." in shaped(1.0, 1.5, 2.0, 2.5)


@pytest.mark.parametrize("depth", [1, 4])
def test_collapse_to_one_depth_is_named(depth):
    trace = made_up(300, depth=np.full(300, depth))
    assert len(choose(trace.about)[0]) == len(PLATES)
    for plate in (LossByDepth, DepthByDifficulty, DepthByPlace):
        assert "Every token has depth" in plate(trace).caption()
    assert ("nothing was given up" in ForgoneGain(trace).caption()) == (depth == 4)
    assert TokenGrid(trace).caption().endswith("tokens halt early.")  # not selected for variety
    names = [entry.get_text() for entry in drawn(GainByIteration, trace).axes[1].get_legend().get_texts()]
    assert names == ["all tokens", "tokens that had halted" if depth == 1 else "tokens still active"]


@pytest.mark.one_of(3)
@pytest.mark.parametrize("plate", PLATES, ids=lambda plate: plate.name)
def test_a_text_of_one_or_two_tokens(plate):
    for length in (2, 1):
        trace = made_up(length, documents=1, sources=1)
        assert plate(trace).caption().endswith(".")
        assert len(plate(trace).table())
    drawn(plate, trace, dark=True)


@pytest.mark.parametrize(
    ("method", "meaning", "thresholds", "after"),
    [
        ("adaponder", "gate s", (0.2, 0.3, 0.4), "halted: K/V reused"),
        ("mor", "router's sigmoid", (0.2, 0.3, 0.4), "halted: out of sight"),
        # Its policy compares the probability of having stayed, not of one exit: a threshold on another scale.
        ("ouro", "exit probability", (None, None, None), "halted: K/V reused"),
        ("a method that is not registered here", "gate", (0.2, 0.3, 0.4), "halted: K/V reused"),
    ],
)
def test_figures_use_the_words_of_the_method(method, meaning, thresholds, after):
    trace = made_up(method=method, tau=(0.2, 0.3, 0.4))
    assert GateValues(trace).meaning == meaning
    assert GateValues(trace).lines == thresholds
    assert TokenGrid(trace).after == after
    assert GateValues(made_up(method="mor", tau=None, policy="router")).lines == (0.5, 0.5, 0.5)


def test_figures_that_a_method_does_not_have_are_left_out(trace):
    assert choose(trace.about) == (list(PLATES), {})
    never = made_up(50, halts=False).about
    plates, left_out = choose(never)
    assert [plate.name for plate in plates] == ["halting", "gains"]
    assert left_out["gates"] == "ponder has no gates"
    assert set(left_out) == {"difficulty", "forgone", "active", "gates", "depth", "grid"}
    for about, name in ((never, "gates"), (trace.about, "pie")):
        with pytest.raises(InputError, match=f"--only {name}"):
            choose(about, [name])
    assert [plate.name for plate in choose(made_up(50, deepest=1, halts=False).about)[0]] == ["halting"]
    assert [plate.name for plate in choose(trace.about, ["grid", "excerpts"])[0]] == ["grid"]


@pytest.mark.parametrize("deepest", [4, pytest.param(16, marks=pytest.mark.every)])
@pytest.mark.parametrize("plate", PLATES, ids=lambda plate: plate.name)
def test_no_label_overlaps_its_neighbour_and_nothing_warns(plate, deepest):
    figure = drawn(plate, made_up(deepest=deepest))
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


def test_rounding_errors_do_not_fill_an_axis():
    trace = made_up(300, depth=np.full(300, 1))
    trace.frame[[f"full_nll_{i}" for i in range(1, 5)]] = 3.0 + 1e-7 * np.random.default_rng(0).normal(size=(300, 4))
    for plate in (ForgoneGain, GainByIteration):
        for axes in drawn(plate, trace).axes:
            low, high = axes.get_ylim()
            assert low < 0 < high
            assert high - low > 3e-4
            assert not axes.yaxis.get_offset_text().get_text()


def test_a_depth_without_tokens_has_no_line_across_it():
    trace = made_up(300, depth=np.tile([1, 2, 4], 100))
    line = drawn(LossByDepth, trace).axes[0].containers[0][0]
    assert np.isnan(line.get_ydata()).tolist() == [False, False, True, False]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("dark", [False, True])
def test_the_colours_of_depths_mean_depths_alone(trace, dark):
    depths = [to_hex(colour) for colour in depth_colours(4)]
    figure = drawn(LossByDepth, trace, dark=dark)
    assert [to_hex(bar.get_facecolor()) for bar in figure.axes[1].patches] == depths
    shades = figure.axes[2].images[0].cmap(np.linspace(0, 1, 256))
    assert to_hex(shades[0]) == to_hex((DARK if dark else LIGHT).paper)
    assert set(depths).isdisjoint(map(to_hex, shades))
    bars = {to_hex(bar.get_facecolor()) for bar in drawn(ActiveTokens, trace, dark=dark).axes[0].patches}
    assert len(bars) == 1
    assert bars.isdisjoint(depths)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("counts", [[130, 260], [7, 7]])
def test_an_axis_of_frequencies_has_numbers(trace, counts):
    panel = drawn(DepthByPlace, changed(trace, count=np.resize(counts, 1200))).axes[0]
    low, high = panel.get_xlim()
    assert sum(low <= place <= high for place in panel.get_xticks()) > 1


@pytest.mark.parametrize("depth", [[1], [3, 4, 4, 4, 4, 4, 4, 4]], ids=str)
def test_no_axis_shows_an_impossible_mean_depth(depth):
    trace = made_up(240, depth=np.resize(depth, 240))
    with house() as theme:
        left, panels = (plate(trace).draw(theme).axes for plate in (DepthByDifficulty, DepthByPlace))
    assert all(1.0 <= end <= 4.0 for end in panels[3].get_xlim())
    for panel in (left[0], *panels[:3]):
        low, high = panel.get_ylim()
        assert 1.0 <= low < high <= 4.0
        line = panel.containers[0][0]
        assert all(low <= mean <= high for mean in line.get_ydata())
        assert not line.get_clip_on()  # a point on the edge is visible as a whole


def test_the_grid_names_every_depth_within_the_page():
    figure = drawn(TokenGrid, made_up(32, deepest=12, documents=1, depth=np.arange(32) % 12 + 1))
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [*(f"computed, depth {depth}" for depth in range(1, 13)), "halted: K/V reused"]
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_the_busiest_stretch_has_the_highest_entropy_of_depths():
    depth, document = np.random.default_rng(0).integers(1, 5, size=90), np.repeat([0, 1, 2], 30)

    def entropy(first: int) -> float:
        share = np.bincount(depth[first : first + 12])[1:] / 12
        return -sum(p * np.log(p) for p in share if p)

    allowed = [first for first in range(79) if document[first] == document[first + 11]]
    first, length = tokens.busiest(depth, document, 12)
    assert (length, first in allowed) == (12, True)
    assert entropy(first) == pytest.approx(max(map(entropy, allowed)))
    assert tokens.busiest(depth, np.arange(90), 12) == (0, 12)


def test_hardest_and_easiest_tokens(trace):
    hard, easy = (tokens.extremes(trace, hardest=hardest) for hardest in (True, False))
    row, first = int(np.argmax(trace["full_nll_1"])), hard[0]
    assert first.words[first.target] == trace.frame["target"].iloc[row]
    assert first.words[first.target - 1] == trace.frame["token"].iloc[row]
    assert first.depths[first.target - 1] == trace["depth"][row]
    assert f"NLL {trace['full_nll_1'][row]:.3f} after one iteration" in first.remark
    for excerpts in (hard, easy):
        assert len({excerpt.words[excerpt.target] for excerpt in excerpts}) == len(excerpts) == 6
    assert len(tokens.passage(trace).words) <= tokens.PASSAGE
    rising = changed(made_up(40, documents=1), full_nll_1=np.arange(40.0))
    excerpt = tokens.extremes(rising, hardest=True, count=1)[0]
    assert (excerpt.target, excerpt.depths[-1]) == (len(excerpt.words) - 1, 0), "the last word is not computed"
    assert "not computed" in tokens.as_html(excerpt)
    apart = changed(made_up(120, documents=1), full_nll_1=np.arange(120.0), target_id=np.arange(120))
    losses = [excerpt.remark.split("NLL ")[1].split()[0] for excerpt in tokens.extremes(apart, hardest=True, count=3)]
    assert losses == ["119.000", "79.000", "39.000"], "excerpts of 40 tokens share none"


def test_a_token_of_several_lines_has_a_closed_box_on_each():
    words = ["a", "\n\n    b", "c\n", "d"]
    html = tokens.as_html(tokens.Excerpt(words, [1, 2, 3, 4], [0.0] * 4, 1, "remark"))
    boxes = re.findall('<span class="([^"]*)"[^>]*>([^<]*)</span>', html)
    lines = [("d2 target", text) for text in ("↵", "↵", "    b")]
    assert boxes == [("d1", "a"), *lines, ("d3", "c↵"), ("d4", "d")]
    assert re.sub("<[^>]*>|↵", "", html) == "".join(words)


def test_text_from_data_is_never_an_instruction():
    assert for_html('<script>"&\n') == "&lt;script&gt;&quot;&amp;↵\n"
    assert visible("a\x1b[31m\u202eb\x00\n") == "a\\x1b[31m\\u202eb\\x00\n"
    assert visible("\u061c\u180e\ufff9\U000e0041\U000f0000\udcff\u2028\u200b\xad\x85\r").isascii()
    assert visible("é 中 \U0001f600\u0301") == "é 中 \U0001f600\u0301"
    assert on_one_line("a\nb") == "a↵b"
    for token, label in (
        ("        x", "␣×8x"),
        ("中", "\\u4e2d"),
        ("\U00013000", "\\U00013000"),
        ("a" * 30, "a" * 9 + "…"),
    ):
        assert for_figure(token) == label
    text = tokens.as_text(tokens.Excerpt(["a\x1b]0;", " b"], [1, 2], [0.0, 0.0], 1, ""), 4)
    assert text.plain == "a\\x1b]0; b"
