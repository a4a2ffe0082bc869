"""Keys that join, train little or nothing, and vanish cost no quorum. Rounds continue."""

from pathlib import Path

import pytest

from swarm.emulation.local_swarm import LocalSwarm
from swarm.emulation.simulator.fault_schedule import run_schedule
from swarm.protocol.messages.events import Received, Undeliverable
from swarm.protocol.messages.messages import Ballot, Header, Ready
from swarm.protocol.rounds.contacts import MAX_STRANGERS
from tests.protocol.messages.test_rounds_membership import join
from tests.protocol.round_pump import Pump, header_of, in_training
from tests.scenarios.swarms import ROUND_S, has_rounds, peer_id, rounds, started_swarm

KEYS = "WXYZ"


def test_what_passing_keys_said_is_kept_for_so_many_of_them_only() -> None:
    """Their entries in the tables would grow for the length of a round."""
    pump = in_training("ABC")
    machines = [pump.nodes[name].machine for name in "ABC"]
    machine = next(each for each in machines if not each._convener.succession.campaign)
    tip, contacts = machine.tip, machine._contacts
    ready = Ready(Ballot(0, "A"), None, None, 1.0)
    for number in range(MAX_STRANGERS + 100):
        key = f"key{number:04}"
        behind = Header(((1, ()),), "0", tip.generation)
        machine.handle(Received(key, behind, ready), pump.now)
        machine.handle(Received(key, header_of(tip), ready), pump.now)
        machine.handle(Received(key, behind, ready), pump.now)
        machine.handle(Undeliverable(key), pump.now)
    tables = {"heard": contacts.heard, "behind": contacts.behind, "readies": contacts.readies,
              "gone": contacts.gone}  # fmt: skip
    for name, table in tables.items():
        assert MAX_STRANGERS <= len(table) <= MAX_STRANGERS + len(tip.members), name
        assert key in table, f"{name} forgets the oldest first"
    assert tip.members.keys() - {machine.me} <= contacts.heard.keys(), "members are never forgotten"


def test_what_passing_keys_were_told_and_declared_is_kept_for_so_many_of_them_only() -> None:
    """A height may last for weeks, while a quorum is away."""
    pump = in_training("ABC")
    machines = [pump.nodes[name].machine for name in "ABC"]
    assert pump.run(pump.now + 30, lambda: any(m._convener.succession.campaign for m in machines))
    machine = next(each for each in machines if each._convener.succession.campaign)
    campaign, contacts, tip = machine._convener.succession.campaign, machine._contacts, machine.tip
    member = next(peer for peer in tip.members if peer != machine.me)
    tables = {"told": contacts.told, "asked": contacts.asked}
    for table in tables.values():
        contacts.is_rate_limited(table, (member, tip.digest))
    for number in range(MAX_STRANGERS + 100):
        key = f"key{number:04}"
        ready = Ready(campaign.ballot, None, None, 1.0)
        machine.handle(Received(key, header_of(tip), ready), pump.now)
        for table in tables.values():
            contacts.is_rate_limited(table, (key, tip.digest))
    for name, table in {**tables, "declared": campaign.grounds.last}.items():
        assert MAX_STRANGERS <= len(table) <= MAX_STRANGERS + len(tip.members), name
    assert all((member, tip.digest) in table for table in tables.values())


def joined_by_idle_keys() -> Pump:
    pump = in_training("ABC")
    for key in KEYS:
        join(pump, key).train_s = 1e9
    assert pump.run(pump.now + 30, lambda: set(KEYS) <= pump.tip_of("A").members.keys())
    return pump


def test_four_idle_keys_that_vanish_hold_three_voters_up_for_seconds() -> None:
    """Without the rule, three of seven members waited for T_reform."""
    pump = joined_by_idle_keys()
    pump.kill(*KEYS)
    machine = pump.nodes["A"].machine
    for _ in range(6):
        height = machine.tip.height
        took_s = pump.run_to_height(height + 1, "ABC", within_s=pump.timers.silence_s + 3)
        assert took_s < pump.timers.reform_s / 4
    assert machine.tip.generation == "0" and machine.tip.members.keys() == set("ABC")


@pytest.mark.parametrize("seed", [0, 1, 3, 9])
def test_fifty_keys_leave_no_gap_of_three_rounds(seed: int) -> None:
    outcome = run_schedule("V", seed)
    assert outcome.violation is None, outcome.violation


@pytest.mark.exhaustive  # takes a minute; the simulator tries 50 keys in every run of the tests
@pytest.mark.scenario
def test_four_real_peers_that_join_idle_and_are_killed_hold_no_round_up(tmp_path: Path) -> None:
    """T_reform is ten minutes here, so only the quorum of the three can continue."""
    with started_swarm(tmp_path, 3, ["run.rounds=400", "round.reform_after_s=600.0"]) as swarm:
        honest = swarm.peers[:3]
        # A peer that is present at the founding votes at once.
        swarm.wait_until(has_rounds(1), what="a round of the three", timeout_s=2 * ROUND_S)
        swarm.program = "tests.hostile.idle_peer"
        keys = [swarm.add(["--initial-peers", honest[0].join_address()]) for _ in KEYS]

        def all_are_members(_: LocalSwarm) -> bool:
            last = rounds(honest[0])[-1:]
            return bool(last) and len(last[0]["members"]) == 7

        swarm.wait_until(all_are_members, what="the keys", timeout_s=4 * ROUND_S)
        ids = {peer_id(key) for key in keys}
        for key in keys:
            key.kill()
        swarm.peers = honest
        seen = max(rounds(peer)[-1]["round"] for peer in honest)
        swarm.wait_until(has_rounds(seen + 4), what="rounds without keys", timeout_s=2 * ROUND_S)
        histories = [rounds(peer) for peer in honest]
    for history in histories:
        assert {event["generation"] for event in history} == {"0"}
        assert not any(ids & set(event["contributors"]) for event in history)
    digests = [{event["height"]: event["digest"] for event in history} for history in histories]
    common = set.intersection(*(set(each) for each in digests))
    assert all(len({each[height] for each in digests}) == 1 for height in common)
