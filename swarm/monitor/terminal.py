"""The live view of a swarm in a terminal, from 80 x 24 characters up."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swarm.monitor import panels
from swarm.monitor.snapshot import Snapshot

MIN_PLOT_LINES = 5
MAX_PLOT_LINES = 18
TALL = 32


def render(snapshot: Snapshot, *, width: int, height: int) -> RenderableType:
    """The whole screen: at most `height` lines of `width` characters.

    Lines that do not fit are left out from the bottom of each part: peers beyond the last line are
    counted, experts become ranges, older merges and reasons go.
    """
    keys = panels.keys_of(snapshot.peers)
    tall = height >= TALL
    experts = panels.experts_map(snapshot, keys, width, max_lines=6 if tall else 3)
    reasons = panels.reasons(snapshot, keys, width, max_lines=6 if tall else 3)
    # Two lines of header, one of column titles, three empty ones.
    left = height - 6 - len(experts) - len(reasons)
    rows = snapshot.peers[: max(left - MIN_PLOT_LINES, 1)]
    hidden = len(snapshot.peers) - len(rows)
    if hidden:
        rows, hidden = rows[:-1], hidden + 1
    more = [Text(f"   and {hidden} more peers", style="dim")] if hidden else []
    plot_lines = min(left - len(rows) - len(more), MAX_PLOT_LINES)
    return Group(
        *panels.header(snapshot, width),
        Text(""),
        panels.peers_table(rows, keys, width),
        *more,
        Text(""),
        *experts,
        Text(""),
        _side_by_side(snapshot, width, max(plot_lines, MIN_PLOT_LINES)),
        *reasons,
    )


def waiting(text: str) -> RenderableType:
    """The screen before there is anything to show."""
    return Text(text, style="dim")


def _side_by_side(snapshot: Snapshot, width: int, height: int) -> Table:
    """The loss curve on the left, facts on the right."""
    plot_width = min(width * 55 // 100, 90)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=plot_width, no_wrap=True)
    table.add_column(width=width - plot_width - 2, no_wrap=True)
    plot = panels.loss_plot(snapshot.losses, plot_width, height)
    facts = panels.facts(snapshot, width - plot_width - 2)[:height]
    facts += [Text("")] * (height - len(facts))
    for left, right in zip(plot, facts, strict=False):
        table.add_row(left, right)
    return table
