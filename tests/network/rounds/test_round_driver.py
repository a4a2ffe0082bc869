"""The shell around the round machine: effects in order, long work in threads, nothing lost.

The machine is scripted by tests. Node and disk are fakes, loop and store are real.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from swarm.codecs import Content
from swarm.config import RoundConfig
from swarm.errors import NetworkDown, OutOfMemory, StateError, SwarmError, Unreachable
from swarm.experts import Slice, UnitLayout
from swarm.network.blobs import disk_retry
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.node.node import Node
from swarm.network.rounds import disk_work
from swarm.network.rounds.record_file import RecordFile
from swarm.network.rounds.round_driver import UNWATCHED, CarryOut, RoundDriver, RoundObserver
from swarm.network.wire.ledger import Ledger
from swarm.network.wire.loop_thread import LoopThread
from swarm.network.wire.traffic import Traffic
from swarm.protocol.chain.trust import Chain, Foothold
from swarm.protocol.messages.events import (
    Apply,
    ComputeMerge,
    Discovered,
    Effect,
    Event,
    Keep,
    LeaveAsked,
    Left,
    MergeComputed,
    NotMade,
    Offered,
    Persist,
    Reason,
    Rebuild,
    Record,
    Reduce,
    Send,
    Stored,
    Sync,
    Synced,
    SyncFailed,
    Tick,
    Topic,
    UnitReduced,
    Unobtainable,
)
from swarm.protocol.messages.message_bytes import BareMessage, decode
from swarm.protocol.messages.messages import (
    Ballot,
    Certificate,
    Commit,
    Header,
    Hello,
    Link,
    Message,
    Ready,
    ReducedUnit,
)
from swarm.protocol.rounds import RoundMachine
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.layout import Layout
from swarm.protocol.values.manifest import Entry, Kind, Manifest
from tests.protocol.round_pump import found, make_offer, make_rules
from tests.waiting import wait_until

WAIT_S = 30.0
UNIT = UnitLayout("shared.0", "fp32", (Slice("norm.weight", 0, 4),), 4, 16)
LAYOUT = Layout((UNIT,), {"norm.weight": (4,)})
TIP = replace(found(make_rules(), ["A", "B"]), run="run-1")
HEADER = Header(TIP.code, TIP.digest, TIP.generation)


def manifest(height: int, parent: Manifest = TIP, **changes: Any) -> Manifest:
    return replace(
        parent, height=height, round=height, kind=Kind.QUORUM, parent=parent.digest, **changes
    )


class FakeNode:
    """Its loop is real. Its posts are recorded, and fail if a test says so."""

    def __init__(self, log: list[str]) -> None:
        self.thread = LoopThread("test-network")
        self.peer_id = "A"
        self.traffic, self.ledger = Traffic(), Ledger()
        self.alive, self.failure = True, None
        self.posted: list[tuple[str, bytes]] = []
        self.unreachable: set[str] = set()
        self._log = log

    @property
    def loop(self) -> Any:
        return self.thread.loop

    async def post(self, peer_id: str, payload: bytes, timeout_s: float) -> None:
        if peer_id in self.unreachable:
            raise Unreachable(f"{peer_id}: no answer")
        self._log.append(f"post {peer_id}")
        self.posted.append((peer_id, payload))


class FakeDisk:
    """A slow disk, so that work that does not wait for it comes first."""

    def __init__(self, log: list[str]) -> None:
        self.failures: list[OSError] = []
        self._log = log

    def write(self, record: Record, links: Sequence[Link] = ()) -> None:
        time.sleep(0.05)
        if self.failures:
            raise self.failures.pop(0)
        self._log.append(f"persist {record.tip.height}")


class FakeMachine:
    """Answers each kind of event with a test's effects."""

    def __init__(self) -> None:
        self.record = Record(TIP, None, None)
        self.chain = Chain.of(self.record)
        self.timers = Timers(tick_s=0.05)
        self.rules = make_rules()
        self.first: list[Effect] = []
        self.answers: dict[type[Event], Callable[[Any], Sequence[Effect]]] = {}
        self.events: list[Event] = []
        self.heard = threading.Condition()

    @property
    def tip(self) -> Manifest:
        return self.record.tip

    def foothold(self) -> Foothold:
        return Foothold(Chain.of(self.record))

    def start(self, now: float) -> list[Effect]:
        return self.first

    def foresee(self, message: Message) -> None:
        pass

    def handle(self, event: Event, now: float) -> list[Effect]:
        with self.heard:
            self.events.append(event)
            self.heard.notify_all()
        return list(self.answers.get(type(event), lambda _: ())(event))

    def wait_for(self, kind: type[Event]) -> Any:
        """Waits for the first event of a kind."""
        with self.heard:
            found = self.heard.wait_for(lambda: self.of(kind), WAIT_S)
        assert found, f"no {kind.__name__} came"
        return found[0]

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


