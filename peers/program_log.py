"""How programs log: colours on a terminal, `key=value` lines off it, or JSON. Always on stderr.

Messages quote what other peers sent, so each is made printable here, where all of them come by:
a peer can neither forge a line nor move a terminal's cursor.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from swarm.protocol.printable import printable

LOG_FORMATS = ("auto", "plain", "json")


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


def configure_logging(log_format: str) -> None:
    """Sets the root logger up, in place of what was there.

    Args:
        log_format: one of `LOG_FORMATS`; "auto" looks whether stderr is a terminal.
    """
    handler: logging.Handler
    if log_format == "auto" and sys.stderr.isatty():
        handler = RichHandler(console=Console(stderr=True), show_path=False, markup=False)
        handler.setFormatter(PrintableFormatter("%(message)s", "[%H:%M:%S]"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter() if log_format == "json" else PlainFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    theirs = logging.getLogger("hivemind")
    theirs.setLevel(logging.WARNING)  # its INFO lines are for its authors
    # It has a handler of its own, which would show what p2pd and other peers say as it is.
    theirs.handlers.clear()
    theirs.propagate = True
