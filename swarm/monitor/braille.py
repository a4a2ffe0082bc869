"""A curve in braille characters: 2 x 4 dots in each cell of a terminal."""

from __future__ import annotations

from collections.abc import Sequence

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot, by row and column of a cell. Source: Unicode, block U+2800."""
EMPTY = 0x2800

Point = tuple[float, float]


def braille(points: Sequence[Point], width: int, height: int) -> list[str]:
    """A line through (x, y) points, ascending in x; the largest y touches the top.

    Returns:
        `height` strings of `width` characters.
    """
    cells = [[0] * width for _ in range(height)]
    if points and width > 0 and height > 0:
        dots = _scaled(points, 2 * width - 1, 4 * height - 1)
        for start, stop in zip(dots, dots[1:] or dots, strict=False):
            for column, row in _line(start, stop):
                cells[row // 4][column // 2] |= DOTS[row % 4][column % 2]
    return ["".join(chr(EMPTY + bits) for bits in row) for row in cells]


def _scaled(points: Sequence[Point], columns: int, rows: int) -> list[tuple[int, int]]:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    left, top = min(xs), max(ys)
    across, down = (max(xs) - left) or 1.0, (top - min(ys)) or 1.0
    return [
        (round((x - left) / across * columns), round((top - y) / down * rows)) for x, y in points
    ]


def _line(start: tuple[int, int], stop: tuple[int, int]) -> list[tuple[int, int]]:
    """Every dot between two, by linear interpolation."""
    (x0, y0), (x1, y1) = start, stop
    count = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [
        (round(x0 + (x1 - x0) * k / count), round(y0 + (y1 - y0) * k / count))
        for k in range(count + 1)
    ]
