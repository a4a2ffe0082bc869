"""Curves in braille."""

from hypothesis import given
from hypothesis import strategies as st

from swarm.monitor.braille import EMPTY, braille

points = st.lists(
    st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=30
).map(sorted)


def dots(lines: list[str]) -> int:
    return sum((ord(cell) - EMPTY).bit_count() for line in lines for cell in line)


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right() -> None:
    lines = braille([(0, 1), (1, 0)], 4, 2)
    assert lines == ["⠑⢄⠀⠀", "⠀⠀⠑⢄"]


def test_a_flat_line_is_at_the_top_and_as_wide_as_the_plot() -> None:
    assert braille([(0, 3), (9, 3)], 3, 1) == ["⠉⠉⠉"]


def test_one_point_is_one_dot_and_none_is_none() -> None:
    assert dots(braille([(5, 5)], 4, 3)) == 1
    assert dots(braille([], 4, 3)) == 0


@given(points, st.integers(1, 40), st.integers(1, 10))
def test_the_plot_has_the_asked_size_and_touches_its_edges(
    values: list[tuple[float, float]], width: int, height: int
) -> None:
    lines = braille(values, width, height)
    assert len(lines) == height and {len(line) for line in lines} == {width}
    assert all(EMPTY <= ord(cell) < EMPTY + 256 for line in lines for cell in line)
    assert dots(lines) >= 1
    assert any(ord(cell) != EMPTY for cell in lines[0])
