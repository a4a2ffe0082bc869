"""COMMITs of strangers: no byte of a manifest is fetched before its proof holds."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from swarm.network.rounds import inbound
from swarm.network.wire.ledger import (
    LIMITS,
    PREFIX_SHARE,
    STRANGERS_SHARE,
    Cost,
    Ledger,
    Limit,
    Rate,
)
from swarm.protocol.chain.trust import Chain, Foothold
from swarm.protocol.messages.events import Fetch, Purpose, Received, Record
from swarm.protocol.messages.message_bytes import Proof, encode, encode_proof
from swarm.protocol.messages.messages import (
    Ballot,
    Certificate,
    Commit,
    Header,
    Hello,
    Link,
    Signature,
)
from swarm.protocol.messages.signatures import MAX_STRANGER_PROOF_BYTES
from swarm.protocol.rounds import LocalPeer, RoundMachine
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.manifest import Kind, Manifest
from tests.network.rounds.test_inbound import Desk
from tests.protocol.exchange.test_handover import next_round
from tests.protocol.round_pump import found, make_rules

RIGHT = b"r" * 64
WRONG = b"w" * 64
RULES = make_rules()
STRANGER = "S"


@pytest.fixture(autouse=True)
def signatures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes signatures right or wrong by their content.

    Returns the peers whose ones were checked.
    """
    looked_at: list[str] = []

    def is_right(peer: str, _: bytes, signature: Signature) -> bool:
        looked_at.append(peer)
        return signature == RIGHT

    monkeypatch.setattr(inbound, "verify", is_right)
    return looked_at


