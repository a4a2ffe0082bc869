"""Moments of experts that change owners: who hands them to whom, and how long both sides wait.

An owner that loses an expert by a manifest offers its newest moments to the peers that own the
expert from then on. A new owner trains at once, with zero moments. It asks the previous owners, and
adds their moments as soon as these arrive. `Giving` and `Taking` decide for the two sides, with the
time as an argument. A peer's network, or the simulator, asks, answers and fetches.

No manifest names a moments blob, no agreed value depends on one, and nobody waits for one. So the
peers need not agree on moments. A false one costs no more than a bad learning rate for one expert.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from pydantic import Field, TypeAdapter

from swarm.canonical import canonical
from swarm.experts import ELEMENT_BYTES, Shape, Slice, UnitLayout, expert_unit
from swarm.protocol.messages.schemas import Count, DigestText, OnWire, parse
from swarm.protocol.timing.deadlines import ASSUMED_RATE_BYTES_PER_S, SAFETY
from swarm.protocol.values.layout import Layout
from swarm.protocol.values.manifest import Digest, Manifest, PeerId

MASTER = "master"
MAX_EXPERTS = 2048
SHORTEST_TRANSFER_S = 300.0
PATIENCE_S = 30.0
"""A new owner waits this long for earlier owners that offer nothing. An earlier owner keeps offered
moments as long for a new owner that does not ask."""


@dataclass(frozen=True)
class Moments(OnWire):
    """One expert's moments as a blob."""

    expert: Annotated[int, Field(ge=0, lt=2**16)]
    round: Count
    """Training round after whose local steps they were read."""
    digest: DigestText
    num_bytes: Count


# ---------------------------------------------------------------- what a blob is


def transfer_limit_s(num_bytes: int) -> float:
    """How long to wait for a number of bytes of moments.

    The limit is three times the time that they take on the slowest link that runs are meant for,
    20 Mbit/s. So an expert of SPES 7B (2.4 GB with masters) gets 48 minutes; a step takes one.
    """
    return max(SHORTEST_TRANSFER_S, SAFETY * num_bytes / ASSUMED_RATE_BYTES_PER_S)


def moments_layout(layout: Layout, expert: int, *, with_master: bool) -> UnitLayout:
    """The layout of a moments blob: each of the run's moments, then masters, all in fp32.

    Masters are part of the blob only if experts are rounded on the wire. Tensors are named as in
    `moments_shapes`. Within each moment, and in the masters, they have the order of the unit.
    """
    pieces = layout.by_unit[expert_unit(expert)].slices
    kinds = (*layout.moments, MASTER) if with_master else layout.moments
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
    """Shape of each tensor in a moments blob, by its name there; masters included."""
    pieces = layout.by_unit[expert_unit(expert)].slices
    return {
        f"{kind}.{piece.name}": layout.shapes[piece.name]
        for kind in (*layout.moments, MASTER)
        for piece in pieces
    }


# ---------------------------------------------------------------- giving


def handed_over(
    me: PeerId, previous: Manifest, manifest: Manifest
) -> dict[int, tuple[PeerId, ...]]:
    """For each expert of `me` in `previous`: its new owners in `manifest`, which need the moments.

    A peer that leaves hands over all its experts, and a peer with more than its share its surplus.
    A co-owner that stays hands over moments of experts that get a further owner.
    """
    newcomers = {}
    for expert, owners in sorted(manifest.owners.items()):
        before = previous.owners.get(expert, ())
        new = tuple(peer for peer in owners if peer not in before and peer != me)
        if me in before and new:
            newcomers[expert] = new
    return newcomers


def handover_round(owner: PeerId, previous: Manifest, manifest: Manifest) -> int:
    """Training round of the moments that an owner by `previous` hands over at `manifest`."""
    return manifest.round if manifest.counts(owner) else previous.round


@dataclass
class _Out:
    """Moments that are offered."""

    waits_for: set[PeerId]
    until_s: float
    last_s: float
    """When the offer ends, even for a new owner that keeps asking."""


class Giving:
    """Moments that a peer offers to new owners of experts that it owned before."""

    def __init__(self) -> None:
        """Starts without offers."""
        self.taken: set[int] = set()
        """Experts whose new owners have all said that they need nothing more."""
        self._out: dict[Moments, _Out] = {}

    def put(self, moments: Moments, peers: Iterable[PeerId], now_s: float) -> None:
        """Lets these peers fetch these moments from now on."""
        until_s = now_s + PATIENCE_S
        self._out[moments] = _Out(
            set(peers), until_s, until_s + transfer_limit_s(moments.num_bytes)
        )

    def asked(self, peer: PeerId, settled: Collection[Digest], now_s: float) -> tuple[Moments, ...]:
        """Moments that an asking peer may fetch, without those that it no longer needs."""
        for moments, out in self._out.items():
            if peer in out.waits_for and moments.digest in settled:
                out.waits_for.discard(peer)
                if not out.waits_for:
                    self.taken.add(moments.expert)
            elif peer in out.waits_for:
                out.until_s = min(now_s + PATIENCE_S, out.last_s)
        return tuple(moments for moments, out in self._out.items() if peer in out.waits_for)

    def waits_for(self, moments: Moments, now_s: float) -> frozenset[PeerId]:
        """Peers that may yet fetch these moments; if there are none, the blob may be deleted."""
        out = self._out.get(moments)
        return frozenset(out.waits_for) if out and now_s <= out.until_s else frozenset()

    def end(self, moments: Moments) -> None:
        """Notes that the blob of these moments is no longer here."""
        self._out.pop(moments, None)

    def holds(self, digest: Digest) -> bool:
        """Whether a blob is one of those that are offered."""
        return any(moments.digest == digest for moments in list(self._out))