class Bench:
    """A driver with its surroundings."""

    def __init__(self, observer: RoundObserver = UNWATCHED) -> None:
        self.log: list[str] = []
        self.node = FakeNode(self.log)
        self.store = BlobStore()
        self.machine = FakeMachine()
        self.merged: dict[str, Content] = {}
        self.disk = FakeDisk(self.log)
        self.driver = RoundDriver(
            cast(Node, self.node),
            self.store,
            cast(RoundMachine, self.machine),
            record_file=cast(RecordFile, self.disk),
            layout=LAYOUT,
            settings=RoundConfig(local_steps=1),
            merger=lambda tip: self.merged,
            observer=observer,
        )

    def start(self, *effects: Effect) -> None:
        self.machine.first = list(effects)
        self.driver.start()
        self.machine.wait_for(Tick)

    def stop(self) -> None:
        self.node.thread.run(self.driver.stop(), WAIT_S)
        assert not self.driver._actor and not self.driver._work
        self.node.thread.stop(WAIT_S)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.stop()


def hello(peer: str) -> Send:
    return Send(peer, HEADER, Hello(ask=True))


def applying(*manifests: Manifest) -> list[Effect]:
    return [Apply(manifest, manifest.parent or "") for manifest in manifests]


# ---------------------------------------------------------------- effects


