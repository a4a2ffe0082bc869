"""Peers that nobody can dial are full members. A daemon without a listen address emulates NAT.

One peer listens, two only dial out. All traffic between these two goes through the third.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from swarm.emulation.links import LINKS, Link
from swarm.emulation.local_swarm import LocalPeer, LocalSwarm, summary
from swarm.emulation.networks import NamespaceLinks, why_not_here
from swarm.errors import LinkTooSlow
from tests.scenarios.spes_reference import assert_equals_the_reference
from tests.scenarios.swarms import (
    NOBODY_LEFT_OUT,
    ROUND_S,
    finish,
    peer_id,
    read_record,
    rounds,
    started_swarm,
    write_run,
)

pytestmark = pytest.mark.scenario

NUM_PEERS = 3


def start(swarm: LocalSwarm, *of_joiners: str) -> None:
    """Starts a founder, and the others with these options."""
    founding = ["--run", str(swarm.run_file), "--wait-for-peers", str(NUM_PEERS)]
    join = swarm.add(founding).join_options()
    for _ in range(1, NUM_PEERS):
        swarm.add([*join, *of_joiners])


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> LocalSwarm:
    """A finished run of one peer that listens and two that only dial out."""
    folder = tmp_path_factory.mktemp("unreachable")
    run_file = write_run(folder, ["ownership.owners_per_expert=2", *NOBODY_LEFT_OUT])
    with LocalSwarm(folder / "swarm", run_file, NUM_PEERS) as started:
        start(started, "--client-mode")
        finish(started, 150)
        return started


def test_their_work_is_in_every_round_and_nothing_is_lost(swarm: LocalSwarm) -> None:
    verdict = summary(swarm)
    assert len(verdict["manifest_digests"]) == 1
    assert (verdict["rounds"], verdict["merges"], verdict["tokens_lost"]) == (3, 1, 0)
    for event in (event for peer in swarm.peers for event in rounds(peer)):
        assert sorted(event["contributors"]) == sorted(map(peer_id, swarm.peers))


def test_their_experts_reach_everybody_bit_for_bit(swarm: LocalSwarm, tmp_path: Path) -> None:
    assert_equals_the_reference(swarm, tmp_path / "data")


def test_who_cannot_be_dialled_reduces_nothing(swarm: LocalSwarm) -> None:
    tip, listening = read_record(swarm.peers[0]).tip, peer_id(swarm.peers[0])
    averaged = [unit for unit, values in tip.sources.items() if len(values) > 1]
    parent = read_record(swarm.peers[0]).parent
    assert parent is not None
    manifest = tip if averaged else parent  # a merge averages nothing
    shared = [unit for unit in manifest.entries if unit.startswith("shared")]
    assert {manifest.entries[unit].source for unit in shared} == {listening}


def prints_no_line(peer: LocalPeer) -> bool:
    return "swarm-peer --initial-peers" not in peer.output()


def test_only_who_can_be_dialled_prints_a_line_for_joiners(swarm: LocalSwarm) -> None:
    assert [prints_no_line(peer) for peer in swarm.peers] == [False, True, True]


# ---------------------------------------------------------------- on an emulated network


@pytest.fixture
def network() -> Iterator[NamespaceLinks]:
    if why := why_not_here():
        pytest.skip(why)
    with closing(NamespaceLinks(LINKS["home-20"])) as links:
        yield links


@pytest.mark.exhaustive  # seconds of time-outs until closed ports are known
@pytest.mark.parametrize("mode", [(), ("--client-mode",)], ids=["listens in vain", "client mode"])
def test_two_behind_routers_train_with_each_other_through_a_third(
    tmp_path: Path, network: NamespaceLinks, mode: tuple[str, ...]
) -> None:
    network.hide([1, 2])
    run_file = write_run(tmp_path, ["run.rounds=6"])
    with LocalSwarm(tmp_path / "swarm", run_file, NUM_PEERS, links=network) as swarm:
        start(swarm, *mode)
        finish(swarm, 280)
        verdict = summary(swarm)
        assert len(verdict["manifest_digests"]) == 1
        everybody = sorted(map(peer_id, swarm.peers))
        last = rounds(swarm.peers[0])[-1]
        assert sorted(last["contributors"]) == everybody
        told = ["nobody can dial this peer" in peer.output() for peer in swarm.peers]
        assert told == [False, not mode, not mode]


@pytest.mark.exhaustive
def test_a_joiner_whose_link_cannot_carry_the_run_is_told_so_before_it_downloads(
    tmp_path: Path,
) -> None:
    if why := why_not_here():
        pytest.skip(why)
    sizes = ["model.hidden_size=192", "model.moe_intermediate_size=384", "run.rounds=100000"]
    with (
        closing(NamespaceLinks(Link(up_mbit=1.5, down_mbit=1.5, rtt_ms=30))) as slow,
        started_swarm(tmp_path, 1, sizes, links=slow, after_rounds=2) as swarm,
    ):
        joiner = swarm.add(["--initial-peers", swarm.peers[0].join_address()])
        assert joiner.wait(2 * ROUND_S) == LinkTooSlow.exit_code
        assert "Mbit/s are needed" in joiner.output()
        packs = list((swarm.folder / "peer-1").glob("runs/*/packs/*.pack"))
        assert sum(path.stat().st_size for path in packs) < 1e6, "no part of the model"
