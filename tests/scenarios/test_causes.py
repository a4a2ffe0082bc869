"""Faults of living peers: a monitor reports their true cause and the peer's name."""

import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from swarm.emulation.fault_plan import FaultPlan
from swarm.emulation.fault_runner import FaultRunner
from swarm.emulation.links import LINKS
from swarm.emulation.local_swarm import LocalPeer, LocalSwarm
from swarm.emulation.networks import NamespaceLinks, why_not_here
from swarm.errors import NobodyReachable
from swarm.monitor.health import REMEDIES, Cause, Fault, causes_of
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.runs.observer import Observer
from swarm.peer.guest import START_S, Watch
from tests.processes import running
from tests.scenarios.swarms import ROUND_S, has_rounds, peer_id, rounds, write_run

pytestmark = [pytest.mark.scenario, pytest.mark.exhaustive]

LOOK_EVERY_S = 2.0
LOG_BYTES = 20_000
told_s: list[str] = []
"""The reports, and their delays after the fault. Shown at the end."""
STEP_S = 0.2
STARVED = 8.0
"""Factor of a peer's longer steps: the others continue without it."""
MISSED = 12
"""Rounds, many more than the longest pause within one fault."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultRunner]:
    folder = tmp_path_factory.mktemp("causes")
    run_file = write_run(folder, ["run.rounds=100000"])
    with LocalSwarm(folder / "swarm", run_file, 4) as swarm:
        found = FaultRunner(swarm, FaultPlan(step_s=STEP_S))
        found.prepare()
        swarm.start()
        swarm.wait_until(has_rounds(2), what="two rounds", timeout_s=4 * ROUND_S)
        yield found
        swarm.kill()
        sys.stdout.write("\n".join([*told_s, ""]))


@pytest.fixture(scope="module")
def watch(runner: FaultRunner) -> Iterator[Watch]:
    store = BlobStore(None)
    addresses = [peer.join_address() for peer in runner.swarm.peers]
    observer = Observer.start(addresses, store, START_S)
    yield Watch(observer, store, None)
    observer.stop()


def told(watch: Watch, peer: LocalPeer, fault: Fault) -> Cause:
    """The monitor's report on a peer, as soon as it is this fault."""
    began_s, me = time.monotonic(), peer_id(peer)
    seen: tuple[Cause, ...] = ()
    while time.monotonic() - began_s < 2 * ROUND_S:
        with suppress(NobodyReachable):
            seen = causes_of(watch.look())
        for cause in seen:
            if cause.peer == me and cause.fault is fault:
                told_s.append(f"{time.monotonic() - began_s:.1f} s: {cause.text}")
                return cause
        time.sleep(LOOK_EVERY_S)
    raise AssertionError(f"no report on {peer.index}: {[cause.text for cause in seen]}")


def test_a_starved_founder_logs_what_the_monitor_says_of_it_once(
    runner: FaultRunner, watch: Watch
) -> None:
    founder, before = runner.swarm.peers[0], len(rounds(runner.swarm.peers[0]))
    runner.folder.tell(founder.index, slow=STARVED)
    try:
        shown = told(watch, founder, Fault.LATE)
        runner.swarm.wait_until(
            lambda _: len(rounds(founder)) >= before + MISSED,
            what="rounds without the founder",
            timeout_s=2 * ROUND_S,
        )
    finally:
        runner.folder.tell(founder.index, slow=1.0)
    alone = [e for e in rounds(founder)[before:] if e["trained_tokens"] and not e["counted"]]
    assert len(alone) > MISSED / 2, "it trained for nothing"
    (logged,) = (line for line in founder.output().splitlines() if "went without" in line)
    remedy = re.escape(f" ({REMEDIES[Fault.LATE]})")
    sentence = rf"round \d+ went without peer-0: (too late|the convener says): .*{remedy}"
    assert re.fullmatch(sentence, shown.text), shown.text
    assert re.fullmatch(rf"\S+ WARN {sentence}", logged), logged


def test_a_full_disk_is_named_in_the_words_of_the_system(runner: FaultRunner, watch: Watch) -> None:
    """A limit on file sizes stands for it: the log fits, a blob does not."""
    victim = runner.swarm.peers[2]
    assert victim.process
    kind, pid = resource.RLIMIT_FSIZE, victim.process.pid
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (victim.log_path.stat().st_size + LOG_BYTES, before[1]))
    try:
        found = told(watch, victim, Fault.TROUBLE)
    finally:
        resource.prlimit(pid, kind, before)
    assert "peer-2 waits" in found.text and "raise the limit of file sizes" in found.text


@pytest.mark.skipif(why_not_here() is not None, reason=str(why_not_here()))
def test_a_cut_line_is_named_with_both_its_ends(tmp_path: Path) -> None:
    """The monitor reaches all peers. Peer 2 and the two others do not reach each other."""
    links = NamespaceLinks(LINKS["datacentre"])
    run_file = write_run(tmp_path, ["run.rounds=100000"])
    with closing(links), LocalSwarm(tmp_path / "swarm", run_file, 3, links=links) as swarm:
        swarm.start()
        swarm.wait_until(has_rounds(2), what="two rounds", timeout_s=4 * ROUND_S)
        with looks(swarm, place=3) as seen:
            next(seen)
            both_ways = [(2, 0), (2, 1), (0, 2), (1, 2)]
            links.cut(both_ways)
            began_s, text = time.monotonic(), ""
            while not ("peer-0" in text and "peer-1" in text):
                took_s = time.monotonic() - began_s
                assert took_s < 2 * ROUND_S, f"no report, but {text!r}"
                text = _told_of(peer_id(swarm.peers[2]), next(seen))
            took_s = time.monotonic() - began_s
    sys.stdout.write(f"{took_s:.1f} s: {text}\n")
    assert text.startswith("peer-2: its link to ") and "is cut: no message gets" in text


def _told_of(peer: str, look: Any) -> str:
    """The report of a look about a peer that is cut off. "" if there is none."""
    causes = (cause for cause in look["causes"] if cause["peer"] == peer)
    return next((cause["text"] for cause in causes if cause["fault"] == Fault.CUT.value), "")


@contextmanager
def looks(swarm: LocalSwarm, place: int) -> Iterator[Iterator[Any]]:
    """The reports of a monitor at a place of the swarm's network, look by look."""
    assert swarm.links
    prefix, _ = swarm.links.place(place)
    command = [*prefix, sys.executable, "-m", "peers.monitor", "--json", "--follow"]
    command += ["--initial-peers", swarm.peers[0].join_address()]
    with running(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield (json.loads(line) for line in process.stdout)


def test_a_dead_owner_is_named_with_its_experts(runner: FaultRunner, watch: Watch) -> None:
    victim = runner.swarm.peers[3]
    snapshot = watch.look()
    owned = [row.expert for row in snapshot.experts if peer_id(victim) in row.owners]
    assert owned
    victim.kill()
    found = told(watch, victim, Fault.DEAD)
    assert "peer-3: nothing listens on its machine any more" in found.text
