"""swarm-doctor's findings from measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.actions.findings import (
    Examined,
    Finding,
    Level,
    Local,
    Nat,
    Needs,
    Sight,
    can_take_part,
    findings_of,
    nat_of,
)
from swarm.protocol.timing.fitness import Fitness, LinkVerdict
from swarm.train.engine.hardware import Processor

GB = 10**9
ME = "/ip4/192.168.1.7/tcp/4001/p2p/QmMe"
OUTSIDE = "/ip4/203.0.113.5/tcp/{}"
LOCAL = Local(
    disk_free_bytes=100 * GB, open_files=4096, state_fault=None, state_in_use=False,
    version="0.1.0",
)  # fmt: skip
SIGHT = Sight("QmA", 12.0, 0.01, "0.1.0", OUTSIDE.format(4001), True, None)
ENOUGH = LinkVerdict(Fitness.ENOUGH, 1.0, "fast")
NEEDS = Needs("demo", GB, "resident: the fastest that fits", True, ENOUGH)
GOOD = Examined(LOCAL, None, (ME,), (SIGHT,), 50.0, 20.0, NEEDS)


def finding(examined: Examined, topic: str) -> Finding:
    return next(found for found in findings_of(examined) if found.topic == topic)


def with_sight(**changes: object) -> Examined:
    return replace(GOOD, sights=(replace(SIGHT, **changes),))


def test_what_is_said_of_cubic_has_the_command_that_brings_bbr() -> None:
    cubic = replace(LOCAL, congestion="cubic", congestion_known=("reno", "cubic"))
    text = finding(replace(GOOD, local=cubic), "congestion control").text
    setting = "sysctl -w net.core.default_qdisc=fq net.ipv4.tcp_congestion_control=bbr"
    assert f"(modprobe tcp_bbr && {setting} as root" in text
    ready = replace(cubic, congestion_known=("reno", "bbr", "cubic"))
    text = finding(replace(GOOD, local=ready), "congestion control").text
    assert f"({setting} as root" in text
    assert can_take_part(findings_of(replace(GOOD, local=cubic)))
    topics = {found.topic for found in findings_of(GOOD)}
    assert "congestion control" not in topics, "another system has no such finding"


def test_a_good_machine_can_take_part_and_needs_nothing() -> None:
    findings = findings_of(GOOD)
    assert {found.level for found in findings} == {Level.GOOD}
    assert not any(found.remedy for found in findings)
    assert can_take_part(findings)
    assert len({found.topic for found in findings}) == len(findings)


@pytest.mark.parametrize(
    ("examined", "topic", "level", "text"),
    [
        (with_sight(clock_offset_s=3.1), "clock", Level.FAULT, "3.10 s behind"),
        (with_sight(clock_offset_s=-3.1), "clock", Level.FAULT, "3.10 s ahead of"),
        (with_sight(clock_offset_s=1.5), "clock", Level.WARNING, "1.50 s"),
        (with_sight(dial_fault="no answer"), "reachability", Level.WARNING, "no answer"),
        (replace(GOOD, addresses=()), "reachability", Level.GOOD, "client mode"),
        (
            replace(GOOD, local=replace(LOCAL, computes_with=Processor("no GPU used", "a driver"))),
            "device", Level.WARNING, "no GPU used",
        ),
        (
            replace(with_sight(door_fault="closed"), door_port=31331),
            "port for blobs", Level.WARNING, "no peer can dial port 31331",
        ),
        (
            replace(GOOD, door_port=31331, door_taken="port 31331: in use"),
            "port for blobs", Level.WARNING, "in use; a peer takes a free one",
        ),
        (replace(GOOD, door_port=31331), "port for blobs", Level.GOOD, "203.0.113.5/tcp/31331"),
        (replace(GOOD, refused=("no such text",)), "options", Level.FAULT, "no such text"),
        (with_sight(rtt_ms=1500.0), "latency", Level.WARNING, "1500 ms"),
        (with_sight(version="0.2.0"), "version", Level.WARNING, "0.2.0 at other peers"),
        (replace(GOOD, up_mbit=None), "rate", Level.WARNING, "not measured"),
        (replace(GOOD, up_mbit=20.0), "rate", Level.GOOD, "with --max-upload 17.6mbit a router"),
        (replace(GOOD, up_mbit=61.0), "rate", Level.GOOD, "50 Mbit/s down, 61 Mbit/s up"),
        (replace(GOOD, network_fault="dead"), "network", Level.FAULT, "dead"),
        (replace(GOOD, sights=()), "network", Level.WARNING, "no peer was asked"),
        (
            replace(GOOD, local=replace(LOCAL, disk_free_bytes=GB // 2)),
            "disk", Level.FAULT, "0.5 GB free, demo needs about 1.0 GB",
        ),
        (
            replace(
                GOOD, local=replace(LOCAL, disk_free_bytes=GB // 2),
                needs=replace(NEEDS, held_bytes=GB * 6 // 10),
            ),
            "disk", Level.GOOD, "needs about 1.0 GB, of which 0.6 GB are here",
        ),
        (
            replace(GOOD, local=replace(LOCAL, disk_free_bytes=None)),
            "disk", Level.WARNING, "could not be read",
        ),
        (
            replace(GOOD, needs=replace(NEEDS, engine="nothing fits", engine_fits=False)),
            "memory", Level.FAULT, "nothing fits",
        ),
        (
            replace(GOOD, local=replace(LOCAL, congestion="bbr")),
            "congestion control", Level.GOOD, "bbr: right for a line that loses packets",
        ),
        (
            replace(GOOD, local=replace(LOCAL, congestion="reno")),
            "congestion control", Level.GOOD, "at 0.1 % loss and 100 ms it sends 4.5 Mbit",
        ),
        (
            replace(GOOD, local=replace(LOCAL, state_fault="read-only")),
            "state directory", Level.FAULT, "read-only",
        ),
        (
            replace(GOOD, local=replace(LOCAL, state_in_use=True)),
            "state directory", Level.GOOD, "running with it",
        ),
        (
            replace(GOOD, local=replace(LOCAL, open_files=256)),
            "open files", Level.WARNING, "limit 256",
        ),
        (
            replace(GOOD, needs=replace(NEEDS, link=replace(ENOUGH, fitness=Fitness.SLOW))),
            "link", Level.WARNING, "fast",
        ),
        (
            replace(GOOD, needs=replace(NEEDS, link=replace(ENOUGH, fitness=Fitness.HOPELESS))),
            "link", Level.FAULT, "fast",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_numbers_and_a_remedy(
    examined: Examined, topic: str, level: Level, text: str
) -> None:
    found = finding(examined, topic)
    assert (found.level, text in found.text) == (level, True), found
    assert bool(found.remedy) == (level is not Level.GOOD)
    assert can_take_part(findings_of(examined)) == (level is not Level.FAULT)


def test_one_peer_with_a_wrong_clock_among_several_is_not_ours() -> None:
    sights = (SIGHT, replace(SIGHT, peer_id="QmB"), replace(SIGHT, clock_offset_s=100.0))
    assert finding(replace(GOOD, sights=sights), "clock").level is Level.GOOD


def test_one_peer_that_gets_through_is_enough() -> None:
    sights = (replace(SIGHT, dial_fault="refused"), SIGHT)
    found = finding(replace(GOOD, sights=sights), "reachability")
    assert found.level is Level.GOOD
    assert "1 of 2 peers can dial it at /ip4/203.0.113.5/tcp/4001 (" in found.text


def test_the_address_that_is_named_is_the_one_that_was_dialled() -> None:
    near = replace(SIGHT, peer_id="QmB", seen_at="/ip4/10.0.0.5/tcp/55555")
    found = finding(replace(GOOD, sights=(SIGHT, near)), "reachability")
    both = "/ip4/10.0.0.5/tcp/4001 and /ip4/203.0.113.5/tcp/4001"
    assert f"2 of 2 peers can dial it at {both} (" in found.text and "192.168" not in found.text


def test_where_no_second_port_is_taken_nothing_is_said_of_it() -> None:
    for examined in (GOOD, replace(GOOD, door_port=31331, addresses=())):
        assert "port for blobs" not in {found.topic for found in findings_of(examined)}


@pytest.mark.parametrize(
    ("addresses", "seen_at", "nat"),
    [
        ([ME], ["/ip4/192.168.1.7/tcp/4001"], Nat.NONE),
        ([ME], [OUTSIDE.format(4001), OUTSIDE.format(4001)], Nat.SAME_PORT),
        ([ME], [OUTSIDE.format(4001), OUTSIDE.format(5002)], Nat.OTHER_PORTS),
        ([ME], [OUTSIDE.format(4001)], Nat.TRANSLATED),
        ([ME], ["", "nonsense"], Nat.UNKNOWN),
        ([], [OUTSIDE.format(4001)], Nat.UNKNOWN),
    ],
)
def test_the_kind_of_nat_is_told_from_what_peers_see(
    addresses: list[str], seen_at: list[str], nat: Nat
) -> None:
    assert nat_of(addresses, seen_at) is nat


def test_of_a_congestion_control_that_was_not_measured_only_its_name_is_said() -> None:
    other = replace(GOOD, local=replace(LOCAL, congestion="vegas"))
    assert finding(other, "congestion control").text == "vegas"
