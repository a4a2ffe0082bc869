"""The manifest, which is the result of a round, and the orders and quorums that follow from it.

The chain of manifests is the run. `height` is a manifest's position in the chain; merges and
reforms count. `round` is the number of training rounds up to the manifest. A "version" is always
the number of a training round. Rules in brackets, as [R7], are those of swarm/protocol/SAFETY.md.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from typing import Annotated

from blake3 import blake3
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, ValidationInfo

from swarm.canonical import canonical
from swarm.config.section import Strict, refusal
from swarm.errors import BadManifest
from swarm.experts import expert_unit
from swarm.protocol.values.digests import DIGEST_BYTES, Buffer, digest_of
from swarm.protocol.values.invitation import Credential, Invitation, Used, as_plain
from swarm.protocol.values.texts import Text, TokenizerFile

Sources = Mapping[str, tuple[tuple[str, str], ...]]
"""For each renewed unit, the offered values behind it, as (peer, digest)."""


def packed_sources(sources: Sources, contributors: tuple[str, ...]) -> dict[str, object]:
    """Sources in their JSON form: only digests, in base64, for a unit to which all contribute."""
    packed: dict[str, object] = {}
    for unit, values in sources.items():
        packed[unit] = values
        peers, digests = zip(*values, strict=True) if values else ((), ())
        if peers and peers == contributors:
            joined = "".join(digests)
            if len(joined) == 2 * DIGEST_BYTES * len(peers) and (plain := _from_hex(joined)):
                packed[unit] = b64encode(plain).decode()
    return packed


def _from_hex(digits: str) -> bytes | None:
    """The bytes of hex digits in lower case; None for anything else."""
    try:
        plain = bytes.fromhex(digits)
    except ValueError:
        return None
    return plain if plain.hex() == digits else None


def sources_from(packed: object, info: ValidationInfo) -> object:
    """Unpacks the form of `packed_sources`; other values are left to the type check."""
    contributors = info.data.get("contributors", ())
    if not isinstance(packed, Mapping):
        return packed
    return {unit: _values_from(values, contributors) for unit, values in packed.items()}


def _values_from(packed: object, contributors: tuple[str, ...]) -> object:
    if not isinstance(packed, str):
        return packed
    digests = b64decode(packed, validate=True)  # its ValueError counts as a validation error
    if len(digests) != DIGEST_BYTES * len(contributors):
        raise ValueError("not a digest for each contributor")
    starts = range(0, len(digests), DIGEST_BYTES)
    return tuple(
        (peer, digests[start : start + DIGEST_BYTES].hex())
        for peer, start in zip(contributors, starts, strict=True)
    )


PeerId = str
Digest = str
Unit = str
Wish = str
"""A member's signature over its wish to leave the run after a manifest, in base64 (member
removal)."""
Stretch = tuple[int, int]
"""Samples of the run's text: the number of the first, and the number after the last."""
Lineage = tuple[tuple[int, tuple[int, str]], ...]
Code = tuple[tuple[int, tuple[int, str] | tuple[()]], ...]

FOUNDING_GENERATION = "0"
UNCODED = "none"
"""The coding of units that travel as values; all other codings are for deltas."""
MAX_MANIFEST_BYTES = 8 * 2**20
Finite = Annotated[float, Field(allow_inf_nan=False)]
"""A real number in canonical JSON, which has no infinities and no NaN."""


class Kind(Enum):
    """How a manifest came about."""

    FOUNDING = "founding"  # manifest 0, written by the founder alone
    QUORUM = "quorum"  # an ordinary round, accepted by a quorum of the parent's voters
    MERGE = "merge"  # an expert merge, accepted by a quorum of the parent's voters
    REFORM = "reform"  # survivors of a lost majority continue, without a quorum


@dataclass(frozen=True)
class Founding:
    """Facts that manifest 0 fixes for ever; every later manifest repeats them."""

    founder: PeerId
    nonce: str
    config: Digest
    """Blob with the run configuration's canonical JSON."""
    config_bytes: int
    validation: Digest
    """Blob with the held-out tokens, little-endian uint32."""
    validation_bytes: int
    text: Text | None = None
    """None if every peer has its own text."""
    tokenizer: TokenizerFile | None = None
    """None, and left out of the JSON, for the byte tokenizer."""

    @property
    def blobs(self) -> dict[Digest, int]:
        """Blobs that every member keeps until the run ends, with their sizes."""
        found = {self.config: self.config_bytes, self.validation: self.validation_bytes}
        return found | ({self.tokenizer.digest: self.tokenizer.num_bytes} if self.tokenizer else {})


ALL_EXPERTS = 2**11
"""The room of a machine that holds every expert of a run; no model has more experts."""
SEASONED_ROUNDS = 50
"""Counted rounds of a member are not recorded beyond this number [R7]."""


