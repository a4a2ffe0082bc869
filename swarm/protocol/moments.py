"""Adam moments of experts on their way between peers: who backs up, who hands over, who is asked.

No manifest names a moments blob, no agreed value depends on one, and nobody waits for one: a peer
that takes an expert up trains on with zero moments until they are there. So all of this is
outside agreement, and a lie in it costs no more than a bad learning rate for one expert.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated

from pydantic import Field

from swarm.experts import Shape, Slice, UnitLayout, expert_unit
from swarm.protocol.deadlines import ASSUMED_RATE_BYTES_PER_S, SAFETY
from swarm.protocol.layout import ELEMENT_BYTES, Layout
from swarm.protocol.manifest import Digest, Manifest, PeerId, decode_manifest
from swarm.protocol.ownership import assign
from swarm.protocol.schemas import Count, DigestText, Schema, parse
from swarm.protocol.voting import on_trial

KINDS = ("exp_avg", "exp_avg_sq")
"""AdamW's first and second moment, in the order of a blob."""
MASTER = "master"
MAX_ASKED = 16
"""Peers asked for the moments of one expert."""
MAX_EXPERTS = 2048
SHORTEST_TRANSFER_S = 300.0


@dataclass(frozen=True)
class Moments:
    """One expert's moments as a blob."""

    expert: int
    round: int
    """Training round after whose local steps they were read."""
    digest: Digest
    num_bytes: int


@dataclass(frozen=True)
class Search:
    """Moments are looked for, of experts that this peer took up together.

    A peer saves it with its masters and moments, in one file, so after a restart it looks again
    for exactly those that are not in these moments, whatever had come since.
    """

    experts: tuple[int, ...]
    previous: Manifest
    manifest: Manifest
    """The experts are this peer's from it on; others owned them by `previous`."""
    steps: int = 0
    """Updates that the experts have had since."""


# ---------------------------------------------------------------- what a blob is


def transfer_limit_s(num_bytes: int) -> float:
    """How long these bytes of moments are worth waiting for.

    Three times what they take on the slowest line that runs are meant for, 20 Mbit/s: an expert of
    SPES 7B (2.4 GB with masters) gets 48 minutes, of steps that take a minute each.
    """
    return max(SHORTEST_TRANSFER_S, SAFETY * num_bytes / ASSUMED_RATE_BYTES_PER_S)


def moments_layout(layout: Layout, expert: int, *, with_master: bool) -> UnitLayout:
    """What the bytes of a moments blob are: fp32, first moments, second moments, masters.

    Masters are there only in a hand-over, and only where the wire rounds experts. Tensors are
    named as in `moments_shapes`, each group in the order of the expert's unit.
    """
    pieces = layout.by_unit[expert_unit(expert)].slices
    kinds = (*KINDS, MASTER) if with_master else KINDS
    slices = tuple(
        Slice(f"{kind}.{piece.name}", piece.start, piece.stop) for kind in kinds for piece in pieces
    )
    num_elements = sum(piece.stop - piece.start for piece in slices)
    return UnitLayout(
        f"moments.{expert}", "fp32", slices, num_elements, num_elements * ELEMENT_BYTES["fp32"]
    )


def layout_of_size(layout: Layout, expert: int, num_bytes: int) -> UnitLayout | None:
    """The layout of a moments blob of this size, with or without masters; None if neither fits."""
    if expert_unit(expert) not in layout.by_unit:
        return None
    for with_master in (False, True):
        found = moments_layout(layout, expert, with_master=with_master)
        if found.num_bytes == num_bytes:
            return found
    return None


def moments_shapes(layout: Layout, expert: int) -> dict[str, Shape]:
    """Name in a moments blob -> shape, masters included."""
    pieces = layout.by_unit[expert_unit(expert)].slices
    return {
        f"{kind}.{piece.name}": layout.shapes[piece.name]
        for kind in (*KINDS, MASTER)
        for piece in pieces
    }


# ---------------------------------------------------------------- who, when, which


