"""How programs log: colours on a terminal, `key=value` lines off it, or JSON. Always on stderr.

Messages quote what other peers sent, so each is made printable here, where all of them come by:
a peer can neither forge a line nor move a terminal's cursor.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars

from swarm.progress import Progress
from swarm.progress import logger as progress_logger
from swarm.protocol.printable import printable

LOG_FORMATS = ("auto", "plain", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


class PrintableFormatter(logging.Formatter):
    """One printable line a message; the lines of a traceback follow it, each with an indent."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        """The traceback; what was raised may quote a peer, over several lines."""
        lines = super().formatException(ei).split("\n")
        return "\n".join("    " + printable(line) for line in lines)


class PlainFormatter(PrintableFormatter):
    """`2026-01-31T12:00:00Z INFO message`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        self.converter = time.gmtime


class JsonFormatter(PrintableFormatter):
    """One JSON object a line: time (seconds since 1970), level, logger, message, error."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        fields = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": printable(record.getMessage()),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class TerminalHandler(RichHandler):
    """Lines with colours, and below them a bar for work that takes long."""

    def __init__(self, console: Console) -> None:
        super().__init__(console=console, show_path=False, markup=False)
        self.setFormatter(PrintableFormatter("%(message)s", "[%H:%M:%S]"))
        words = TextColumn("{task.description}", markup=False)
        self.bars = Bars(BarColumn(20), words, console=console, transient=True)

    def emit(self, record: logging.LogRecord) -> None:
        """A line, or a new state of the bar; nothing on a terminal that was closed."""
        progress = getattr(record, "progress", None)
        if isinstance(progress, Progress):
            with contextlib.suppress(OSError):
                self.draw(progress)
        else:
            super().emit(record)

    def close(self) -> None:
        """At the end of the program: gives the cursor back."""
        with contextlib.suppress(OSError):
            self.bars.stop()
        super().close()

    def draw(self, progress: Progress) -> None:
        """Shows how far the work is; nothing any more once it is done."""
        words = printable(str(progress))
        if progress.done >= progress.total:
            self.bars.stop()
            for task in self.bars.task_ids:
                self.bars.remove_task(task)
            return
        if not self.bars.task_ids:
            self.bars.add_task(words, total=progress.total)
            self.bars.start()
        self.bars.update(
            self.bars.task_ids[0],
            completed=progress.done,
            total=progress.total,
            description=words,
        )


def configure_logging(log_format: str, level: str = "info") -> None:
    """Sets the root logger up, in place of what was there.

    Args:
        log_format: one of `LOG_FORMATS`; "auto" looks whether stderr is a terminal.
        level: one of `LOG_LEVELS`, the least that is said.
    """
    handler: logging.Handler
    draws = log_format == "auto" and sys.stderr.isatty() and level in ("debug", "info")
    if log_format == "auto" and sys.stderr.isatty():
        handler = TerminalHandler(Console(stderr=True))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter() if log_format == "json" else PlainFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    progress_logger.setLevel(logging.DEBUG if draws else max(logging.INFO, logging.root.level))
    theirs = logging.getLogger("hivemind")
    theirs.setLevel(logging.WARNING)  # its INFO lines are for its authors
    # It has a handler of its own, which would show what p2pd and other peers say as it is.
    theirs.handlers.clear()
    theirs.propagate = True
