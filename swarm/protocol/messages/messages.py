"""The eight messages that peers exchange to agree on a manifest.

The connection that a message came on identifies its sender. A message keeps the header of its
creation. So a vote never counts for another tip, generation or electorate [H1, H2].
"""

from __future__ import annotations

import operator
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PlainSerializer, TypeAdapter

from swarm.canonical import canonical
from swarm.experts import expert_of_unit
from swarm.protocol.messages import schemas
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.invitation import Credential
from swarm.protocol.values.manifest import ALL_EXPERTS, Digest, Manifest, PeerId, Unit

SIGNATURE_BYTES = 64


def _text(signature: bytes) -> str:
    return b64encode(signature).decode()


_SIGNATURE = Annotated[schemas.SignatureText, AfterValidator(b64decode), PlainSerializer(_text)]
Signature = Annotated[bytes, schemas.read_as(_SIGNATURE)]
"""Ed25519, 64 bytes; the signer's key follows from its peer id."""
UNSIGNED: Signature = bytes(SIGNATURE_BYTES)
"""A placeholder for peers that trust each other, as in tests of the machine alone."""
Uplinks = Annotated[
    Mapping[schemas.PeerText, schemas.Uplink],
    Field(max_length=4096),
    AfterValidator(schemas.in_order),
]
"""Uplink of each peer in Mbit/s; 0: not known."""
MAX_REPORTS = 4096
MAX_ATTEMPT = 2**31
"""No peer begins, sends or believes an attempt above this (attempt limit)."""


@dataclass(frozen=True, order=True)
class Ballot(schemas.OnWire):
    """Number of one attempt to decide; compared as a tuple.

    Only the first convener uses attempt 0, which needs no phase 1.
    """

    attempt: schemas.Count
    convener: schemas.PeerText


def _possible(ballot: Ballot) -> Ballot:
    if ballot.attempt > MAX_ATTEMPT:
        raise ValueError(f"an attempt over {MAX_ATTEMPT}")
    return ballot


PossibleBallot = Annotated[Ballot, AfterValidator(_possible)]
"""A ballot that a peer may send (attempt limit)."""


@dataclass(frozen=True)
class Header(schemas.OnWire):
    """The sender's tip at the moment the message was created."""

    code: schemas.CodeText
    tip: schemas.DigestText
    generation: schemas.Generation


@dataclass(frozen=True)
class OfferedUnit(schemas.OnWire):
    """One unit's value as its owner offers it."""

    digest: schemas.DigestText
    """Digest of the value; for a unit whose deltas are averaged, digest of the delta."""
    num_bytes: schemas.Count
    base: schemas.DigestText
    """Digest of the agreed value that it was trained from [S3]."""
    delta: schemas.DigestIfAny = None
    """The delta from the base to the value, for a unit that is used verbatim."""


@dataclass(frozen=True)
class Offer(schemas.OnWire):
    """The values that a peer puts into a round: a blob, which messages name by its digest."""

    tip: schemas.DigestText
    """Manifest that the local steps started from."""
    steps: schemas.RoundCount
    tokens: schemas.RoundCount
    units: Mapping[schemas.UnitText, OfferedUnit]
    seconds: schemas.Seconds = 0.0
    """How long the local steps took."""

    @cached_property
    def is_late(self) -> bool:
        """Whether the offer has only experts, from a peer that an earlier round left out.

        Policy: late offers.
        """
        return all(expert_of_unit(unit) is not None for unit in self.units)

    @cached_property
    def encoded(self) -> bytes:
        """Canonical JSON: the offer's blob."""
        return canonical(OFFER.dump_python(self))

    @cached_property
    def digest(self) -> Digest:
        """Digest of its blob."""
        return digest_of(self.encoded)


@dataclass(frozen=True)
class Declaration(schemas.OnWire):
    """The signed part of a READY, which others see as evidence of a proposal [A6]."""

    offer: schemas.DigestText | None
    """Digest of its offer's blob; None without an offer."""
    seconds: schemas.Seconds
    """Seconds of the local steps in its offer."""
    capacity: schemas.Capacity
    leave: bool
    room: schemas.Room = ALL_EXPERTS
    """Number of experts that fit the peer's machine."""


@dataclass(frozen=True)
class Declared:
    """A declaration, with its peer's signature over `ready_statement`."""

    declaration: Declaration
    signature: Signature


@dataclass(frozen=True)
class _Signed(Declaration):
    """The JSON form: declaration and signature in one object."""

    signature: Signature = field(kw_only=True)


def _declared(said: _Signed) -> Declared:
    declaration = Declaration(said.offer, said.seconds, said.capacity, said.leave, said.room)
    return Declared(declaration, said.signature)


