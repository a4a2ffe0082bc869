"""swarm-peer: what signals do, and what it prints for others."""

import os
import signal

import pytest

from peers.printed import Printed
from peers.taking_part import leave_on_signals
from swarm.peer.leaving import Stop


def test_the_first_signal_asks_and_the_second_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        stop = Stop(7.0)
        leave_on_signals(stop)
        assert not stop() and stop.remaining_s == float("inf")
        signal.raise_signal(signal.SIGTERM)
        assert stop() and stop.wait(0) and 6.0 < stop.remaining_s <= 7.0
        assert codes == []
        signal.raise_signal(signal.SIGINT)
        assert codes == [130]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    said = capsys.readouterr().err
    assert "may take 7 s" in said and "leaving at once" in said


def test_scripts_find_the_address_alone_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    Printed().on_address("/ip4/203.0.113.7/tcp/1/p2p/A")
    assert capsys.readouterr().out == "swarm-peer --initial-peers /ip4/203.0.113.7/tcp/1/p2p/A\n"
