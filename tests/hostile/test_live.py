"""The cost of attacks on a training swarm, compared with equal times without them.

There are three honest peers and, in attempt-counters and garbage-values, a lying fourth member.
Phases without and with the attack alternate in one swarm, and at the end of each a newcomer joins.
The test prints a line of figures.

Two things are emulated, because real peers and attackers have separate machines and here all share
one. A local step is a timed wait (`peers/emulated.py`), so that rounds last about two seconds and
the honest peers leave the processor free. The attacker has a low priority, so that its own
computing does not slow the honest peers. Computing that an attack causes at an honest peer and its
daemon hardly shows in the length of a round, and so has a limit of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError

from swarm.emulation.controls import FOLDER_VARIABLE, ControlFolder, Controls
from swarm.emulation.local_peer import LocalPeer
from swarm.emulation.local_swarm import LocalSwarm, digests_by_height
from swarm.errors import Refused, SwarmError
from swarm.protocol.messages.message_bytes import encode
from swarm.protocol.messages.messages import Ballot, Hello, Roster
from swarm.protocol.records.records import encode_record, peers_key, runs_key, shard_of
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.manifest import Manifest, PeerId
from swarm.protocol.values.updates import IMPLAUSIBLE
from tests.hostile.attacking_peer import ATTACK_VARIABLE
from tests.hostile.false_records import Stranger, store, strangers
from tests.hostile.forger import Forger, forger
from tests.hostile.test_attachments import naming
from tests.hostile.test_escape_codes import EVERYTHING, key_named
from tests.hostile.test_false_figures import HIGHEST
from tests.hostile.test_flooded_keys import FLOOD, LARGEST
from tests.hostile.test_fuzz import CORPUS
from tests.hostile.test_greedy_streams import be_greedy
from tests.hostile.test_idle_streams import open_idle
from tests.hostile.test_invented_parents import forgeries
from tests.hostile.test_nested_values import BOMB, DICTIONARIES
from tests.hostile.test_nested_values import store as store_raw
from tests.hostile.test_path_names import PATHS, record_named
from tests.peer_records import peer_record
from tests.protocol.round_pump import header_of, make_offer, make_rules
from tests.scenarios.swarms import ROUND_S, peer_id, rounds, write_run

pytestmark = [pytest.mark.scenario, pytest.mark.exhaustive]

MIB = 2**20
PAIRS = 2
"""Pairs of phases without and with the attack, because the machine is noisy."""
ROUNDS = 8
"""Rounds of one phase."""
STEP_S = 0.25
"""Seconds of a local step. A round has six, so it takes at least 1.5 s."""
MOST_SLOWER, MOST_BYTES, MOST_JOINING = 1.25, 64 * MIB, 2.0
MOST_PROCESSOR = 0.25
"""Limit of the processor seconds per second that an attack costs an honest peer and its daemon: the
strangers' share of everything (`ledger.STRANGERS_SHARE`). The ledger allows 0.1 for parsing and
decoding. The rest is for opening, decrypting and refusing, which a peer cannot avoid."""
WAIT_S = 60.0
LOW_PRIORITY = 15
EMULATED = "peers.emulated"


# ---------------------------------------------------------------- measurements


@dataclass(frozen=True)
class Effort:
    """An attacker's work in one phase: turns, successes, seconds."""

    turns: int
    landed: int
    seconds: float


@dataclass(frozen=True)
class Figures:
    """The figures of one phase: the largest of any honest peer."""

    round_s: float
    processor: float
    """Processor seconds per second, without the attacker's own."""
    memory_bytes: int
    disk_bytes: int
    joining_s: float


