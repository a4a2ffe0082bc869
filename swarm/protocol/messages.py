"""The eight messages that peers exchange to agree on a manifest.

A message's sender is known from the connection that it came on. Its header is bound when the
message is created, so a vote never crosses tips, generations or electorates [H1, H2].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from swarm.canonical import canonical
from swarm.experts import expert_of_unit
from swarm.protocol.digests import digest_of
from swarm.protocol.invitation import Invitation
from swarm.protocol.manifest import Code, Digest, Head, Manifest, PeerId, Unit, Wish

SIGNATURE_BYTES = 64
Signature = bytes
"""Ed25519, 64 bytes; the signer's key follows from its peer id."""
UNSIGNED: Signature = bytes(SIGNATURE_BYTES)
"""For peers that trust each other, as in tests of the machine alone."""
Uplinks = Mapping[PeerId, int]
"""Mbit/s from each peer; 0 where it is not known."""
MAX_ATTEMPT = 2**31
"""Nobody begins a later attempt, sends one or believes one [A5]."""


class Ballot(NamedTuple):
    """Number of one attempt to decide; compared as a tuple.

    Only the first convener uses attempt 0, which needs no phase 1.
    """

    attempt: int
    convener: PeerId


@dataclass(frozen=True)
class Header:
    """The sender's tip at the moment the message was created."""

    code: Code
    tip: Digest
    generation: str


@dataclass(frozen=True)
class OfferedUnit:
    """One unit's value as its owner offers it."""

    digest: Digest
    """Of the value; of a unit whose deltas are averaged, of the delta, and no value is offered."""
    num_bytes: int
    base: Digest
    """Digest of the agreed value that it was trained from [S3]."""
    delta: Digest | None = None
    """The blob that makes the value of the base, where one writer's delta is taken verbatim."""


@dataclass(frozen=True)
class Offer:
    """What one peer puts into a round. Travels as a blob; messages carry its digest."""

    tip: Digest
    """Manifest that the local steps started from."""
    steps: int
    tokens: int
    units: Mapping[Unit, OfferedUnit]
    seconds: float = 0.0
    """How long the local steps took."""

    @cached_property
    def is_late(self) -> bool:
        """Whether it holds experts only, as of a peer that rounds before left out [O2]."""
        return all(expert_of_unit(unit) is not None for unit in self.units)

    @cached_property
    def encoded(self) -> bytes:
        """Canonical JSON: the offer's blob."""
        units = {unit: with_delta(vars(offered)) for unit, offered in self.units.items()}
        return canonical(
            {
                "tip": self.tip,
                "steps": self.steps,
                "tokens": self.tokens,
                "seconds": float(self.seconds),
                "units": units,
            }
        )

    @cached_property
    def digest(self) -> Digest:
        """Name of its blob."""
        return digest_of(self.encoded)


@dataclass(frozen=True)
class Declaration:
    """What a peer puts its name to with a READY: others see it behind a proposal [A6]."""

    offer: Digest | None
    """Of its offer's blob; None without an offer."""
    seconds: float
    """Of its offer."""
    capacity: float
    leave: bool


@dataclass(frozen=True)
class Declared:
    """A declaration, with its peer's signature over `ready_statement`."""

    declaration: Declaration
    signature: Signature


@dataclass(frozen=True)
class Report:
    """Results of a reducer, with its signature over `reduced_statement`."""

    reducer: PeerId
    results: Mapping[Unit, ReducedUnit]
    signature: Signature


@dataclass(frozen=True)
class Evidence:
    """What is behind the manifest of a round: who has signed what of it [A6]. Travels as a blob."""

    declared: Mapping[PeerId, Declared]
    """Of every member that the convener heard, and of the strangers that it takes in."""
    able: Uplinks
    """Who was asked to reduce, in peer-id order, with the uplinks by which units were dealt; for
    both there is the convener's word alone."""
    roster_id: Digest
    """Under which the reducers signed."""
    reports: tuple[Report, ...]
    """What they found; the first of a reducer that has a unit counts."""


@dataclass(frozen=True)
class Certificate:
    """Why a manifest counts as decided: the signed ACCEPTs of a quorum of the parent's members.

    Of a reform: those of the parent's members that have left for it, under the ballot 0 of its
    author; a quorum would not have needed it.
    """

    ballot: Ballot
    signatures: Mapping[PeerId, Signature]


@dataclass(frozen=True)
class Link:
    """One step of a proof: a manifest's head and why it counts, see `swarm.protocol.trust`."""

    head: Head
    certificate: Certificate | None = None
    """None where a proof begins."""
    parent: Head | None = None
    """Its parent's head, unless that is the link before."""


@dataclass(frozen=True)
class Hello:
    """Gossip. `ask`: send me your tip if it is newer than mine."""

    ask: bool


@dataclass(frozen=True)
class Prepare:
    """Phase 1a, and the convener's poll and heartbeat while it collects."""

    ballot: Ballot


@dataclass(frozen=True)
class Accepted:
    """A vote that a peer has durably cast."""

    ballot: Ballot
    manifest: Manifest
    evidence: Evidence | None = None
    """None of a merge. A convener that proposes the manifest again shows it again [C2]."""


