"""A jump of this machine's clock does not affect the DHT, and is reported once."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from hivemind.dht import protocol
from hivemind.proto import dht_pb2

from swarm.errors import NobodyReachable
from swarm.network.dht.dht import refusal
from swarm.network.wire import steady_clock
from swarm.network.wire.steady_clock import LIMIT_S, NEAR_S, SteadyClock, compared, dht_clock
from tests.network.conftest import Peers, records_of

WAIT_S = 60.0
real_time = time.time


def test_records_outlive_jumps_of_the_clock(peers: Peers, monkeypatch) -> None:
    first = peers.node()
    second = peers.node()
    second.run(second.store("key", b"before", 60), WAIT_S)
    for module in steady_clock.HIVEMIND:  # code that still asks the wall clock would see the jump
        if module.get_dht_time is real_time:
            monkeypatch.setattr(module, "get_dht_time", lambda: time.time())
    for jump_s in (600.0, -600.0):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: real_time() + jump_s)
        assert set(records_of(first, "key")) == {second.peer_id}
        second.run(second.store("key", f"{jump_s}".encode(), 60), WAIT_S)
        (record,) = records_of(first, "key").values()
        assert record.value == f"{jump_s}".encode()
        left_s = record.expiration - real_time()
        assert 30 < left_s < 65, "others must not take it for expired, nor keep it forever"
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


class Machine:
    """A machine with a drifting clock, whose wall clock is corrected by steps or not at all."""

    def __init__(self, ppm: float, *, set_every_s: float | None, begin_s: float = 1e9) -> None:
        self.true_s, self.begin_s, self.rate = begin_s, begin_s, 1 + ppm * 1e-6
        self.set_every_s, self.set_at_s, self.jumped_s = set_every_s, begin_s, 0.0
        self.clock = SteadyClock(self.passed, self.wall)

    def passed(self) -> float:
        return (self.true_s - self.begin_s) * self.rate

    def wall(self) -> float:
        since = self.begin_s if self.set_every_s is None else self.set_at_s
        return since + (self.true_s - since) * self.rate + self.jumped_s

    def run(self, seconds: float, told=lambda machine: ()) -> float:
        """The largest error, with a comparison with other peers every ten minutes."""
        end_s, worst_s, before_s = self.true_s + seconds, 0.0, self.clock()
        while self.true_s < end_s:
            self.true_s += 60.0
            if self.set_every_s and self.true_s - self.set_at_s >= self.set_every_s:
                self.set_at_s = self.true_s
            self.clock.look()
            if (self.true_s - self.begin_s) % 600 == 0:
                self.clock.compare(told(self))
            assert self.clock() > before_s, "records' expirations grow"
            before_s, worst_s = self.clock(), max(worst_s, abs(self.error_s))
        return worst_s

    @property
    def error_s(self) -> float:
        return self.clock() - self.true_s


DAY_S = 86_400.0


@pytest.mark.parametrize("ppm", [60.0, -60.0])
def test_a_drift_that_the_wall_clock_corrects_by_steps_is_followed(caplog, ppm: float) -> None:
    """Once it was 3 s off after 14 hours and 36 s after a week, and the wall clock was blamed."""
    machine = Machine(ppm, set_every_s=3600.0)
    with caplog.at_level(logging.INFO):
        assert machine.run(7 * DAY_S) < 0.5
    assert "jumped" not in caplog.text
    assert f"count of time drifted by {ppm * 0.036:+.1f} s in 10.0 h" in caplog.text
    assert f"({ppm:+.0f} ppm)" in caplog.text


@pytest.mark.parametrize("others", [1, 2, 3])
def test_a_drift_that_nothing_corrects_is_followed_by_the_other_members(others: int) -> None:
    machine = Machine(60.0, set_every_s=None)
    right = [lambda m: m.true_s - m.clock()] * others
    assert machine.run(7 * DAY_S, lambda m: [clock(m) for clock in right]) < 1.5 < LIMIT_S


def test_two_members_meet_in_the_middle() -> None:
    one, other = Machine(60.0, set_every_s=None), Machine(-60.0, set_every_s=None)
    for _ in range(7 * 144):
        one.run(600.0)
        other.run(600.0)
        apart_s = other.clock() - one.clock()
        one.clock.compare([apart_s])
        other.clock.compare([-apart_s])
    assert abs(one.clock() - other.clock()) < 2 * NEAR_S and abs(one.error_s) < LIMIT_S


def test_a_jump_is_followed_once_another_member_has_the_new_time(caplog) -> None:
    machine = Machine(0.0, set_every_s=None, begin_s=1e9)
    machine.jumped_s = 300.0
    assert machine.run(DAY_S) < 0.1 and caplog.text.count("jumped by +300.0 s") == 1
    machine.jumped_s = 0.0
    machine.run(3600.0)
    wrong = Machine(0.0, set_every_s=None)
    wrong.clock = SteadyClock(wrong.passed, lambda: wrong.wall() - 300.0)  # it began too early
    wrong.clock._wall = wrong.wall  # it is corrected
    with caplog.at_level(logging.WARNING):
        wrong.run(2 * 3600.0, lambda m: [m.true_s - m.clock()])
    assert (
        abs(wrong.error_s) < 0.1 and "have the time that this machine's wall clock" in caplog.text
    )


def test_what_counts_of_the_clocks_of_others() -> None:
    def ahead(*told: float, wall: float = 0.0, jumped: bool = False) -> float | None:
        return compared(told, wall, has_jumped=jumped).ahead_s

    assert ahead() is None and ahead(0.9, 50.0, 50.0) is None, "one has the time that is here"
    assert ahead(4.0) == 2.0 and ahead(4.0, 4.5) == 4.25
    assert ahead(4.0, 9.0, -9.0) is None, "they have three times"
    assert ahead(4.0, 4.0, wall=60.0, jumped=True) == 4.0
    assert ahead(60.5, -9.0, wall=60.0, jumped=True) == 60.0
    assert ahead(60.5, -9.0, wall=60.0) is None


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
    falling_s = itertools.count(dht_clock()(), -100.0)  # each look is 100 s earlier
    monkeypatch.setattr(protocol, "get_dht_time", lambda: next(falling_s))
    with pytest.raises(NobodyReachable, match=r"this machine's clock is [12]00\.\d s") as refused:
        peers.node(known_peers=first.addresses)
    assert refused.value.exit_code == 3 and "3 s are allowed" in str(refused.value)
    assert refused.value.hint == "set the clock that is wrong: timedatectl set-ntp true"


@pytest.mark.parametrize(("ahead_s", "is_dialled"), [(-60.0, True), (60.0, True), (0.0, False)])
def test_each_of_hiveminds_two_refusals_has_its_own_cause_and_remedy(
    ahead_s: float, is_dialled: bool
) -> None:
    """Recognized by the texts of the installed version of hivemind."""

    class Peer:
        async def rpc_ping(self, *_: object, **__: object) -> dht_pb2.PingResponse:
            node = dht_pb2.NodeInfo(node_id=b"0" * 20)
            now_s = protocol.get_dht_time()
            return dht_pb2.PingResponse(peer=node, dht_time=now_s - ahead_s, available=is_dialled)

    node = SimpleNamespace(
        get_stub=lambda _: Peer(),
        client_mode=False,
        node_info=None,
        wait_timeout=1.0,
        rpc_semaphore=asyncio.Semaphore(),
        update_routing_table=AsyncMock(return_value=None),
    )
    ping = protocol.DHTProtocol.call_ping(node, "QmPeer", validate=True, strict=True)
    with pytest.raises(protocol.ValidationError) as raised:
        asyncio.run(ping)
    refused = refusal(str(raised.value))
    if is_dialled:
        where = "ahead of" if ahead_s > 0 else "behind"
        assert f"this machine's clock is 60.0 s {where} the clock of the peer" in str(refused)
        assert "timedatectl set-ntp true" in refused.hint and "port" not in str(refused)
    else:
        assert "cannot dial this machine back" in str(refused)
        assert "--client-mode" in refused.hint and "clock" not in str(refused)
