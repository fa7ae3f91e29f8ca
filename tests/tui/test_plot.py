"""The chart: 0, 1, many points, gaps, level curves, both dot styles."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tui.widgets.loss_chart import chart_lines
from tui.widgets.plot import BLOCKS, BRAILLE, DotStyle, plot

NAN, INF = float("nan"), float("inf")


def test_nothing_to_draw() -> None:
    assert plot([], 10, 4) is None
    assert plot([(0, None), (1, NAN), (2, INF)], 10, 4) is None
    assert plot([(0, 1e300), (1, -1e300)], 10, 4) is None
    assert plot([(0, 1.0)], 0, 4) is None
    assert "No round has been measured yet" in chart_lines((), 70, 8)[0]


def test_one_point_is_a_dot_in_the_middle() -> None:
    drawn = plot([(7, 2.0)], 4, 3)
    assert drawn is not None
    assert (drawn.first, drawn.last, drawn.low, drawn.high) == (7, 7, 1.8, 2.2)
    assert drawn.lines == ("    ", "⠄   ", "    ")


def test_a_falling_line_goes_from_the_top_left_to_the_bottom_right() -> None:
    drawn = plot([(0, 4.0), (3, 1.0)], 2, 2, BLOCKS)
    assert drawn is not None
    assert drawn.lines == ("█ ", " █")
    braille = plot([(0, 4.0), (3, 1.0)], 2, 1, BRAILLE)
    assert braille is not None
    assert braille.lines == ("⠑⢄",)


def test_a_level_curve_is_level() -> None:
    drawn = plot([(0, 0.0), (5, 0.0)], 3, 2, BLOCKS)
    assert drawn is not None
    assert (drawn.low, drawn.high) == (-0.1, 0.1)
    assert len({line for line in drawn.lines if line.strip()}) == 1


def test_a_gap_is_bridged() -> None:
    whole = plot([(0, 3.0), (1, 2.0), (2, 1.0)], 6, 3)
    gap = plot([(0, 3.0), (1, None), (2, 1.0)], 6, 3)
    assert whole is not None
    assert gap is not None
    assert whole.lines == gap.lines


def test_a_peak_among_thousands_stays_visible() -> None:
    points = [(index, 9.0 if index == 5000 else 1.0) for index in range(10_000)]
    drawn = plot(points, 20, 5)
    assert drawn is not None
    assert drawn.high == 9.0
    assert drawn.lines[0].strip()


_VALUES = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))


@settings(deadline=None)
@given(
    st.lists(_VALUES, max_size=300),
    st.integers(1, 60),
    st.integers(1, 12),
    st.sampled_from([BRAILLE, BLOCKS]),
)
def test_the_size_is_kept_whatever_comes(
    values: list[float | None], width: int, height: int, style: DotStyle
) -> None:
    drawn = plot(list(enumerate(values)), width, height, style)
    if drawn is not None:
        assert len(drawn.lines) == height
        assert {len(line) for line in drawn.lines} == {width}


def test_axes_are_labelled() -> None:
    lines = chart_lines([(0, 5.5), (12, 1.5)], 40, 6)
    assert lines[0].startswith("5.5000 ┤")
    assert lines[2].startswith("3.5000 ┤")
    assert lines[4].startswith("1.5000 ┤")
    assert lines[5].strip().split() == ["round", "0", "12"]
    assert max(len(line) for line in lines) == 40


@pytest.mark.parametrize("size", [(3, 8), (8, 3), (10, 2), (0, 0)])
def test_tiny_charts_do_not_fail(size: tuple[int, int]) -> None:
    assert len(chart_lines([(0, 5.5), (12, 1.5)], *size)) <= max(size[1], 1)
