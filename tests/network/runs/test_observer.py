"""A guest finds a run, reads its records and fetches its model, and believes no forgery."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from swarm.config import RunConfig, validate_config
from swarm.errors import NobodyReachable
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.blob_server import BlobServer
from swarm.network.fetch.bulk import PROTOCOL
from swarm.network.node.node import Handlers, Node
from swarm.network.runs import observer
from swarm.network.runs.joiner import publish_peer
from swarm.network.runs.observer import Observer
from swarm.network.runs.run_founding import founding_manifest
from swarm.network.runs.run_records import fetch_dated, publish
from swarm.network.runs.run_search import (
    MAX_ASKED,
    RUN_QUESTION,
    Announced,
    encode_preparing,
    whom_to_ask,
)
from swarm.network.runs.tips import asked_tip
from swarm.network.wire.identity import load_or_create_identity
from swarm.protocol.messages.message_bytes import encode
from swarm.protocol.messages.messages import Ballot, Certificate, Commit, Header, Link, Signature
from swarm.protocol.records.records import (
    RunRecord,
    RunState,
    Score,
    ScoreRecord,
    ValidationRecord,
    encode_record,
    runs_key,
    scores_keys,
    validation_key,
)
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.layout import Layout, layout_of
from swarm.protocol.values.manifest import Founding, Kind, Manifest, run_id
from tests.blobs import blob_of
from tests.peer_records import peer_record
from tests.waiting import wait_until

WAIT_S = 60.0
SHORT_S = 6.0


def tiny_run() -> RunConfig:
    values = {
        "run": {"name": "tiny", "rounds": 2},
        "model": {
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 8,
        },
        "data": {"sequence_length": 8, "validation_bytes": 64},
        "train": {"batch_tokens": 8, "micro_batch_sequences": 1},
        "optimizer": {"lr": 1e-3},
        "round": {"local_steps": 2},
    }
    return validate_config(RunConfig, values, source="test")


@dataclass
class Lonely:
    """A run of one peer, as far as a guest can see."""

    run: RunConfig = field(default_factory=tiny_run)
    store: BlobStore = field(default_factory=BlobStore)
    shown: Manifest | None = None
    """The tip that it shows."""
    votes: dict[str, Signature] = field(default_factory=dict)
    """Signatures of the tip."""
    told: bytes = b""
    """Its answer to a request for its run."""

    def start(self, peers) -> Node:
        server = BlobServer()
        server.attach(self.store)
        handlers = Handlers(on_request=self._answer, streams={PROTOCOL: server.serve})
        self.node = peers.node(handlers)
        self.layout = layout_of(self.run)
        self.manifest = self.shown = self._found()
        self.id = run_id("tiny", self.run.fingerprint(), self.manifest.blob)
        return self.node

    def _found(self) -> Manifest:
        zeros = _zeros(self.layout)
        initial = {}
        for unit in self.layout.units:
            blob = blob_of(unit, zeros)
            initial[unit.unit] = (self.store.put(blob), len(blob))
        config, held_out = self.run.canonical_json(), bytes(256)
        founding = Founding(
            self.node.peer_id, "nonce", self.store.put(config), len(config),
            self.store.put(held_out), len(held_out),
        )  # fmt: skip
        manifest = founding_manifest(
            founding, self.run, self.layout, initial, {self.node.peer_id: 1.0}
        )
        self.store.put(manifest.encoded)
        return manifest

    async def _answer(self, _source: str, question: bytes) -> bytes:
        if question == RUN_QUESTION:
            return self.told
        if asked_tip(question, self.id) != self.manifest.digest or self.shown is None:
            return b""
        tip = self.shown
        header = Header(tip.code, tip.digest, tip.generation)
        payload, attachments = encode(header, Commit(tip, None, None, self.path()))
        for blob in attachments.values():
            self.store.put(blob)
        return payload

    def path(self) -> tuple[Link, ...]:
        """The claimed proof of the tip that it shows."""
        founding = Link(self.manifest.head)
        if self.shown is None or self.shown == self.manifest:
            return (founding,)
        return (founding, Link(self.shown.head, Certificate(Ballot(0, "X"), self.votes)))

    def record(self, **changes) -> RunRecord:
        manifest = self.manifest
        record = RunRecord(
            run=self.id, name="tiny", fingerprint=self.run.fingerprint(),
            founder=self.node.peer_id, founding=manifest.blob,
            founding_bytes=len(manifest.encoded), config=manifest.founding.config,
            config_bytes=manifest.founding.config_bytes, state=RunState.RUNNING,
            wait_for_peers=1,
        )  # fmt: skip
        return dataclasses.replace(record, **changes)

    def announce(self, **changes) -> None:
        record, node = self.record(**changes), self.node
        loss = ValidationRecord(0, self.manifest.digest, 5.5, 64, 64)
        node.run(publish(node, runs_key(node.peer_id), record), WAIT_S)
        node.run(publish(node, validation_key(record.run, node.peer_id), loss), WAIT_S)
        node.run(publish_peer(node, record.run, peer_record(node.peer_id)), WAIT_S)


def _zeros(layout: Layout) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in layout.shapes.items()}


@pytest.fixture
def lonely(peers) -> Lonely:
    found = Lonely()
    found.start(peers)
    return found


@pytest.fixture
def store() -> BlobStore:
    return BlobStore()


@pytest.fixture
def guest(lonely: Lonely, store: BlobStore):
    started = Observer.start(lonely.node.addresses, store, WAIT_S)
    yield started
    started.stop()


def test_a_guest_sees_and_fetches_all_of_a_run(
    lonely: Lonely, guest: Observer, store: BlobStore
) -> None:
    lonely.announce()
    announced = guest.find(None, WAIT_S)
    assert announced.record.run == lonely.id
    assert announced.publishers == (lonely.node.peer_id,)
    seen = guest.look(lonely.id, WAIT_S)
    assert seen.peers == {lonely.node.peer_id: peer_record(lonely.node.peer_id)}
    assert seen.validations[lonely.node.peer_id].val_loss == 5.5 and seen.merges == {}
    assert guest.config(announced, WAIT_S) == lonely.run
    tip = guest.tip(announced, seen.peers, WAIT_S)
    assert tip == lonely.manifest
    progress: list[tuple[int, int]] = []
    guest.fetch_model(
        tip,
        lonely.layout,
        sources=[lonely.node.peer_id],
        on_blob=lambda here, total: progress.append((here, total)),
        deadline_s=WAIT_S,
    )
    assert progress[-1][0] == progress[-1][1]
    for entry in tip.entries.values():
        blob = store.get(entry.digest)
        assert blob is not None and digest_of(blob) == entry.digest


def test_scores_are_published_under_the_key_of_a_person_not_of_the_guest(
    lonely: Lonely, guest: Observer, store: BlobStore, tmp_path: Path
) -> None:
    lonely.announce()
    record = ScoreRecord((Score(lonely.manifest.digest, 0, "sciq", "acc", 0.25, 1000),))
    mine = load_or_create_identity(tmp_path / "identity")
    expected = {}
    # The key of a running peer may be used: it names the measuring peer, and joins no network.
    for signer in (mine, lonely.node.identity):
        publisher = Observer.start(lonely.node.addresses, store, WAIT_S, signer=signer)
        try:
            publisher.publish_scores(lonely.id, record, WAIT_S)
        finally:
            publisher.stop()
        expected[signer.peer_id] = record
        assert guest.look(lonely.id, WAIT_S).scores == expected


def test_scores_are_repeated_as_long_as_who_published_them_runs(
    lonely: Lonely, guest: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "RENEW_S", 0.2)
    lonely.announce()
    keys = scores_keys(lonely.id)

    def found() -> tuple[float, ScoreRecord]:
        dated = lonely.node.run(fetch_dated(lonely.node, ScoreRecord, keys), WAIT_S)
        return dated[guest._node.peer_id]

    for round_ in (0, 1):
        record = ScoreRecord((Score(lonely.manifest.digest, round_, "sciq", "acc", 0.25, 1000),))
        guest.publish_scores(lonely.id, record, WAIT_S)
        first_s, _ = found()
        assert wait_until(lambda first_s=first_s: found()[0] > first_s), "it expires later"
        # Older records are not repeated any more.
        assert found()[1] == record and len(guest._renewing) == 1


def test_a_guest_leaves_no_record_and_no_address(lonely: Lonely, guest: Observer) -> None:
    lonely.announce()
    guest.find(None, WAIT_S)
    assert list(guest.look(lonely.id, WAIT_S).peers) == [lonely.node.peer_id]
    assert guest._node.addresses == ()


def test_a_guest_remembers_addresses_of_peers_it_reads_of(lonely: Lonely, guest: Observer) -> None:
    """Its entry peer may leave, and libp2p forgets the addresses of the others."""
    other = "/ip4/203.0.113.9/tcp/9/p2p/12D3KooWEhqPMwUVi6Sr3ThFZAsoGfBTXdv6PxBByKg8ZdCrNgTf"
    me = lonely.node.peer_id
    record = peer_record(me, addresses=(other,))
    lonely.node.run(publish_peer(lonely.node, lonely.id, record), WAIT_S)
    assert guest.look(lonely.id, WAIT_S).peers.keys() == {me}
    known = guest._node.run(_known(guest._node), WAIT_S)
    assert other in known


async def _known(node: Node) -> list[str]:
    return [address.text for address in node._book.addresses()]


def test_without_a_run_the_guest_says_so_in_time(lonely: Lonely, guest: Observer) -> None:
    began_s = time.monotonic()
    with pytest.raises(NobodyReachable, match="no peer announces a run"):
        guest.find(None, SHORT_S)
    assert time.monotonic() - began_s < 60
    lonely.announce()
    with pytest.raises(NobodyReachable, match="no peer announces another-run"):
        guest.find("another-run", SHORT_S)


def test_the_peer_at_the_address_is_asked_for_its_run_before_the_dht(
    lonely: Lonely, guest: Observer
) -> None:
    lonely.told = encode_record(lonely.record())
    assert guest.find(None, WAIT_S).record == lonely.record(), "nothing is in the DHT"
    lonely.told = b"{"
    with pytest.raises(NobodyReachable, match="no peer announces a run"):
        guest.find(None, SHORT_S)
    assert guest._node.traffic.refused["record_schema"] > 0


def test_a_guest_is_told_of_a_founder_that_prepares(lonely: Lonely, guest: Observer) -> None:
    lonely.told = encode_preparing(lonely.run.fingerprint())
    with pytest.raises(
        NobodyReachable, match=r"no peer announces a run yet: peer .* prepares a run"
    ):
        guest.find(None, 2 * SHORT_S)
    lonely.told = encode_record(lonely.record())
    assert guest.find(None, WAIT_S).record == lonely.record()


def test_an_announcement_unlike_its_id_is_not_followed(lonely: Lonely, guest: Observer) -> None:
    lonely.announce(fingerprint="ab" * 32)
    with pytest.raises(NobodyReachable, match="no peer announces a run"):
        guest.find(None, SHORT_S)
    assert guest._node.traffic.refused["record_run"] > 0


def test_a_manifest_without_a_quorum_is_not_the_tip(lonely: Lonely, guest: Observer) -> None:
    lonely.announce()
    lonely.shown = dataclasses.replace(
        lonely.manifest, run=lonely.id, height=1, round=1, kind=Kind.QUORUM,
        parent=lonely.manifest.digest,
    )  # fmt: skip
    announced = guest.find(None, WAIT_S)
    seen = guest.look(lonely.id, WAIT_S)
    lonely.votes = {"X": bytes(64)}
    with pytest.raises(NobodyReachable, match="0 of the 1 voters of height 0"):
        guest.tip(announced, seen.peers, WAIT_S)
    assert guest._node.traffic.refused["no_proof"] == 1


def test_nobody_at_the_address_is_said_before_the_deadline() -> None:
    began_s = time.monotonic()
    with pytest.raises(NobodyReachable, match="no known peer answers"):
        Observer.start(
            ["/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEhqPMwUVi6Sr3ThFZAsoGfBTXdv6PxBByKg8ZdCrNgTf"],
            BlobStore(),
            300.0,
        )
    assert time.monotonic() - began_s < 60


def test_whom_to_ask_is_no_matter_of_figures_or_of_numbers(lonely: Lonely, guest: Observer) -> None:
    entrance = lonely.node.peer_id
    record = lonely.record()
    many = [f"Qm{number:03}" for number in range(1000)]
    asked = whom_to_ask(guest._node, Announced(record, ("QmX",)), many)
    assert asked[0] == entrance and len(asked) == len(set(asked)) == MAX_ASKED
    assert set(asked[1:]) <= {*many, "QmX"}
    assert whom_to_ask(guest._node, Announced(record, ("QmX",)), []) == [entrance, "QmX"]