def signed(manifest: Manifest, parent: Manifest, signature: Signature = RIGHT) -> Link:
    members = parent.order[: len(parent.members) // 2 + 1]
    return Link(
        manifest.head,
        Certificate(Ballot(0, members[0]), dict.fromkeys(members, signature)),
        parent.head,
    )


def commit_of(manifest: Manifest, parent: Manifest, tip: Manifest, **changes: object) -> Commit:
    link = signed(manifest, parent)
    commit = Commit(manifest, link.certificate, parent, (Link(tip.head), link))
    return replace(commit, **changes)


def header_of(manifest: Manifest) -> Header:
    return Header(manifest.code, manifest.digest, manifest.generation)


def heads(rounds: int, peers: list[str]) -> list[Manifest]:
    """A chain in which all peers contribute to each round."""
    rules, chain = RULES, [found(RULES, peers)]
    for _ in range(rounds):
        chain.append(next_round(chain[-1], rules, sorted(peers)))
    return chain


CHAIN = heads(4, ["A", "B", "C"])


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk(Foothold(Chain.of(Record(CHAIN[1], None, None))))
    yield desk
    assert len(desk.store) == len(desk.aside.store) == 0, "nothing is kept"


def hear(desk: Desk, commit: Commit, source: str = STRANGER, **named: bytes) -> list[str]:
    """Takes a stranger's COMMIT. Returns the blobs fetched for it, in order."""
    payload, attachments = encode(header_of(commit.manifest), commit)
    frame = json.loads(payload)
    kinds = {}
    for kind in ("manifest", "parent", "proof"):
        reference = frame["message"][kind]
        if reference and kind in named:
            attachments[digest_of(named[kind])] = named[kind]
            reference |= {"digest": digest_of(named[kind]), "num_bytes": len(named[kind])}
        if reference:
            kinds[reference["digest"]] = kind
    desk.aside.blobs |= attachments
    desk.aside.asked.clear()
    desk.run((source, json.dumps(frame).encode()))
    return [kinds[want.digest] for want in desk.aside.asked]


def test_a_manifest_is_fetched_once_its_proof_holds_and_from_its_signers_too(desk: Desk) -> None:
    commit = commit_of(CHAIN[4], CHAIN[3], CHAIN[1])
    assert hear(desk, commit) == ["proof", "manifest", "parent"]
    (event,) = desk.events
    assert isinstance(event, Received) and event.message == commit
    assert event.header == header_of(CHAIN[4])
    assert [want.sources for want in desk.aside.asked] == [
        (STRANGER,),
        *[(STRANGER, *sorted(commit.certificate.signatures))] * 2,
    ]


INVENTED = replace(CHAIN[3], members=dict.fromkeys([STRANGER], CHAIN[3].members["A"]))
FORGED = replace(CHAIN[4], parent=INVENTED.digest)
TRUE = commit_of(CHAIN[4], CHAIN[3], CHAIN[1])
WRONGLY = (Link(CHAIN[1].head), signed(CHAIN[4], CHAIN[3], WRONG))
UNSIGNED = (Link(CHAIN[1].head), Link(CHAIN[4].head, None, CHAIN[3].head))
FALSE = {
    "an invented electorate": commit_of(FORGED, INVENTED, CHAIN[1]),
    "signatures that are wrong": replace(TRUE, path=WRONGLY),
    "no signatures": replace(TRUE, path=UNSIGNED),
    "another manifest": replace(TRUE, manifest=replace(CHAIN[4], tokens=7)),
    "another parent": replace(TRUE, parent=CHAIN[2]),
}


@pytest.mark.parametrize("lie", FALSE)
def test_for_a_false_proof_no_byte_of_a_manifest_is_fetched(desk: Desk, lie: str) -> None:
    desk.ledger = Ledger()
    before = desk.ledger.left(STRANGER, Cost.SECONDS, 0.0)
    assert hear(desk, FALSE[lie]) == ["proof"]
    assert desk.events == []
    assert desk.refused == {"false_proof": 1}
    assert desk.ledger.left(STRANGER, Cost.SECONDS, 0.0) < before
    assert desk.ledger.left(STRANGER, Cost.BYTES, 0.0) < LIMITS[Cost.BYTES].stranger.most
    assert desk.ledger.left(STRANGER, Cost.MANIFESTS, 0.0) == LIMITS[Cost.MANIFESTS].stranger.most


def test_links_after_one_that_does_not_hold_cost_no_time(desk: Desk, signatures: list[str]) -> None:
    links = [signed(after, before, WRONG) for before, after in pairwise(CHAIN[1:])]
    commit = Commit(CHAIN[4], links[-1].certificate, CHAIN[3], (Link(CHAIN[1].head), *links))
    assert hear(desk, commit) == ["proof"]
    assert len(signatures) == len(links[0].certificate.signatures) == 2


def test_signatures_of_who_has_no_vote_are_not_looked_at(desk: Desk, signatures: list[str]) -> None:
    commit = commit_of(CHAIN[4], CHAIN[3], CHAIN[1])
    crowd = {"P" + "x" * number: RIGHT for number in range(1, 40)} | dict(
        commit.certificate.signatures
    )
    link = replace(commit.path[1], certificate=replace(commit.certificate, signatures=crowd))
    assert hear(desk, replace(commit, path=(commit.path[0], link)))[0] == "proof"
    assert set(signatures) <= {"A", "B", "C"}
    (event,) = desk.events
    assert event.message.certificate == commit.certificate


@pytest.mark.parametrize(
    "of", ["nothing", "another head", "what is no better", "what is on its way"]
)
def test_who_has_nothing_to_prove_is_heard_as_if_it_had_greeted(desk: Desk, of: str) -> None:
    commit = commit_of(CHAIN[4], CHAIN[3], CHAIN[1])
    if of == "nothing":
        commit = replace(commit, path=())
    elif of == "another head":
        commit = commit_of(CHAIN[4], CHAIN[3], CHAIN[2])
    elif of == "what is no better":
        desk.foothold = Foothold(Chain.of(Record(CHAIN[4], None, CHAIN[3])).grown([]))
        commit = commit_of(CHAIN[4], CHAIN[3], CHAIN[4], path=(Link(CHAIN[4].head),))
    else:
        desk.foothold = replace(desk.foothold, pursued=CHAIN[4].blob)
    assert hear(desk, commit) == ["proof"]
    assert desk.events == [Received(STRANGER, header_of(CHAIN[4]), Hello(ask=False))]
    assert not desk.refused


def test_a_proof_that_is_too_large_is_not_fetched(desk: Desk) -> None:
    commit = commit_of(CHAIN[4], CHAIN[3], CHAIN[1])
    assert hear(desk, commit, proof=bytes(MAX_STRANGER_PROOF_BYTES + 1)) == []
    assert desk.refused == {"proof_of_stranger": 1}


def test_manifests_that_are_proved_again_and_again_are_bounded(desk: Desk) -> None:
    commit = commit_of(CHAIN[4], CHAIN[3], CHAIN[1])
    size = len(CHAIN[4].encoded) + len(CHAIN[3].encoded)
    rate = Rate(1.5 * size)
    desk.ledger = Ledger({**LIMITS, Cost.MANIFESTS: Limit(Rate(16 * size), rate, rate)})
    assert len(hear(desk, commit)) == 3
    assert hear(desk, commit) == ["proof"]
    assert desk.refused == {"manifests_of_stranger": 1}


def test_keys_of_one_network_have_few_proofs_fetched_however_small_they_are(desk: Desk) -> None:
    desk.ledger, limit = Ledger(), LIMITS[Cost.PROOFS]
    most = limit.shared.part(STRANGERS_SHARE * PREFIX_SHARE)
    began_s = time.monotonic()
    fetched, refused = 0, Counter[str]()
    for number in range(2 * int(most.most)):
        key = f"S{number}"
        desk.ledger.locate(key, "/ip4/192.0.2.7/tcp/4001")
        fetched += len(hear(desk, commit_of(CHAIN[4], CHAIN[3], CHAIN[2]), source=key))
        refused += desk.refused
    passed_s = time.monotonic() - began_s
    assert most.most <= fetched <= most.most + most.per_s * passed_s
    assert refused == {"proofs_of_prefix": 2 * most.most - fetched}


# ---------------------------------------------------------------- a large swarm

PEERS = 256
RNG = random.Random(1)
LARGE = make_rules(experts=PEERS, parts=110)
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
NAMES = [f"12D3KooW{RNG.getrandbits(220):044x}"[:52].replace("0", "z") for _ in range(PEERS)]


def test_who_was_away_for_long_comes_back_to_256_peers_along_what_a_stranger_says() -> None:
    """Their manifest exceeds the former limit of 1 MiB for strangers' manifests."""
    old = found(LARGE, NAMES)
    parent = next_round(next_round(old, LARGE, sorted(NAMES)), LARGE, sorted(NAMES))
    tip = next_round(parent, LARGE, sorted(NAMES))
    assert len(tip.encoded) > 2**20
    link = signed(tip, parent)
    commit = Commit(tip, link.certificate, parent, (Link(old.head), link))
    desk = Desk(Foothold(Chain.of(Record(old, None, None))))
    assert hear(desk, commit) == ["proof", "manifest", "parent"]
    (event,) = desk.events
    peer = LocalPeer("A", 1.0, LARGE, Timers(), now=0.0, random=random.Random(1))
    machine = RoundMachine(peer, Record(old, None, None), stored=[])
    machine.start(0.0)
    fetched = [e for e in machine.handle(event, 1.0) if isinstance(e, Fetch)]
    assert [effect.purpose for effect in fetched] == [Purpose.CATCH_UP]


def test_sixteen_links_of_256_peers_with_small_signatures_fit_into_a_strangers_proof() -> None:
    parent = found(RULES, NAMES)
    tip = replace(parent, kind=Kind.QUORUM, height=1, run="run-1", parent=parent.digest)
    link = signed(tip, parent, bytes(64))
    size = len(encode_proof(Proof(link.certificate, (link,) * 16)))
    assert MAX_STRANGER_PROOF_BYTES * 2 / 3 < size <= MAX_STRANGER_PROOF_BYTES
