"""An exporter's requests to peers: a proof only of something new, values from idle peers."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from peers.actions.exports import FETCHING, _fetched_beside
from swarm.config import RunConfig
from swarm.errors import NobodyReachable
from swarm.export.facts import Form
from swarm.export.model_fetch import EMPTY_TURNS, MAX_NAMES, FromPeers
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.runs.observer import Seen
from swarm.network.runs.run_search import Announced
from swarm.protocol.records.records import PeerState, RunRecord, RunState, ValidationRecord
from swarm.protocol.values.digests import PIECE_BYTES, piece_index
from swarm.protocol.values.manifest import Manifest
from tests.export.models import after, found, toy_run
from tests.fake_time import Time
from tests.peer_records import peer_record

RUN = toy_run()


class Swarm:
    """An `Observer` of two peers. One of them sends requested blobs while it is `willing`."""

    def __init__(self, held_out: bytes = b"held") -> None:
        self.remote = BlobStore()
        self.manifest = after(self.remote, RUN, found(self.remote, RUN, held_out), 2)
        self.store = BlobStore()
        self.states = {"QmA": PeerState.TRAINING, "QmB": PeerState.AVERAGING}
        self.willing = {"QmA", "QmB"}
        self.gathers = 1
        self.proofs = 0
        self.losses: dict[str, float] = {"QmA": 3.5}
        self.asked: list[Sequence[str]] = []

    def find(self, wanted: str | None, deadline_s: float) -> Announced:
        state = RunState.GATHERING if self.gathers else RunState.RUNNING
        self.gathers = max(self.gathers - 1, 0)
        record = RunRecord(
            self.manifest.run, "exact", "0" * 64, "QmA", "0" * 64, 1, "0" * 64, 1, state, 2
        )
        return Announced(record, ("QmA",))

    def config(self, announced: Announced, deadline_s: float) -> RunConfig:
        return RUN

    def look(self, run: str, deadline_s: float) -> Seen:
        digest, number = self.manifest.digest, self.manifest.round
        peers = {
            peer: peer_record(peer, state=state, round=number, manifest_digest=digest)
            for peer, state in self.states.items()
        }
        validations = {
            peer: ValidationRecord(number, digest, loss, 10, 10)
            for peer, loss in self.losses.items()
        }
        return Seen(peers, {}, validations)

    def tip(self, announced: Announced, peers: Mapping[str, Any], deadline_s: float) -> Manifest:
        self.proofs += 1
        return self.manifest

    def fetch_model(
        self,
        manifest: Manifest,
        layout: object,
        *,
        sources: Sequence[str],
        on_blob: Callable[[int, int], None],
        deadline_s: float,
    ) -> None:
        self.asked.append(sources)
        if not self.willing & set(sources):
            raise NobodyReachable("the model: no answer within 60 s")
        for digest in manifest.blobs:
            content = self.remote.get(digest)
            assert content is not None
            self.store.put(bytes(content))


def source(swarm: Swarm) -> FromPeers:
    time = Time()
    return FromPeers(swarm, swarm.store, None, clock=time, sleep=time.sleep)  # type: ignore[arg-type]


@pytest.fixture
def swarm() -> Swarm:
    return Swarm()


def test_a_run_that_gathers_is_waited_for_but_not_for_ever(swarm: Swarm) -> None:
    swarm.gathers = 100
    assert source(swarm).run_id == swarm.manifest.run
    swarm.gathers = 10_000
    with pytest.raises(NobodyReachable, match="has gathered peers for 600 s"):
        source(swarm)


def test_a_proof_is_asked_for_once_somebody_has_the_round(swarm: Swarm) -> None:
    peers = source(swarm)
    assert peers.newest(3) is None and not swarm.proofs
    assert peers.newest(2) is swarm.manifest and swarm.proofs == 1


def test_who_follows_many_peers_reads_what_they_say_less_often(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = source(swarm)
    assert (peers.pause_s, peers.newest(3), peers.pause_s) == (5.0, None, 5.0)
    swarm.states = {f"Qm{number}": PeerState.TRAINING for number in range(256)}
    assert (peers.newest(3), peers.pause_s) == (None, 16.0)
    swarm.willing, swarm.losses = set(swarm.states), {}
    looks: list[str] = []
    real = swarm.look
    monkeypatch.setattr(swarm, "look", lambda *asked: looks.append(asked[0]) or real(*asked))
    peers.bring(swarm.manifest, Form())
    assert len(looks) == 3, "once for sources, and twice in 15 s for a loss"


def test_values_are_asked_of_a_peer_whose_link_is_idle(swarm: Swarm) -> None:
    facts = source(swarm).bring(swarm.manifest, Form())
    assert swarm.asked == [["QmA"]]
    assert facts.names == {"QmA": "name-of-QmA", "QmB": "name-of-QmB"}
    assert facts.val_loss == 3.5 and facts.model.manifest is swarm.manifest


def test_busy_peers_are_asked_where_idle_ones_send_nothing_up_to_a_limit(swarm: Swarm) -> None:
    swarm.willing = {"QmB"}
    source(swarm).bring(swarm.manifest, Form())
    assert swarm.asked == [["QmA"], ["QmA", "QmB"]]
    swarm.willing, swarm.asked = set(), []
    with pytest.raises(NobodyReachable, match="no answer"):
        source(swarm).bring(after(swarm.remote, RUN, swarm.manifest), Form())
    assert len(swarm.asked) == EMPTY_TURNS


class Thin(Swarm):
    """One piece of a large blob comes in each turn, and all other blobs after it."""

    def fetch_model(self, manifest: Manifest, *args: Any, **kwargs: Any) -> None:
        digest, size = manifest.founding.validation, manifest.founding.validation_bytes
        blob = self.remote.get(digest)
        assert blob is not None
        arriving, number = self.store.writer(digest, size), len(self.asked)
        arriving.set_index(piece_index(blob))
        arriving.write_piece(number, blob[number * PIECE_BYTES : (number + 1) * PIECE_BYTES])
        if not arriving.complete:
            self.asked.append(kwargs["sources"])
            raise NobodyReachable("the model: no answer within 60 s")
        self.store.keep(arriving)
        super().fetch_model(manifest, *args, **kwargs)


def test_a_blob_that_comes_piece_by_piece_is_not_given_up() -> None:
    thin = Thin(bytes(6 * PIECE_BYTES + 1))
    source(thin).bring(thin.manifest, Form())
    assert thin.asked == 7 * [["QmA"]], "nor is a busy peer asked"


class Killed(BaseException):
    """No code of ours cleans up after it."""


class Dying(Swarm):
    """One value comes in the first turn. The second turn ends the process."""

    def fetch_model(self, manifest: Manifest, *args: Any, **kwargs: Any) -> None:
        digest = manifest.founding.validation
        if self.store.has(digest):
            raise Killed
        self.store.put(self.remote.get(digest) or b"", digest)
        raise NobodyReachable("the model: no answer within 60 s")


def test_what_came_in_a_turn_survives_a_kill(tmp_path: Path) -> None:
    dying = Dying()
    dying.store = BlobStore(tmp_path)
    with pytest.raises(Killed):
        source(dying).bring(dying.manifest, Form())
    assert BlobStore(tmp_path).digests() == [dying.manifest.founding.validation]


def damage(folder: Path, content: bytes) -> None:
    """Changes the first byte of a blob that lies in a store."""
    for pack in (folder / "packs").glob("*.pack"):
        pack.write_bytes(pack.read_bytes().replace(content, b"?" + content[1:]))


def test_what_was_changed_on_the_disk_since_is_fetched_anew(swarm: Swarm, tmp_path: Path) -> None:
    digest, folder = swarm.manifest.founding.validation, tmp_path / FETCHING
    store = BlobStore(folder)
    store.sync([store.put(b"held", digest)])
    damage(folder, b"held")
    assert bytes(BlobStore(folder).get(digest) or b"") == b"?eld"
    with _fetched_beside(tmp_path) as swarm.store:
        source(swarm).bring(swarm.manifest, Form())
        assert bytes(swarm.store.get(digest) or b"") == b"held"


def test_a_strangers_loss_does_not_count_and_a_missing_one_is_soon_given_up(swarm: Swarm) -> None:
    swarm.losses = {"QmStranger": 0.1}
    facts = source(swarm).bring(swarm.manifest, Form())
    assert facts.val_loss is None and facts.losses == ()


def test_of_its_own_round_a_model_has_only_its_own_loss(swarm: Swarm) -> None:
    """A round with a merge has two states, which are measured separately."""
    peers = source(swarm)
    peers.bring(swarm.manifest, Form())
    merged = dataclasses.replace(swarm.manifest, height=3, merged=1)
    swarm.remote.put(merged.encoded)
    swarm.manifest, swarm.losses = merged, {"QmA": 3.25}
    assert peers.bring(merged, Form()).losses == ((2, 3.25),)
    swarm.manifest, swarm.losses = dataclasses.replace(merged, height=4, round=3), {}
    swarm.remote.put(swarm.manifest.encoded)
    facts = peers.bring(swarm.manifest, Form())
    assert facts.losses == ((2, 3.25),) and facts.val_loss is None


def test_names_of_peers_that_come_and_go_are_bounded(swarm: Swarm) -> None:
    """Anybody may publish a record, and an exporter follows a run for weeks."""
    peers = source(swarm)
    for number in range(0, 2 * MAX_NAMES, 512):
        swarm.states = {f"Qm{number + i}": PeerState.TRAINING for i in range(512)}
        peers._look()
    assert len(peers._names) == MAX_NAMES and f"Qm{2 * MAX_NAMES - 1}" in peers._names
