"""Text of a peer that acts on a terminal, or forges a line of the log.

Each path of such text to a person is tried with all kinds of text: logs in each format, a program's
last error, hivemind's own log, the terminal monitor.
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import sys
from collections.abc import Iterator

import hivemind.p2p.p2p_daemon as hivemind_p2p
import pytest
from rich.console import Console

from peers.actions.findings import Finding, Level
from peers.command_line.command import (
    JsonFormatter,
    PlainFormatter,
    PrintableFormatter,
    configure_logging,
)
from peers.command_line.options import program
from peers.doctor import line_of
from swarm.errors import BadMessage, SwarmError
from swarm.monitor.snapshot import Sighting
from swarm.monitor.terminal import render
from swarm.protocol.messages.message_bytes import decode
from swarm.protocol.records.printable import MAX_CHARACTERS, printable
from tests.monitor.small_swarm import project
from tests.peer_records import peer_record

WAIT_S = 60.0
ACTING = {
    "escape": "\x1b[2J\x1b]0;title\x07",
    "line": "\r\n2026-01-31T12:00:00Z INFO round=9 decided",
    "right to left": "\u202egnorw\u202c\u2067",
    "unicode lines": "\u2028\u2029\x85\x0b\x0c\x1c",
    "c1": "\x9b31m\x90\x9d",
    "invisible": "\u200b\u200f\ufeff\xad\U000e0041\ud800",
}
EVERYTHING = "".join(ACTING.values())
formatters = pytest.mark.parametrize(
    "formatter", [PlainFormatter(), JsonFormatter(), PrintableFormatter("%(message)s")]
)


def assert_harmless(shown: str, lines: int = 1) -> None:
    """Checks that only line ends act, and that the number of lines is right."""
    assert shown.replace("\n", "").isprintable(), repr(shown)
    assert len(shown.splitlines()) == lines, repr(shown)


@pytest.mark.parametrize("text", ACTING.values(), ids=ACTING)
def test_what_acts_becomes_an_escape_and_the_rest_stays(text: str) -> None:
    shown = printable(f"before {text} Zoë's 機械 after")
    assert_harmless(shown)
    assert shown.startswith("before \\") and shown.endswith(" Zoë's 機械 after")


def test_escapes_say_what_was_there_and_the_length_is_bounded() -> None:
    assert printable("a\x1b\u202e\n\u2028\x9b") == r"a\x1b\u202e\n\u2028\x9b"
    assert printable("x" * MAX_CHARACTERS) == "x" * MAX_CHARACTERS
    assert printable("\n" * 10, limit=2) == r"\n\n… (8 more characters)"
    assert len(printable("\U000e0041" * 10**6)) < 11 * MAX_CHARACTERS


@formatters
def test_a_log_message_is_one_harmless_line(formatter: logging.Formatter) -> None:
    record = logging.LogRecord("swarm.x", 30, "x.py", 1, "refused: %s", (EVERYTHING,), None)
    line = formatter.format(record)
    assert_harmless(line)
    if isinstance(formatter, JsonFormatter):
        assert_harmless(json.loads(line)["message"])


@formatters
def test_a_traceback_forges_no_line(formatter: logging.Formatter) -> None:
    try:
        raise ValueError(EVERYTHING)
    except ValueError:
        record = logging.LogRecord("swarm.x", 40, "x.py", 1, "broke", (), sys.exc_info())
    text = formatter.format(record)
    if isinstance(formatter, JsonFormatter):
        text = "broke\n" + json.loads(text)["error"]
    first, *rest = text.split("\n")
    assert "broke" in first and all(line.startswith("    ") for line in rest)
    assert_harmless(text, lines=1 + len(rest))


def key_named(key: str) -> bytes:
    """A message with an unknown key."""
    header = {"code": [[0, []]], "tip": "0" * 64, "generation": "0"}
    message = {"type": "hello", "ask": True, key: 1}
    return json.dumps({"header": header, "message": message}).encode()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """A program's log outside of a terminal."""
    root, theirs = logging.getLogger(), logging.getLogger("hivemind")
    before = root.handlers[:], root.level, theirs.handlers[:], theirs.propagate, theirs.level
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    configure_logging("plain")
    yield stderr
    root.handlers[:], root.level, theirs.handlers[:], theirs.propagate, theirs.level = before


def test_an_unknown_key_in_a_message_shows_as_escapes(log: io.StringIO) -> None:
    with pytest.raises(BadMessage) as raised:
        decode(key_named(EVERYTHING[:-1]), {})
    logging.getLogger("swarm.x").warning("from=%s refused: %s", "abc", raised.value)
    assert "\\x1b[2J" in log.getvalue()
    assert_harmless(log.getvalue())


def test_what_libp2ps_daemon_says_goes_the_same_way(log: io.StringIO) -> None:
    # Without half a character, because pytest sends logs between processes in UTF-8.
    text = EVERYTHING.encode("utf-8", "ignore").decode()
    said = {"logger": "swarm2", "level": "error", "ts": "no time", "caller": "x", "msg": text}
    hivemind_p2p.P2P._log_p2pd_message('{"logger" ' + text[:-1])
    hivemind_p2p.P2P._log_p2pd_message(json.dumps(said | {"ts": "2026-01-31T12:00:00.000+0000"}))
    lines = log.getvalue().splitlines()
    assert log.getvalue().replace("\n", "").isprintable()
    assert "\\x1b[2J" in lines[0] and "\\x1b[2J" in lines[-1]
    assert not any("decided" in line and line.startswith("2026-01-31") for line in lines)


def test_the_last_error_of_a_program_is_one_harmless_line(capsys) -> None:
    @program("swarm-test")
    def main() -> None:
        raise SwarmError(f"a peer said {EVERYTHING[:-1]}")

    with pytest.raises(SystemExit):
        main([])
    said = capsys.readouterr().err
    assert_harmless(said)
    assert "\\x1b[2J" in said


def test_the_doctors_findings_quote_peers_as_escapes() -> None:
    line = line_of(Finding("network", Level.FAULT, EVERYTHING, EVERYTHING))
    coloured = line.replace("\x1b[31m", "").replace("\x1b[0m", "")
    assert_harmless(coloured, lines=2)


def test_the_terminal_monitor_shows_escapes() -> None:
    hostile = peer_record(
        "QmA", name=EVERYTHING, reason=EVERYTHING, refused={EVERYTHING: 1}, generation=EVERYTHING
    )
    peers = {"QmA": hostile, "QmB": dataclasses.replace(hostile, peer_id="QmB")}
    snapshot = project(Sighting(EVERYTHING, EVERYTHING, peers, {}, {}, None))
    console = Console(width=200, height=60, record=True, file=io.StringIO())
    console.print(render(snapshot, width=200, height=60))
    shown = console.export_text(styles=False)
    assert shown.replace("\n", "").isprintable()
    assert "\\x1b" in shown
