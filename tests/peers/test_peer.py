"""swarm-peer: its reaction to signals, and its output for other programs."""

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from peers.actions import participation
from peers.actions.participation import leave_on_signals
from peers.actions.printed import Printed
from peers.peer import main
from swarm.emulation.local_peer import JOIN_LINE
from swarm.peer.training.leaving import Stop, Stopped


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Records exit codes instead of exiting. Restores signal handlers afterwards."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield codes
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_signal_asks_and_the_second_ends_at_once(
    exits: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    stop = Stop(7.0)
    leave_on_signals(stop)
    assert not stop() and stop.remaining_s == float("inf")
    signal.raise_signal(signal.SIGTERM)
    assert stop() and stop.wait(0) and 6.0 < stop.remaining_s <= 7.0
    assert exits == []
    signal.raise_signal(signal.SIGINT)
    assert exits == [130]
    said = capsys.readouterr().err
    assert "may take 7 s" in said and "leaving at once" in said


def test_a_signal_does_not_wait_for_the_end_of_what_is_read_before_a_run(exits: list[int]) -> None:
    stop, read = Stop(7.0), list[int]()
    leave_on_signals(stop)
    with pytest.raises(Stopped), stop.at_once():
        for shard in range(3):
            read.append(shard)
            if shard == 1:
                signal.raise_signal(signal.SIGINT)
    assert read == [0, 1] and stop() and not exits
    with pytest.raises(Stopped), stop.at_once():
        read.append(2)
    assert read == [0, 1], "asked to stop, it begins nothing"


def test_a_signal_ends_nothing_of_another_threads_or_after_such_work(exits: list[int]) -> None:
    def elsewhere() -> None:
        with stop.at_once():
            inside.set()
            asked.wait(30.0)

    stop, inside, asked = Stop(7.0), threading.Event(), threading.Event()
    leave_on_signals(stop)
    with stop.at_once():
        pass
    other = threading.Thread(target=elsewhere, daemon=True)
    other.start()
    assert inside.wait(30.0)
    signal.raise_signal(signal.SIGINT)
    asked.set()
    other.join(30.0)
    assert stop() and not other.is_alive() and not exits


def test_a_terminal_that_is_closed_asks_however_often_it_says_so(
    exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    signal.signal(signal.SIGHUP, lambda *_: None)  # whatever started the tests
    stop = Stop(7.0)
    leave_on_signals(stop)
    monkeypatch.setattr(sys, "stderr", Gone())
    signal.raise_signal(signal.SIGHUP)
    assert stop() and 6.0 < stop.remaining_s <= 7.0
    signal.raise_signal(signal.SIGHUP)
    assert exits == [], "the kernel sends it, and the shell once more"
    signal.raise_signal(signal.SIGTERM)
    assert exits == [130]


def test_a_peer_that_nohup_has_started_outlives_its_terminal(exits: list[int]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = Stop(7.0)
    leave_on_signals(stop)
    signal.raise_signal(signal.SIGHUP)
    assert not stop() and exits == []
    signal.raise_signal(signal.SIGTERM)
    assert stop() and exits == []


def test_scripts_find_the_address_alone_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    Printed().on_address("/ip4/203.0.113.7/tcp/1/p2p/A")
    assert capsys.readouterr().out == "swarm-peer --initial-peers /ip4/203.0.113.7/tcp/1/p2p/A\n"


def test_a_founder_that_waits_for_others_gives_them_an_invitation_in_its_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = Printed()
    printed.on_invitation("swarm-invitation-x")
    printed.on_address("/ip4/203.0.113.7/tcp/1/p2p/A")
    line = capsys.readouterr().out
    assert line.endswith("/p2p/A --invitation swarm-invitation-x\n")
    found = JOIN_LINE.search(line)
    assert found and found[2] == "swarm-invitation-x"


class Trained:
    """A peer of a run of two rounds that has applied `rounds` of them.

    Records how long it served.
    """

    addresses, run_id, run = (), "run-1", SimpleNamespace(run=SimpleNamespace(rounds=2))

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.served_s: list[float] = []

    def __enter__(self) -> "Trained":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def train(self) -> SimpleNamespace:
        return SimpleNamespace(round=self.rounds)

    def serve(self, seconds: float) -> None:
        self.served_s.append(seconds)


@pytest.mark.parametrize(
    ("rounds", "options", "served_s"),
    [
        pytest.param(2, [], [60.0], id="finished"),
        pytest.param(2, ["--linger", "7.5"], [7.5], id="finished, with --linger"),
        pytest.param(1, [], [], id="left before the end"),
    ],
)
def test_a_peer_whose_training_is_over_serves_others_if_the_run_is_and_exits_with_0(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    rounds: int,
    options: list[str],
    served_s: list[float],
) -> None:
    peer = Trained(rounds)
    monkeypatch.setattr(participation.Peer, "start", lambda *_, **__: peer)
    for name in ("leave_on_signals", "raise_file_limit", "watch_for_unborn_threads"):
        monkeypatch.setattr(participation, name, lambda *_: None)  # they change the process
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    result = CliRunner().invoke(main, ["--state-dir", str(tmp_path), *options])
    assert (result.exit_code, peer.served_s) == (0, served_s), result.output
