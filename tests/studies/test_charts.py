import html
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.studies.charts import Axes, Series, interval_row, line_chart, nice_ticks, stacked_bar, thinned, tick_format


def payload(chart):
    return json.loads(html.unescape(re.search(r'data-chart="([^"]*)"', chart).group(1)))


def test_ticks_are_round_and_enclose_the_values():
    assert nice_ticks(0.0, 1.0) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert nice_ticks(0.13, 0.61) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])
    assert nice_ticks(5.0, 5.0)[0] < 5.0 < nice_ticks(5.0, 5.0)[-1]


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_ticks_enclose_any_range_in_few_steps(a, b):
    low, high = min(a, b), max(a, b)
    ticks = nice_ticks(low, high)
    slack = 1e-6 * (ticks[-1] - ticks[0])
    assert ticks[0] - slack <= low and high <= ticks[-1] + slack
    assert 2 <= len(ticks) <= 9


@pytest.mark.parametrize(
    ("ticks", "value", "text"),
    [
        ([0, 0.25, 0.5], 0.25, "0.25"),
        ([0, 0.25, 0.5], 0.375, "0.375"),
        ([0, 20_000], 12_000, "12k"),
        ([0, 2.5e-5, 5e-5], 2.5e-5, "2.5e-5"),
        ([0, 1e-4], 1e-4, "1e-4"),
        ([-10, -5, 0], -7.5, "−7.5"),
        ([0, 100, 200], 100, "100"),
        ([0, 1], 0.0, "0"),
    ],
)
def test_values_are_written_as_their_scale_asks(ticks, value, text):
    assert tick_format(ticks)(value) == text


def test_a_missing_value_breaks_the_line_and_a_lone_value_is_a_point():
    chart = line_chart([Series("a", [1, 2, 3, 4, 5], [0.1, 0.2, None, math.nan, 0.4])], Axes("update", "reward"))
    (path,) = re.findall(r'<path d="([^"]*)" class="line s0">', chart)
    assert path.count("M") == 1 and path.count("L") == 1
    assert len(re.findall(r'class="mark small s0"', chart)) == 1
    assert payload(chart)["series"][0]["text"][2:4] == [None, None]


def test_points_lie_where_their_values_say():
    chart = line_chart([Series("a", [0, 10], [0.0, 1.0])], Axes("update", "reward"))
    assert '<path d="M0.00 100.00L100.00 0.00" class="line s0">' in chart


def test_axes_are_labelled_and_more_than_one_line_has_a_legend():
    lines = [Series("<a>", [1, 2], [1, 2]), Series("b", [1, 2], [2, 1], 1, "dashed"), Series("b", [1, 2], [2, 1], 1, "faint", legend=False)]
    chart = line_chart(lines, Axes("update", "tokens"))
    assert ">update</div>" in chart and ">tokens</div>" in chart
    legend = re.search(r'<ul class="legend">.*</ul>', chart).group(0)
    assert legend.count("<li>") == 2 and "&lt;a&gt;" in legend
    assert '<ul class="legend">' not in line_chart(lines[:1], Axes("update", "tokens"))


def test_whiskers_reach_from_low_to_high_and_are_told_on_hover():
    chart = line_chart(
        [Series("e", [0.0, 1.0], [0.5, 0.75], 0, "marks", [0.25, 0.5], [0.75, 1.0])], Axes("update", "success", low=0, high=1)
    )
    assert '<path d="M0.00 75.00V25.00" class="whisker s0">' in chart
    assert payload(chart)["series"][0]["text"] == ["0.5 [0.25, 0.75]", "0.75 [0.5, 1]"]


def test_rounding_residues_are_drawn_as_zero():
    chart = line_chart([Series("residual", [1, 2], [1e-17, -3e-17])], Axes("update", "residual", reference=0.0))
    assert payload(chart)["series"][0]["text"] == ["0", "0"]


def test_long_lines_are_averaged_in_blocks():
    long = Series("a", list(range(1000)), [float(i % 2) for i in range(1000)])
    short = thinned(long, 100)
    assert len(short.x) == 100 and set(short.y) == {0.5}
    assert short.x[0] == 4.5
    assert thinned(Series("a", list(range(10)), [None] * 10), 5).y == [None] * 5


def test_a_ninth_run_takes_the_first_colour_again():
    assert 'class="line s0"' in line_chart([Series("a", [1, 2], [1, 2], colour=8)], Axes("x", "y"))


def test_a_chart_of_one_point_or_none_is_drawn():
    assert "svg" in line_chart([Series("a", [3], [0.5])], Axes("x", "y"))
    assert "svg" in line_chart([Series("a", [], [])], Axes("x", "y"))


def test_bars_share_the_whole():
    bar = stacked_bar([("training", 3.0), ("nothing", 0.0), ("waiting", 1.0)], lambda seconds: f"{seconds:g} s")
    assert "width:75.000%" in bar and "width:25.000%" in bar and "nothing" not in bar
    assert "< 1 %" not in bar and "&lt; 1 %" in stacked_bar([("a", 999.0), ("b", 1.0)], str)


def test_an_interval_is_a_bar_around_its_dot():
    row = interval_row("after", 0.5, 0.4, 0.65, 0)
    assert "left:40.00%;width:25.00%" in row and "left:50.00%" in row and "[40.0, 65.0]" in row
