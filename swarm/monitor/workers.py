"""The worker processes of a peer, in a line of the live view."""

from __future__ import annotations

from rich.text import Text

from swarm.monitor import metrics
from swarm.protocol.figures import WorkersFigures
from swarm.protocol.printable import printable, ranges


def workers_line(name: str, workers: WorkersFigures) -> Text:
    """What they wait for, and which of them the others wait for."""
    said = f"{printable(name)}: {workers.number}, {workers.step_s:.3g} s a step"
    said += f", {sum(workers.shares.values()):.0%} {metrics.BETWEEN.title}"
    if workers.bubble is not None and workers.expected is not None:
        said += f", {metrics.BUBBLE.title} {workers.bubble:.0%}"
        said += f" ({workers.expected:.0%} with even stages)"
    if workers.idle:
        said += f", fewer micro-batches: {ranges(workers.idle)}"
    line = Text.assemble(("workers  ", "dim"), said)
    return line.append(f"; {printable(workers.why)}", style="yellow") if workers.why else line
