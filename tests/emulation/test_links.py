"""Emulated links: arrival times, losses, and real shaping in namespaces."""

import math
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing

import pytest
from click.testing import CliRunner

from peers.local import main as local
from swarm.emulation.links import LINKS, MOST_QUEUED_S, PROFILES, Bursts, Cuts, Link, Losses, Shaper
from swarm.emulation.networks import NamespaceLinks, address_of, why_not_here
from swarm.errors import SwarmError
from tests.processes import running

HOME = Link(up_mbit=8, down_mbit=80, rtt_ms=50)
PACKET_BYTES = 1000


class Timed:
    """A shaper that a test sends through, with the arrival times of packets."""

    def __init__(self, shaper: Shaper) -> None:
        self.shaper, self.num_sent = shaper, 0
        self.arrivals: dict[int, float] = {}
        """Number of a packet in the order of sending -> arrival time in seconds."""

    def send(self, now_s: float, source: int, target: int, num_bytes: int = PACKET_BYTES) -> int:
        """Sends one more packet, after all earlier due ones. Returns its number."""
        self.run(now_s)
        number, self.num_sent = self.num_sent, self.num_sent + 1
        self.shaper.send(now_s, source, target, number.to_bytes(4, "big").ljust(num_bytes))
        return number

    def run(self, until_s: float = math.inf) -> dict[int, float]:
        """Delivers packets until a moment. Returns all arrivals so far."""
        while (at_s := self.shaper.next_s) is not None and at_s <= until_s:
            for _, packet in self.shaper.arrived(at_s):
                self.arrivals[int.from_bytes(packet[:4], "big")] = at_s
        return self.arrivals


def test_a_packet_takes_both_lines_and_half_the_round_trip() -> None:
    timed = Timed(Shaper(HOME))
    timed.send(10.0, 0, 1)
    # 1 ms up at 8 Mbit/s, 0.1 ms down at 80, 25 ms on the way.
    assert timed.run() == {0: pytest.approx(10.0 + 0.001 + 0.0001 + 0.025)}


def test_a_stream_gets_the_rate_of_its_slowest_line() -> None:
    for link in (HOME, Link(up_mbit=80, down_mbit=8, rtt_ms=50)):
        timed = Timed(Shaper(link))
        for _ in range(100):
            timed.send(0.0, 0, 1)
        arrivals = timed.run()
        took_s = arrivals[99] - arrivals[0]
        assert 99 * PACKET_BYTES * 8 / took_s == pytest.approx(8e6, rel=0.01)


def test_a_full_queue_drops() -> None:
    timed = Timed(Shaper(HOME))
    for _ in range(400):
        timed.send(0.0, 0, 1)
    kept = len(timed.run())
    # The packets that pass in MOST_QUEUED_S, and the one on the line.
    assert kept == pytest.approx(MOST_QUEUED_S * 8e6 / 8 / PACKET_BYTES, abs=2)
    assert timed.shaper.packets == {"delivered": kept, "queue up is full": 400 - kept}


def test_a_full_queue_before_the_line_down_drops() -> None:
    timed = Timed(Shaper(Link(up_mbit=8, down_mbit=8, rtt_ms=0)))
    for i in range(1000):
        for source in (0, 1):
            timed.send(i * 0.001, source, 2)
    kept = len(timed.run())
    # Both uplinks carry all. The downlink carries half, and the packets still queued at the end.
    assert kept == pytest.approx(1000 + MOST_QUEUED_S * 1000, abs=2)
    assert timed.shaper.packets == {"delivered": kept, "queue down is full": 2000 - kept}


def test_two_peers_share_the_line_down_of_a_third() -> None:
    timed = Timed(Shaper(Link(up_mbit=80, down_mbit=8, rtt_ms=0)))
    timed.send(0.0, 0, 2)
    timed.send(0.0, 1, 2)
    assert timed.run()[1] == pytest.approx(0.0001 + 2 * 0.001)


def test_what_queues_in_a_peers_line_up_is_in_no_others_way() -> None:
    idle = Timed(Shaper(HOME))
    idle.send(0.0, 1, 2)
    (idle_s,) = idle.run().values()
    timed = Timed(Shaper(HOME))
    for _ in range(300):  # more than its uplink queues
        timed.send(0.0, 0, 2)
    other = timed.send(0.0, 1, 2)
    arrivals = timed.run()
    assert timed.shaper.packets["queue up is full"] > 0
    assert max(arrivals.values()) > MOST_QUEUED_S, "the first peer's line was full"
    assert arrivals[other] == pytest.approx(idle_s, abs=2 * PACKET_BYTES * 8 / 80e6)


