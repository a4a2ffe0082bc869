#!/usr/bin/env python
"""The cost of a swarm of N peers: bytes and milliseconds of every message, decision and record.

The run is the 7B (`configs/runs/spes_7b.toml`) with max(32, N) experts, so every peer owns one. The
functions of peers make, encode and decode records, offers, rosters, manifests, certificates and
messages. Only digests and bytes of tensors are invented. Milliseconds are CPU time of one thread,
the best of some calls. As in timeit, Python's garbage collection is off, because its cost depends
on all objects of the process. Messages of a round are counted in a simulation without faults, see
`round_rows`. Messages that a peer could not send are marked as over the limit.

    python scripts/benchmarks/bench_scale.py [--peers 4,16,64,256,1024] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.config import MergingConfig, RunConfig, parse_config
from swarm.emulation.simulator.faults.world import World
from swarm.emulation.simulator.peers.participant import Character, Setup, UnderTest
from swarm.emulation.simulator.peers.surroundings import Packet, Payload
from swarm.errors import StateError
from swarm.experts import expert_unit, shared_unit
from swarm.network.fetch.bulk import ASSIGNED_AT_ONCE, JOINED_AT_ONCE
from swarm.network.rounds.inbound import MANY
from swarm.network.wire.identity import (
    KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    load_or_create_identity,
    peer_id_of,
    verify,
)
from swarm.network.wire.ledger import LARGE_BYTES
from swarm.protocol.exchange.sourcing import Sourcing
from swarm.protocol.membership.ownership import assign
from swarm.protocol.messages import message_bytes
from swarm.protocol.messages.events import Received, Record
from swarm.protocol.messages.messages import (
    Accept,
    Ballot,
    Certificate,
    Commit,
    Header,
    Hello,
    Message,
    Offer,
    OfferedUnit,
    Prepare,
    Propose,
    Ready,
    Reduced,
    ReducedUnit,
    Roster,
    Signature,
    accept_statement,
)
from swarm.protocol.messages.schemas import MAX_HOLDERS
from swarm.protocol.records.records import (
    HEARTBEAT_S,
    NUM_SHARDS,
    PeerRecord,
    PeerState,
    RunRecord,
    RunState,
    encode_record,
    look_every_s,
    routing_figures,
    shards_at_once,
)
from swarm.protocol.rounds import LocalPeer, RoundMachine, Rules
from swarm.protocol.rounds.policies.checks import successor_problem
from swarm.protocol.rounds.policies.composition import Attendance, compose_round
from swarm.protocol.rounds.policies.roster_deadline import Absent, OpenRoster, why_close
from swarm.protocol.rounds.policies.rosters import Plan, assign_reducers, offer_problem, plan_roster
from swarm.protocol.rounds.policies.slow_links import relays_of_body
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.digests import PIECE_BYTES, digest_of, num_pieces
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.manifest import (
    FOUNDING_GENERATION,
    MAX_MANIFEST_BYTES,
    Entry,
    Founding,
    Kind,
    Manifest,
    Member,
    PeerId,
    decode_manifest,
)

RUN = Path(__file__).parents[2] / "configs" / "runs" / "spes_7b.toml"
SIMULATED = 64
"""The largest swarm whose messages of a round are counted. Counts of larger swarms are scaled."""
ROUND_S = 60.0
"""Seconds of local steps in the simulated round. Only polls and greetings grow with this time."""
ROUNDS = 3
REPLICAS = 5
"""Peers at which hivemind stores a value by default."""
VISITED = 20
"""Peers that a search of hivemind asks for one key. Each peer names the same number of others."""
ASK_BYTES = 70
NEIGHBOUR_BYTES = 62
"""Bytes of a search request (key and sender) and of a DHT id with a peer id, with protobuf
headers."""
SIGNED_BYTES = KEY_BYTES + SIGNATURE_BYTES
"""Public key and signature of each record."""
OFF_LOOP = ("manifest decoded", "sourcing, in all", "pieces queued", "taken in", "half late")
"""Work that does not block the event loop: in another thread, or in slices."""


class Swarm:
    """N peers in the round after some tip, with all their messages."""

    def __init__(self, num_peers: int, identity: Identity, run: RunConfig | None = None) -> None:
        self.num_peers = num_peers
        self.identity = identity
        self.run = run or run_of(num_peers)
        self.rules = Rules.of("spes_7b-0123456789abcdef", self.run, layout_of(self.run))
        self.peers = [_peer_id(number) for number in range(num_peers)]
        self.tip = self._tip()
        self.ballot = Ballot(0, self.tip.order[0])
        self.header = Header(self.tip.code, self.tip.digest, self.tip.generation)

    def _tip(self) -> Manifest:
        """The manifest of round 7, made from founding and offers as in a round."""
        members = {peer: Member(0, 1.0) for peer in sorted(self.peers)}
        entries = {
            unit: Entry(_digest("tip", unit), size, 0, self.peers[0], self.rules.unit_codec[unit])
            for unit, size in self.rules.unit_bytes.items()
        }
        founding = Manifest(
            run="",
            generation=FOUNDING_GENERATION,
            height=0,
            round=0,
            kind=Kind.FOUNDING,
            parent=None,
            founding=Founding(
                self.peers[0], "nonce", _digest("config"), 4000, _digest("held out"), 262144
            ),
            step=0,
            tokens=0,
            merged=0,
            members=members,
            contributors=(),
            sources={},
            owners=self.owners(members),
            entries=entries,
        )
        plan = plan_roster(founding, self._offers(founding), self.rules)
        return self.compose(founding, plan)

    def owners(self, members: dict[PeerId, Member]) -> dict[int, tuple[PeerId, ...]]:
        """The owners of every expert when all members begin together."""
        return assign(
            {},
            {peer: member.capacity for peer, member in members.items()},
            members,
            stale=(),
            owners_per_expert=self.rules.owners_per_expert,
            num_experts=self.rules.num_experts,
            seed="nonce",
        ).owners

    def _offers(self, tip: Manifest) -> dict[PeerId, Offer]:
        return {peer: self._offer(tip, peer) for peer in self.peers}

    def _offer(self, tip: Manifest, peer: PeerId) -> Offer:
        units = {
            unit: OfferedUnit(
                _digest(tip.digest, peer, unit),
                self.rules.unit_bytes[unit],
                tip.entries[unit].digest,
            )
            for unit in self.rules.schedule.due_of(peer, tip)
        }
        return Offer(tip.digest, 100, 100 * 2**21, units)

    @cached_property
    def offers(self) -> dict[PeerId, Offer]:
        """The offers of all peers on the tip."""
        return self._offers(self.tip)

    @cached_property
    def plan(self) -> Plan:
        """The roster of all offers."""
        return plan_roster(self.tip, self.offers, self.rules)

    @property
    def attendance(self) -> Attendance:
        """Everybody answered."""
        return Attendance(self.peers, {}, {}, {})

    def compose(self, tip: Manifest, plan: Plan) -> Manifest:
        """The manifest after a tip, with invented means."""
        results = {
            unit: ReducedUnit(_digest("mean", tip.digest, unit), self.rules.unit_bytes[unit])
            for unit in plan.reducers
        }
        return compose_round(tip, plan, results, self.attendance, self.rules)

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest after the tip."""
        return self.compose(self.tip, self.plan)

    def signature(self) -> Signature:
        """A real signature. All signatures are made with one key."""
        statement = accept_statement(self.rules.run, self.ballot, self.manifest.digest)
        return self.identity.sign(statement)

    def messages(self) -> Iterator[Message]:
        """One message of each kind, of the largest size in a round without faults."""
        peer, signature = self.tip.order[-1], self.signature()
        quorum = sorted(self.peers)[: self.num_peers // 2 + 1]
        own = [unit for unit, reducer in self.plan.reducers.items() if reducer == peer]
        means = {unit: ReducedUnit(_digest(unit), self.rules.unit_bytes[unit]) for unit in own}
        yield Hello(ask=True)
        yield Prepare(self.ballot)
        yield Ready(self.ballot, self.offers[peer], None, 1.0, remaining_s=12.5)
        yield Roster(self.ballot, self.plan.roster_id, self.offers, self.plan.able)
        yield Reduced(self.ballot, self.plan.roster_id, means, {})
        yield Propose(self.ballot, self.manifest, tuple(self.peers[:MAX_HOLDERS]))
        yield Accept(self.ballot, self.manifest.digest, signature)
        certificate = Certificate(self.ballot, dict.fromkeys(quorum, signature))
        yield Commit(self.manifest, certificate, self.tip)


def run_of(num_peers: int, path: Path = RUN, others: Sequence[str] = ()) -> RunConfig:
    """The 7B with as many experts as peers, if there are more than 32, of the same total size.

    `others`: further overrides of the run file.
    """
    run = parse_config(RunConfig, path.read_text(), source=str(path))
    experts = max(run.model.num_experts, num_peers)
    width = run.model.moe_intermediate_size * run.model.num_experts // experts
    return parse_config(
        RunConfig,
        path.read_text(),
        source=str(path),
        overrides=[
            f"run.peers={num_peers}",
            f"model.num_experts={experts}",
            f"model.moe_intermediate_size={width}",
            *others,
        ],
    )


def _peer_id(number: int) -> PeerId:
    """A peer id with the form of real ones, in pseudo-random order."""
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(_digest("peer", str(number))))
    peer_id = peer_id_of(key.public_key().public_bytes_raw())
    assert peer_id is not None
    return peer_id


