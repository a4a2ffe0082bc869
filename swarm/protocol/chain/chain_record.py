"""The protocol's record on disk as bytes, and peers whose record was lost or rolled back [P5]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import TypeAdapter

from swarm.canonical import canonical
from swarm.errors import BadMessage
from swarm.protocol.messages.events import Record, Regained
from swarm.protocol.messages.message_bytes import decode_evidence, encode_evidence
from swarm.protocol.messages.messages import MAX_ATTEMPT, Accepted, Ballot, Certificate, Link, Offer
from swarm.protocol.messages.schemas import IF_ANY, Count, OnWire, parse
from swarm.protocol.values.digests import Buffer
from swarm.protocol.values.manifest import MAX_MANIFEST_BYTES, Manifest, PeerId, decode_manifest

MAX_KEPT_BYTES = 5 * MAX_MANIFEST_BYTES


@dataclass(frozen=True)
class _Vote(OnWire):
    ballot: Ballot
    """Without a bound: `repaired` repairs a record with an impossible attempt."""
    manifest: str
    evidence: str | None


@dataclass(frozen=True)
class _Kept(OnWire):
    """The record; manifests are kept as their exact bytes."""

    tip: str
    certificate: Certificate | None
    parent: str | None
    promised: Ballot | None
    accepted: _Vote | None
    abstain_until_height: Count
    regained: Annotated[Regained | None, IF_ANY] = None


_RECORD = TypeAdapter(_Kept)
_LINK = TypeAdapter(Link)


def encode_record(record: Record) -> bytes:
    """The record for the disk, manifests included."""
    vote, parent = record.accepted, record.parent
    kept = _Kept(
        record.tip.encoded.decode(),
        record.certificate,
        parent.encoded.decode() if parent else None,
        record.promised,
        _Vote(
            vote.ballot,
            vote.manifest.encoded.decode(),
            encode_evidence(vote.evidence).decode() if vote.evidence else None,
        )
        if vote
        else None,
        record.abstain_until_height,
        record.regained,
    )
    return canonical(_RECORD.dump_python(kept))


def decode_record(encoded: Buffer) -> Record:
    """The record from the disk.

    Raises:
        BadMessage: too large or not of the schema.
        BadManifest: one of its manifests is invalid.
    """
    if len(encoded) > MAX_KEPT_BYTES:
        raise BadMessage("record_size", f"a record of {len(encoded)} bytes is too large")
    parsed = parse(_RECORD, encoded, "record")
    return Record(
        decode_manifest(parsed.tip.encode()),
        parsed.certificate,
        decode_manifest(parsed.parent.encode()) if parsed.parent is not None else None,
        parsed.promised,
        _vote(parsed.accepted) if parsed.accepted else None,
        parsed.abstain_until_height,
        parsed.regained,
    )


def _vote(vote: _Vote) -> Accepted:
    evidence = None if vote.evidence is None else decode_evidence(vote.evidence.encode())
    return Accepted(vote.ballot, decode_manifest(vote.manifest.encode()), evidence)


def encode_link(link: Link) -> bytes:
    """A link for the disk."""
    return canonical(_LINK.dump_python(link, mode="json"))


def decode_link(encoded: Buffer) -> Link:
    """A link from the disk.

    Raises:
        BadMessage: not of the schema.
    """
    return parse(_LINK, encoded, "link")


ABSTAIN_HEIGHTS = 2
"""Heights above the previous record's tip at which a peer that lost its newest record casts no
vote. The tip of the lost record may have been one height higher. That record may also have had a
vote for the height after its tip."""
UNTIL_IT_CONTRIBUTES = 2**62
"""A height that is never reached."""


def rolled_back(earlier: Record) -> Record:
    """The record of a peer whose newest record is lost, made from its previous one."""
    return _abstaining(earlier, earlier.tip.height + ABSTAIN_HEIGHTS)


def repaired(record: Record) -> Record | None:
    """Repairs a record with an impossible attempt in promise or vote. None if there is no such.

    No message can name such a ballot, so the promise or vote is dropped. The peer then no longer
    knows which votes it must not cast. So it casts no vote at that height.
    """
    ballots = [record.promised, record.accepted.ballot if record.accepted else None]
    if not any(ballot and ballot.attempt > MAX_ATTEMPT for ballot in ballots):
        return None
    return _abstaining(replace(record, promised=None, accepted=None), record.tip.height + 1)


def without_record(me: PeerId, shown: Record, path: Sequence[Link]) -> Record:
    """The record of a peer that has no record (lost, or never written) and was shown a tip.

    The peers that showed the tip may be far behind this peer's last vote, so it abstains at all
    heights until it contributes. They may also be on a chain without this peer, while another chain
    has it as a member. A peer that is neither a member of the tip nor a voter on the way to the tip
    is a newcomer, and need not abstain. If every newcomer with an old key abstained, a few that are
    invited together would leave no quorum.

    Args:
        me: the peer.
        shown: the tip, with its certificate.
        path: proof of the tip for a peer without a record. Heads that the proof leaves out stay
            unseen.
    """
    heads = [head for link in path for head in (link.head, link.parent) if head]
    if me not in shown.tip.members and not any(me in head.voters for head in heads):
        return shown
    return replace(shown, abstain_until_height=UNTIL_IT_CONTRIBUTES)


def moved_on(before: Record, shown: Record) -> Record:
    """The record of a peer that takes a newer tip from others, not from its own rounds.

    The peer abstains as before, since the new tip does not show at which height its last vote was.
    """
    return replace(
        shown, abstain_until_height=before.abstain_until_height, regained=before.regained
    )


def _abstaining(record: Record, until_height: int) -> Record:
    until_height = max(record.abstain_until_height, until_height)
    return replace(record, abstain_until_height=until_height, regained=None)


def abstains(record: Record) -> bool:
    """Whether this peer may have cast, and forgotten, a vote for the next height."""
    return record.tip.height + 1 <= _abstains_until(record)


def _abstains_until(record: Record) -> int:
    regained = record.regained
    if regained and regained.generation == record.tip.generation:
        return regained.height
    return record.abstain_until_height


def regained(
    record: Record, manifest: Manifest, me: PeerId, offer: Offer | None
) -> Regained | None:
    """The height from which an abstaining peer votes again, once it has applied a manifest.

    If the manifest contains an offer that the peer made since it came back, the peer votes again in
    the manifest's generation, after one more height. Let v be the height of its last vote before
    the loss. A manifest below v was decided before the loss, so it cannot contain the new offer. So
    the manifest with the new offer has at least height v. If the offer is an old offer from the
    private state, the height is at least v + 1. In both cases the peer is then past v. A generation
    that branches off at or above that height began after the loss.

    The peer knows nothing of other generations. It may have voted in them, and may come back to
    such a generation when the parts of a swarm meet again [F1].
    """
    until, tip = _abstains_until(record), record.tip
    if manifest.parent != tip.digest:
        return record.regained
    if manifest.generation != tip.generation:
        has_begun_since = record.regained and tip.height >= until
        return Regained(manifest.generation, until) if has_begun_since else record.regained
    if until <= manifest.height or offer is None:
        return record.regained
    mine = {(me, unit.digest) for unit in offer.units.values()}
    if mine.isdisjoint(source for sources in manifest.sources.values() for source in sources):
        return record.regained
    return Regained(manifest.generation, manifest.height + 1)