class Holding(RoundObserver):
    """Holds the first message back until something was made durable. Records what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.held: list[Effect] = []

    def on_rounds(self, machine: RoundMachine, record_file: RecordFile) -> None:
        self.heard.append("rounds")

    def before_event(self, event: Event) -> None:
        self.heard.append(type(event).__name__)

    def before_offer(self) -> None:
        self.heard.append("offer")

    def before_leave(self) -> None:
        self.heard.append("leave")

    async def carry_out(self, effect: Effect, act: CarryOut) -> None:
        if isinstance(effect, Send) and effect.destination == "B" and not self.held:
            self.held.append(effect)
            return
        await act(effect)
        if isinstance(effect, Persist):
            await act(self.held[0])


def test_an_observer_hears_of_everything_and_may_hold_an_effect_back() -> None:
    observer = Holding()
    bench = Bench(observer)
    try:
        bench.start(hello("B"), hello("C"), Persist(Record(TIP, None, None)))
        assert wait_until(lambda: len(bench.log) == 3)
        assert bench.log == ["post C", "persist 0", "post B"]
        bench.driver.offer(make_offer(make_rules(), "A", TIP))
        bench.machine.wait_for(Offered)
        bench.driver.leave()
        bench.machine.wait_for(LeaveAsked)
    finally:
        bench.stop()
    told = [heard for heard in observer.heard if heard not in ("Tick", "Stored")]
    assert told == ["rounds", "offer", "Offered", "leave", "LeaveAsked"]


def test_nothing_is_sent_before_what_stands_before_it_is_durable(bench: Bench) -> None:
    second = Record(manifest(1), None, TIP)
    bench.start(Persist(Record(TIP, None, None)), hello("B"), Persist(second), hello("C"))
    assert wait_until(lambda: len(bench.log) == 4)
    assert bench.log == ["persist 0", "post B", "persist 1", "post C"]


def test_a_lost_message_is_no_failure(bench: Bench) -> None:
    bench.node.unreachable = {"B"}
    bench.start(hello("B"), hello("C"))
    assert wait_until(lambda: bench.log == ["post C"])
    assert bench.driver.wait_for_tip(TIP.digest, 0.01) == []


def test_what_a_message_refers_to_can_be_fetched_when_it_leaves(bench: Bench) -> None:
    offer = make_offer(make_rules(), "A", TIP)
    bench.start(Send("B", HEADER, Ready(Ballot(0, "B"), offer, None, 1.0)))
    assert wait_until(lambda: len(bench.node.posted) == 1)
    (_, payload), *_ = bench.node.posted
    (digest,) = bench.driver.outbound._sent
    blob = bench.store.get(digest)
    assert blob is not None
    _, message = decode(payload, {digest: bytes(blob)})
    assert isinstance(message, Ready)
    assert message.offer == offer


def test_a_mean_is_stored_and_told(bench: Bench) -> None:
    inputs = [np.array([1, 2, 3, 4], "<f4"), np.array([3, 2, 1, 0], "<f4")]
    digests = [bench.store.put(values.tobytes()) for values in inputs]
    bench.start(Reduce("roster", "shared.0", (("A", digests[0]), ("B", digests[1]))))
    reduced = bench.machine.wait_for(UnitReduced)
    expected = np.array([2, 2, 2, 2], "<f4").tobytes()
    assert reduced == UnitReduced("roster", "shared.0", ReducedUnit(digest_of(expected), 16))
    assert bench.store.get(digest_of(expected)) == expected


def test_a_mean_is_weighted_as_the_machine_says(bench: Bench) -> None:
    inputs = [np.array([1, 2, 3, 4], "<f4"), np.array([5, 2, 7, 0], "<f4")]
    digests = [bench.store.put(values.tobytes()) for values in inputs]
    values = (("A", digests[0]), ("B", digests[1]))
    bench.start(Reduce("roster", "shared.0", values, (300, 100)))
    reduced = bench.machine.wait_for(UnitReduced)
    expected = np.array([2, 2, 4, 3], "<f4").tobytes()
    assert reduced == UnitReduced("roster", "shared.0", ReducedUnit(digest_of(expected), 16))


def test_a_mean_whose_inputs_were_collected_is_not_made_up(bench: Bench) -> None:
    here = bench.store.put(bytes(16))
    bench.start(Reduce("roster", "shared.0", (("A", here), ("B", "0" * 64))))
    assert wait_until(lambda: len(bench.driver._work) == 1), "it asks for heads, and no more"
    ticks = len(bench.machine.of(Tick))
    # The second event comes only after all reports of the work were handled.
    assert wait_until(lambda: len(bench.machine.of(Tick)) > ticks + 1)
    assert not bench.machine.of(UnitReduced)


def test_means_that_the_disk_holds_up_take_neither_the_voice_nor_all_helpers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vote waits for the record. Requests and decoding wait for a helper thread."""
    goes_on, waiting = threading.Event(), []

    def synced_late(effect: Reduce, _: str | None) -> None:
        waiting.append(effect)
        goes_on.wait(WAIT_S)

    monkeypatch.setattr(bench.driver.reducing, "mean", synced_late)
    means = [Reduce(f"roster {number}", "shared.0", (), base="0" * 64) for number in range(10)]
    try:
        bench.start(*means, Persist(Record(TIP, None, None)), hello("B"), Sync(TIP))
        assert wait_until(lambda: "post B" in bench.log)
        bench.machine.wait_for(SyncFailed)
        assert len(waiting) == disk_work.MEANS_AT_ONCE
    finally:
        goes_on.set()
    assert wait_until(lambda: len(waiting) == len(means))


def test_a_merge_is_computed_beside_the_rounds_stored_and_told(bench: Bench) -> None:
    bench.merged = {"expert.0": Content.of(b"merged")}
    bench.start(ComputeMerge(TIP))
    computed = bench.machine.wait_for(MergeComputed)
    digest = digest_of(b"merged")
    assert computed == MergeComputed(TIP.digest, {"expert.0": ReducedUnit(digest, 6)})
    assert bench.store.has(digest)


def whole_manifest(store: BlobStore, **more: Entry) -> Manifest:
    """A manifest whose blobs are in the store, except for those of more entries."""
    value, config, validation = (store.put(word) for word in (b"value", b"c", b"v"))
    founding = replace(TIP.founding, config=config, validation=validation)
    entries = {"shared.0": Entry(value, 5, 1, "A", "fp32"), **more}
    return replace(manifest(1), founding=founding, entries=entries)


def test_synced_is_told_when_the_manifest_and_all_that_it_names_is_here(bench: Bench) -> None:
    complete = whole_manifest(bench.store)
    bench.start(Sync(complete))
    assert bench.machine.wait_for(Synced) == Synced(complete.digest)
    assert bench.store.has(complete.blob)


