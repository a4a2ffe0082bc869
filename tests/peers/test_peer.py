"""swarm-peer: what signals do, and what it prints for others."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from peers import taking_part
from peers.peer import main
from peers.printed import Printed
from peers.taking_part import leave_on_signals
from swarm.peer.leaving import Stop, Stopped


@pytest.fixture
def stop() -> Iterator[Stop]:
    """What signals ask, of this process too."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stop = Stop(7.0)
    leave_on_signals(stop)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_first_signal_asks_and_the_second_ends_at_once(
    stop: Stop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    assert not stop() and stop.remaining_s == float("inf")
    signal.raise_signal(signal.SIGTERM)
    assert stop() and stop.wait(0) and 6.0 < stop.remaining_s <= 7.0
    assert codes == []
    signal.raise_signal(signal.SIGINT)
    assert codes == [130]
    said = capsys.readouterr().err
    assert "may take 7 s" in said and "leaving at once" in said


def test_a_signal_does_not_wait_for_the_end_of_what_is_read_before_a_run(stop: Stop) -> None:
    read: list[int] = []
    with pytest.raises(Stopped), stop.at_once():
        for shard in range(3):
            read.append(shard)
            if shard == 1:
                signal.raise_signal(signal.SIGINT)
    assert read == [0, 1] and stop()
    with pytest.raises(Stopped), stop.at_once():
        read.append(2)
    assert read == [0, 1], "asked to stop, it begins nothing"


def test_a_signal_ends_nothing_of_another_threads_or_after_such_work(stop: Stop) -> None:
    def elsewhere() -> None:
        with stop.at_once():
            inside.set()
            asked.wait(30.0)

    inside, asked = threading.Event(), threading.Event()
    with stop.at_once():
        pass
    other = threading.Thread(target=elsewhere, daemon=True)
    other.start()
    assert inside.wait(30.0)
    signal.raise_signal(signal.SIGINT)
    asked.set()
    other.join(30.0)
    assert stop() and not other.is_alive()


def test_scripts_find_the_address_alone_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    Printed().on_address("/ip4/203.0.113.7/tcp/1/p2p/A")
    assert capsys.readouterr().out == "swarm-peer --initial-peers /ip4/203.0.113.7/tcp/1/p2p/A\n"


class Trained:
    """A peer of a run of two rounds that has applied so many of them; keeps what it served."""

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
    monkeypatch.setattr(taking_part.Peer, "start", lambda *_, **__: peer)
    for name in ("leave_on_signals", "raise_file_limit", "watch_for_unborn_threads"):
        monkeypatch.setattr(taking_part, name, lambda *_: None)  # they change the process
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    result = CliRunner().invoke(main, ["--state-dir", str(tmp_path), *options])
    assert (result.exit_code, peer.served_s) == (0, served_s), result.output
