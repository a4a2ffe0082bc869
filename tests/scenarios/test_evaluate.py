"""Exports of a running swarm are evaluated, and their scores reach another monitor."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swarm.errors import NobodyReachable
from swarm.monitor.snapshot import ScoreRow
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.runs.observer import Observer
from swarm.peer.guest import START_S, Watch
from tests.scenarios.swarms import ROUND_S, peer_id, rounds, started_swarm

pytestmark = [pytest.mark.scenario, pytest.mark.exhaustive]

ROUNDS = 6


def held_out_bits(watch: Watch) -> dict[int, ScoreRow]:
    """Round -> the score of its model in a monitor."""
    try:
        scores = watch.look().scores
    except NobodyReachable:
        return {}
    return {row.round: row for row in scores if row.metric == "bits_per_byte"}


def test_scores_of_a_followed_run_reach_another_monitor(tmp_path: Path) -> None:
    slow = ["round.local_steps=100", "merging.interval_steps=100000"]
    with started_swarm(tmp_path, 2, [f"run.rounds={ROUNDS}", *slow], after_rounds=1) as swarm:
        line = [sys.executable, "-m", "peers.export", "--every", "2", "--evaluate"]
        line += ["--publish-scores", "--state-dir", str(swarm.peers[1].folder)]
        line += ["--initial-peers", swarm.peers[0].join_address()]
        line += ["--output-dir", str(tmp_path / "out")]
        said = tmp_path / "said"
        with said.open("wb") as to:
            exporter = subprocess.Popen(line, stdout=to, stderr=subprocess.STDOUT)
        store = BlobStore(None)
        observer = Observer.start([swarm.peers[0].join_address()], store, START_S)
        visible: dict[int, float] = {}
        found: dict[int, ScoreRow] = {}
        try:
            watch = Watch(observer, store, None)
            end_s = time.monotonic() + ROUNDS * ROUND_S
            while ROUNDS not in found and time.monotonic() < end_s:
                found |= held_out_bits(watch)
                for round_ in found:
                    visible.setdefault(round_, time.time())
                time.sleep(0.2)
            code = exporter.wait(ROUND_S)
        finally:
            observer.stop()
            exporter.kill()
            exporter.wait(ROUND_S)
        text = said.read_text()
        assert code == 0 and ROUNDS in found, text
        agreed = {event["round"]: event for event in rounds(swarm.peers[0])}
        losses = {
            event["round"]: event["val_loss"]
            for peer in swarm.peers
            for event in peer.events()
            if event["event"] == "validation"
        }
        signer = peer_id(swarm.peers[1])
        swarm.kill()
    kept = [json.loads(one) for one in (tmp_path / "out" / "scores.jsonl").read_text().splitlines()]
    nats = {score["round"]: score["value"] for score in kept if score["metric"] == "nats_per_token"}
    bits = {score["round"]: score["value"] for score in kept if score["metric"] == "bits_per_byte"}
    told = []
    for round_, row in found.items():
        assert (row.publisher, row.member, row.value) == (signer, True, bits[round_])
        assert row.manifest_digest == agreed[round_]["digest"]
        # In fp32, as the peers of this run compute, so the published losses equal the files'.
        assert nats[round_] == pytest.approx(losses[round_], abs=1e-4)
        took_s = visible[round_] - agreed[round_]["time"]
        told.append(f"round {round_}: {took_s:.1f} s from its commit to its score on a monitor")
    sys.stdout.write("\n".join([*told, text]))