def test_a_peer_that_sends_twice_what_its_line_carries_costs_others_no_packet() -> None:
    timed, others = Timed(Shaper(HOME)), []
    for i in range(4000):  # 16 Mbit/s for 2 s
        timed.send(i * 0.0005, 0, 2)
        if i % 20 == 0:
            others.append((i * 0.0005, timed.send(i * 0.0005, 1, 2)))
    arrivals = timed.run()
    delays_s = [arrivals[number] - sent_s for sent_s, number in others]
    assert max(delays_s) < 0.001 + 0.025 + 3 * PACKET_BYTES * 8 / 80e6
    assert timed.shaper.packets["queue up is full"] > 1000


def lost_by(shaper: Shaper, source: int, num_packets: int) -> int:
    """The lost packets of a peer, out of a number of packets."""
    before = shaper.packets.get("lost", 0)
    for _ in range(num_packets):
        shaper.send(0.0, source, 1 - source, b"packet")
    return shaper.packets.get("lost", 0) - before


def test_so_many_packets_are_lost_as_the_link_says() -> None:
    lost = lost_by(Shaper(Link(1000, 1000, 1, loss_pct=5.0), seed=1), 0, 4000)
    # Binomial: standard deviation 0.34 percentage points.
    assert lost / 40 == pytest.approx(5.0, abs=1.2)


def lost_of(link: Link, num_packets: int, seed: int = 1) -> list[bool]:
    losses = Losses(link, random.Random(seed))
    return [losses.next_is_lost() for _ in range(num_packets)]


def stretches_of(lost: Sequence[bool]) -> list[int]:
    """Lengths of consecutive losses."""
    text = "".join("x" if each else "." for each in lost)
    return [len(stretch) for stretch in text.split(".") if stretch]


def test_losses_in_bursts_are_as_many_and_as_long_as_the_chain_says() -> None:
    bursts = Bursts(p_pct=1.0, r_pct=25.0)
    assert bursts.loss_pct == pytest.approx(100 * 1 / 26)
    lost = lost_of(Link(1, 1, 1, bursts=bursts), 100_000)
    # Bursts are 4 packets long, so the deviation is that of some 25,000 independent packets.
    assert 100 * sum(lost) / len(lost) == pytest.approx(bursts.loss_pct, abs=0.5)
    stretches = stretches_of(lost)
    assert sum(stretches) / len(stretches) == pytest.approx(4.0, rel=0.1)
    at_random = stretches_of(lost_of(Link(1, 1, 1, loss_pct=bursts.loss_pct), 100_000))
    assert sum(at_random) / len(at_random) == pytest.approx(
        1 / (1 - bursts.loss_pct / 100), rel=0.1
    )


def test_a_bad_line_may_let_some_through_and_a_good_one_lose_some() -> None:
    bursts = Bursts(p_pct=10.0, r_pct=10.0, lost_bad_pct=60.0, lost_good_pct=20.0)
    assert bursts.loss_pct == pytest.approx(40.0)
    lost = lost_of(Link(1, 1, 1, bursts=bursts), 50_000)
    assert 100 * sum(lost) / len(lost) == pytest.approx(40.0, abs=1.5)


def test_the_bursts_of_one_peer_are_not_those_of_another() -> None:
    shaper = Shaper(Link(1000, 1000, 1, bursts=Bursts(p_pct=50.0, r_pct=0.001)), seed=1)
    lost_by(shaper, 0, 50)
    assert lost_by(shaper, 0, 1) == 1, "its line turned bad and stays so"
    assert lost_by(shaper, 1, 1) == 0, "a line begins as a good one"


def test_peers_have_several_links_in_turn() -> None:
    near, far = Link(8, 80, 10), Link(80, 8, 90)
    timed = Timed(Shaper([near, far]))
    assert [timed.shaper.link_of(peer) for peer in range(3)] == [near, far, near]
    first, second = timed.send(10.0, 0, 1), timed.send(20.0, 1, 0)
    arrivals = timed.run()
    # 1 ms up at 8 Mbit/s, 1 ms down at 8, and half of the mean of both round trips.
    assert arrivals[first] == pytest.approx(10.0 + 0.001 + 0.001 + 0.025)
    assert arrivals[second] == pytest.approx(20.0 + 0.0001 + 0.0001 + 0.025)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_each_figure_of_a_named_link_says_where_it_comes_from(name: str) -> None:
    profile = PROFILES[name]
    link = profile.link
    assert len(profile.rates) > 20 and len(profile.rtt) > 20
    assert bool(profile.loss) == (link.mean_loss_pct > 0)
    assert not (link.bursts and link.loss_pct), "one kind of losses"
    assert link.up_mbit > 0 and link.down_mbit > 0 and link.rtt_ms > 0
    assert 0 <= link.mean_loss_pct < 10


