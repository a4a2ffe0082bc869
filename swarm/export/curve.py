"""The loss curve of an export, as a picture that needs no program and no network to be shown."""

from __future__ import annotations

from collections.abc import Sequence

CURVE_FILE = "loss.svg"
WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 32, 44
"""Margins around the drawing, in pixels as all sizes here."""
TICKS = 4
HEAD = (
    f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
    f'height="{HEIGHT}" role="img" font-family="sans-serif" font-size="12"'
)


def curve(losses: Sequence[tuple[int, float]], title: str) -> str:
    """An SVG of losses by round.

    Args:
        losses: (round, nats per token), ascending and at least one.
        title: above the drawing; it must need no escaping.
    """
    rounds, values = [each[0] for each in losses], [each[1] for each in losses]
    x_low, x_high = rounds[0], max(rounds[-1], rounds[0] + 1)
    y_low, y_high = min(values), max(values)
    if y_high - y_low < 1e-6:
        y_low, y_high = y_low - 0.5, y_high + 0.5

    def x(round_: float) -> float:
        return LEFT + (round_ - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return HEIGHT - BOTTOM - (loss - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    points = " ".join(f"{x(round_):.1f},{y(loss):.1f}" for round_, loss in losses)
    marks = [
        f'<circle cx="{x(round_):.1f}" cy="{y(loss):.1f}" r="2.5" fill="#1f6feb">'
        f"<title>round {round_}: {loss:.4f}</title></circle>"
        for round_, loss in losses
    ]
    lines, words = [], []
    for tick in range(TICKS + 1):
        loss = y_low + (y_high - y_low) * tick / TICKS
        lines.append(f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}" stroke="#d0d7de"/>')
        words.append(_word(LEFT - 8, y(loss) + 4, f"{loss:.3f}", "end"))
    for round_ in sorted({round(x_low + (x_high - x_low) * k / TICKS) for k in range(TICKS + 1)}):
        words.append(_word(x(round_), HEIGHT - BOTTOM + 18, str(round_), "middle"))
    words.append(_word(LEFT, TOP - 12, title, "start"))
    words.append(_word((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "round", "middle"))
    return "\n".join(
        [
            f"<svg {HEAD}>",
            f"<title>{title}</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            *lines,
            f'<polyline points="{points}" fill="none" stroke="#1f6feb" stroke-width="1.5"/>',
            *marks,
            *words,
            "</svg>\n",
        ]
    )


def _word(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#24292f">{text}</text>'
