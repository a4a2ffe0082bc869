"""A peer of two worker processes and a peer of one process in one swarm."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from swarm.api import load_run
from swarm.model.cost import bytes_sent_per_peer_per_round
from swarm.network.rounds.record_file import RecordFile
from swarm.protocol.records.life_events import EventReader
from swarm.protocol.values.manifest import Digest, Unit

pytestmark = [pytest.mark.scenario, pytest.mark.exhaustive]

LIMIT_S = 120
AWAY_S = 30.0
"""Limit for the absence of a peer's workers."""
GONE_S = 10.0
"""Limit for workers that outlive their peer."""
LOCAL_STEPS = 5
FOUND = ["--run", "demo", "--rounds", "6", "--peers", "2", "--wait-for-peers", "2"]
SMALL = [
    f"round.local_steps={LOCAL_STEPS}",
    "merging.alpha=0.0",
    "data.validation_bytes=512",
    "train.micro_batch_sequences=4",
]

UNLIKE = ("experts dealt out over 2", "a pipeline of 2 stages", "streaming")


class Training:
    """A peer whose output goes to a file next to its state directory."""

    def __init__(self, folder: Path, *args: str) -> None:
        self.path = folder.with_suffix(".log")
        command = [sys.executable, "-m", "peers.peer", "--state-dir", str(folder), *args]
        command += ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--device", "cpu", "--linger", "5"]
        with self.path.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self.path.read_text()

    def says(self, pattern: str) -> str:
        """The first group of the first match in its output."""
        end_s = time.monotonic() + LIMIT_S
        while not (match := re.search(pattern, self.log)):
            assert self.process.poll() is None and time.monotonic() < end_s, self.log[-3000:]
            time.sleep(0.1)
        return match[1]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        pytest.param(("expert_parallel=1", "pipeline=1"), None, id="whole"),
        pytest.param(("expert_parallel=2",), "experts dealt out over 2", id="experts dealt out"),
        pytest.param(("pipeline=2",), "a pipeline of 2 stages", id="pipeline"),
        pytest.param(("engine=streaming",), "streaming", id="streaming"),
    ],
)
def test_a_worker_that_is_killed_takes_neither_the_peer_nor_the_swarm_along(
    tmp_path: Path, asked: tuple[str, ...], said: str | None
) -> None:
    chosen = (*settings(*(f"compute.{setting}" for setting in asked)), "--gpus", "2")
    corpus = corpus_in(tmp_path)
    peers = [Training(tmp_path / "two", *FOUND, *chosen, *corpus)]
    try:
        join = peers[0].says(r"swarm-peer (--initial-peers \S+ --invitation \S+)").split()
        peers.append(Training(tmp_path / "one", *join, *corpus))
        victim = int(peers[0].says(r"workers began within .*processes \d+, (\d+)\)"))
        peers[1].says(r"(round 1/6)")
        os.kill(victim, signal.SIGKILL)
        assert [peer.process.wait(LIMIT_S) for peer in peers] == [0, 0]
    finally:
        for peer in peers:
            peer.process.kill()
            peer.process.wait()
    assert "worker 1 was killed" in peers[0].log
    engine = peers[0].says(r"engine: (.*?): the fastest that fits")
    assert [words in engine for words in UNLIKE] == [words == said for words in UNLIKE]
    assert_members_throughout(peers)
    assert [event["workers"] for event in applied(tmp_path / "one")] == [None] * 6
    events = applied(tmp_path / "two")
    assert any(event["steps"] for event in events)
    for event in events:
        found = event["workers"]
        if not event["steps"]:  # on a busy machine: the round was over before they were back
            assert found is None
            continue
        assert found["number"] == len(found["ranks"]) == 2
        assert (found["bubble"] is not None) == ("pipeline" in engine)
        assert all(0 < sum(rank["waited_s"].values()) < rank["seconds"] for rank in found["ranks"])
    assert re.search(r"2 workers, \S+ s a step; ", peers[0].log)
    began = r"workers began within (\S+) s \(processes [\d, ]+\)(?:; steps made again: (\d+))?$"
    (_, none), (away_s, made_again) = re.findall(began, peers[0].log, re.M)
    assert not none and float(away_s) < AWAY_S
    assert int(made_again or 0) <= LOCAL_STEPS  # none, if the worker died between two rounds
    assert_bytes_are_those_of_the_formula([tmp_path / "one", tmp_path / "two"])


def assert_bytes_are_those_of_the_formula(folders: list[Path]) -> None:
    """Compares blob bytes of rounds of both peers, after the one with a kill, with the formula."""
    run = load_run("demo", [*SMALL, "run.peers=2"])
    events = [event for folder in folders for event in applied(folder)[2:]]
    sent = [e["blob_bytes_sent"] for e in events if len(e["contributors"]) == 2]
    assert sent
    expected = bytes_sent_per_peer_per_round(run, 2)
    assert sum(sent) / len(sent) == pytest.approx(expected, rel=0.03)


