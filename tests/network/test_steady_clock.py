"""A jump of this machine's clock changes nothing for the DHT, and is said once."""

from __future__ import annotations

import itertools
import logging
import time

import pytest
from hivemind.dht import protocol

from swarm.errors import NobodyReachable
from swarm.network import steady_clock
from swarm.network.steady_clock import SteadyClock, dht_clock
from tests.network.conftest import Peers, records_of

WAIT_S = 60.0
real_time = time.time


def test_records_outlive_jumps_of_the_clock(peers: Peers, monkeypatch) -> None:
    first = peers.node()
    second = peers.node()
    second.run(second.store("key", b"before", 60), WAIT_S)
    for module in steady_clock.HIVEMIND:  # what would still ask the wall clock is to feel the jump
        if module.get_dht_time is real_time:
            monkeypatch.setattr(module, "get_dht_time", lambda: time.time())
    for jump_s in (600.0, -600.0):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: real_time() + jump_s)
        assert set(records_of(first, "key")) == {second.peer_id}
        second.run(second.store("key", f"{jump_s}".encode(), 60), WAIT_S)
        (record,) = records_of(first, "key").values()
        assert record.value == f"{jump_s}".encode()
        left_s = record.expiration - real_time()
        assert 30 < left_s < 65, "others must not take it for expired, nor keep it for ever"
    third = peers.node()  # whose ping compares clocks
    assert third.num_neighbours > 0


def test_a_jump_is_said_once_with_its_size(monkeypatch, caplog) -> None:
    clock = SteadyClock()
    assert abs(clock.look()) < 1
    monkeypatch.setattr(time, "time", lambda: real_time() + 300)
    with caplog.at_level(logging.WARNING):
        assert clock.look() == pytest.approx(300, abs=1)
        clock.look()
    assert caplog.text.count("jumped by +300.0 s") == 1


def test_time_in_which_the_machine_slept_counts(monkeypatch) -> None:
    clock = SteadyClock()
    before = clock()
    passed_s = steady_clock.passed_s
    monkeypatch.setattr(steady_clock, "passed_s", lambda: passed_s() + 3600)
    assert clock() - before == pytest.approx(3600, abs=5)


def test_a_clock_that_others_do_not_have_is_as_good_as_nobody_at_the_first_start(
    peers: Peers, monkeypatch
) -> None:
    first = peers.node()
    falling_s = itertools.count(dht_clock()(), -100.0)  # each look is 100 s before the one before
    monkeypatch.setattr(protocol, "get_dht_time", lambda: next(falling_s))
    with pytest.raises(NobodyReachable, match="local time") as refused:
        peers.node(known_peers=first.addresses)
    assert refused.value.exit_code == 3 and "set this machine's clock" in refused.value.hint
