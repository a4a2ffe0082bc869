"""The earlier knowledge that a peer keeps when it enters a run, and facts that it cannot know."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from swarm.config import PeerConfig
from swarm.errors import DataQuotaSpent, InvitationError
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.rounds.record_file import RecordFile
from swarm.network.runs.run_search import Opened
from swarm.network.runs.signed_invitations import credential_for, invite
from swarm.network.runs.tips import Shown
from swarm.network.wire.identity import load_or_create_identity
from swarm.network.wire.loop_thread import LoopThread
from swarm.peer.machine.state_directory import RunDirectory
from swarm.peer.start import entry
from swarm.peer.start.entry import Started, Starter
from swarm.peer.status.observing import UNOBSERVED
from swarm.peer.text.run_request import Wanted
from swarm.peer.training.leaving import Stop, Stopped
from swarm.protocol.chain.chain_record import UNTIL_IT_CONTRIBUTES, abstains, without_record
from swarm.protocol.messages.events import Record, Regained
from swarm.protocol.messages.messages import Ballot, Certificate, Link
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.manifest import Manifest
from tests.protocol.round_pump import found, make_rules

FOUNDING = found(make_rules(), ["A", "B", "C"])
CERTIFICATE = Certificate(Ballot(0, "A"), {})


def after(parent: Manifest) -> Manifest:
    height = parent.height + 1
    return replace(parent, height=height, round=height, parent=parent.digest)


OWN, NEWER = after(FOUNDING), after(after(FOUNDING))
PATH = (Link(FOUNDING.head), Link(OWN.head, CERTIFICATE), Link(NEWER.head, CERTIFICATE))


ANY: Any = SimpleNamespace()


class Entering(Starter):
    """Peer A, whose tip the others drop during its fetch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.state: Any
        self.host: Any
        self.wanted: Any
        self.text: Any
        self.node: Any = SimpleNamespace(peer_id="A", entrances=("A", "B", "silent"))
        self.observer: Any = SimpleNamespace(on_fetched=None)
        self.path = folder / "record"
        directory = SimpleNamespace(record_path=self.path, read_founding=lambda: FOUNDING)
        self.started: Any = SimpleNamespace(
            run=None, run_id="run", layout=None, directory=directory, store=None
        )
        for name in ("recompute_initial", "announcement"):
            monkeypatch.setattr(entry, name, lambda *_: None)
        monkeypatch.setattr(entry, "fetch_newest_state", self.fetch)

    async def fetch(self, *_: object, **__: object) -> Shown:
        return Shown(Record(NEWER, CERTIFICATE, OWN), PATH)

    def wait_for(self, coroutine: Any) -> Any:
        return asyncio.run(coroutine)

    def repaired(self, record: Record) -> Record:
        RecordFile(self.path).write(record, PATH[:2])
        self.started.record = record
        return self._repair(self.started, ANY)


def test_a_peer_that_must_not_vote_must_not_once_the_others_have_given_it_a_newer_tip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It lost its record and joined again. Then values of its tip were damaged [P5]."""
    peer = Entering(monkeypatch, tmp_path)
    record = without_record("A", Record(OWN, CERTIFICATE, FOUNDING), PATH[:2])
    assert abstains(record)
    repaired = peer.repaired(record)
    assert repaired.tip == NEWER and abstains(repaired)
    assert repaired.abstain_until_height == UNTIL_IT_CONTRIBUTES
    assert RecordFile(peer.path).read() == repaired


def test_a_peer_that_votes_again_still_does_after_a_repair(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = replace(
        without_record("A", Record(OWN, CERTIFICATE, FOUNDING), PATH[:2]),
        regained=Regained(OWN.generation, OWN.height),
    )
    assert not abstains(record)
    assert not abstains(Entering(monkeypatch, tmp_path).repaired(record))


class Joining(Entering):
    """Peer A, which is shown a tip, with or without room in its quota."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        super().__init__(monkeypatch, folder)
        shows = AsyncMock(return_value=Shown(Record(OWN, CERTIFICATE, FOUNDING), PATH[:2]))
        for name in ("present_peers", "measure_line"):
            monkeypatch.setattr(entry, name, AsyncMock(return_value={}))
        monkeypatch.setattr(entry, "newest_tip", shows)
        for name in ("layout_of", "require_admission", "missing_bytes"):
            monkeypatch.setattr(entry, name, lambda *_: None)
        monkeypatch.setattr(entry, "whom_to_ask", lambda *_: ["B"])
        monkeypatch.setattr(self, "_open_text", lambda *_: [])
        self.directory = RunDirectory(folder)
        monkeypatch.setattr(self, "new_directory", lambda *_: self.directory)
        self.state = SimpleNamespace(run=lambda _: self.directory, current_run="demo", peers=0)
        self.quota = SimpleNamespace(require_room=lambda *_: None)
        self.host = SimpleNamespace(
            serve=lambda _: None,
            quota=self.quota,
            remember_peers=self.remember_peers,
            node=self.node,
        )
        self.wanted, self.stop, self.credential = Wanted(), Stop(1.0), None
        self.text = SimpleNamespace(shards=None)
        self.admission = "open"

    def remember_peers(self) -> None:
        self.state.peers += 1

    def joined(self) -> Started:
        section = SimpleNamespace(admission=self.admission)
        run: Any = SimpleNamespace(canonical_json=lambda: b"{}", run=section)
        announced: Any = SimpleNamespace(record=SimpleNamespace(run="run"), publishers=("B",))
        return self._join_opened(Opened(announced, run, FOUNDING), ANY)