@dataclass(frozen=True)
class Member:
    """A peer that trains: a voter, or a trainee that has yet to earn its vote [R7]."""

    silent: int
    """Consecutive rounds in which nothing was heard of this peer (member removal)."""
    capacity: Finite
    """Relative share of experts that it wants to own."""
    tokens_per_s: Finite = 0.0
    """Speed of its local steps in the last round that counted it; 0 before the first."""
    counted: int = SEASONED_ROUNDS
    """Rounds that have counted it since it joined, at most `SEASONED_ROUNDS`, with which founding
    voters begin."""
    votes: bool = True
    """Whether it is an elector of the next round; a trainee is not."""
    vouched: bool = True
    """Whether an anchor vouches for it, or the founder took it into manifest 0 [R7]."""
    invites: int = 0
    """How many peers it may admit; with more than 0 it is an anchor. Left out of the JSON if 0."""
    given: int = 0
    """How many peers it has admitted. Left out of the JSON if 0."""
    room: int = ALL_EXPERTS
    """How many experts fit its machine, by its own declaration (expert ownership). Left out of the
    JSON if all fit."""
    weight: int = 1
    """The work of this member may count like that of this many ordinary members, as an anchor
    decided (mean weights, deal sizes). Left out of the JSON if 1."""


@dataclass(frozen=True)
class FormerMember:
    """A vouched member that was removed, or left; it may return in its old role [R8]."""

    since: int
    """Training round of the first manifest without this member."""
    invites: int
    given: int
    weight: int


@dataclass(frozen=True)
class Entry:
    """The agreed value of one unit."""

    digest: Digest
    num_bytes: int
    version: int
    """Training round in which the value last changed; a merge keeps it (merge manifests)."""
    source: PeerId
    """The peer that had the value first."""
    codec: str
    base: Digest | None = None
    """Digest of the previous value, in a merge (merge manifests) or if a delta moved the value
    (delta entries)."""
    delta: Digest | None = None
    """The delta's blob; None in a merge, and for a unit whose values travel whole."""
    coding: str = UNCODED
    """The coding of the delta; left out of the JSON if there is no delta."""


@dataclass(frozen=True)
class Head(Strict):
    """The part of a manifest that says who decides the next one. Its digest is the manifest's id.

    A chain of heads with certificates proves a manifest to a peer without the manifests before it
    (`swarm.protocol.chain.trust`). Everything else is in the body, which the head names.
    """

    run: str
    generation: str
    height: Annotated[int, Field(ge=0, le=2**40)]
    kind: Kind
    parent: Digest | None
    lineage: Lineage
    founder: PeerId
    voters: tuple[PeerId, ...]
    """Electors of the next height, in peer-id order. Trainees are in the body alone."""
    anchors: str
    """Which voters are anchors (or the founder): bits as hex digits, with the first voter as the
    highest bit."""
    contributed: str
    """Which voters contributed, as bits in the same form."""
    seed: Digest | None
    body: Digest
    """The blob that holds the manifest's canonical JSON."""

    @cached_property
    def encoded(self) -> bytes:
        """Canonical JSON."""
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        return canonical(content, plain=_plain)

    @cached_property
    def digest(self) -> Digest:
        """The manifest's identity."""
        return digest_of(self.encoded)

    @cached_property
    def code(self) -> Code:
        """Place in the total order of all manifests of a run: larger wins [F1]."""
        return (*self.lineage, (self.height, ()))

    @cached_property
    def order(self) -> tuple[PeerId, ...]:
        """Voters in the order in which they convene: contributors first, each group by hash."""
        seed = self.seed or self.digest
        worked = self._among_voters(self.contributed)
        return tuple(sorted(self.voters, key=lambda p: (p not in worked, turn(seed, p), p)))

    @cached_property
    def anchored(self) -> frozenset[PeerId]:
        """The voters that are anchors [L2]."""
        return self._among_voters(self.anchors)

    def _among_voters(self, packed: str) -> frozenset[PeerId]:
        bits = _bits(packed, len(self.voters))
        return frozenset(peer for peer, bit in zip(self.voters, bits, strict=True) if bit)

    def is_quorum(self, peers: Iterable[PeerId]) -> bool:
        """Whether these peers decide the next round; any two quorums share a voter.

        A quorum is more than half of the voters, or exactly half with the tie-breaker `order[0]`.
        """
        present = frozenset(self.voters).intersection(peers)
        twice, electors = 2 * len(present), len(self.voters)
        return twice > electors or (
            twice == electors and bool(present) and self.order[0] in present
        )


