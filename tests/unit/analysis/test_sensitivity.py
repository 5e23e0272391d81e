"""The figure of a sweep shows the records and nothing else, in colours that differ in grey print too."""

import statistics

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from adaponder.analysis import style
from adaponder.analysis.sensitivity import lines_of, points, sensitivity
from adaponder.errors import InputError


def record(loss: float | None, depth: float = 3.5, *, seed: int = 0, requested: float = 3.7, **fields) -> dict:
    return {
        "name": str(fields),
        "fields": {f"train.{name}": value for name, value in fields.items()},
        "seed": seed,
        "status": "failed" if loss is None else "finished",
        "requested_depth": requested,
        "validation_loss": loss,
        "validation_depth": None if loss is None else depth,
        "validation_halted": None if loss is None else [0.0, 0.1, 0.4],
        "tokens_per_second": None if loss is None else 100.0 + seed,
    }


WEIGHTS, SHARES = (0.0, 0.1, 0.2), (0.1, 0.3)


@pytest.fixture
def grid() -> list[dict]:
    grid = [(w, k) for w in WEIGHTS for k in SHARES]
    return [record(2 + w + k, 4 - 3 * k * w, requested=4 - 3 * k * (w > 0), ponder_weight=w, k_max=k) for w, k in grid]


@pytest.fixture
def one_at_a_time() -> list[dict]:
    settings = [(0.1, 0.1), (0.0, 0.1), (0.2, 0.1), (0.1, 0.3)]
    return [
        record(2.0 + w + k + 0.01 * seed, 4 - 3 * k * w + 0.02 * seed, seed=seed, ponder_weight=w, k_max=k)
        for seed in range(3)
        for w, k in settings
    ]


def drawn(panel) -> list[tuple[list[float], list[float]]]:
    """(x, y) of every series of a panel."""
    return [(list(c[0].get_xdata()), list(c[0].get_ydata())) for c in panel.containers]


def test_a_point_is_the_mean_and_spread_of_its_seeds(one_at_a_time):
    base = points(one_at_a_time)[0]
    losses = [2.2, 2.21, 2.22]
    assert base.fields == {"train.ponder_weight": 0.1, "train.k_max": 0.1}
    assert base.loss == pytest.approx((statistics.fmean(losses), statistics.stdev(losses), 3))
    assert base.depth.mean == pytest.approx(3.99)
    assert base.halted == pytest.approx([0.0, 0.1, 0.4])
    assert base.tokens_per_second == pytest.approx(101)
    assert f"{base.loss:.2f}" == "2.21 ± 0.01"
    [alone] = points(one_at_a_time[:1])
    assert (alone.loss.deviation, alone.loss.count) == (None, 1)
    assert f"{alone.loss:.2f}" == "2.20"
    [point] = points([record(2.0, k_max=0.1), record(None, seed=1, k_max=0.1)])
    assert (point.runs, point.loss.count, point.loss.mean) == (2, 1, 2.0)
    [lost] = points([record(None, k_max=0.1)])
    assert (lost.loss, lost.depth, lost.halted, lost.tokens_per_second) == (None, None, None, None)


def test_a_grid_is_drawn_along_its_longest_axis_and_one_at_a_time_along_each(grid, one_at_a_time):
    lines = lines_of(points(grid))
    assert [(line.axis, line.label) for line in lines] == [("train.ponder_weight", f"k = {share}") for share in SHARES]
    assert [p.fields["train.ponder_weight"] for p in lines[0].points] == list(WEIGHTS)
    lines = lines_of(points(one_at_a_time))
    assert [(line.axis, len(line.points)) for line in lines] == [("train.ponder_weight", 3), ("train.k_max", 2)]
    # Planned as 0.1, 0, 0.2: drawn in order.
    assert [p.fields["train.ponder_weight"] for p in lines[0].points] == list(WEIGHTS)
    words = [record(2.0 + i, ponder_on=on) for i, on in enumerate(("probabilities", "logits"))]
    assert [line.label for line in lines_of(points(words))] == ["ponder on = probabilities", "ponder on = logits"]


def test_the_figure_shows_the_records_against_each_knob_and_both_depths(grid):
    knob, requested, realised = sensitivity(grid).axes
    for index, k in enumerate(SHARES):
        losses = pytest.approx([2.0 + w + k for w in WEIGHTS])
        assert drawn(knob)[index] == (list(WEIGHTS), losses)
        assert drawn(requested)[index] == (pytest.approx([4 - 3 * k * (w > 0) for w in WEIGHTS]), losses)
        assert drawn(realised)[index] == (pytest.approx([4 - 3 * k * w for w in WEIGHTS]), losses)
    assert requested.get_xlim() == realised.get_xlim()
    assert "λ" in knob.get_xlabel()
    assert "requested" in requested.get_xlabel()
    assert "realised" in realised.get_xlabel()