def _digest(*words: str) -> str:
    return digest_of("/".join(words).encode())


def best_ms(function: Callable[[], object], least: int = 2, seconds: float = 0.3) -> float:
    """Milliseconds of the fastest call. The first calls fill caches, as in a running peer."""
    best, began, calls = float("inf"), time.thread_time(), 0
    while calls < least or (calls < 50 and time.thread_time() - began < seconds):
        start = time.thread_time()
        function()
        best = min(best, time.thread_time() - start)
        calls += 1
    return best * 1e3


def once_ms(function: Callable[[], object]) -> float:
    """Milliseconds of a single call."""
    start = time.thread_time()
    function()
    return (time.thread_time() - start) * 1e3


def kind_of(message: Message) -> str:
    """A message's name in the tables."""
    return type(message).__name__.upper()


def message_rows(swarm: Swarm) -> list[dict[str, Any]]:
    """Bytes, attachments and milliseconds of one message of each kind.

    `encode_ms` is for a message whose offers and manifests were encoded before. `decode_ms` is for
    a message with new attachments, and `decode_again_ms` for its repetition.
    """
    rows = []
    for message in swarm.messages():
        row: dict[str, Any] = {"peers": swarm.num_peers, "message": kind_of(message)}
        try:
            payload, attached = message_bytes.encode(swarm.header, message)
        except StateError as error:
            rows.append(row | {"over_the_limit": str(error)})
            continue
        row |= {
            "bytes": len(payload),
            "attached_bytes": sum(map(len, attached.values())),
            "attachments": len(attached),
            "encode_ms": best_ms(partial(message_bytes.encode, swarm.header, message)),
        }
        if max(map(len, attached.values()), default=0) > MAX_MANIFEST_BYTES:
            rows.append(row | {"over_the_limit": "the manifest is over 8 MiB"})
            continue
        forget_decoded()
        decode = partial(message_bytes.decode, payload, attached)
        row["decode_ms"] = once_ms(decode)
        row["decode_again_ms"] = best_ms(decode)
        rows.append(row)
    return rows


