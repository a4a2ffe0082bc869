"""Faults of one machine: its peer says what is wrong, spoils nothing, and is back by itself."""

import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from swarm.emulation.local_swarm import LocalPeer, LocalSwarm
from swarm.errors import OutOfMemory
from tests.scenarios.swarms import ROUND_S, assert_one_chain, contributes, run_folder, started_swarm

pytestmark = pytest.mark.scenario

NUM_PEERS = 3
FAULT_S = 4.0
LOG_BYTES = 20_000


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    folder = tmp_path_factory.mktemp("local_faults")
    with started_swarm(folder, NUM_PEERS, ["run.rounds=100000"], after_rounds=2) as started:
        yield started
        started.kill()
        assert_one_chain(started)
        assert all("runs already" not in peer.output() for peer in started.peers)


def daemon_of(peer: LocalPeer) -> int:
    """Process id of a peer's p2pd."""
    assert peer.process is not None
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, rest = (folder / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
        except OSError:
            continue
        if name == "p2pd" and int(rest.split()[1]) == peer.process.pid:
            found.append(int(folder.name))
    (daemon,) = found
    return daemon


def is_back(swarm: LocalSwarm, peer: LocalPeer) -> None:
    """It contributes again, in the same process."""
    swarm.wait_until(contributes(peer, *swarm.peers), what="its return", timeout_s=2 * ROUND_S)


def limited(swarm: LocalSwarm, peer: LocalPeer, kind: int, limit: int, says: str = "") -> None:
    """Runs the peer under a limit of the system for a while, and until it logs a pattern."""
    assert peer.process is not None
    pid = peer.process.pid
    before = resource.prlimit(pid, kind, (limit, resource.prlimit(pid, kind)[1]))
    try:
        time.sleep(FAULT_S)
        if says:
            swarm.wait_until(lambda _: says in peer.output(), what=says, timeout_s=ROUND_S)
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, kind, before)


def test_a_daemon_that_is_killed_runs_again_under_the_same_identity(swarm: LocalSwarm) -> None:
    victim = swarm.peers[1]
    life, daemon = victim.process, daemon_of(victim)
    os.kill(daemon, signal.SIGKILL)
    is_back(swarm, victim)
    assert victim.process is life and daemon_of(victim) != daemon
    assert "status -9; nothing can be sent or received until it runs again" in victim.output()


def test_a_disk_that_takes_nothing_is_waited_for(swarm: LocalSwarm) -> None:
    """A limit on file sizes stands for a full disk: the log fits, a blob does not."""
    victim = swarm.peers[2]
    fits = victim.log_path.stat().st_size + LOG_BYTES
    limited(swarm, victim, resource.RLIMIT_FSIZE, fits, says="raise the limit of file sizes")
    assert victim.alive, victim.output()[-2000:]
    is_back(swarm, victim)


@pytest.mark.exhaustive
def test_a_process_that_gets_no_more_memory_works_on_or_ends_with_the_remedy(
    swarm: LocalSwarm,
) -> None:
    """Its memory may suffice. If not, the others continue, and it returns when it is restarted."""
    victim = swarm.peers[2]
    assert victim.process is not None
    status = Path(f"/proc/{victim.process.pid}/status").read_text()
    (kilobytes,) = re.findall(r"VmSize:\s+(\d+) kB", status)
    back = contributes(victim, *swarm.peers)
    limited(swarm, victim, resource.RLIMIT_AS, int(kilobytes) * 1024)
    swarm.wait_until(
        lambda _: back(swarm) or not victim.alive, what="its return or end", timeout_s=2 * ROUND_S
    )
    if not victim.alive:
        assert victim.wait(ROUND_S) == OutOfMemory.exit_code
        assert "start it again with fewer other programs" in victim.output()
        swarm.restart(victim, ["--initial-peers", swarm.peers[0].join_address()])
    is_back(swarm, victim)


@pytest.mark.exhaustive
def test_a_process_out_of_file_descriptors_is_back_when_there_are_some(swarm: LocalSwarm) -> None:
    victim = swarm.peers[0]
    assert victim.process is not None
    used = max(int(path.name) for path in Path(f"/proc/{victim.process.pid}/fd").iterdir())
    limited(swarm, victim, resource.RLIMIT_NOFILE, used + 1)
    assert victim.alive, victim.output()[-2000:]
    is_back(swarm, victim)


def damage_records(victim: LocalPeer) -> None:
    """Damages the files of a peer's founding, port and known peers."""
    run = run_folder(victim)
    for path in (run / "config.json", run / "founding", victim.folder / "port"):
        path.write_bytes(b"\xff garbage")
    with (victim.folder / "known_peers").open("ab") as file:
        file.write(b"\xff\xfe garbage 7 8 9")


@pytest.mark.exhaustive
def test_damaged_records_of_a_run_are_written_anew_from_its_store(swarm: LocalSwarm) -> None:
    victim = swarm.peers[1]
    victim.kill()
    damage_records(victim)
    swarm.restart(victim, ["--initial-peers", swarm.peers[0].join_address()])
    is_back(swarm, victim)
    for name in ("config.json", "founding"):
        assert re.search(rf"{name} is damaged: .*; rewritten from the store", victim.output())


@pytest.mark.exhaustive
def test_damaged_records_and_a_lost_store_are_made_whole_by_the_others(swarm: LocalSwarm) -> None:
    victim = swarm.peers[1]
    victim.kill()
    damage_records(victim)
    shutil.rmtree(run_folder(victim) / "packs")
    swarm.restart(victim, ["--initial-peers", swarm.peers[0].join_address()])
    is_back(swarm, victim)
    assert "joining the run again" in victim.output()
