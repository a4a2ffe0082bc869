"""A killed peer resumes from its disk: bit for bit, and without damaged files."""

from collections.abc import Callable
from pathlib import Path

import pytest

from swarm.emulation.local_swarm import LocalPeer
from tests.scenarios.spes_reference import assert_equals_the_reference
from tests.scenarios.swarms import (
    NOBODY_LEFT_OUT,
    ROUND_S,
    assert_one_chain,
    contributes,
    finish,
    restart_all_once_one_died,
    run_folder,
    started_swarm,
)

pytestmark = pytest.mark.scenario

NUM_PEERS = 3
SIX_ROUNDS = ["run.rounds=6", *NOBODY_LEFT_OUT]


def test_six_rounds_with_everybody_killed_four_times_equal_the_reference(tmp_path: Path) -> None:
    """Killed between accept, record and swap of a round or a merge, and once after three rounds."""
    with started_swarm(
        tmp_path,
        NUM_PEERS,
        SIX_ROUNDS,
        options=["--crash", "accepted@1"],
        program="tests.scenarios.crashing_peer",
    ) as swarm:
        for crash in ("applied@2m", "applying@4", "swapped@5", ""):
            restart_all_once_one_died(swarm, crash)
        finish(swarm, 150)
        assert_equals_the_reference(swarm, tmp_path / "data")


def tear(path: Path) -> None:
    """Cuts a file in the middle, as a power failure may."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip(path: Path) -> None:
    """Flips one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def damage_record(peer: LocalPeer) -> None:
    tear(run_folder(peer) / "record")


def damage_private_state(peer: LocalPeer) -> None:
    flip(run_folder(peer) / "private")


def damage_packs(peer: LocalPeer) -> None:
    """In many places, because parts of a pack may be unused garbage."""
    for path in sorted((run_folder(peer) / "packs").glob("*.pack")):
        content = bytearray(path.read_bytes())
        for place in range(0, len(content), 1024):
            content[place] ^= 1
        path.write_bytes(bytes(content))


DAMAGES: list[tuple[Callable[[LocalPeer], None], str]] = [
    (damage_record, "record is torn or was changed; continuing from height"),
    (damage_private_state, "using private.previous"),
    (damage_packs, "blobs of the tip are damaged"),
]


@pytest.mark.exhaustive
def test_a_damaged_file_is_noticed_and_its_peer_contributes_again(tmp_path: Path) -> None:
    with started_swarm(tmp_path, 4, ["run.rounds=1000"], after_rounds=3) as swarm:
        for peer, (damage, said) in zip(swarm.peers[1:], DAMAGES, strict=True):
            peer.kill()
            damage(peer)
            swarm.restart(peer, ["--initial-peers", swarm.peers[0].join_address()])
            swarm.wait_until(contributes(peer), what="its return", timeout_s=3 * ROUND_S)
            assert said in peer.output()
        swarm.kill()
    assert_one_chain(swarm)
