"""Log lines for people and for scripts."""

import errno
import io
import json
import logging
import re
import sys

import pytest
from rich.console import Console

from peers.command_line.command import (
    JsonFormatter,
    PlainFormatter,
    TerminalHandler,
    configure_logging,
    progress_logger,
)
from swarm.progress import Progress
from tests.conftest import loggers_as_before


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


@pytest.mark.parametrize(("level", "said"), [("debug", 4), ("info", 3), ("error", 1)])
def test_the_level_decides_what_is_said(
    level: str, said: int, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("plain", level)
    for number in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logging.getLogger("swarm.x").log(number, "hello")
    progress_logger.debug("step 1", extra={"progress": Progress("round 1/2", "step", 1, 2)})
    assert len(capsys.readouterr().err.splitlines()) == said


def test_on_a_terminal_work_is_a_bar_below_the_lines_that_goes_when_it_is_done() -> None:
    file = io.StringIO()
    handler = TerminalHandler(Console(file=file, force_terminal=True, width=100))
    for done in (1, 2):
        progress = Progress("round 1/2", "step", done, 2, 3.0, "loss 2.5, \x1b[31m12 tokens/s")
        handler.handle(logging.makeLogRecord({"msg": str(progress), "progress": progress}))
        handler.bars.refresh()
        if done == 1:
            handler.handle(logging.makeLogRecord({"msg": "a line"}))
    handler.close()
    said = file.getvalue()
    assert "round 1/2: step 1 of 2, loss 2.5, \\x1b[31m12 tokens/s, 3 s left" in said
    assert "a line" in said
    assert not handler.bars.task_ids and handler.bars.finished


def test_a_terminal_that_was_closed_ends_nothing() -> None:
    class Terminal(io.StringIO):
        is_closed = False

        def write(self, text: str) -> int:
            if self.is_closed:
                raise OSError(errno.EIO, "Input/output error")
            return super().write(text)

    file = Terminal()
    handler = TerminalHandler(Console(file=file, force_terminal=True, width=100))
    for done in range(1, 4):
        progress = Progress("round 1/2", "step", done, 3)
        handler.handle(logging.makeLogRecord({"msg": str(progress), "progress": progress}))
        assert "step 1 of 3" in file.getvalue()
        file.is_closed = True
    handler.close()


def state_of_loggers() -> dict[str, object]:
    root, theirs = logging.getLogger(), logging.getLogger("hivemind")
    return {
        "root's level": root.level,
        "root's handlers": root.handlers[:],
        "their level": theirs.level,
        "their handlers": theirs.handlers[:],
        "their way to the root": theirs.propagate,
        "the level of progress": progress_logger.level,
    }


def test_what_a_program_sets_up_ends_with_its_test() -> None:
    theirs = logging.getLogger("hivemind")  # as it is once hivemind was imported
    theirs.handlers[:], theirs.propagate = [logging.NullHandler()], False
    theirs.setLevel(logging.INFO)
    before = state_of_loggers()
    with loggers_as_before():
        configure_logging("plain", "error")
        within = state_of_loggers()
        assert [name for name in before if within[name] == before[name]] == []
    assert state_of_loggers() == before