def memory_of(peer: LocalPeer) -> int:
    """Resident bytes of a peer and its daemon."""
    found = 0
    for pid in peer._pids():
        with_size = Path(f"/proc/{pid}/statm")
        try:
            found += int(with_size.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            continue
    return found


def processor_s_of(peer: LocalPeer) -> float:
    """Processor time that a peer and its daemon have taken."""
    ticks = 0
    for pid in peer._pids():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # user and system
    return ticks / os.sysconf("SC_CLK_TCK")


def disk_of(peer: LocalPeer) -> int:
    """Bytes that a peer's folder takes."""
    found = 0
    for path in peer.folder.rglob("*"):
        try:
            found += path.lstat().st_blocks * 512
        except OSError:
            continue
    return found


def phase(swarm: LocalSwarm, honest: Sequence[LocalPeer]) -> Figures:
    """Measures a number of rounds, and then a newcomer that joins and leaves."""
    first, began_s = newest(honest), time.monotonic()
    memory, disk, ends = [], [], [began_s]
    watched_from_s, spent_s = began_s, [processor_s_of(peer) for peer in honest]

    def watch(_: LocalSwarm) -> None:
        memory.append(max(map(memory_of, honest)))
        disk.append(max(map(disk_of, honest)))
        if newest(honest) >= first + len(ends):
            ends.append(time.monotonic())

    swarm.wait_until(
        lambda _: len(ends) > ROUNDS, what="the rounds", timeout_s=ROUNDS * ROUND_S, on_poll=watch
    )
    spent_s = [processor_s_of(peer) - before for peer, before in zip(honest, spent_s, strict=True)]
    passed_s = time.monotonic() - watched_from_s
    lengths = [after - before for before, after in pairwise(ends)]
    began_s = time.monotonic()
    joiner = swarm.add(["--initial-peers", honest[0].join_address()])
    swarm.wait_until(lambda _: bool(rounds(joiner)), what="joining", timeout_s=2 * ROUND_S)
    joining_s = time.monotonic() - began_s
    leave(joiner)
    return Figures(
        statistics.median(lengths), max(spent_s) / passed_s, max(memory), max(disk), joining_s
    )


def leave(peer: LocalPeer) -> None:
    """Ends a peer in order.

    Do not end all of a swarm at once, because they would wait for each other.
    """
    if peer.alive:
        peer.send(signal.SIGINT)
        assert peer.wait(2 * ROUND_S) == 0


def newest(peers: Sequence[LocalPeer]) -> int:
    """The newest round that all have applied."""
    return min(max((e["round"] for e in rounds(peer)), default=0) for peer in peers)


# ---------------------------------------------------------------- attacks


@dataclass
class Attack:
    """A stranger's means of attack."""

    liar: Forger
    tip: Manifest
    crowd: list[Stranger]
    number: int = 0
    landed: int = 0
    """Answered messages (also with a refusal), stored records, opened streams."""

    def look(self) -> None:
        """Finds the newest tip, but keeps the attacked members."""
        members = self.liar.members
        with suppress(SwarmError):  # refused for too many requests
            self.tip = self.liar.look()
        self.liar.members = members

    def at_each(self, act: Callable[[Any, PeerId], int]) -> None:
        """Attacks each member and counts successes. Refusals are expected."""
        for peer in self.liar.members:
            holder = SimpleNamespace(peer_id=peer)
            try:
                self.landed += act(holder, peer)
            except P2PHandlerError:
                self.landed += 1
            except (SwarmError, TimeoutError, asyncio.IncompleteReadError):
                continue

    def post(self, payload: bytes, times: int = 1) -> None:
        """Sends bytes to all members."""

        async def post_all(peer: PeerId) -> int:
            posts = [self.liar.node.post(peer, payload, 5.0) for _ in range(times)]
            said = await asyncio.gather(*posts, return_exceptions=True)
            return sum(each is None or isinstance(each, Refused) for each in said)

        self.at_each(lambda _, peer: self.liar.node.run(post_all(peer), WAIT_S))

    def records(self, key: str, values: Sequence[tuple[Stranger, bytes]]) -> None:
        """Stores records at all members."""
        node = self.liar.node
        self.at_each(lambda holder, _: store(node, holder, key, values, life_s=20.0))

    def announce(self, *records: Any) -> None:
        """Stores announcements of runs."""
        for who, record in zip(self.crowd, records, strict=False):
            self.records(runs_key(who.peer_id), [(who, encode_record(record))])


def invented_parents(attack: Attack) -> None:
    if attack.number % 5 == 4:
        attack.look()
    for commit in forgeries(attack.liar, attack.tip, attack.number):
        payload, blobs = encode(header_of(commit.manifest), commit)
        for digest, blob in blobs.items():
            attack.liar.store.put(blob, digest)
            attack.liar.store.pin([digest])
        attack.post(payload)


def nested_values(attack: Attack) -> None:
    node = attack.liar.node
    for subkey, value in ((DHTProtocol.IS_DICTIONARY, BOMB), (DICTIONARIES, b"")):
        attack.at_each(lambda _, peer, s=subkey, v=value: len(store_raw(node, peer, s, v)))


def false_figures(attack: Attack) -> None:
    invented_parents(attack)
    for who in attack.crowd[:20]:
        claims = {"height": HIGHEST, "round": HIGHEST, "rounds_total": 2**60}
        record = encode_record(peer_record(who.peer_id, manifest_digest="ff" * 32, **claims))
        attack.records(peers_key(attack.liar.run.run, shard_of(who.peer_id)), [(who, record)])


def idle_streams(attack: Attack) -> None:
    for peer in attack.liar.members:
        to, node = SimpleNamespace(peer_id=peer), attack.liar.node
        opened = node.run(open_idle(node, None, to), WAIT_S)
        attack.landed += len(opened)
        time.sleep(5.0)
        for connection in opened:
            node.loop.call_soon_threadsafe(connection.close)


def attachments(attack: Attack) -> None:
    rules, tip = make_rules(), attack.tip
    offer = replace(make_offer(rules, "B", replace(tip, entries={}, owners={})), tip=tip.digest)
    offers = {f"P{number}": offer for number in range(40)}
    message = Roster(Ballot(0, attack.liar.node.peer_id), tip.digest, offers, {})
    attack.post(naming(attack.liar.store, header_of(tip), message, 2**18))
    attack.liar.store.collect(())


def names(attack: Attack) -> None:
    attack.announce(*[record_named(path) for path in PATHS])


def text(attack: Attack) -> None:
    attack.post(key_named(EVERYTHING.encode("utf-16", "surrogatepass").decode("utf-16", "replace")))


def flooded_keys(attack: Attack) -> None:
    flood = [(who, b"x" * LARGEST) for who in attack.crowd]
    run = attack.liar.run.run
    for key in (runs_key(attack.liar.members[0]), peers_key(run, attack.number % 16)):
        attack.records(key, flood)


def false_records(attack: Attack) -> None:
    run, false = attack.liar.run, "f" * 64
    lies = [{"founding": false}, {"config": false}, {"config_bytes": 5}, {"founder": "QmStranger"}]
    attack.announce(*[replace(run, **lies[n % len(lies)]) for n in range(40)])


def greedy(attack: Attack) -> None:
    header, node = header_of(attack.tip), attack.liar.node
    hello, _ = encode(header, Hello(ask=True))
    blob = max(attack.tip.entries.values(), key=lambda entry: entry.num_bytes).digest
    streams = []
    for peer in attack.liar.members:
        to = SimpleNamespace(peer_id=peer)
        for _ in range(8):
            call = be_greedy(node, to, blob, [])  # type: ignore[arg-type]
            streams.append(asyncio.run_coroutine_threadsafe(call, node.loop))
    attack.post(hello, times=700)
    for stream in streams:
        stream.cancel()


def sizes(attack: Attack) -> None:
    blob = (CORPUS / "config-billions_of_parts").read_bytes()
    digest = attack.liar.store.put(blob, digest_of(blob))
    attack.liar.store.pin([digest])
    huge = replace(attack.liar.run, config=digest, config_bytes=len(blob))
    attack.announce(*[huge] * 10)


STRANGERS: dict[str, Callable[[Attack], None]] = {
    "invented-parents": invented_parents,
    "nested-values": nested_values,
    "false-figures": false_figures,
    "idle-streams": idle_streams,
    "attachments": attachments,
    "path-names": names,
    "escape-codes": text,
    "flooded-keys": flooded_keys,
    "false-announcements": false_records,
    "greedy-streams": greedy,
    "announced-sizes": sizes,
}
MEMBERS = {"attempt-counters": "bad_prepare", "garbage-values": IMPLAUSIBLE}
"""A member's attack, and the counter of honest peers that shows it."""


@contextmanager
def attacked(name: str, honest: Sequence[LocalPeer], switch: Path) -> Iterator[list[Effort]]:
    """Runs the attack while the context is open, and fails if the attack itself fails.

    Yields the efforts of the attack, which are complete at the end.
    """
    efforts: list[Effort] = []
    if name in MEMBERS:
        switch.write_text(name)
        try:
            yield efforts
        finally:
            switch.unlink()
        return
    ready, over = threading.Event(), threading.Event()

    def go_on() -> int:
        # Threads and processes that are started after this inherit the priority.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
        with forger([honest[0].join_address()]) as liar:
            attack = Attack(liar, liar.look(), strangers(FLOOD))
            liar.members = [peer_id(peer) for peer in honest]  # a record outlives who has left
            ready.set()
            began_s = time.monotonic()
            while not over.is_set() or not attack.number:
                STRANGERS[name](attack)
                attack.number += 1
        efforts.append(Effort(attack.number, attack.landed, time.monotonic() - began_s))
        return attack.landed

    with ThreadPoolExecutor(1) as threads:
        going_on = threads.submit(go_on)
        try:
            while not ready.wait(0.1) and not going_on.done():
                continue
            yield efforts
        finally:
            over.set()
        assert going_on.result(10 * WAIT_S), "the attack did not even arrive"


# ---------------------------------------------------------------- the test


@pytest.mark.parametrize("name", [*STRANGERS, *MEMBERS])
def test_a_swarm_goes_on_under_attack(name: str, tmp_path: Path) -> None:
    run_file = write_run(tmp_path, ["run.rounds=100000", "merging.interval_steps=600000"])
    switch, controls = tmp_path / "attack", ControlFolder(tmp_path / "controls")
    controls.create()
    controls.tell_all(Controls(step_s=STEP_S))
    num_members = 4 if name in MEMBERS else 3
    with LocalSwarm(
        tmp_path / "swarm",
        run_file,
        3,
        founder_options=["--wait-for-peers", str(num_members)],
        program=EMULATED,
    ) as swarm:
        folders = {ATTACK_VARIABLE: str(switch), FOLDER_VARIABLE: str(controls.path)}
        swarm.environment = {**swarm.environment, **folders}
        swarm.start()
        if name in MEMBERS:
            swarm.program = "tests.hostile.attacking_peer"
            swarm.add(swarm.peers[0].join_options())
            swarm.program = EMULATED
        honest = list(swarm.peers[:3])
        swarm.wait_until(lambda _: newest(honest) >= 3, what="rounds", timeout_s=5 * ROUND_S)
        without, during, efforts = [], [], []
        for _ in range(PAIRS):
            without.append(phase(swarm, honest))
            with attacked(name, honest, switch) as known:
                during.append(phase(swarm, honest))
            efforts.extend(known)
        assert all(peer.alive for peer in honest), "nobody has ended"
        for peer in reversed(swarm.peers):
            leave(peer)
        histories = [peer.events() for peer in honest]
        logs = {peer.index: peer.log_path.read_bytes() for peer in honest}
    refused: Counter[str] = Counter()
    for events in histories:
        refused.update(events[-1]["refused"])
    report(name, without, during, efforts, refused)
    assert name in STRANGERS or refused[MEMBERS[name]], "the attack did not even arrive"
    assert all(len(digests) == 1 for digests in digests_by_height(histories).values())
    for log in logs.values():
        acting = [one for one in log.decode("utf-8", "replace") if not one.isprintable()]
        assert set(acting) <= {"\n"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "controls",
        "run.toml",
        "swarm",
    ]
    assert {path.name.partition("-")[0] for path in (tmp_path / "swarm").iterdir()} == {"peer"}
    assert middle(during, "round_s") <= MOST_SLOWER * middle(without, "round_s")
    assert middle(during, "processor") - middle(without, "processor") <= MOST_PROCESSOR
    for kind in ("memory_bytes", "disk_bytes"):
        assert middle(during, kind) - middle(without, kind) <= MOST_BYTES, kind
    assert middle(during, "joining_s") <= MOST_JOINING * middle(without, "joining_s")


def middle(figures: Sequence[Figures], kind: str) -> float:
    """The median over phases."""
    return statistics.median(getattr(one, kind) for one in figures)


def report(
    name: str,
    without: Sequence[Figures],
    during: Sequence[Figures],
    efforts: Sequence[Effort],
    refused: Counter[str],
) -> None:
    """One line of figures, for people: `pytest -s`."""
    kinds = ("round_s", "processor", "memory_bytes", "disk_bytes", "joining_s")
    pairs = {kind: (middle(without, kind), middle(during, kind)) for kind in kinds}
    line = {
        "attack": name,
        "rounds": round(pairs["round_s"][1] / pairs["round_s"][0], 2),
        "processor": round(pairs["processor"][1] - pairs["processor"][0], 3),
        "memory_mib": round((pairs["memory_bytes"][1] - pairs["memory_bytes"][0]) / MIB, 1),
        "disk_mib": round((pairs["disk_bytes"][1] - pairs["disk_bytes"][0]) / MIB, 1),
        "joining": round(pairs["joining_s"][1] / pairs["joining_s"][0], 2),
        "turns": sum(each.turns for each in efforts),
        "landed_per_s": [round(each.landed / each.seconds, 1) for each in efforts],
        "refused": dict(refused),
        "load": os.getloadavg()[0],
        "round_s": [[round(one.round_s, 2) for one in part] for part in (without, during)],
        "processors": [[round(one.processor, 3) for one in part] for part in (without, during)],
        "joining_s": [[round(one.joining_s, 1) for one in part] for part in (without, during)],
    }
    sys.stdout.write(json.dumps(line) + "\n")