def _signed(declared: Declared) -> Mapping[str, object]:
    return vars(declared.declaration) | {"signature": _text(declared.signature)}


_SIGNED = Annotated[_Signed, AfterValidator(_declared), PlainSerializer(_signed)]
DeclaredText = Annotated[Declared, schemas.read_as(_SIGNED)]


@dataclass(frozen=True)
class Report(schemas.OnWire):
    """Results of a reducer, with its signature over `reduced_statement`."""

    reducer: schemas.PeerText
    results: Mapping[schemas.UnitText, ReducedUnit]
    signature: Signature


@dataclass(frozen=True)
class Evidence(schemas.OnWire):
    """The signed statements behind the manifest of a round [A6]. Travels as a blob."""

    declared: Mapping[schemas.PeerText, DeclaredText]
    """Declarations of every member that the convener heard, and of the strangers that it admits."""
    able: Uplinks
    """The possible reducers, in peer-id order, with the uplinks by which units were assigned.
    Nothing proves these claims of the convener."""
    roster_id: schemas.DigestText
    """The roster under which the reducers signed."""
    reports: Annotated[tuple[Report, ...], Field(max_length=MAX_REPORTS)]
    """Results of the reducers. Of several reports on a unit, its reducer's first counts."""


@dataclass(frozen=True)
class Certificate(schemas.OnWire):
    """Why a manifest counts as decided: the signed ACCEPTs of a quorum of the parent's voters.

    For a reform: the ACCEPTs of those voters of its parent that have joined the reform, under
    ballot 0 of its author. They need not be a quorum, since a reform is made because a quorum is
    missing.
    """

    ballot: PossibleBallot
    signatures: Annotated[Mapping[schemas.PeerText, Signature], AfterValidator(schemas.in_order)]


@dataclass(frozen=True)
class Link(schemas.OnWire):
    """One step of a proof: a head and why it counts, see `swarm.protocol.chain.trust`."""

    head: schemas.NamedHead
    certificate: Certificate | None = None
    """None where a proof begins."""
    parent: schemas.NamedHead | None = None
    """The head of the parent of `head`, unless the previous link already has it."""
    alike: Annotated[bool, Field(exclude_if=operator.not_)] = False
    """Whether all heads between the previous link and this link have the previous link's voters.
    Left out of the JSON if false."""


@dataclass(frozen=True)
class Hello(schemas.OnWire):
    """Gossip. With `ask`, the receiver sends its tip if that is newer than the sender's."""

    ask: bool
    type: Literal["hello"] = field(default="hello", repr=False)


@dataclass(frozen=True)
class Prepare(schemas.OnWire):
    """Phase 1a, and the convener's poll and heartbeat while it collects."""

    ballot: PossibleBallot
    type: Literal["prepare"] = field(default="prepare", repr=False)


@dataclass(frozen=True)
class Accepted(schemas.OnWire):
    """A vote that a peer has durably cast."""

    ballot: PossibleBallot
    manifest: Annotated[Manifest, schemas.BESIDE]
    evidence: Annotated[Evidence, schemas.BESIDE] | None = None
    """None for a merge. A convener that proposes the manifest again [C2] sends the evidence
    again."""


@dataclass(frozen=True)
class Ready(schemas.OnWire):
    """Phase 1b with the offer. With a higher ballot it refuses; from a stranger it asks to join."""

    ballot: PossibleBallot
    offer: Annotated[Offer, schemas.BESIDE] | None
    accepted: Accepted | None
    capacity: schemas.Capacity
    leave: bool = False
    dialable: bool = True
    """Whether others can dial the sender, and it was not stuck as a reducer lately. Otherwise the
    sender is asked to reduce only if nobody else can."""
    remaining_s: schemas.Seconds | None = None
    """Expected time until the sender's local steps end; None: not known."""
    worked_s: schemas.Seconds = 0.0
    """Time of the sender's local steps so far; with an offer, of all its steps."""
    fetched_s: schemas.Seconds = 0.0
    """How long the sender took to fetch the tip before it could begin its steps."""
    wish: schemas.SignatureText | None = None
    """With `leave`: signature over `leave_statement`, so that nobody else can make the sender
    leave."""
    credential: Credential | None = None
    """Sent by a peer for which an anchor vouches, until a manifest lists it as vouched [R8]."""
    stalls_in_s: schemas.Seconds | None = None
    """Where rounds overlap: time until the sender has no steps left; None: it has none left now."""
    uplink_mbit: schemas.Uplink = 0
    """Measured uplink of the sender; 0: not known (balanced uploads)."""
    room: schemas.Room = ALL_EXPERTS
    """Number of experts that fit the sender's machine, including those that it owns
    (expert ownership)."""
    signature: Signature = UNSIGNED
    """Over `ready_statement` of its declaration and the header's tip; verified on receipt."""
    type: Literal["ready"] = field(default="ready", repr=False)

    @cached_property
    def declared(self) -> Declared:
        """The part of the READY that is shown to others as evidence."""
        said = declaration_of(self.offer, self.capacity, self.leave, self.room)
        return Declared(said, self.signature)


