"""A manifest from bytes that are not trusted: what can be judged without its parent."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from swarm.config.section import MAX_COUNT
from swarm.errors import BadManifest
from swarm.protocol.dealing import book_of, book_problem
from swarm.protocol.manifest import Manifest, Member, decode_manifest
from swarm.protocol.schemas import (
    IS_DIGEST,
    IS_GENERATION,
    IS_NAME,
    IS_PEER,
    IS_SIGNATURE,
    IS_UNIT,
    wrong_name,
)

MAX_AMOUNT = 1e12


@lru_cache(maxsize=4)
def foreign_manifest(encoded: bytes) -> Manifest:
    """A manifest whose names are valid and whose book is one; the same come again and again.

    Raises:
        BadManifest: it is none, or something in it is no name, or its samples are in no order.
    """
    manifest = decode_manifest(encoded)
    wrong = wrong_name(
        (IS_DIGEST, _digests(manifest)),
        (IS_GENERATION, (manifest.generation, *(id_ for _, (_, id_) in manifest.lineage))),
        (IS_PEER, _peers(manifest)),
        (IS_SIGNATURE, manifest.wishes.values()),
        (IS_DIGEST, manifest.invitations),
        (IS_UNIT, [*manifest.entries, *manifest.sources]),
        (IS_NAME, {entry.coding for entry in manifest.entries.values()}),
        (IS_NAME, [manifest.run] if manifest.run else []),
    )
    if wrong is not None:
        raise BadManifest("manifest_names", f"{wrong[:80]!r} is no name in a manifest")
    if not manifest.sources.keys() <= manifest.entries.keys():
        raise BadManifest("manifest_names", "a manifest renews what it has no value of")
    if not all(0 <= count <= MAX_COUNT for count in _counts(manifest)):
        raise BadManifest("manifest_counts", f"a count in a manifest is not 0 .. {MAX_COUNT}")
    amounts = [amount for member in manifest.members.values() for amount in _amounts(member)]
    if not all(0 <= amount <= MAX_AMOUNT for amount in amounts):  # NaN is not either
        raise BadManifest("manifest_counts", f"an amount in a manifest is not 0 .. {MAX_AMOUNT:g}")
    problem = book_problem(book_of(manifest))
    if problem:
        raise BadManifest("manifest_book", f"manifest at height {manifest.height}: {problem}")
    return manifest


def _digests(manifest: Manifest) -> Iterator[str]:
    yield from manifest.founding.blobs
    if manifest.founding.text:
        yield manifest.founding.text.digest
    yield from (name for name in (manifest.parent, manifest.seed) if name is not None)
    for entry in manifest.entries.values():
        yield entry.digest
        yield from (name for name in (entry.base, entry.delta) if name is not None)
    for values in manifest.sources.values():
        yield from (digest for _, digest in values)


def _counts(manifest: Manifest) -> Iterator[int]:
    yield from (manifest.height, manifest.round, manifest.step, manifest.tokens, manifest.merged)
    yield from manifest.founding.blobs.values()
    yield from manifest.work.values()
    yield from manifest.owners
    yield from (member.silent for member in manifest.members.values())
    yield from (member.counted for member in manifest.members.values())
    for member in manifest.members.values():
        yield from (member.room, member.invites, member.given, member.weight)
    for absent in manifest.absent.values():
        yield from (absent.since, absent.invites, absent.given, absent.weight)
    for entry in manifest.entries.values():
        yield from (entry.num_bytes, entry.version)
    for height, (num_members, _) in manifest.lineage:
        yield from (height, num_members)


def _amounts(member: Member) -> tuple[float, float]:
    return member.capacity, member.tokens_per_s


def _peers(manifest: Manifest) -> Iterator[str]:
    yield manifest.founding.founder
    yield from (*manifest.members, *manifest.contributors, *manifest.work, *manifest.dealt)
    yield from (*manifest.wishes, *manifest.invited, *manifest.absent)
    for owners in manifest.owners.values():
        yield from owners
    for entry in manifest.entries.values():
        yield entry.source
    for values in manifest.sources.values():
        yield from (peer for peer, _ in values)
