"""A member that lies in every possible way is refused and counted, and harms nobody else."""

from collections import Counter
from pathlib import Path

import pytest

from swarm.emulation.local_swarm import applied, summary
from tests.scenarios.swarms import ROUND_S, finish, peer_id, started_swarm

pytestmark = pytest.mark.scenario

ROUNDS = 8
LIES = 6
"""One lie per round, from the second round on."""
REFUSALS = {
    "non_finite": "values that are NaN",
    "bad_ready": "values of a wrong size",
    "bad_commit": "manifests without certificate",
    "blob_digest": "values with a flipped byte",
    "blob_size": "values announced as larger than they are",
    "ended_early": "streams that end in the middle",
}


def test_every_lie_is_refused_and_counted_and_every_round_ends_right(tmp_path: Path) -> None:
    # Each lie costs this time. An honest peer with the same delay on a busy machine is excluded
    # too.
    settings = ["wire.part_bytes=65536", "round.roster_after_s=12.0"]
    with started_swarm(
        tmp_path,
        3,
        [f"run.rounds={ROUNDS}", *settings],
        founder_options=["--wait-for-peers", "4"],
        program="tests.scenarios.forgiving_peer",  # otherwise some lies would not be tried
    ) as swarm:
        swarm.program = "tests.scenarios.hostile_peer"
        liar = swarm.add(swarm.peers[0].join_options())
        finish(swarm, ROUNDS * ROUND_S)
        honest = swarm.peers[:3]
        histories = [peer.events() for peer in honest]
        liar_id = peer_id(liar)
        verdict = summary(swarm)
    rounds = [applied(events, "quorum") for events in histories]
    merges = [event["round"] for event in applied(histories[0], "merge")]
    assert merges == [2, 4, 6, 8], "announcements forged, dropped and late change nothing"
    assert verdict["digests_per_height"] == [1] * len(verdict["digests_per_height"])
    assert [event["round"] for event in rounds[0]] == list(range(1, ROUNDS + 1))
    assert all(len(event["contributors"]) >= 3 for event in rounds[0])
    # Its offers after its last lie are in order again.
    counted = [liar_id in event["contributors"] for event in rounds[0]]
    assert counted == [True] + [False] * LIES + [True]
    refused: Counter[str] = Counter()
    for events in histories:
        refused.update(next(e["refused"] for e in reversed(events) if e["event"] == "ended"))
    for reason, lie in REFUSALS.items():
        assert refused[reason] > 0, lie
