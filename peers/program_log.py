"""How programs log: colours on a terminal, `key=value` lines off it, or JSON. Always on stderr."""

from __future__ import annotations

import json
import logging
import sys
import time

from rich.console import Console
from rich.logging import RichHandler

LOG_FORMATS = ("auto", "plain", "json")


class PlainFormatter(logging.Formatter):
    """`2026-01-31T12:00:00Z INFO message`, one line a message (a traceback follows it)."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        self.converter = time.gmtime


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (seconds since 1970), level, logger, message, error."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        fields = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
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
        handler.setFormatter(logging.Formatter("%(message)s", "[%H:%M:%S]"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter() if log_format == "json" else PlainFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("hivemind").setLevel(logging.WARNING)  # its INFO lines are for its authors