# ---------------------------------------------------------------- taking


@dataclass
class Search:
    """The search for the moments of an expert that this peer took over."""

    expert: int
    version: int
    """Round in which the expert's weights last changed; older moments do not belong to these."""
    owners: tuple[PeerId, ...]
    """The other peers that owned the expert before."""
    givers: tuple[PeerId, ...]
    """The `owners`, except those from which a blob could not be fetched."""
    until_s: float
    source: PeerId | None = None
    """The peer from which the moments are being fetched."""


@dataclass(frozen=True)
class Choice:
    """The outcome of a search: moments are fetched from a giver, or the expert keeps zeros."""

    search: Search
    found: tuple[PeerId, Moments] | None
    """None: the search has ended without moments."""


class Taking:
    """One peer's searches for the moments of experts that other peers owned before."""

    def __init__(self) -> None:
        """Starts without searches."""
        self._searches: dict[int, Search] = {}

    def take_up(
        self,
        me: PeerId,
        experts: Iterable[int],
        previous: Manifest,
        manifest: Manifest,
        now_s: float,
    ) -> None:
        """Searches for the moments of experts that this peer owns from `manifest` on."""
        for expert in experts:
            owners = tuple(peer for peer in previous.owners.get(expert, ()) if peer != me)
            version = manifest.entries[expert_unit(expert)].version
            self._searches[expert] = Search(expert, version, owners, owners, now_s + PATIENCE_S)

    def keep_only(self, experts: Collection[int]) -> None:
        """Drops the searches for all other experts."""
        self._searches = {e: search for e, search in self._searches.items() if e in experts}

    @property
    def is_looking(self) -> bool:
        """Whether a search is under way."""
        return bool(self._searches)

    def whom_to_ask(self) -> list[PeerId]:
        """Peers that have the wanted moments, or may still get them; asked during a fetch too."""
        givers = (peer for search in self._searches.values() for peer in search.givers)
        return list(dict.fromkeys(givers))

    def choose(self, answers: Mapping[PeerId, Sequence[Moments]], now_s: float) -> list[Choice]:
        """The moments to fetch, by peers' answers, and the experts that keep zero moments."""
        choices = []
        for search in [each for each in self._searches.values() if each.source is None]:
            found = [
                (peer, moments)
                for peer in search.givers
                for moments in answers.get(peer, ())
                if self._is_wanted(search, moments)
            ]
            if found:
                search.source = found[0][0]
                choices.append(Choice(search, found[0]))
            elif not self._may_come(search, now_s):
                del self._searches[search.expert]
                choices.append(Choice(search, None))
        return choices

    def _is_wanted(self, search: Search, moments: Moments) -> bool:
        """Whether these moments belong to the weights that this peer took over."""
        return moments.expert == search.expert and moments.round >= search.version

    def _may_come(self, search: Search, now_s: float) -> bool:
        """Whether to wait for a giver: up to a limit, and while it sends other moments."""
        busy = {other.source for other in self._searches.values()}
        is_early = now_s <= search.until_s and bool(search.givers)
        return is_early or not busy.isdisjoint(search.givers)

    def fetched(self, choice: Choice, now_s: float, *, is_here: bool) -> bool:
        """Ends a search whose moments were fetched, or continues it without the failed giver.

        Returns:
            Whether to use the moments: they are here, and the search for them had not ended.
        """
        search, giver = choice.search, choice.search.source
        if self._searches.get(search.expert) is not search:
            return False
        search.source = None
        if not is_here:
            search.givers = tuple(peer for peer in search.givers if peer != giver)
            return False
        del self._searches[search.expert]
        for other in self._searches.values():
            if giver in other.givers:
                other.until_s = max(other.until_s, now_s + PATIENCE_S)
        return True


# ---------------------------------------------------------------- question and answer


@dataclass(frozen=True)
class _Question(OnWire):
    settled: Annotated[tuple[DigestText, ...], Field(max_length=MAX_EXPERTS)]


@dataclass(frozen=True)
class _Answer(OnWire):
    moments: Annotated[tuple[Moments, ...], Field(max_length=MAX_EXPERTS)]


_QUESTION, _ANSWER = TypeAdapter(_Question), TypeAdapter(_Answer)


def encode_question(settled: Iterable[Digest]) -> bytes:
    """A question as canonical JSON: which moments do you have for me, except these blobs?"""
    return canonical({"settled": list(settled)})


def decode_question(encoded: bytes) -> tuple[Digest, ...]:
    """The blobs that the asking peer has already, from the foreign bytes of its question.

    Raises:
        BadMessage: not of the schema.
    """
    return parse(_QUESTION, encoded, "moments_question").settled


def encode_answer(moments: Iterable[Moments]) -> bytes:
    """An answer as canonical JSON."""
    return canonical({"moments": [asdict(each) for each in moments]})


def decode_answer(encoded: bytes) -> tuple[Moments, ...]:
    """An answer from foreign bytes.

    Raises:
        BadMessage: not of the schema.
    """
    return parse(_ANSWER, encoded, "moments_answer").moments
