"""What a local swarm sums up from the histories of its peers."""

import json
from pathlib import Path

from swarm.emulation.local_peer import Event, LocalPeer
from swarm.emulation.local_swarm import LocalSwarm, bytes_sent, summary


def applied(round_: int, sent: int) -> Event:
    return {
        "event": "applied", "kind": "quorum", "height": round_, "round": round_, "digest": "d",
        "tokens": 10 * round_, "tokens_lost": 0, "blob_bytes_sent": sent,
    }  # fmt: skip


STARTED: Event = {"event": "started", "run": "r", "height": 0, "digest": "d", "blobs_sent": 5}


def test_lives_that_were_killed_count_what_they_said_they_had_sent() -> None:
    ended: Event = {"event": "ended", "blobs_sent": 400}
    killed = [STARTED, applied(1, 100), applied(2, 50)]
    assert bytes_sent(killed) == 155
    assert bytes_sent([*killed, STARTED, applied(3, 70), ended]) == 155 + 400


def test_a_swarm_that_is_killed_at_its_end_has_sent_something(tmp_path: Path) -> None:
    """As scripts/soak does with its swarm: nobody says that it has ended."""
    peers = []
    for index in range(2):
        folder = tmp_path / f"peer-{index}"
        (folder / "runs" / "r").mkdir(parents=True)
        (folder / "current_run").write_text("r\n")
        lines = [json.dumps(event) for event in (STARTED, applied(1, 95), applied(2, 100))]
        (folder / "runs" / "r" / "events.jsonl").write_text("\n".join(lines) + "\n")
        peers.append(LocalPeer(index, folder, [], {}))
    swarm = LocalSwarm(tmp_path, Path("run.toml"), 2, peers=peers)
    assert summary(swarm)["bytes_sent_per_peer_per_round"] == 100