def forget_decoded() -> None:
    """Empties the caches of decoded offers and manifests."""
    for cached in vars(message_bytes).values():
        if hasattr(cached, "cache_clear") and not isinstance(cached, type):
            cached.cache_clear()


def decision_rows(swarm: Swarm) -> list[dict[str, Any]]:
    """Milliseconds of decisions that block the event loop."""
    rules, tip, plan, offers = swarm.rules, swarm.tip, swarm.plan, swarm.offers
    reducer = swarm.peers[-1]
    statement = accept_statement(rules.run, swarm.ballot, swarm.manifest.digest)
    signature = swarm.signature()
    shares = dict.fromkeys(swarm.peers, 1.0)
    lost = dict.fromkeys(swarm.peers[1::2], 1.0)
    open_roster = _waiting_roster(swarm)
    decisions: dict[str, Callable[[], object]] = {
        "why_close": lambda: why_close(open_roster, Timers()),
        "a poll's answers taken in": _answers_to_a_poll(swarm),
        "the same, half late": _answers_to_a_poll(swarm, is_late=True),
        "offers checked": lambda: [offer_problem(o, p, tip, rules) for p, o in offers.items()],
        "plan_roster": lambda: plan_roster(tip, offers, rules),
        "assign_reducers": lambda: assign_reducers(offers, plan.able, rules.unit_bytes),
        "compose_round": lambda: swarm.compose(tip, plan),
        "manifest encoded": lambda: replace(swarm.manifest).digest,
        "successor_problem": lambda: successor_problem(swarm.manifest, tip, rules, due=False),
        "assign, half the owners lost": lambda: _assign(swarm, lost),
        "assign, nobody lost": lambda: _assign(swarm, shares),
        "units due": lambda: rules.schedule.due_of(reducer, tip),
        "certificate verified": lambda: [
            verify(swarm.identity.peer_id, statement, signature)
            for _ in range(swarm.num_peers // 2 + 1)
        ],
    }
    if len(swarm.manifest.encoded) <= MAX_MANIFEST_BYTES:
        decisions["manifest decoded"] = lambda: decode_manifest(swarm.manifest.encoded)
    rows = [
        {"peers": swarm.num_peers, "decision": name, "ms": best_ms(decide)}
        for name, decide in decisions.items()
    ]
    return [*rows, *sourcing_rows(swarm)]


def _waiting_roster(swarm: Swarm) -> OpenRoster:
    """A quorum has offered. All others still train, and report their remaining time."""
    quorum = swarm.num_peers // 2 + 1
    absent = tuple(Absent(peer, 0.5, 30.0, 600.0) for peer in swarm.peers[quorum:])
    return OpenRoster(20.0, 10.0, quorum, swarm.num_peers, True, 600.0, absent)


def _answers_to_a_poll(swarm: Swarm, *, is_late: bool = False) -> Callable[[], None]:
    """The answers of all others to the convener's poll every 1.5 s: they still train.

    With `is_late`, half of the peers and one have offered, and each sixth of the others has a slow
    line.
    """
    convener, *others = swarm.tip.order
    local = LocalPeer(convener, 1.0, swarm.rules, Timers(), now=0.0, random=Random(0))
    record = Record(swarm.tip, certificate=None, parent=None)
    stored = [entry.digest for entry in swarm.tip.entries.values()]
    machine = RoundMachine(local, record, stored=stored)
    machine.start(0.0)
    for peer in others:
        machine.handle(Received(peer, swarm.header, Hello(ask=False)), 0.0)
    late = others[swarm.num_peers // 2 + 2 :] if is_late else others
    thin = set(late[::6]) if is_late else set()
    training = set(late)
    left_s = 8.0 if is_late else 1800.0

    def take_in() -> None:
        for peer in others:
            trains_on = Ready(
                swarm.ballot,
                offer=None if peer in training else swarm.offers[peer],
                accepted=None,
                capacity=1.0,
                remaining_s=left_s if peer in training else None,
                worked_s=1800.0,
                uplink_mbit=3 if peer in thin else 100,
            )
            machine.handle(Received(peer, swarm.header, trains_on), 0.0)

    take_in()
    assert machine.campaign.stage == "collect"
    return take_in


def _assign(swarm: Swarm, members: dict[PeerId, float]) -> object:
    return assign(
        swarm.tip.owners,
        members,
        members,
        stale=(),
        owners_per_expert=swarm.rules.owners_per_expert,
        num_experts=swarm.rules.num_experts,
        seed="nonce",
    )


def sourcing_rows(swarm: Swarm) -> list[dict[str, Any]]:
    """Sourcing of one proposal: every piece of the model from all peers, each unit from another
    peer.

    The total lasts until every piece was requested, with four pieces in flight at each peer. The
    event loop is blocked by the longest slice and the longest call.
    """
    sourcing: Sourcing[tuple[str, int]] = Sourcing()
    peers = swarm.peers[1:]
    pieces, slice_ms = 0, 0.0
    start = began = time.thread_time()
    for position, (unit, num_bytes) in enumerate(swarm.rules.unit_bytes.items()):
        shift = position % len(peers)
        sources = [*peers[shift:], *peers[:shift]]
        for number in range(num_pieces(num_bytes)):
            sourcing.want((unit, number), PIECE_BYTES, sources)
            pieces += 1
        if position % JOINED_AT_ONCE == 0:
            slice_ms, began = max(slice_ms, time.thread_time() - began), time.thread_time()
    queued_ms = (time.thread_time() - start) * 1e3
    longest_ms, now = 0.0, 0.0
    under_way: list[tuple[str, int]] = []
    while True:
        began = time.thread_time()
        assigned = sourcing.assign(now, ASSIGNED_AT_ONCE)
        longest_ms = max(longest_ms, (time.thread_time() - began) * 1e3)
        under_way += [assignment.key for assignment in assigned]
        if not under_way:
            break
        for key in under_way[: len(peers)]:
            sourcing.done(key)
        del under_way[: len(peers)]
        now += 0.1
    total_ms = (time.thread_time() - start) * 1e3
    figures = {
        f"sourcing, {pieces} pieces queued": queued_ms,
        "sourcing, longest slice of these": slice_ms * 1e3,
        "sourcing, longest call": longest_ms,
        "sourcing, in all": total_ms,
    }
    return [{"peers": swarm.num_peers, "decision": name, "ms": ms} for name, ms in figures.items()]


def record_rows(swarm: Swarm) -> list[dict[str, Any]]:
    """The two records that every member repeats, and their cost by formula.

    Each record is stored at `REPLICAS` peers every `HEARTBEAT_S`. A reader of a key gets all of its
    records from each of these peers. Answers come from other peers, so on average a peer sends as
    much as it receives.
    """
    owned = tuple(e for e, owners in swarm.tip.owners.items() if swarm.peers[-1] in owners)
    values: dict[str, Any] = dict.fromkeys(PeerRecord.__dataclass_fields__, 0)
    values |= {
        "peer_id": swarm.peers[-1],
        "name": "a peer",
        "addresses": ("/ip4/203.0.113.7/tcp/31330", "/ip4/192.168.0.7/tcp/31330"),
        "state": PeerState.TRAINING,
        "capacity": 1.0,
        "room": 4,
        "generation": FOUNDING_GENERATION,
        "manifest_digest": swarm.tip.digest,
        "owned_experts": owned,
        "loss": 2.123456,
        "val_loss": 2.123456,
        "refused": {},
        "reason": "round 7 (height 7, quorum) applied: everybody contributed",
        "version": "1.0",
        "moments_reason": "",
        "routing": routing_figures(
            {
                "max_load": 1.234567,
                "idle_experts": 0,
                "dropped": 0.0,
                "similarity": 0.123456,
                "shares": [max(1, 1000 // len(swarm.tip.owners))] * len(swarm.tip.owners),
                "pairs": [(expert, expert + 1, 0.123) for expert in range(16)],
            }
        ),
        "grad_norm": 0.123456,
        "engine": "resident",
        "trouble": "",
    }
    digest = swarm.tip.digest
    run = RunRecord(
        swarm.rules.run, "spes_7b", digest, swarm.peers[0], digest, 10**6, digest, 4000,
        RunState.RUNNING, swarm.num_peers,
    )  # fmt: skip
    peer_bytes = len(encode_record(PeerRecord(**values))) + SIGNED_BYTES
    run_bytes = len(encode_record(run)) + SIGNED_BYTES
    figures = {
        "PeerRecord, signed": peer_bytes,
        "RunRecord, signed": run_bytes,
        "all RunRecords (4 keys)": swarm.num_peers * run_bytes,
        "all PeerRecords (16 keys)": swarm.num_peers * peer_bytes,
        **dht_rates(swarm.num_peers, peer_bytes, run_bytes),
    }
    return [
        {"peers": swarm.num_peers, "record": name, "bytes": size} for name, size in figures.items()
    ]


def dht_rates(num_peers: int, peer_bytes: int, run_bytes: int) -> dict[str, float]:
    """Bytes per second each way of a peer that publishes both records and reads those of others."""
    holders = min(REPLICAS, num_peers - 1)
    search = min(VISITED, num_peers - 1) * (
        ASK_BYTES + min(VISITED, num_peers - 2) * NEIGHBOUR_BYTES
    )
    stores = 2 * search + holders * (peer_bytes + run_bytes)
    look = search + holders * peer_bytes * num_peers / NUM_SHARDS
    return {
        "to publish, bytes/s each way": stores / HEARTBEAT_S,
        "to look for others, bytes/s each way": (
            shards_at_once(num_peers) * look / look_every_s(num_peers)
        ),
        "a look at all keys": NUM_SHARDS * look,
    }


class _Counting(World):
    """A simulation that counts messages by kind."""

    def post(self, source: PeerId, destination: PeerId, payload: Payload) -> None:
        if isinstance(payload, Packet):
            sent[kind_of(payload.message)] += 1
        super().post(source, destination, payload)


sent: Counter[str] = Counter()
FROM_CONVENER = ("PREPARE", "ROSTER", "PROPOSE", "COMMIT")


def counted(num_peers: int) -> Counter[str]:
    """Messages of each kind in `ROUNDS` rounds without faults, counted in a simulation."""
    peers = tuple(f"p{number}" for number in range(num_peers))
    units = [*(shared_unit(part) for part in range(num_peers))]
    units += [expert_unit(expert) for expert in range(num_peers)]
    run = run_of(num_peers)
    rules = replace(
        Rules.of("run", run, layout_of(run)),
        num_experts=num_peers,
        unit_bytes=dict.fromkeys(units, 100),
        unit_codec=dict.fromkeys(units, "fp32"),
        certificates=False,
        merging=MergingConfig(),
    )
    timers = Timers(roster_s=2 * ROUND_S, roster_late_s=4 * ROUND_S, attempt_s=10 * ROUND_S)
    characters = {peer: Character(local_steps_s=ROUND_S) for peer in peers}
    world = _Counting(Setup(peers, rules, timers, characters), Random("scale"), tested=UnderTest())

    def has_done(rounds: int) -> Callable[[], bool]:
        return lambda: world.nodes[peers[0]].disk.record.tip.round >= rounds

    world.run(has_done(1))
    sent.clear()
    world.run(has_done(1 + ROUNDS))
    return sent.copy()


def evidence_bytes(num_peers: int, num_means: int) -> int:
    """Bytes of a proposal's evidence, by swarm/network/README.md."""
    return 900 * num_peers + 120 * num_means


def round_rows(swarm: Swarm, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Control bytes of a round: messages counted in a simulation, attachments by formula.

    Counts come from a swarm of at most `SIMULATED` peers, for each peer but the convener. PREPARE,
    ROSTER, PROPOSE and COMMIT go from the convener to each of these peers, HELLO between all peers,
    and the rest from each peer to the convener. Manifest and evidence go from the convener to all
    peers, or in a large swarm with known lines to relays, and from the relays to the others (blob
    relays). Offers go to the convener. Reducers get offers from their authors, or from the convener
    if there are few offers.
    """
    others, simulated = swarm.num_peers - 1, min(swarm.num_peers, SIMULATED)
    sizes = {row["message"]: row.get("bytes", message_bytes.MAX_MESSAGE_BYTES) for row in messages}
    told, answered, gossip = 0.0, 0.0, 0.0
    for kind, count in counted(simulated).items():
        num_bytes = sizes[kind] * count / ROUNDS
        if kind == "HELLO":
            gossip += num_bytes / simulated
        elif kind in FROM_CONVENER:
            told += num_bytes / (simulated - 1)
        else:
            answered += num_bytes / (simulated - 1)
    offer = max(len(each.encoded) for each in swarm.offers.values())
    reducers = len(set(swarm.plan.reducers.values()))
    evidence = evidence_bytes(swarm.num_peers, len(swarm.plan.reducers))
    body = len(swarm.manifest.encoded) + evidence
    rosters = offer * swarm.num_peers * reducers
    shared = swarm.num_peers > MANY
    relays = len(relays_of_body(dict.fromkeys(swarm.peers[1:], 100)))
    table = {
        "convener sends": (
            told * others + gossip,
            body * (relays or others) + (offer * reducers if shared else rosters),
        ),
        "convener gets": (answered * others + gossip, offer * others),
        "another sends": (answered + gossip, offer * (reducers + 1 if shared else 1)),
        "another gets": (told + gossip, body + rosters / swarm.num_peers),
    }
    if relays:
        table["a relay also sends"] = (0, body * (others - relays) / relays)
    return [
        {"peers": swarm.num_peers, "who": who, "message_bytes": text, "attached_bytes": attached}
        for who, (text, attached) in table.items()
    ]


def measured(num_peers: int, identity: Identity) -> dict[str, list[dict[str, Any]]]:
    """All tables of one size."""
    swarm = Swarm(num_peers, identity)
    messages = message_rows(swarm)
    decisions = decision_rows(swarm)
    rounds = round_rows(swarm, messages)
    return {
        "messages": messages,
        "decisions": decisions,
        "records": record_rows(swarm),
        "round": rounds,
        "summary": [summary(swarm, messages, decisions, rounds)],
    }


def summary(
    swarm: Swarm,
    messages: list[dict[str, Any]],
    decisions: list[dict[str, Any]],
    rounds: list[dict[str, Any]],
) -> dict[str, Any]:
    """Largest message, and longest block of the event loop. Large messages are decoded elsewhere.

    Control bytes are the bytes of messages that a peer other than the convener sends and receives
    in a round.
    """
    is_large = swarm.num_peers // 2 + 1 > MANY
    on_loop = [
        (row["ms"], row["decision"])
        for row in decisions
        if not row["decision"].endswith(OFF_LOOP)
        and (row["decision"] != "certificate verified" or not is_large)
    ]
    on_loop += [
        (row["decode_ms"], f"{row['message']} decoded")
        for row in messages
        if "decode_ms" in row and row["attached_bytes"] <= LARGE_BYTES
    ]
    longest_ms, what = max(on_loop)
    largest = max(messages, key=lambda row: row.get("bytes", message_bytes.MAX_MESSAGE_BYTES + 1))
    return {
        "peers": swarm.num_peers,
        "control_bytes_of_a_peer": sum(
            row["message_bytes"] for row in rounds if row["who"].startswith("another")
        ),
        "manifest_bytes": len(swarm.manifest.encoded),
        "largest_message": largest["message"],
        "largest_bytes": largest.get("bytes", "over the limit"),
        "longest_block_ms": longest_ms,
        "longest_block": what,
    }


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A table in Markdown, with the columns of all rows."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for row in rows:
        print(f"| {' | '.join(_text(row.get(column, '')) for column in columns)} |")
    print()


def _text(cell: Any) -> str:
    if not isinstance(cell, float):
        return f"{cell:,}" if isinstance(cell, int) else str(cell)
    return f"{cell:,.0f}" if cell >= 100 else f"{cell:.2f}"


def main() -> None:
    """Prints the tables, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default="4,16,64,256,1024", help="sizes, with commas between")
    parser.add_argument("--json", action="store_true", help="one JSON object last on stdout")
    args = parser.parse_args()
    tables: dict[str, list[dict[str, Any]]] = {}
    gc.disable()
    with TemporaryDirectory() as folder:
        identity = load_or_create_identity(Path(folder) / "identity")
        for num_peers in map(int, args.peers.split(",")):
            for name, rows in measured(num_peers, identity).items():
                tables.setdefault(name, []).extend(rows)
    for name, rows in tables.items():
        print(f"{name}:\n")
        print_rows(rows)
    if args.json:
        print(json.dumps(tables))


if __name__ == "__main__":
    main()
