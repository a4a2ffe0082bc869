"""A stranger's unexpected attachments are not fetched, and allowed ones are bounded."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace

from swarm.network.blobs.blob_store import BlobStore
from swarm.network.wire.ledger import LIMITS, Cost
from swarm.protocol.messages.message_bytes import encode
from swarm.protocol.messages.messages import Ballot, Commit, Header, Message, Roster
from swarm.protocol.messages.signatures import MAX_STRANGER_PROOF_BYTES
from swarm.protocol.values.digests import digest_of
from tests.hostile.victim import RUN, Victim, post, signed_ready
from tests.network.conftest import Peers
from tests.protocol.round_pump import found, header_of, make_offer, make_rules

OFFERS = 40
OFFER_BYTES = 2**18
"""Smaller than the two megabytes that an offer may have, so that the test is quick."""
COMMITS = 40
RULES = make_rules()


def naming(store: BlobStore, header: Header, message: Message, num_bytes: int) -> bytes:
    """A message whose attachments are different blobs of this size in the store."""
    frame = json.loads(encode(header, message)[0])
    body = frame["message"]
    for named in [body.get("list"), body.get("proof")]:
        if named:
            blob = random.Random(time.monotonic_ns()).randbytes(num_bytes)
            named |= {"digest": store.put(blob, digest_of(blob)), "num_bytes": num_bytes}
    return json.dumps(frame).encode()


def test_a_roster_of_a_stranger_brings_no_byte_of_what_it_names(
    peers: Peers, victim: Victim
) -> None:
    store = BlobStore()
    attacker = peers.serving(store)
    tip = replace(found(RULES, [victim.node.peer_id]), run=RUN)
    ballot, offer = Ballot(0, attacker.peer_id), make_offer(RULES, "B", tip)
    offers = {"P" + "x" * number: offer for number in range(OFFERS)}
    message = Roster(ballot, tip.digest, offers, {attacker.peer_id: 0})
    payload = naming(store, header_of(tip), message, OFFER_BYTES)
    assert len(payload) < 10_000
    assert post(attacker, victim, payload) == 1
    victim.settle()
    assert attacker.traffic.blob_bytes_sent == victim.node.traffic.blob_bytes_received == 0
    assert victim.store.num_bytes == len(victim.store) == 0
    assert victim.inbound.refused == {"roster_of_stranger": 1}


def test_commits_of_a_stranger_cost_two_megabytes_at_once_and_no_disk(
    peers: Peers, victim: Victim
) -> None:
    store = BlobStore()
    attacker = peers.serving(store)
    member = peers.serving(sent := BlobStore())
    victim.ledger.admit([victim.node.peer_id, member.peer_id])
    tip = replace(found(RULES, [victim.node.peer_id, member.peer_id]), run=RUN)
    began_s = time.monotonic()
    for _ in range(COMMITS):
        commit = naming(store, header_of(tip), Commit(tip, None, None), MAX_STRANGER_PROOF_BYTES)
        post(attacker, victim, commit)
    victim.settle()
    passed_s = time.monotonic() - began_s
    limit = LIMITS[Cost.BYTES].stranger
    fetched = victim.node.traffic.blob_bytes_received
    assert 0 < fetched <= limit.most + limit.per_s * passed_s
    assert victim.store.num_bytes == len(victim.store) == 0, "nothing on disk"
    assert len(victim.transfers.aside.store) == 0, "nothing in memory"
    assert victim.received_from(attacker) == 0
    offer = make_offer(RULES, member.peer_id, tip)
    ready = signed_ready(member, RUN, tip, offer=offer, to=victim.node.peer_id)
    payload, attachments = encode(header_of(tip), ready)
    for digest, blob in attachments.items():
        sent.put(blob, digest)
    assert post(member, victim, payload) == 1
    victim.settle()
    assert victim.received_from(member) == 1, "a member is heard as ever"