@dataclass(frozen=True)
class Ready:
    """Phase 1b and the offer. A higher ballot than asked refuses; from a stranger it is a join."""

    ballot: Ballot
    offer: Offer | None
    accepted: Accepted | None
    capacity: float
    leave: bool = False
    dialable: bool = True
    """Whether others can dial the sender, and it did not get stuck as a reducer lately: only then
    is it asked to reduce, if anybody else can."""
    remaining_s: float | None = None
    """Until the sender's local steps are done, as it expects; None: it does not know."""
    worked_s: float = 0.0
    """What the sender's local steps have taken so far; with an offer, until it was made."""
    fetched_s: float = 0.0
    """What it took the sender to fetch the tip before it could begin them."""
    wish: Wish | None = None
    """Goes with `leave`: over `leave_statement`, so that nobody else can have the sender leave."""
    invitation: Invitation | None = None
    """Of a stranger that asks to join, if it has one [R8]."""
    stalls_in_s: float | None = None
    """Until the sender would wait for its offer to be decided, where rounds overlap; None: now."""
    uplink_mbit: int = 0
    """What the sender's line carries away from it, as it was measured; 0: not known [D3]."""
    signature: Signature = UNSIGNED
    """Over `ready_statement` of its declaration and the header's tip; verified on receipt."""

    @cached_property
    def declared(self) -> Declared:
        """What of it others may be shown."""
        return Declared(declaration_of(self.offer, self.capacity, self.leave), self.signature)


@dataclass(frozen=True)
class Roster:
    """Whose offers are averaged, and who may reduce; also the heartbeat while reducing.

    Every peer derives the same reducer of every unit from it.
    """

    ballot: Ballot
    roster_id: Digest
    offers: Mapping[PeerId, Offer]
    reducers: Uplinks
    """Who may reduce, in peer-id order, with the uplinks by which units are dealt [D3]."""


@dataclass(frozen=True)
class ReducedUnit:
    """Digest and size of a mean."""

    digest: Digest
    num_bytes: int
    delta: Digest | None = None
    """The blob that makes it of the agreed value before, where deltas are averaged [W5]."""


@dataclass(frozen=True)
class Reduced:
    """A reducer's (partial) result; answers every repeat of the roster."""

    ballot: Ballot
    roster_id: Digest
    results: Mapping[Unit, ReducedUnit]
    missing: Mapping[PeerId, str]
    """Contributors whose values could not be had, with the reason."""
    signature: Signature = UNSIGNED
    """Over `reduced_statement`; verified on receipt."""


@dataclass(frozen=True)
class Propose:
    """Phase 2a, repeated to those that have not accepted."""

    ballot: Ballot
    manifest: Manifest
    holders: tuple[PeerId, ...]
    """Peers known to hold every blob of the manifest."""
    evidence: Evidence | None = None
    """None of a merge."""


@dataclass(frozen=True)
class Accept:
    """Phase 2b: the manifest and all its blobs are on my disk."""

    ballot: Ballot
    digest: Digest
    signature: Signature
    """Over `accept_statement`; verified by the shell on receipt."""


@dataclass(frozen=True)
class Commit:
    """The manifest is decided, or is a reform; certificate or path prove it to its receiver."""

    manifest: Manifest
    certificate: Certificate | None
    parent: Manifest | None
    path: tuple[Link, ...] = ()
    """Proves the manifest to who has another tip than the parent; ends with the manifest's link."""


Message = Hello | Prepare | Ready | Roster | Reduced | Propose | Accept | Commit


def with_delta(content: dict[str, Any]) -> dict[str, Any]:
    """What JSON says of a unit: its delta only where there is one."""
    return {name: each for name, each in content.items() if name != "delta" or each is not None}


def accept_statement(run: str, ballot: Ballot, digest: Digest) -> bytes:
    """The bytes that a peer signs when it accepts a manifest."""
    return f"swarm accept {run} {ballot.attempt} {ballot.convener} {digest}".encode()


def declaration_of(offer: Offer | None, capacity: float, leave: bool) -> Declaration:
    """What a peer declares with this offer."""
    seconds = float(offer.seconds) if offer else 0.0
    return Declaration(offer.digest if offer else None, seconds, float(capacity), leave)


def ready_statement(run: str, tip: Digest, declared: Declaration) -> bytes:
    """The bytes that a peer signs with a READY; once for all that say the same on a tip."""
    what = f"{declared.offer or '-'} {declared.seconds!r} {declared.capacity!r} {declared.leave:d}"
    return f"swarm ready {run} {tip} {what}".encode()


def reduced_statement(run: str, roster_id: Digest, results: Mapping[Unit, ReducedUnit]) -> bytes:
    """The bytes that a reducer signs with each message of its results."""
    means = [
        [unit, mean.digest, mean.num_bytes, *([mean.delta] if mean.delta else [])]
        for unit, mean in sorted(results.items())
    ]
    return f"swarm reduced {run} {roster_id} {digest_of(canonical(means))}".encode()
