#!/usr/bin/env python
"""Draws a run as an SVG from its peers' events: held-out loss and traffic of each round.

    python scripts/benchmarks/plot_run.py STATE_DIR... --out run.svg

Each place is an events.jsonl, or a folder with such files anywhere below it: the state directory of
a peer, or that of swarm-local. More peers give a fuller picture, because a held-out loss is in the
events of the measuring peer, and sent bytes are in the events of the sending peer.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, TOP = 720, 64, 16, 40
PANEL, GAP, FOOT = 180, 52, 44
LOSS, TRAFFIC, INK, GRID = "#1f6feb", "#2da44e", "#24292f", "#d8dee4"
MAX_MARKS = 6
MAX_ROUND_MARKS = 12


class NothingToDraw(Exception):
    """The files hold no round and no loss."""


@dataclass
class History:
    """The events of several peers of a run.

    Attributes:
        losses: held-out loss by round, nats per token. For a round with a merge, the loss after it.
        sent: bytes that each peer sent for a round and a merge after it, by round.
        peers: number of peers with an event of a round.
        runs: ids of the events' runs.
    """

    losses: dict[int, float] = field(default_factory=dict)
    sent: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    peers: int = 0
    runs: set[str] = field(default_factory=set)


def events_of(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file. Skips an incomplete line, as a crash leaves it."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(event, dict):
                yield event


def files_of(places: Iterable[Path]) -> list[Path]:
    """All files of events in these places.

    Raises:
        NothingToDraw: a place has none.
    """
    found = []
    for place in places:
        here = [place] if place.is_file() else sorted(place.rglob("events.jsonl*"))
        if not here:
            raise NothingToDraw(f"{place}: no events.jsonl there; name a peer's state directory")
        found += here
    return found


def history_of(files: Iterable[Path]) -> History:
    """The combined events of all these files.

    Raises:
        NothingToDraw: the files have no round, or events of several runs.
    """
    history = History()
    for path in files:
        sent: dict[int, float] = defaultdict(float)
        for event in events_of(path):
            kind, at = event.get("event"), event.get("round", 0)
            if kind == "validation":
                history.losses[at] = event["val_loss"]
            elif kind == "started":
                history.runs.add(event["run"])
            elif kind == "applied" and at > 0:
                sent[at] += event["blob_bytes_sent"]
        for at, num_bytes in sent.items():
            history.sent[at].append(num_bytes)
        history.peers += bool(sent)
    if len(history.runs) > 1:
        raise NothingToDraw(f"events of several runs: {', '.join(sorted(history.runs))}")
    if not history.sent:
        raise NothingToDraw("no round has ended yet in these events")
    return history


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from at most `low` to at least `high`, at most `most` of them."""
    span = max(high - low, abs(high) * 1e-6, 1e-9)
    step = 10.0 ** math.floor(math.log10(span))
    for factor in (0.2, 0.5, 1, 2, 5, 10):
        first, last = math.floor(low / (step * factor)), math.ceil(high / (step * factor))
        if last - first < most:
            return [round(k * step * factor, 10) for k in range(first, last + 1)]
    raise AssertionError("the largest step always fits")


def svg(title: str, height: int, drawn: Iterable[str]) -> str:
    """A whole picture, `WIDTH` wide."""
    view = f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" {view}>',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            *drawn,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, *, anchor: str = "middle", size: int = 12) -> str:
    """A line of text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{INK}">{escape(words)}</text>'
    )


@dataclass(frozen=True)
class Panel:
    """One diagram: rounds to the right, a figure upward.

    Attributes:
        top: upper edge of the diagram in the picture.
        first: round at the left edge.
        last: round at the right edge.
        marks: values of the horizontal lines, the lowest first.
    """

    top: float
    first: float
    last: float
    marks: Sequence[float]

    def x(self, at: float) -> float:
        """The x coordinate of a round."""
        return LEFT + (at - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """The y coordinate of a value."""
        low, high = self.marks[0], self.marks[-1]
        return self.top + PANEL * (1 - (value - low) / (high - low))

    def frame(self, title: str) -> list[str]:
        """Title, horizontal lines and their numbers."""
        drawn = [text(LEFT, self.top - 12, title, anchor="start", size=14)]
        for mark in self.marks:
            y = self.y(mark)
            drawn.append(
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
                f'stroke="{GRID}"/>'
            )
            drawn.append(text(LEFT - 8, y + 4, f"{mark:g}", anchor="end"))
        return drawn

    def rounds(self) -> list[str]:
        """The numbers of rounds below the diagram."""
        y = self.top + PANEL + 18
        marks = ticks(self.first, self.last, MAX_ROUND_MARKS)
        inside = [mark for mark in marks if self.first <= mark <= self.last and mark == int(mark)]
        return [text(self.x(mark), y, f"{mark:g}") for mark in inside]


def loss_panel(history: History, top: float, last: int) -> list[str]:
    """The held-out loss, with a point for each measurement."""
    if not history.losses:
        return [text(LEFT, top, "no held-out loss in these events", anchor="start")]
    panel = Panel(top, -0.5, last + 0.5, ticks(0, max(history.losses.values()), MAX_MARKS))
    points = [(panel.x(at), panel.y(loss)) for at, loss in sorted(history.losses.items())]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    at, loss = max(history.losses.items())
    return [
        *panel.frame("held-out loss, nats per token"),
        f'<polyline points="{line}" fill="none" stroke="{LOSS}" stroke-width="2"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{LOSS}"/>' for x, y in points),
        text(panel.x(at), panel.y(loss) - 10, f"{loss:.3f}"),
        *panel.rounds(),
    ]


def traffic_panel(history: History, top: float, last: int) -> list[str]:
    """Bytes that a peer sent for each round, the mean over the peers."""
    sent_mb = {at: fmean(sent) / 1e6 for at, sent in history.sent.items()}
    panel = Panel(top, -0.5, last + 0.5, ticks(0, max(sent_mb.values()) or 1.0, MAX_MARKS))
    drawn = panel.frame("MB sent by each peer")
    width = (panel.x(1) - panel.x(0)) * 0.6
    for at, value in sorted(sent_mb.items()):
        x, y = panel.x(at) - width / 2, panel.y(value)
        drawn.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{panel.y(0) - y:.1f}" fill="{TRAFFIC}"/>'
        )
    return [*drawn, *panel.rounds()]


def picture(history: History) -> str:
    """The whole SVG."""
    last = max({*history.sent, *history.losses})
    second = TOP + PANEL + GAP
    height = second + PANEL + FOOT
    name = next(iter(history.runs), "")
    peers = f"{history.peers} peer{'s' if history.peers > 1 else ''}"
    drawn = [
        *loss_panel(history, TOP, last),
        *traffic_panel(history, second, last),
        text(WIDTH - RIGHT, height - 8, f"round of {name}, {peers}", anchor="end"),
    ]
    return svg(f"{name}: held-out loss and traffic by round", height, drawn)


def main() -> int:
    """Reads, draws, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("places", type=Path, nargs="+", metavar="STATE_DIR")
    parser.add_argument("--out", type=Path, required=True, help="the SVG to write")
    arguments = parser.parse_args()
    try:
        drawn = picture(history_of(files_of(arguments.places)))
    except NothingToDraw as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 1
    arguments.out.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