@dataclass(frozen=True)
class Manifest:
    """One agreed state of the run."""

    run: str
    """Run id; empty in manifest 0, whose digest the run id contains."""
    generation: str
    height: int
    round: int
    kind: Kind
    parent: Digest | None
    founding: Founding
    step: int
    """Cumulative optimizer steps of the run (a step that all peers take counts once)."""
    tokens: int
    """Cumulative tokens of all contributors."""
    merged: int
    """The number of merge intervals, floor(step / interval), up to which merges are done (merge
    schedule)."""
    members: Mapping[PeerId, Member]
    contributors: tuple[PeerId, ...]
    """Peers whose shared tensors are in the mean, in peer-id order."""
    sources: Annotated[Sources, BeforeValidator(sources_from)]
    """For each renewed unit, the offered values behind it, in peer-id order."""
    owners: Mapping[int, tuple[PeerId, ...]]
    """Owners of each expert in the next round, in peer-id order."""
    entries: Mapping[Unit, Entry]
    lineage: Lineage = ()
    """For each reform in the ancestry: (height, (number of electors of its parent in it,
    generation))."""
    work: Mapping[PeerId, int] = field(default_factory=dict)
    """Tokens of each contributor, which decide its weight in the means of this round."""
    cursor: int = 0
    holes: tuple[Stretch, ...] = ()
    dealt: Mapping[PeerId, tuple[Stretch, ...]] = field(default_factory=dict)
    """The dealt samples of the text, see `swarm.protocol.values.work`."""
    wishes: Mapping[PeerId, Wish] = field(default_factory=dict)
    """Signed wishes to leave, of members that were heard but are no longer listed."""
    invited: Mapping[PeerId, Credential] = field(default_factory=dict)
    """Credentials of peers that vote from this manifest on, without ten rounds of work [R8]."""
    invitations: Mapping[Digest, Used] = field(default_factory=dict)
    """Invitations that were used and are still valid, by name [R8]."""
    absent: Mapping[PeerId, FormerMember] = field(default_factory=dict)
    """Peers that were members and are still vouched for [R8]."""
    seed: Digest | None = None
    """Decides the order of members: in a merge, the parent's seed or digest; None: this manifest's
    digest."""
    reasons: tuple[str, ...] = ()
    """Why members or owners changed, one sentence each."""

    @cached_property
    def encoded(self) -> bytes:
        """Canonical JSON: the manifest's blob."""
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        content["sources"] = packed_sources(self.sources, self.contributors)
        return canonical(content, plain=_plain)

    @cached_property
    def blob(self) -> Digest:
        """Digest of the manifest's blob."""
        return digest_of(self.encoded)

    @cached_property
    def head(self) -> Head:
        """The head, which follows from the manifest."""
        voters = tuple(sorted(self.voters))
        contributors = frozenset(self.contributors)
        return Head(
            run=self.run,
            generation=self.generation,
            height=self.height,
            kind=self.kind,
            parent=self.parent,
            lineage=self.lineage,
            founder=self.founding.founder,
            voters=voters,
            anchors=_packed([self.is_anchor(peer) for peer in voters]),
            contributed=_packed([peer in contributors for peer in voters]),
            seed=self.seed,
            body=self.blob,
        )

    @property
    def blobs(self) -> set[Digest]:
        """Every blob that a member keeps for this manifest."""
        return {self.blob, *self.founding.blobs, *(each.digest for each in self.entries.values())}

    @property
    def sizes(self) -> dict[Digest, int]:
        """Bytes of every blob of the state: values, configuration and held-out tokens."""
        values = {entry.digest: entry.num_bytes for entry in self.entries.values()}
        return values | dict(self.founding.blobs)

    @cached_property
    def deltas(self) -> Mapping[Digest, Unit]:
        """Deltas by which this manifest moved units. Peers that voted for it have them [W6]."""
        renewed = ((self.entries[unit].delta, unit) for unit in self.sources)
        return {delta: unit for delta, unit in renewed if delta is not None}

    @property
    def digest(self) -> Digest:
        """The manifest's identity: the digest of its head."""
        return self.head.digest

    @property
    def code(self) -> Code:
        """Place in the total order of all manifests of a run: larger wins [F1]."""
        return self.head.code

    @cached_property
    def ownerless(self) -> frozenset[Unit]:
        """Experts that wait for an owner: frozen, not due, but part of merges.

        Policies: expert ownership, due units.
        """
        return frozenset(expert_unit(expert) for expert, who in self.owners.items() if not who)

    @cached_property
    def voters(self) -> frozenset[PeerId]:
        """Members that elect the next height; the others are trainees [R7]."""
        return frozenset(peer for peer, member in self.members.items() if member.votes)

    @cached_property
    def trusted(self) -> Mapping[PeerId, int]:
        """Members whose work may count like that of several members, with that number."""
        return {peer: each.weight for peer, each in self.members.items() if each.weight > 1}

    def is_anchor(self, peer: PeerId) -> bool:
        """Whether a peer may invite others and vouch for a reform [L2, R8]."""
        member = self.members.get(peer)
        return peer == self.founding.founder or (member is not None and member.invites > 0)

    @cached_property
    def vouched(self) -> frozenset[PeerId]:
        """Members for which anchors vouch: in every manifest a majority of the voters [R7]."""
        return frozenset(peer for peer, member in self.members.items() if member.vouched)

    @property
    def order(self) -> tuple[PeerId, ...]:
        """Voters by turn, see `Head.order`."""
        return self.head.order

    def counts(self, peer: PeerId) -> bool:
        """Whether this manifest itself counted the peer; merges and reforms repeat the list."""
        return self.kind is Kind.QUORUM and peer in self.contributors

    def is_quorum(self, peers: Iterable[PeerId]) -> bool:
        """Whether these peers decide the next round, see `Head.is_quorum`."""
        return self.head.is_quorum(peers)


