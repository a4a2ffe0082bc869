"""Rounds of an agreed time: a fast peer does more, and nobody waits for the slow one."""

from pathlib import Path

import pytest

from swarm.data.corpus import standard_library_corpus
from swarm.data.loader import Loader
from swarm.data.shards import open_shards
from swarm.data.tokenizer import BYTE
from swarm.emulation.fault_plan import FaultPlan
from swarm.emulation.fault_runner import FaultRunner
from swarm.emulation.local_peer import LocalPeer
from swarm.emulation.local_swarm import LocalSwarm, summary
from swarm.monitor.snapshot import Coverage, Sighting
from swarm.protocol.values.manifest import Manifest
from swarm.protocol.values.work import num_samples, trained
from tests.monitor.small_swarm import project
from tests.peer_records import peer_record
from tests.scenarios.swarms import finish, peer_id, read_record, read_run, rounds, write_run

pytestmark = [pytest.mark.scenario, pytest.mark.alone]

SECONDS = 6.0
STEP_S = (0.1, 0.4)
"""Compute as a timed wait, much longer than a step of this model. The second peer is four times as
slow, on a busy machine less."""
NUM_ROUNDS = 4
BATCH_TOKENS = 128


def coverage_of(tip: Manifest) -> Coverage:
    coverage = project(Sighting("run", "run", {"A": peer_record("A")}, {}, {}, tip)).coverage
    assert coverage
    return coverage


def share_of_training(peer: LocalPeer) -> float:
    """Seconds of local steps over those of rounds, without the first, in which peers start."""
    later = rounds(peer)[1:]
    return float(sum(e["training_s"] for e in later) / sum(e["seconds"] for e in later))


def test_unequal_peers_work_for_the_agreed_time_and_both_count(tmp_path: Path) -> None:
    settings = [f"round.seconds={SECONDS}", f"run.rounds={NUM_ROUNDS}", "run.peers=2"]
    run_file = write_run(tmp_path, [*settings, "optimizer.schedule_steps=1000"])
    with LocalSwarm(tmp_path / "swarm", run_file, 2) as swarm:
        runner = FaultRunner(swarm, FaultPlan(step_s=STEP_S[0]))
        runner.prepare()
        runner.folder.tell(1, step_s=STEP_S[1])
        swarm.start()
        finish(swarm, 300)
        verdict = summary(swarm)
        ids = [peer_id(peer) for peer in swarm.peers]
        tip = read_record(swarm.peers[0]).tip
    assert (verdict["rounds"], verdict["tokens_lost"]) == (NUM_ROUNDS, 0)
    assert set(verdict["digests_per_height"]) == {1}
    ended = [event for peer in swarm.peers for event in peer.events() if event["event"] == "ended"]
    assert len(ended) == 2
    assert not any(event["refused"] for event in ended), "every message came complete"
    told = [[event["steps"] for event in rounds(peer)] for peer in swarm.peers]
    figures = {"steps": told, "training": [share_of_training(peer) for peer in swarm.peers]}
    assert all(event["counted"] for peer in swarm.peers for event in rounds(peer)), figures
    # With equal steps both would do the same number, and the fast one would wait three quarters of
    # the time.
    assert sum(told[0]) > 2 * sum(told[1]), figures
    assert min(figures["training"]) > 0.5, figures
    # The manifest has the work. With two peers the schedule follows the slower one.
    assert dict(tip.work) == {
        ids[0]: told[0][-1] * BATCH_TOKENS,
        ids[1]: told[1][-1] * BATCH_TOKENS,
    }
    works = [
        {"A": fast * BATCH_TOKENS, "B": slow * BATCH_TOKENS}
        for fast, slow in zip(*told, strict=True)
    ]
    assert tip.tokens == sum(map(trained, works)) == verdict["tokens_total"]
    assert tip.step == tip.tokens // (2 * BATCH_TOKENS)
    covered = coverage_of(tip)
    run = read_run(run_file)
    assert covered.counted * run.data.sequence_length == sum(sum(w.values()) for w in works)
    with Loader(open_shards(standard_library_corpus(), tmp_path / "data", BYTE), run) as loader:
        assert covered.windows == loader.num_windows
    # The next deals fit the pace: about four times as much for the fast one.
    dealt = [num_samples(tip.dealt[peer]) for peer in ids]
    assert dealt[0] > 2 * dealt[1], dealt