def is_backup_round(number: int, every: int) -> bool:
    """Whether owners offer copies of their moments in this training round; `every` 0: never."""
    return every > 0 and number > 0 and number % every == 0


def backup_holders(manifest: Manifest) -> dict[int, PeerId]:
    """Expert -> the peer that keeps a copy of its moments: the one that would adopt it.

    That is what `assign` says of the same members without the expert's owner. An expert with
    several owners needs none: each of them has moments.

    Cost: one assignment for each owner.
    """
    if any(len(owners) != 1 for owners in manifest.owners.values()):
        return {}
    holders: dict[int, PeerId] = {}
    for owner in sorted({owners[0] for owners in manifest.owners.values()}):
        left = {p: m.capacity for p, m in manifest.members.items() if p != owner}
        if not left:
            continue
        adopted = assign(
            manifest.owners,
            left,
            [peer for peer in manifest.contributors if peer != owner],
            stale=(),
            on_trial=on_trial(manifest.members),
            owners_per_expert=1,
            num_experts=len(manifest.owners),
            seed=manifest.founding.nonce,
        ).owners
        holders |= {e: adopted[e][0] for e, owners in manifest.owners.items() if owner in owners}
    return dict(sorted(holders.items()))


def handed_over(
    me: PeerId, previous: Manifest, manifest: Manifest
) -> dict[int, tuple[PeerId, ...]]:
    """Expert of mine by `previous` -> its new owners in `manifest`, who need my moments.

    So a leaver hands over all it had, a peer that had more than its share what it gives up, and
    a co-owner that stays what it shares.
    """
    newcomers = {}
    for expert, owners in sorted(manifest.owners.items()):
        before = previous.owners.get(expert, ())
        new = tuple(peer for peer in owners if peer not in before and peer != me)
        if me in before and new:
            newcomers[expert] = new
    return newcomers


def handover_round(owner: PeerId, previous: Manifest, manifest: Manifest) -> int:
    """Training round of the moments that an owner by `previous` hands over at `manifest`.

    New owners know by it what is still to come, and a copy for a backup is not taken for it.
    """
    return manifest.round if manifest.counts(owner) else previous.round


def is_wanted(me: PeerId, source: PeerId, expert: int, tip: Manifest) -> bool:
    """Whether this peer fetches what another announces: to train with it, or as its backup."""
    owners = tip.owners.get(expert, ())
    return me in owners or (source in owners and backup_holders(tip).get(expert) == me)


def whom_to_ask(
    me: PeerId, expert: int, previous: Manifest, manifest: Manifest
) -> tuple[PeerId, ...]:
    """Peers that may have an expert's moments: owners so far, its backup, then all members."""
    holder = backup_holders(previous).get(expert)
    peers = dict.fromkeys(
        (
            *previous.owners.get(expert, ()),
            *([holder] if holder else []),
            *manifest.owners.get(expert, ()),
            *manifest.order,
            *manifest.members,
        )
    )
    return tuple(peer for peer in peers if peer != me)[:MAX_ASKED]


def may_come(
    expert: int,
    previous: Manifest,
    manifest: Manifest,
    answering: Collection[PeerId],
    found: Iterable[tuple[PeerId, Moments]],
) -> bool:
    """Whether an owner so far still answers, and newer moments than theirs here are to come.

    Of several owners, one may have missed the round that another contributed to.
    """
    newest_of = {
        peer: handover_round(peer, previous, manifest)
        for peer in previous.owners.get(expert, ())
        if peer in answering
    }
    wanted = max(newest_of.values(), default=0)
    is_there = any(m.round >= wanted for peer, m in found if peer in newest_of)
    return bool(newest_of) and not is_there


def newest(candidates: Iterable[tuple[PeerId, Moments]]) -> tuple[PeerId, Moments] | None:
    """The candidate of the latest round; of several, the one with more in it, then by peer id."""
    return min(candidates, key=lambda c: (-c[1].round, -c[1].num_bytes, c[0]), default=None)