def test_derived_losses_are_what_their_sources_say() -> None:
    assert len({profile.link for profile in PROFILES.values()}) >= 16
    assert LINKS["home-100-20-bursty"].mean_loss_pct == pytest.approx(0.1, rel=0.01)
    satellite = LINKS["satellite"].bursts
    assert satellite and satellite.loss_pct == pytest.approx(1.0, rel=0.02)
    # 0.3 of every 15 s are bad. That is 250 packets of 12,000 bits at 10 Mbit/s.
    assert 100 / satellite.r_pct == pytest.approx(250, rel=0.01)
    in_flight = LINKS["in-flight"].bursts
    assert in_flight and 1 <= in_flight.p_pct <= 8 and 8 <= in_flight.r_pct <= 50


def test_a_link_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    result = CliRunner().invoke(local, ["--link", "home-20,home-21"])
    assert result.exit_code == 2
    assert "'home-21' is none of lan, datacentre, home-100" in " ".join(result.stderr.split())


def test_a_cut_has_a_direction_and_a_partition_none() -> None:
    cuts = Cuts()
    cuts.pairs.add((0, 1))
    assert cuts.loses(0, 1) and not cuts.loses(1, 0)
    cuts.partition([[0, 1], [2]])
    assert cuts.loses(1, 2) and cuts.loses(2, 1) and not cuts.loses(1, 0)
    assert cuts.loses(3, 4), "a peer in no group reaches nobody"
    cuts.heal()
    assert not cuts.loses(0, 1) and not cuts.loses(1, 2)


SERVER = """
import socket
s = socket.socket(); s.bind(("{host}", 5000)); s.listen(); print("up", flush=True)
c, _ = s.accept(); c.sendall(b"hello"); c.recv(1)
"""
CLIENT = """
import socket
s = socket.create_connection(("{host}", 5000), 1.0); print(s.recv(5).decode())
"""


@pytest.mark.skipif(why_not_here() is not None, reason=str(why_not_here()))
def test_peers_in_namespaces_reach_each_other_unless_they_are_cut() -> None:
    with closing(NamespaceLinks(Link(100, 100, 10))) as links:
        (serve, _), (ask, _), host = links.place(1), links.place(0), address_of(1)
        serving = [*serve, sys.executable, "-c", SERVER.format(host=host)]
        with running(serving, stdout=subprocess.PIPE, limit_s=100.0) as server:
            assert server.stdout is not None
            server.stdout.readline()
            client = [*ask, sys.executable, "-c", CLIENT.format(host=host)]
            links.cut([(0, 1)])
            assert subprocess.run(client, capture_output=True, timeout=30, check=False).returncode
            links.heal()
            found = subprocess.run(client, capture_output=True, timeout=30, check=False)
            assert found.stdout == b"hello\n"
            server.wait(10)


@pytest.mark.skipif(why_not_here() is not None, reason=str(why_not_here()))
def test_a_congestion_control_that_a_namespace_may_not_use_is_an_error_with_a_remedy() -> None:
    with closing(NamespaceLinks(Link(100, 100, 10), congestion="nosuch")) as links:
        with pytest.raises(SwarmError, match="congestion control nosuch") as refused:
            links.place(0)
        assert "tcp_allowed_congestion_control" in str(refused.value.hint)


COUNT = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("{host}", 5000)); s.settimeout(20.0)
print("up", flush=True)
found = []
while not found or found[-1] != {last}:
    found.append(int(s.recv(100)))
print(*found)
"""
SEND = """
import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range({num}):
    s.sendto(b"%d" % number, ("{host}", 5000)); time.sleep(0.001)
"""


@pytest.mark.skipif(why_not_here() is not None, reason=str(why_not_here()))
def test_a_namespace_loses_the_very_packets_that_the_chain_of_its_link_says() -> None:
    bursty = Link(100, 100, 10, bursts=Bursts(p_pct=5.0, r_pct=30.0))
    kept = [number for number, lost in enumerate(lost_of(bursty, 400, seed=7)) if not lost]
    num = kept[-1] + 1
    with closing(NamespaceLinks([bursty, LINKS["home-100-20-bursty"]], seed=7)) as links:
        (send, _), (count, _), host = links.place(0), links.place(1), address_of(1)
        counting = [*count, sys.executable, "-c", COUNT.format(host=host, last=num - 1)]
        with running(counting, stdout=subprocess.PIPE, limit_s=100.0) as counter:
            assert counter.stdout is not None
            counter.stdout.readline()
            sending = [*send, sys.executable, "-c", SEND.format(host=host, num=num)]
            subprocess.run(sending, capture_output=True, timeout=30, check=True)
            found, _ = counter.communicate(timeout=30)
        assert [int(word) for word in found.split()] == kept
        assert links.packets["lost"] == num - len(kept) > 20
