"""A killed peer resumes from its disk: bit for bit, and without damaged files."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.data.corpus import standard_library_corpus
from swarm.data.shards import open_shards
from swarm.data.tokenizer import BYTE
from swarm.emulation.local_swarm import LocalPeer, LocalSwarm, digests_by_height
from tests.scenarios.spes_reference import train_by_reference
from tests.scenarios.swarms import (
    NOBODY_LEFT_OUT,
    ROUND_S,
    agreed_state,
    contributes,
    finish,
    has_rounds,
    peer_id,
    read_record,
    read_run,
    run_folder,
    write_run,
)

pytestmark = pytest.mark.scenario

NUM_PEERS = 3
SIX_ROUNDS = ["run.rounds=6", *NOBODY_LEFT_OUT]


def test_six_rounds_with_everybody_killed_four_times_equal_the_reference(tmp_path: Path) -> None:
    """Killed between accept, record and swap of a round or a merge, and once after three rounds."""
    run_file = write_run(tmp_path, SIX_ROUNDS)
    with LocalSwarm(
        tmp_path / "swarm",
        run_file,
        NUM_PEERS,
        options=["--crash", "accepted@1"],
        program="tests.scenarios.crashing_peer",
    ) as swarm:
        swarm.start()
        for crash in ("applied@2m", "applying@4", "swapped@5"):
            kill_everybody_once_one_died(swarm)
            restart_all(swarm, crash)
        kill_everybody_once_one_died(swarm)
        swarm.program = "peers.peer"
        restart_all(swarm)
        finish(swarm, 150)
        states = [agreed_state(peer, read_run(run_file)) for peer in swarm.peers]
        expected = reference(swarm, read_run(run_file), tmp_path / "data")
    for state in states:
        different = [name for name in expected if not torch.equal(state[name], expected[name])]
        assert not different


def kill_everybody_once_one_died(swarm: LocalSwarm) -> None:
    swarm.wait_until(
        lambda swarm: any(not peer.alive for peer in swarm.peers), what="a crash", timeout_s=120
    )
    for peer in swarm.peers:
        peer.kill()


def restart_all(swarm: LocalSwarm, crash: str | None = None) -> None:
    swarm.options = ["--crash", crash] if crash else []
    for peer in swarm.peers:
        peer.program = swarm.program
        swarm.restart(peer, [])


def reference(swarm: LocalSwarm, run: RunConfig, cache: Path) -> Mapping[str, Tensor]:
    """The result of one process that trains the same peers without a swarm."""
    ordered = sorted(peer_id(peer) for peer in swarm.peers)
    owners = read_record(swarm.peers[0]).tip.owners
    return train_by_reference(
        run,
        open_shards(standard_library_corpus(), cache, BYTE),
        ordered,
        {expert: [ordered.index(peer) for peer in peers] for expert, peers in owners.items()},
        rounds=run.run.rounds,
    )


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
    run_file = write_run(tmp_path, ["run.rounds=1000"])
    with LocalSwarm(tmp_path / "swarm", run_file, 4) as swarm:
        swarm.start()
        swarm.wait_until(has_rounds(3), what="three rounds", timeout_s=2 * ROUND_S)
        for peer, (damage, said) in zip(swarm.peers[1:], DAMAGES, strict=True):
            peer.kill()
            damage(peer)
            swarm.restart(peer, ["--initial-peers", swarm.peers[0].join_address()])
            swarm.wait_until(contributes(peer), what="its return", timeout_s=3 * ROUND_S)
            assert said in peer.output()
        swarm.kill()
        histories = [peer.events() for peer in swarm.peers]
    assert {len(digests) for digests in digests_by_height(histories).values()} == {1}