def test_a_sync_without_all_blobs_is_told_as_failed_and_what_it_lacks_as_lost(bench: Bench) -> None:
    gone = digest_of(b"gone")
    lacking = whole_manifest(bench.store, **{"expert.0": Entry(gone, 4, 1, "A", "fp32")})
    bench.start(Sync(lacking))
    failed = bench.machine.wait_for(SyncFailed)
    assert failed.manifest == lacking.digest
    assert gone in failed.reason
    assert bench.machine.of(Unobtainable) == [
        Unobtainable(gone, bench.node.peer_id, "it is not in the store")
    ]
    assert not bench.machine.of(Synced)


def test_a_sync_that_the_disk_refuses_for_good_is_told_as_failed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Mock(side_effect=StateError("packs/0.pack: the disk is lost"))
    monkeypatch.setattr(bench.store, "sync", refuse)
    bench.start(Sync(manifest(1)))
    told = SyncFailed(manifest(1).digest, "manifest: packs/0.pack: the disk is lost")
    assert bench.machine.wait_for(SyncFailed) == told


def test_a_value_that_cannot_be_made_here_is_told_as_not_made(bench: Bench) -> None:
    bench.start(Rebuild("shared.0", "0" * 64, "1" * 64, "2" * 64))
    told = bench.machine.wait_for(NotMade)
    assert told == NotMade("2" * 64, "its base or its delta is no longer here")
    assert bench.driver.refused["other_bits"] == 1
    assert not bench.machine.of(Unobtainable)


def test_a_blob_found_damaged_is_told_as_lost(bench: Bench) -> None:
    bench.start()
    digest = bench.store.put(b"value")
    place = bench.store._places[digest]
    place.pack.write(place.offset, 0, memoryview(b"VALUE"))
    assert bench.store.verify([digest]) == [digest]
    lost = bench.machine.wait_for(Unobtainable)
    assert lost == Unobtainable(digest, bench.node.peer_id, "it reads wrongly")