def test_a_peer_that_is_killed_takes_its_workers_along_and_resumes_bit_for_bit(
    tmp_path: Path,
) -> None:
    """With two micro-batches per step, two workers have the bits of one process."""
    whole = ("compute.expert_parallel=1", "compute.pipeline=1")
    alone = ["--run", "demo", "--rounds", "4", "--peers", "1", *settings(*whole)]
    alone += corpus_in(tmp_path)
    straight = Training(tmp_path / "straight", *alone)
    assert straight.process.wait(LIMIT_S) == 0, straight.log
    peer = Training(tmp_path / "killed", *alone, "--gpus", "2")
    try:
        for lives in range(2):
            pids = peer.says(r"workers began within .*processes (\d+, \d+)\)").split(", ")
            peer.says(rf"(round {2 * lives + 1}/4)")
            peer.process.kill()
            peer.process.wait()
            end_s = time.monotonic() + GONE_S
            while any(map(is_running, pids)):
                assert time.monotonic() < end_s, "workers run on without a peer"
                time.sleep(0.05)
            peer = Training(tmp_path / "killed", *alone, "--gpus", "2")
        assert peer.process.wait(LIMIT_S) == 0, peer.log
    finally:
        peer.process.kill()
        peer.process.wait()
    found = [model(tmp_path / name) for name in ("straight", "killed")]
    assert found[0] == found[1] and found[0][0] == 4


def is_running(pid: str) -> bool:
    """Whether a process has not ended yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def model(folder: Path) -> tuple[int, dict[Unit, Digest]]:
    """The newest round of an ended peer, and the digest of each part of its model."""
    (run,) = (folder / "runs").iterdir()
    record = RecordFile(run / "record").read()
    assert record is not None
    tip = record.tip
    return tip.round, {unit: entry.digest for unit, entry in tip.entries.items()}


def applied(folder: Path) -> list[dict[str, Any]]:
    """A peer's events of each manifest after the founding one."""
    (path,) = (folder / "runs").glob("*/events.jsonl")
    events = map(EventReader().read, path.read_text().splitlines())
    return [event for event in events if event["event"] == "applied" and event["round"]]


def test_a_node_that_is_killed_takes_neither_the_peer_nor_the_swarm_along(tmp_path: Path) -> None:
    """A peer has one worker here and one through swarm-worker, which is restarted."""
    corpus, agents = corpus_in(tmp_path), []
    elsewhere = ("--gpus", "1", "--workers-from", "127.0.0.1:0", "--remote-workers", "1")
    peers = [Training(tmp_path / "two", *FOUND, *settings(), *elsewhere, *corpus)]
    try:
        join = peers[0].says(r"swarm-peer (--initial-peers \S+ --invitation \S+)").split()
        peers.append(Training(tmp_path / "one", *join, *corpus))
        controller = peers[0].says(r"swarm-worker --controller (\S+) --key")
        key = tmp_path / "two" / "workers.key"
        command = [sys.executable, "-m", "peers.worker", "--controller", controller, "--once"]
        command += ["--key", str(key), "--workers", "1"]
        agents.append(subprocess.Popen(command))
        peers[1].says(r"(round 1/6)")
        agents[0].kill()
        agents.append(subprocess.Popen(command))
        assert [peer.process.wait(LIMIT_S) for peer in peers] == [0, 0]
        assert agents[1].wait(LIMIT_S) == 0
    finally:
        for process in (*agents, *(peer.process for peer in peers)):
            process.kill()
            process.wait()
    assert "(workers 1 to 1) is gone" in peers[0].log
    assert_members_throughout(peers)


def settings(*more: str) -> list[str]:
    return [word for setting in (*SMALL, *more) for word in ("--set", setting)]


def corpus_in(folder: Path) -> list[str]:
    text = shutil.copytree(Path(__file__).parents[2] / "swarm" / "protocol", folder / "text")
    return ["--corpus", str(text)]


def assert_members_throughout(peers: list[Training]) -> None:
    """Checks for equal digests, and that both are counted again before the end."""
    histories = [applied(peer.path.with_suffix("")) for peer in peers]
    rounds = [
        [
            (e["height"], e["digest"], len(e["contributors"]))
            for e in history
            if e["kind"] != "merge"
        ]
        for history in histories
    ]
    assert all(len(event["members"]) == 2 for event in histories[0])
    assert rounds[0] == rounds[1]
    assert [height for height, _, _ in rounds[0]] == list(range(1, 7))
    assert 2 in [contributors for height, _, contributors in rounds[0] if height > 2]