@dataclass(frozen=True)
class Roster:
    """Whose offers are averaged, and who may reduce; also the heartbeat while reducing.

    Every peer derives the same reducer of each unit from the roster.
    """

    ballot: Ballot
    roster_id: Digest
    offers: Mapping[PeerId, Offer]
    reducers: Uplinks
    """Possible reducers, in peer-id order, with the uplinks by which units are assigned
    (balanced uploads)."""


@dataclass(frozen=True)
class ReducedUnit(schemas.OnWire):
    """Digest and size of a mean."""

    digest: schemas.DigestText
    num_bytes: schemas.Count
    delta: schemas.DigestIfAny = None
    """Where deltas are averaged: the blob that makes the mean from the previous agreed value
    (delta means)."""


@dataclass(frozen=True)
class Reduced(schemas.OnWire):
    """A reducer's (partial) result; answers every repeat of the roster."""

    ballot: PossibleBallot
    roster_id: schemas.DigestText
    results: Annotated[
        Mapping[schemas.UnitText, ReducedUnit],
        Field(max_length=schemas.MAX_RESULTS),
        AfterValidator(schemas.in_order),
    ]
    missing: Annotated[
        Mapping[schemas.PeerText, schemas.Why], Field(max_length=schemas.MAX_MISSING)
    ]
    """Contributors whose values could not be obtained, with the reason."""
    signature: Signature = UNSIGNED
    """Over `reduced_statement`; verified on receipt."""
    type: Literal["reduced"] = field(default="reduced", repr=False)


@dataclass(frozen=True)
class Propose(schemas.OnWire):
    """Phase 2a, repeated to peers that have not accepted."""

    ballot: PossibleBallot
    manifest: Annotated[Manifest, schemas.BESIDE]
    holders: Annotated[tuple[schemas.PeerText, ...], Field(max_length=schemas.MAX_HOLDERS)]
    """Peers known to hold every blob of the manifest."""
    evidence: Annotated[Evidence, schemas.BESIDE] | None = None
    """None for a merge."""
    relays: Annotated[tuple[schemas.PeerText, ...], Field(max_length=schemas.MAX_RELAYS)] = ()
    """Peers that relay manifest and evidence; other peers ask these first (blob relays)."""
    type: Literal["propose"] = field(default="propose", repr=False)


@dataclass(frozen=True)
class Accept(schemas.OnWire):
    """Phase 2b: the manifest and all its blobs are on the sender's disk."""

    ballot: PossibleBallot
    digest: schemas.DigestText
    signature: Signature
    """Over `accept_statement`; verified by the shell on receipt."""
    type: Literal["accept"] = field(default="accept", repr=False)


@dataclass(frozen=True)
class Commit:
    """A decided manifest or a reform; certificate or path prove it to the receiver."""

    manifest: Manifest
    certificate: Certificate | None
    parent: Manifest | None
    path: tuple[Link, ...] = ()
    """Proves the manifest to a peer whose tip is not its parent; ends with the manifest's link."""


Message = Hello | Prepare | Ready | Roster | Reduced | Propose | Accept | Commit


OFFER = TypeAdapter(Offer)


def accept_statement(run: str, ballot: Ballot, digest: Digest) -> bytes:
    """The bytes that a peer signs when it accepts a manifest."""
    return f"swarm accept {run} {ballot.attempt} {ballot.convener} {digest}".encode()


def declaration_of(
    offer: Offer | None, capacity: float, leave: bool, room: int = ALL_EXPERTS
) -> Declaration:
    """The declaration of a peer with this offer."""
    seconds = float(offer.seconds) if offer else 0.0
    return Declaration(offer.digest if offer else None, seconds, float(capacity), leave, room)


def ready_statement(run: str, tip: Digest, declared: Declaration) -> bytes:
    """The bytes that a peer signs with a READY. A repeated declaration on a tip is signed once."""
    what = f"{declared.offer or '-'} {declared.seconds!r} {declared.capacity!r} {declared.leave:d}"
    return f"swarm ready {run} {tip} {what} {declared.room}".encode()


def reduced_statement(run: str, roster_id: Digest, results: Mapping[Unit, ReducedUnit]) -> bytes:
    """The bytes that a reducer signs with each message of its results."""
    means = [
        [unit, mean.digest, mean.num_bytes, *([mean.delta] if mean.delta else [])]
        for unit, mean in sorted(results.items())
    ]
    return f"swarm reduced {run} {roster_id} {digest_of(canonical(means))}".encode()
