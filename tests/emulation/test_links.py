"""Emulated links: when packets arrive, which are lost, and namespaces that really shape."""

import subprocess
import sys

import pytest

from swarm.emulation.links import MOST_QUEUED_S, Cuts, Link, Shaper
from swarm.emulation.namespaces import NamespaceLinks, address_of, why_not_here

HOME = Link(up_mbit=8, down_mbit=80, rtt_ms=50)
PACKET_BYTES = 1000


def test_a_packet_takes_both_lines_and_half_the_round_trip() -> None:
    at_s, _ = Shaper(HOME).arrives_at(10.0, 0, 1, PACKET_BYTES)
    # 1 ms up at 8 Mbit/s, 0.1 ms down at 80, 25 ms on the way.
    assert at_s == pytest.approx(10.0 + 0.001 + 0.0001 + 0.025)


def test_a_stream_gets_the_rate_of_its_slowest_line() -> None:
    shaper = Shaper(HOME)
    arrivals = [shaper.arrives_at(0.0, 0, 1, PACKET_BYTES)[0] for _ in range(100)]
    took_s = float(arrivals[-1] or 0) - float(arrivals[0] or 0)
    assert 99 * PACKET_BYTES * 8 / took_s == pytest.approx(8e6, rel=0.01)


def test_a_full_queue_drops() -> None:
    shaper = Shaper(HOME)
    found = [shaper.arrives_at(0.0, 0, 1, PACKET_BYTES) for _ in range(400)]
    kept = sum(at_s is not None for at_s, _ in found)
    # What passes in MOST_QUEUED_S, and the one that is on the line.
    assert kept == pytest.approx(MOST_QUEUED_S * 8e6 / 8 / PACKET_BYTES, abs=2)
    assert found[-1] == (None, "queue up is full")


def test_two_peers_share_the_line_down_of_a_third() -> None:
    shaper = Shaper(Link(up_mbit=80, down_mbit=8, rtt_ms=0))
    shaper.arrives_at(0.0, 0, 2, PACKET_BYTES)
    at_s, _ = shaper.arrives_at(0.0, 1, 2, PACKET_BYTES)
    assert at_s == pytest.approx(0.0001 + 2 * 0.001)


def test_so_many_packets_are_lost_as_the_link_says() -> None:
    shaper = Shaper(Link(1000, 1000, 1, loss_pct=5.0), seed=1)
    lost = [shaper.arrives_at(float(i), 0, 1, 100)[1] for i in range(4000)].count("lost")
    # Binomial: standard deviation 0.34 percentage points.
    assert lost / 40 == pytest.approx(5.0, abs=1.2)


def test_a_cut_has_a_direction_and_a_partition_none() -> None:
    cuts = Cuts()
    cuts.pairs.add((0, 1))
    assert cuts.loses(0, 1) and not cuts.loses(1, 0)
    cuts.partition([[0, 1], [2]])
    assert cuts.loses(1, 2) and cuts.loses(2, 1) and not cuts.loses(1, 0)
    assert cuts.loses(3, 4), "who is in no group reaches nobody"
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
    links = NamespaceLinks(Link(100, 100, 10))
    try:
        (serve, _), (ask, _), host = links.place(1), links.place(0), address_of(1)
        server = subprocess.Popen(
            [*serve, sys.executable, "-c", SERVER.format(host=host)], stdout=subprocess.PIPE
        )
        assert server.stdout is not None
        server.stdout.readline()
        client = [*ask, sys.executable, "-c", CLIENT.format(host=host)]
        links.cut([(0, 1)])
        assert subprocess.run(client, capture_output=True, timeout=30, check=False).returncode
        links.heal()
        found = subprocess.run(client, capture_output=True, timeout=30, check=False)
        assert found.stdout == b"hello\n"
        server.wait(10)
        server.stdout.close()
    finally:
        links.close()