def leave_statement(run: str, tip: Digest) -> bytes:
    """The bytes that a member signs when it asks to leave with the manifest after `tip`."""
    return f"swarm leave {run} {tip}".encode()


def is_ancestor(code: Code, of: Code) -> bool:
    """Whether the manifest with one code is an ancestor of that with the other code, or the same.

    A reform has the same height as its parent. So manifests of the old generation above this height
    are not ancestors of the reform.
    """
    *lineage, (height, _) = code
    return of[: len(lineage)] == tuple(lineage) and height <= of[len(lineage)][0]


_UNSAID = {"room": ALL_EXPERTS, "invites": 0, "given": 0, "weight": 1}
"""Values of a member that the JSON leaves out."""
_NEVER = object()


def _plain(
    value: Kind
    | Member
    | FormerMember
    | Entry
    | Founding
    | Text
    | TokenizerFile
    | Invitation
    | Credential
    | Used,
) -> object:
    """A nested value in its JSON form, without a copy, which would take three times as long."""
    if isinstance(value, Founding):
        return {k: each for k, each in vars(value).items() if each or k != "tokenizer"}
    if isinstance(value, Member):
        return {k: each for k, each in vars(value).items() if each != _UNSAID.get(k, _NEVER)}
    if isinstance(value, Entry) and value.coding == UNCODED:
        return {name: each for name, each in vars(value).items() if name != "coding"}
    if isinstance(value, (Invitation, Credential, Used)):
        return as_plain(value)  # these cache derived values in their `__dict__`
    return value.value if isinstance(value, Kind) else vars(value)


def _packed(bits: Sequence[bool]) -> str:
    return f"{int(''.join('01'[bit] for bit in bits) or '0', 2):0{-(-len(bits) // 4)}x}"


def _bits(packed: str, number: int) -> list[bool]:
    """Unpacks bits from the form of `_packed`. An invalid form counts as no bits."""
    try:
        bits = f"{int(packed or '0', 16):0{number}b}"
    except ValueError:
        bits = ""
    return [bit == "1" for bit in bits] if len(bits) == number else [False] * number


def turn(seed: str, peer: PeerId) -> bytes:
    """Pseudo-random rank of a peer under a seed; equal everywhere."""
    return blake3(f"{seed}/{peer}".encode()).digest()


RUN_ID = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}-[0-9a-f]{16}$"
IS_RUN_ID = re.compile(RUN_ID)
"""The form of a `run_id`, which alone may become the name of a folder."""


def run_id(name: str, fingerprint: str, founding_manifest: Digest) -> str:
    """Identity of a run: its name and 16 hex digits over configuration and manifest 0."""
    return f"{name}-{blake3(f'{name}/{fingerprint}/{founding_manifest}'.encode()).hexdigest()[:16]}"


_MANIFEST = TypeAdapter(Manifest)
HEAD: TypeAdapter[Head] = TypeAdapter(Head)


def decode_manifest(encoded: Buffer) -> Manifest:
    """Reads a manifest from the bytes of its blob.

    Raises:
        BadManifest: too large, not of the schema, or not canonical.
    """
    if len(encoded) > MAX_MANIFEST_BYTES:
        raise BadManifest("manifest_size", f"a manifest of {len(encoded)} bytes is too large")
    try:
        manifest = _MANIFEST.validate_json(bytes(encoded))
    except ValidationError as error:
        raise BadManifest("manifest_schema", f"manifest field {refusal(error)}") from error
    if manifest.encoded != bytes(encoded):
        raise BadManifest("manifest_schema", "the manifest is not in canonical form")
    return manifest