def test_a_member_without_its_record_must_not_vote_on_the_tip_that_it_has_fetched_at_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others continued while it fetched the tip that it was shown first."""
    peer = Joining(monkeypatch, tmp_path)
    started = peer.joined()
    assert started.record.tip == NEWER and abstains(started.record)
    assert RecordFile(peer.path).read() == started.record


def test_nothing_is_fetched_of_a_state_for_which_the_months_bytes_are_too_few(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    peer = Joining(monkeypatch, tmp_path)
    fetched: list[object] = []
    peer.quota.require_room = Mock(side_effect=DataQuotaSpent("too few"))
    monkeypatch.setattr(entry, "fetch_newest_state", fetched.append)
    with pytest.raises(DataQuotaSpent, match="too few"):
        peer.joined()
    assert not fetched
    assert (peer.state.current_run, peer.state.peers) == ("demo", 0), "it is in no new run"


class Killed(BaseException):
    """Stands for kill -9: nobody catches it."""


def test_what_a_join_knows_is_on_disk_before_the_model_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next start gets only the state directory."""
    peer = Joining(monkeypatch, tmp_path)
    key = load_or_create_identity(tmp_path / "key")
    credential = credential_for(invite(key, "run", uses=1, last_round=9), key)
    peer.wanted, peer.credential = Wanted(vouched=OWN.digest), credential
    shown: list[Any] = []

    async def shows(*asked: object) -> Shown:
        shown.append(asked[-1])
        return Shown(Record(OWN, CERTIFICATE, FOUNDING), PATH[:2])

    monkeypatch.setattr(entry, "newest_tip", shows)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(entry, "fetch_newest_state", AsyncMock(side_effect=Killed))
        peer.joined()
    assert (peer.state.current_run, peer.state.peers) == ("run", 1)
    assert not peer.directory.record_path.exists(), "nothing to be resumed"
    assert peer.directory.read_entered_by() == ("B",), "not a peer without a record in the run"
    admitted: list[Any] = []
    monkeypatch.setattr(entry, "require_admission", lambda *asked: admitted.append(asked[-1]))
    peer.wanted, peer.credential = Wanted(), None
    for peer.admission in ("invited", "open"):
        peer.joined()
    assert [trust.begin for trust in shown] == 3 * [OWN.digest]
    assert admitted == [credential, None], "in an open run it may be used up by now"


def test_a_newcomer_that_is_refused_keeps_what_it_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    peer = Joining(monkeypatch, tmp_path)
    key = load_or_create_identity(tmp_path / "key")
    good, bad = (credential_for(invite(key, "run", uses=n, last_round=9), key) for n in (1, 2))
    peer.directory.write_credential(good)
    peer.wanted, peer.credential = Wanted(vouched=OWN.digest), bad
    monkeypatch.setattr(entry, "require_admission", Mock(side_effect=InvitationError("used up")))
    with pytest.raises(InvitationError):
        peer.joined()
    assert (peer.directory.read_credential(), peer.directory.read_vouched()) == (good, None)
    assert (peer.state.current_run, peer.state.peers) == ("demo", 0)


def test_what_was_changed_since_a_join_that_was_killed_is_not_taken_for_the_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    value = b"value" * 100
    entries = {unit: replace(e, digest=digest_of(value)) for unit, e in OWN.entries.items()}
    tip = replace(OWN, entries=entries)
    store = BlobStore(tmp_path)
    store.sync([store.put(value)])
    for pack in (tmp_path / "packs").glob("*.pack"):
        pack.write_bytes(pack.read_bytes().replace(value, b"Value" * 100))
    assert BlobStore(tmp_path).has(digest_of(value))
    peer = Joining(monkeypatch, tmp_path)
    shows = AsyncMock(return_value=Shown(Record(tip, CERTIFICATE, FOUNDING), PATH[:2]))
    monkeypatch.setattr(entry, "newest_tip", shows)
    assert not peer.joined().store.has(digest_of(value)), "it is fetched again"


@pytest.fixture
def waiting() -> Iterator[Starter]:
    """A peer that waits for something in its node's loop."""
    thread, host = LoopThread("test-entering"), SimpleNamespace()
    host.stop, host.state, host.config = Stop(1.0), SimpleNamespace(data_path=None), PeerConfig()
    host.node = thread
    any_host: Any = host
    yield Starter(any_host, Wanted(), UNOBSERVED)
    thread.stop(5.0)


def test_a_peer_whose_quota_is_used_up_while_it_enters_says_so(waiting: Starter) -> None:
    waiting.stop.ask(DataQuotaSpent("used up"))
    with pytest.raises(DataQuotaSpent, match="used up"):
        waiting.wait_for(asyncio.sleep(60.0))


def test_a_peer_that_a_person_stops_while_it_enters_is_stopped(waiting: Starter) -> None:
    waiting.stop.ask()
    with pytest.raises(Stopped):
        waiting.wait_for(asyncio.sleep(60.0))


def test_what_a_peer_waits_for_while_it_enters_has_no_limit(
    waiting: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 7B over a slow line, or a founder that waits for others, takes more than a day."""
    run, limits = waiting.node.run, []

    def noted(coroutine: Any, timeout_s: float | None) -> Any:
        limits.append(timeout_s)
        return run(coroutine, timeout_s)

    monkeypatch.setattr(waiting.node, "run", noted)
    monkeypatch.setattr(entry, "STOP_POLL_S", 0.01)
    assert waiting.wait_for(asyncio.sleep(0.05, "the model")) == "the model"
    assert limits == [None]
