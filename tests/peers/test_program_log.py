"""Log lines for people and for scripts."""

import json
import logging
import re
import sys

import pytest

from peers.program_log import JsonFormatter, PlainFormatter, configure_logging


def record(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("swarm.x", logging.INFO, "x.py", 1, message, args, None)


def test_a_plain_line_has_time_level_and_message() -> None:
    line = PlainFormatter().format(record("round=%d loss=%.1f", 3, 2.5))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO round=3 loss=2\.5", line)


def test_a_json_line_is_one_object_even_with_a_traceback() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        failed = logging.LogRecord("swarm.x", 40, "x.py", 1, "broke", (), sys.exc_info())
    line = JsonFormatter().format(failed)
    assert "\n" not in line
    fields = json.loads(line)
    assert (fields["level"], fields["logger"], fields["message"]) == ("ERROR", "swarm.x", "broke")
    assert "ValueError" in fields["error"]


@pytest.mark.parametrize(
    ("log_format", "formatter"),
    [("auto", PlainFormatter), ("plain", PlainFormatter), ("json", JsonFormatter)],
)
def test_off_a_terminal_there_are_no_colours(log_format: str, formatter: type) -> None:
    configure_logging(log_format)
    configure_logging(log_format)  # twice does not double the lines
    (handler,) = logging.getLogger().handlers
    assert isinstance(handler.formatter, formatter)