def test_a_disk_too_full_to_be_tidied_does_not_hold_up_the_rounds(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    def full(*_: object) -> None:
        raise StateError("full") from OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(bench.store, "shrink", full)
    bench.start(Keep(frozenset()), Persist(Record(manifest(1), None, None)))
    assert wait_until(lambda: bench.log == ["persist 1"])
    assert wait_until(lambda: "garbage is left until the next round: full" in caplog.text)


def test_rounds_go_on_while_the_room_of_what_was_dropped_is_given_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poll is answered and a manifest made durable, even while a slow disk takes long."""
    begun, goes_on = threading.Event(), threading.Event()

    def slow(is_ended: Callable[[], bool]) -> None:
        begun.set()
        goes_on.wait(WAIT_S)

    monkeypatch.setattr(bench.store, "shrink", slow)
    bench.machine.answers[Discovered] = lambda _: [hello("C"), Persist(Record(TIP, None, None))]
    dropped = bench.store.put(b"dropped")
    try:
        bench.start(Keep(frozenset()), hello("B"), Sync(TIP))
        assert begun.wait(WAIT_S)
        assert not bench.store.has(dropped), "unnamed blobs are removed at once"
        bench.driver.discovered(["C"])
        assert wait_until(lambda: bench.log == ["post B", "post C", "persist 0"])
        bench.machine.wait_for(SyncFailed)
        bench.machine.events.clear()
        bench.machine.wait_for(Tick)
    finally:
        goes_on.set()


def test_a_driver_that_ends_ends_what_gives_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, begun, ended = Bench(), threading.Event(), threading.Event()

    def until_its_end(is_ended: Callable[[], bool]) -> None:
        begun.set()
        assert wait_until(is_ended)
        ended.set()

    monkeypatch.setattr(bench.store, "shrink", until_its_end)
    try:
        bench.start(Keep(frozenset()))
        assert begun.wait(WAIT_S)
    finally:
        bench.stop()
    assert ended.is_set()


def test_what_nothing_names_any_more_is_collected(bench: Bench) -> None:
    kept, dropped = bench.store.put(b"kept"), bench.store.put(b"dropped")
    bench.start(Keep(frozenset([kept])))
    assert wait_until(lambda: bench.store.digests() == [kept])
    assert not bench.store.has(dropped)


def test_refusals_are_counted_and_the_last_reason_is_for_people(bench: Bench) -> None:
    bench.start(Reason(Topic.REFUSED, "proposal refused: it belongs to another run", "PROPOSE"))
    assert bench.driver.refused == {"bad_propose": 1}
    assert bench.driver.last_reason == "proposal refused: it belongs to another run"


# ---------------------------------------------------------------- the trainer's side


def written_in_pieces(driver: RoundDriver) -> tuple[str, int]:
    with driver.open_value(5) as draft:
        draft.write(b"va")
        draft.write(b"lue")
        return draft.finish(), 5


def stored(driver: RoundDriver) -> tuple[str, int]:
    return driver.store_value(Content.of(b"value"))


@pytest.mark.parametrize("store", [stored, written_in_pieces])
def test_a_value_survives_a_collection_until_the_machine_decides_on_it(
    bench: Bench, store: Callable[[RoundDriver], tuple[str, int]]
) -> None:
    digest, size = store(bench.driver)
    assert (digest, size) == (digest_of(b"value"), 5)
    bench.store.collect([])  # before the machine has heard of it
    assert bench.store.has(digest)
    bench.start()
    assert bench.machine.wait_for(Stored) == Stored(digest)
    assert wait_until(lambda: bench.store.collect([]) == 1)


def test_offers_leaves_and_discoveries_reach_the_machine_in_order(bench: Bench) -> None:
    bench.start()
    offer = make_offer(make_rules(), "A", TIP)
    bench.driver.offer(offer)
    bench.driver.discovered(["B", "C"])
    bench.driver.leave()
    bench.machine.wait_for(LeaveAsked)
    told = [event for event in bench.machine.events if not isinstance(event, Tick)]
    assert told == [Offered(offer), Discovered(("B", "C")), LeaveAsked()]


def test_waiting_gives_every_manifest_applied_since(bench: Bench) -> None:
    first = manifest(1)
    second = manifest(2, first)
    bench.machine.answers[Offered] = lambda _: applying(first, second)
    bench.start()
    assert bench.driver.wait_for_tip(TIP.digest, 0.05) == []
    bench.driver.offer(make_offer(make_rules(), "A", TIP))
    assert wait_until(lambda: bench.driver.tip == second)
    assert [a.manifest for a in bench.driver.wait_for_tip(TIP.digest, WAIT_S)] == [first, second]
    assert [a.manifest for a in bench.driver.wait_for_tip(first.digest, WAIT_S)] == [second]
    assert bench.driver.wait_for_tip(second.digest, 0.05) == []


def test_each_tip_comes_with_the_parent_that_the_record_named_beside_it(bench: Bench) -> None:
    """The machine is ahead of its effects, so its own record may name another tip by then."""
    first = manifest(1)
    second = manifest(2, first)
    effects = [
        [Persist(Record(tip, None, parent)), *applying(tip)]
        for tip, parent in ((first, TIP), (second, first))
    ]
    bench.machine.answers[Offered] = lambda _: [*effects[0], *effects[1]]
    bench.start()
    bench.driver.offer(make_offer(make_rules(), "A", TIP))
    assert wait_until(lambda: bench.driver.newest.manifest == second)
    applied = bench.driver.wait_for_tip(TIP.digest, WAIT_S)
    assert [(a.manifest, a.parent) for a in applied] == [(first, TIP), (second, first)]


def test_who_waits_since_long_ago_gets_the_newest_only(bench: Bench) -> None:
    path = [manifest(1)]
    while len(path) < 12:
        path.append(manifest(len(path) + 1, path[-1]))
    bench.start(*applying(*path))
    assert [a.manifest for a in bench.driver.wait_for_tip(TIP.digest, WAIT_S)] == path[-1:]


def test_having_left_ends_the_wait_with_the_reason(bench: Bench) -> None:
    bench.machine.answers[LeaveAsked] = lambda _: [Left("manifest 7 lists this peer no longer")]
    bench.start()
    bench.driver.leave()
    assert bench.driver.wait_for_tip(TIP.digest, WAIT_S) == []
    assert bench.driver.left == "manifest 7 lists this peer no longer"


def test_a_machine_that_fails_is_told_to_the_trainer_not_waited_for(bench: Bench, caplog) -> None:
    bench.machine.answers[Offered] = Mock(side_effect=ZeroDivisionError("a bug"))
    bench.start()
    bench.driver.offer(make_offer(make_rules(), "A", TIP))
    began_s = time.monotonic()
    with pytest.raises(SwarmError, match="a bug"):
        bench.driver.wait_for_tip(TIP.digest, 10 * WAIT_S)
    assert time.monotonic() - began_s < 2 * WAIT_S
    assert "a task of the round driver failed" in caplog.text


def test_a_full_disk_is_waited_for_and_nothing_is_said_before_the_record_is_durable(
    bench: Bench, caplog
) -> None:
    bench.disk.failures = [OSError(errno.ENOSPC, "No space left on device")] * 2
    bench.start(Persist(Record(manifest(1), None, None)), hello("B"))
    assert wait_until(lambda: len(bench.log) == 2)
    assert bench.log == ["persist 1", "post B"]
    assert caplog.text.count("record: No space left on device (free some space)") == 2


def test_a_disk_that_fails_for_good_ends_the_peer_with_the_error_of_its_kind(bench: Bench) -> None:
    bench.disk.failures = [OSError(errno.EACCES, "Permission denied")]
    bench.machine.first = [Persist(Record(manifest(1), None, None))]
    bench.driver.start()
    with pytest.raises(StateError, match=r"record: .*Permission denied"):
        bench.driver.wait_for_tip(TIP.digest, WAIT_S)


def test_a_dead_network_is_told_to_the_trainer(bench: Bench) -> None:
    bench.start()
    bench.node.alive, bench.node.failure = False, "libp2p's daemon ended with status -9"
    with pytest.raises(NetworkDown, match="status -9"):
        bench.driver.wait_for_tip(TIP.digest, WAIT_S)


def test_work_that_lacks_memory_is_tried_again(bench: Bench, caplog) -> None:
    lacking = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    merged = {"expert.0": Content.of(b"merged")}
    bench.driver.merger = Mock(side_effect=[MemoryError(), lacking, merged])
    bench.start(ComputeMerge(TIP))
    assert bench.machine.wait_for(MergeComputed)
    assert caplog.text.count("merge: Cannot allocate memory (stop other programs)") == 2


def test_memory_that_stays_away_ends_the_peer(bench: Bench, monkeypatch) -> None:
    monkeypatch.setattr(disk_retry, "MEMORY_PATIENCE_S", 0.0)
    bench.driver.merger = Mock(side_effect=MemoryError)
    bench.start(ComputeMerge(TIP))
    with pytest.raises(OutOfMemory, match="gave up"):
        bench.driver.wait_for_tip(TIP.digest, WAIT_S)


def test_a_failed_task_is_logged_and_the_rounds_go_on(bench: Bench, caplog) -> None:
    bench.driver.merger = lambda _: 1 // 0
    bench.start(ComputeMerge(TIP))
    assert wait_until(lambda: "a task of the round driver's work failed" in caplog.text)
    bench.machine.events.clear()
    bench.machine.wait_for(Tick)


# ---------------------------------------------------------------- helpers


def test_strangers_get_the_tip_with_its_certificate_and_parent(bench: Bench) -> None:
    decided = manifest(1)
    certificate = Certificate(Ballot(0, "A"), {})
    bench.machine.record = Record(decided, certificate, TIP)
    bench.start()
    bench.machine.chain = Chain.of(bench.machine.record)
    payload = bench.driver.heads.commit_of_tip(TIP.digest)
    named = BareMessage(payload).attachments
    blobs = {digest: bytes(bench.store.get(digest)) for digest, _ in named}
    assert {m.blob for m in (decided, TIP)} < blobs.keys()
    header, message = decode(payload, blobs)
    assert header.tip == decided.digest
    path = (Link(TIP.head), Link(decided.head, certificate))
    assert message == Commit(decided, certificate, TIP, path)
    assert all(bench.store.has(digest) for digest in blobs)


def test_a_strangers_fetch_is_leased_as_a_whole_and_a_members_is_not(bench: Bench) -> None:
    values = {unit: bench.store.put(unit.encode()) for unit in TIP.entries}
    entries = {u: replace(e, digest=values[u]) for u, e in TIP.entries.items()}
    bench.machine.record = Record(replace(TIP, entries=entries), None, None)
    asked = values["expert.0"]
    bench.driver.asked_for("B", asked)
    assert bench.store.collect([values["expert.1"]], time.monotonic()) == len(values) - 1
    for unit in TIP.entries:
        bench.store.put(unit.encode())
    bench.driver.asked_for("stranger", asked)
    assert bench.store.collect([], time.monotonic()) == 0
