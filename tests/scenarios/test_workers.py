"""A peer of two worker processes and a peer of one process in one swarm."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.scenario, pytest.mark.exhaustive]

LIMIT_S = 120
FOUND = ["--run", "demo", "--rounds", "6", "--peers", "2", "--wait-for-peers", "2", "--gpus", "2"]
SMALL = [
    "round.local_steps=5",
    "merging.alpha=0.0",
    "data.validation_bytes=512",
    "train.micro_batch_sequences=4",
]

UNLIKE = ("experts dealt out over 2", "a pipeline of 2 stages")


class Training:
    """A peer that writes what it says to a file beside its state directory."""

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
        """The first group of what it has said, as soon as it has."""
        end_s = time.monotonic() + LIMIT_S
        while not (match := re.search(pattern, self.log)):
            assert self.process.poll() is None and time.monotonic() < end_s, self.log[-3000:]
            time.sleep(0.1)
        return match[1]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        pytest.param("expert_parallel=1", None, id="whole"),
        pytest.param("expert_parallel=2", "experts dealt out over 2", id="experts dealt out"),
        pytest.param("pipeline=2", "a pipeline of 2 stages", id="pipeline"),
    ],
)
def test_a_worker_that_is_killed_takes_neither_the_peer_nor_the_swarm_along(
    tmp_path: Path, setting: str, said: str | None
) -> None:
    chosen = [*SMALL, f"compute.{setting}"]
    settings = [word for setting in chosen for word in ("--set", setting)]
    text = shutil.copytree(Path(__file__).parents[2] / "swarm" / "protocol", tmp_path / "text")
    corpus = ["--corpus", str(text)]
    peers = [Training(tmp_path / "two", *FOUND, *settings, *corpus)]
    try:
        address = peers[0].says(r"--initial-peers (/ip4/\S+)")
        peers.append(Training(tmp_path / "one", "--initial-peers", address, *corpus))
        victim = int(peers[0].says(r"workers began within .*processes \d+, (\d+)\)"))
        peers[1].says(r"(round=1/6)")
        os.kill(victim, signal.SIGKILL)
        assert [peer.process.wait(LIMIT_S) for peer in peers] == [0, 0]
    finally:
        for peer in peers:
            peer.process.kill()
            peer.process.wait()
    logs = [peer.log for peer in peers]
    assert "worker 1 was killed" in logs[0]
    assert [words in logs[0] for words in UNLIKE] == [words == said for words in UNLIKE]
    # A member throughout, with the other's digests, and counted again before the end.
    rounds = [
        re.findall(r"height=(\d+) digest=(\w+) members=2 contributors=(\d)", log) for log in logs
    ]
    assert rounds[0] == rounds[1]
    assert [int(height) for height, _, _ in rounds[0]] == list(range(1, 7))
    assert "2" in [contributors for height, _, contributors in rounds[0] if int(height) > 2]