def is_outdated(moments: Moments, version: int, every: int) -> bool:
    """Whether a copy may go: its expert was renewed twice as often since as copies are made.

    The age is counted in rounds of the expert: while its owner is gone nothing renews it, and
    the copy stays as good as it was.
    """
    return _is_past(moments.round, version, every)


def is_in_vain(search: Search, expert: int, tip: Manifest, every: int) -> bool:
    """Whether nobody keeps what a search is for any more: by `is_outdated` all have dropped it.

    That bounds, in rounds of the expert, how often a peer that is restarted looks again.
    """
    return _is_past(search.manifest.round, tip.entries[expert_unit(expert)].version, every)


def counts_twice(search: Search, moments: Moments) -> bool:
    """Whether moments hold updates that the ones they would be added to hold too.

    Such are copies of the own ones from before a restart that took this peer back.
    """
    return search.steps > 0 and moments.round > search.manifest.round


def _is_past(number: int, version: int, every: int) -> bool:
    return version - number > 2 * max(every, 1)


# ---------------------------------------------------------------- question and answer


@dataclass(frozen=True)
class Question:
    """What a peer asks another: which moments have you got?"""

    news: bool = False
    """The asking peer has some too that the asked one may want."""
    settled: tuple[Digest, ...] = ()
    """Blobs of the asked one that the asking peer holds by now, or needs no more."""


class _QuestionSchema(Schema):
    news: bool
    settled: Annotated[list[DigestText], Field(max_length=MAX_EXPERTS)]


class _MomentsSchema(Schema):
    expert: Annotated[int, Field(ge=0, lt=2**16)]
    round: Count
    digest: DigestText
    num_bytes: Count


class _AnswerSchema(Schema):
    moments: Annotated[list[_MomentsSchema], Field(max_length=MAX_EXPERTS)]


def encode_question(question: Question) -> bytes:
    """A question as canonical JSON."""
    return _json({"news": question.news, "settled": list(question.settled)})


def decode_question(encoded: bytes) -> Question:
    """A question from foreign bytes.

    Raises:
        BadMessage: not of the schema.
    """
    parsed = parse(_QuestionSchema, encoded, "moments_question")
    return Question(parsed.news, tuple(parsed.settled))


def encode_answer(moments: Iterable[Moments]) -> bytes:
    """An answer as canonical JSON; also the form in which a peer keeps the list on its disk."""
    return _json({"moments": [asdict(each) for each in moments]})


def decode_answer(encoded: bytes) -> tuple[Moments, ...]:
    """An answer from foreign bytes.

    Raises:
        BadMessage: not of the schema.
    """
    parsed = parse(_AnswerSchema, encoded, "moments_answer")
    return tuple(Moments(**each.model_dump()) for each in parsed.moments)


# ---------------------------------------------------------------- over a restart


class _SearchSchema(Schema):
    experts: list[Annotated[int, Field(ge=0, lt=2**16)]]
    previous: str
    manifest: str
    steps: Count


class _SearchesSchema(Schema):
    searches: list[_SearchSchema]


def encode_searches(searches: Iterable[Search]) -> str:
    """Searches as text for the private state; of each some ten kB, its two manifests."""
    content = [
        {
            "experts": list(search.experts),
            "previous": search.previous.encoded.decode(),
            "manifest": search.manifest.encoded.decode(),
            "steps": search.steps,
        }
        for search in searches
    ]
    return _json({"searches": content}).decode()


def decode_searches(encoded: str) -> tuple[Search, ...]:
    """Searches as they were saved.

    Raises:
        BadMessage, BadManifest: another version wrote it.
    """
    parsed = parse(_SearchesSchema, encoded.encode(), "moments_searches")
    return tuple(
        Search(
            tuple(each.experts),
            decode_manifest(each.previous.encode()),
            decode_manifest(each.manifest.encode()),
            each.steps,
        )
        for each in parsed.searches
    )


def _json(content: Mapping[str, object]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
