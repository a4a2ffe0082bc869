"""A local swarm's summary of its peers' histories, and its detection of their end."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swarm.emulation.local_peer import Event, LocalPeer, launch
from swarm.emulation.local_swarm import LocalSwarm, bytes_sent, summary, tokens_lost
from swarm.errors import SwarmError


def applied(round_: int, sent: int) -> Event:
    return {
        "event": "applied", "kind": "quorum", "height": round_, "round": round_, "digest": "d",
        "tokens": 10 * round_, "tokens_lost": 0, "blob_bytes_sent": sent,
    }  # fmt: skip


STARTED: Event = {"event": "started", "run": "r", "height": 0, "digest": "d", "blobs_sent": 5}


def test_lives_that_were_killed_count_what_they_said_they_had_sent() -> None:
    ended: Event = {"event": "ended", "blobs_sent": 400, "tokens_lost": 0}
    killed = [STARTED, applied(1, 100), applied(2, 50)]
    assert bytes_sent(killed) == 155
    assert bytes_sent([*killed, STARTED, applied(3, 70), ended]) == 155 + 400


def test_what_a_peer_loses_as_it_leaves_is_counted() -> None:
    ended: Event = {"event": "ended", "blobs_sent": 400, "tokens_lost": 7}
    assert tokens_lost([STARTED, applied(1, 100), ended]) == 7
    assert tokens_lost([STARTED, applied(1, 100), ended, STARTED, applied(2, 100)]) == 7


def test_a_swarm_that_is_killed_at_its_end_has_sent_something(tmp_path: Path) -> None:
    """As in scripts/benchmarks/soak, where no event reports the end."""
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
    for peer in peers:
        text = json.dumps(STARTED) + "\n"
        (peer.folder / "runs" / "r" / "events.jsonl").write_text(text)
        peer._events.clear()
        peer._events_read = None
    assert summary(swarm)["bytes_sent_per_peer_per_round"] is None, "without a round"


@contextmanager
def swarm_of(folder: Path, program: str) -> Iterator[LocalSwarm]:
    """A swarm of one process that runs a one-line program."""
    peer = LocalPeer(0, folder / "peer-0", [], {})
    with LocalSwarm(folder, Path("run.toml"), 1, peers=[peer]) as swarm:
        with peer.log_path.open("wb") as log:
            peer.process = launch([sys.executable, "-c", program], log, {})
        yield swarm


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGKILL])
def test_a_peer_that_dies_of_a_signal_of_its_own_ends_the_waiting(
    tmp_path: Path, number: signal.Signals
) -> None:
    kills_itself = f"import os; os.kill(os.getpid(), {int(number)})"
    with swarm_of(tmp_path, kills_itself) as swarm:
        with pytest.raises(SwarmError, match=f"peer 0 was ended by {signal.Signals(number).name}"):
            swarm.wait_until(lambda _: False, what="nothing", timeout_s=20.0)
        swarm.wait_until(lambda swarm: not swarm.peers[0].alive, what="its end", timeout_s=20.0)


def test_a_peer_that_is_killed_from_here_is_no_failure(tmp_path: Path) -> None:
    with swarm_of(tmp_path, "import time; time.sleep(60)") as swarm:
        (peer,) = swarm.peers
        peer.kill()
        assert (peer.exit_code, peer.own_end) == (-signal.SIGKILL, None)
        with pytest.raises(SwarmError, match="nothing: not within 0 s"):
            swarm.wait_until(lambda _: False, what="nothing", timeout_s=0.0)