def test_one_at_a_time_has_a_panel_per_knob_bars_for_seeds_and_a_ring_for_the_recipe(one_at_a_time):
    figure = sensitivity(one_at_a_time)
    assert len(figure.axes) == 4
    assert figure.axes[0].containers[0].has_yerr
    assert "3 seeds" in figure.get_supxlabel()
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["λ varied,  k = 0.1", "k varied,  λ = 0.1", "the recipe itself"]
    realised = figure.axes[-1]
    assert realised.containers[0].has_xerr
    rings = [line for line in realised.lines if line.get_markerfacecolor() == "none" and len(line.get_xdata())]
    assert [tuple(ring.get_xydata()[0]) for ring in rings] == [pytest.approx((3.99, 2.21))]


def test_what_failed_is_counted_below_and_nothing_at_all_is_an_error(grid):
    grid[0] |= {"status": "failed", "validation_loss": None}
    figure = sensitivity(grid)
    assert "1 of 6 runs" in figure.get_supxlabel()
    assert drawn(figure.axes[0])[0][0] == [0.1, 0.2]
    with pytest.raises(InputError, match="nothing to draw"):
        sensitivity([record(None, k_max=0.1)])


def test_sweeps_of_words_of_many_sizes_and_of_seeds_alone_are_drawn():
    words = sensitivity([record(2.0 + i, ponder_on=on) for i, on in enumerate(("probabilities", "logits"))])
    assert [tick.get_text() for tick in words.axes[0].get_xticklabels()] == ["probabilities", "logits"]
    wide = sensitivity([record(2.0, lr=rate) for rate in (1e-5, 1e-3)])
    assert wide.axes[0].get_xscale() == "log"
    assert len(sensitivity([record(2.0, seed=seed) for seed in range(3)]).axes) == 2
    many = [record(2.0 + a, a=a, b=1, c=1, d=1) for a in (0, 1)]
    many += [record(2.0, **({"a": 0, "b": 1, "c": 1, "d": 1} | {name: 2})) for name in "bcd"]
    assert len(sensitivity(many).axes) == 6
    low, high = sensitivity([record(2.0 + 1e-7 * k, k_max=k) for k in SHARES]).axes[0].get_ylim()
    assert high - low == pytest.approx(0.002), "tiny differences are not blown up"
    unasked = [record(2.0, k_max=k) | {"requested_depth": None} for k in SHARES]
    assert [panel.get_xlabel() for panel in sensitivity(unasked).axes][1:] == ["mean iterations, realised"]


@pytest.mark.parametrize("count", [6, 12])
def test_no_colour_is_used_twice_however_many_lines_there_are(count):
    words = [f"w{index}" for index in range(count)]
    records = [record(2.0 + k, 3.0, ponder_weight=k, ponder_on=word) for k in range(2) for word in words]
    panel = sensitivity(records).axes[0]
    assert len(panel.containers) == count
    assert len({container[0].get_color() for container in panel.containers}) == count


def test_no_axis_of_depths_shows_one_that_cannot_be():
    # Three shares of halted tokens: K is 4.
    for depths in ((1.0, 4.0), (3.99, 4.0), (1.0, 1.01), (4.0, 4.0)):
        drawn = sensitivity([record(2.0 + d, d, requested=d, k_max=i) for i, d in enumerate(depths)])
        for panel in drawn.axes[1:]:
            low, high = panel.get_xlim()
            assert 1.0 <= low < high <= 4.0
            points = [x for container in panel.containers for x in container[0].get_xdata()]
            assert all(low <= x <= high for x in points)
            assert not any(container[0].get_clip_on() for container in panel.containers)


def test_colours_stand_out_on_their_paper_and_differ_in_grey_print():
    def lightness(colour) -> float:
        return float(np.array(to_rgb(colour)) @ [0.2126, 0.7152, 0.0722])

    for theme in (style.LIGHT, style.DARK):
        away = [abs(lightness(colour) - lightness(theme.paper)) for colour in (*style.PALETTE, theme.muted, theme.ink)]
        assert min(away[:-1]) > 0.2
        assert away[-1] > 0.8
    for place in range(len(style.PALETTE) - 1):
        left, right = style.series(place), style.series(place + 1)
        assert all(left[key] != right[key] for key in ("color", "marker", "linestyle"))
        assert abs(lightness(left["color"]) - lightness(right["color"])) > 0.05
    for deepest in (1, 4, 7):
        shades = [lightness(colour) for colour in style.depth_colours(deepest)]
        assert shades == sorted(shades), "deeper is lighter"
