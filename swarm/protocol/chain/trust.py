"""Why a peer believes a manifest without the manifests before it. Pure.

A manifest follows from a trusted manifest by a certificate: the signatures of a quorum of the
trusted one's voters. A peer that was away trusts its own tip. A newcomer trusts manifest 0, which
the run id binds, or the head that a person named. From there the peer follows *links*, each a head
with its certificate:

- the next height: signed by a quorum of the trusted head's voters;
- a later height: signed by a quorum of the trusted head's voters, and by a quorum of the voters of
  its own parent;
- a reform of the trusted head itself: signed by voters of that head which have joined the reform.

A chain keeps the links that lead to the tip from each earlier head (`pruned`). So the number of
links depends on the turnover of voters, not on the number of rounds.

The second rule (later heights) is that of Tendermint's light client. It is safe because any two
quorums of the trusted electorate share a voter, and a voter signs one manifest a height. So the
parent's quorum cannot have decided another chain than that of the trusted members. The keys of a
past electorate convince no peer whose trusted head is later.

A reform is made because a quorum is lost, so no number of signatures proves that it was necessary.
Peers with a tip adopt a reform only if they hear no quorum themselves [F2]. Then one signature by a
voter of the reform's parent is enough, since strangers cannot make it. A newcomer has heard nobody.
So it requires the signature of the founder, or of more than half of the parent's anchors
(`is_vouched_for`), or a head that a person vouches for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from swarm.errors import BadMessage
from swarm.protocol.messages.events import Record
from swarm.protocol.messages.messages import Certificate, Link
from swarm.protocol.messages.schemas import MAX_LINKS
from swarm.protocol.values.manifest import Code, Digest, Head, Kind, PeerId, is_ancestor

Sound = Callable[[Certificate, Digest], Certificate]
RECENT = 64
"""A chain keeps all of this many newest links. Pruning searches as many links for the furthest one
that a single step can reach."""


def step_problem(before: Head, link: Link, *, is_new: bool = False) -> str | None:
    """Why a head is not believed to follow from a trusted head. None when it is.

    Args:
        before: the trusted head.
        link: the claimed successor; wrong signatures have been dropped from its certificate.
        is_new: whether the reader has no tip, so that founder or anchors must vouch for a reform.
    """
    head = link.head
    if head.founder != before.founder or (before.run and head.run != before.run):
        return "it belongs to another run"
    if head.kind is Kind.FOUNDING:
        return "a founding manifest follows from nothing"
    if link.certificate is None:
        return f"height {head.height} has no certificate"
    signers = frozenset(link.certificate.signatures)
    if head.kind is Kind.REFORM:
        return _reform_problem(before, head, signers, is_new=is_new)
    if (head.generation, head.lineage) != (before.generation, before.lineage):
        return f"height {head.height} is of another generation"
    parent = before if head.parent == before.digest else link.parent
    if parent is None or parent.digest != head.parent:
        return f"the parent of height {head.height} is missing"
    if head.height <= before.height or head.height != parent.height + 1:
        return f"height {head.height} does not follow from {parent.height}"
    if (parent.generation, parent.lineage) != (head.generation, head.lineage):
        return f"the parent of height {head.height} is of another generation"
    for electorate in (parent, before):
        if not electorate.is_quorum(signers):
            present = len(signers.intersection(electorate.voters))
            return (
                f"the certificate of height {head.height} has {present} of the "
                f"{len(electorate.voters)} voters of height {electorate.height}"
            )
    return None


def _reform_problem(
    before: Head, head: Head, signers: Collection[str], *, is_new: bool
) -> str | None:
    if head.parent != before.digest or head.height != before.height:
        return "a reform follows from its parent alone"
    electors = len(reform_electors(before).intersection(head.voters))
    expected = (*before.lineage, (head.height, (electors, head.generation)))
    if head.lineage != expected:
        return f"a reform with {electors} voters of its parent has another lineage"
    left = reform_electors(before).intersection(signers)
    if not left:
        return "no voter of its parent signed the reform"
    if is_new and not is_vouched_for(before, left):
        return (
            f"the reform at height {head.height} is signed by {len(left)} of its parent's "
            f"{len(before.voters)} voters, neither the founder nor more than half of its "
            f"{len(before.anchored)} anchors among them: wait for them, or name a head that "
            "somebody you trust shows you (--tip)"
        )
    return None


def reform_electors(before: Head) -> frozenset[PeerId]:
    """The peers whose reform of this head others believe: its voters and the founder [F3, L2].

    The founder is an elector even if it has left: manifest 0 names it, and all peers trust manifest
    0. Otherwise a founder that is left with trainees alone could not reform with them.
    """
    return frozenset([before.founder, *before.voters])


def is_vouched_for(before: Head, signers: Collection[PeerId]) -> bool:
    """Whether these signatures of a reform convince a peer that has heard no member [L2].

    The founder's signature is enough, since its key made the run. Signatures of more than half of
    the parent's anchors are enough too, so that a run outlives its founder. Signatures of strangers
    that have earned votes are not: one person may hold many keys.
    """
    anchors = before.anchored
    return before.founder in signers or 2 * len(anchors.intersection(signers)) > len(anchors) > 0


def proof_problem(
    path: Sequence[Link], target: Head, trusted: Collection[Digest], *, is_new: bool = False
) -> str | None:
    """Why a path does not prove a head; None when it does.

    Args:
        path: begins with a trusted head, ends with the target.
        target: the head to be believed.
        trusted: digests of heads that are believed already.
        is_new: see `step_problem`.
    """
    if not path:
        return "it comes without a proof"
    if len(path) > MAX_LINKS:
        return f"a proof of {len(path)} links is too long"
    before = path[0].head
    if before.digest not in trusted:
        return f"its proof begins with {before.digest[:12]} at height {before.height}, not trusted"
    for link in path[1:]:
        problem = step_problem(before, link, is_new=is_new)
        if problem:
            return problem
        before = link.head
    return None if before.digest == target.digest else "its proof is of another manifest"


@dataclass(frozen=True)
class Foothold:
    """The facts by which a peer judges a stranger's claim that a manifest was decided.

    Attributes:
        chain: the heads that this peer believes.
        pursued: the body of the manifest that this peer is fetching already.
    """

    chain: Chain
    pursued: Digest | None = None

    def proved(
        self, path: Sequence[Link], body: Digest, parent: Digest | None, sound: Sound
    ) -> tuple[Link, ...] | None:
        """The path with only valid signatures, if it proves a manifest that beats the tip.

        This is checked before a byte of the manifest is fetched, so only decided manifests are
        fetched. The signatures of a link are checked once all links before it hold.

        Args:
            path: the path of a COMMIT.
            body: the blob that the COMMIT names as the manifest.
            parent: the blob that the COMMIT names as the manifest's parent, if any.
            sound: drops the invalid signatures of a certificate, given the head's digest.

        Returns:
            None if there is nothing to prove: the path begins elsewhere, or the manifest is not
            better than the tip, or is being fetched already.

        Raises:
            BadMessage: reason `false_proof`: the proof does not prove its manifest.
        """
        path = self.chain.rooted(path)
        if not path or path[0].head.digest not in self.chain.trusted or body == self.pursued:
            return None
        target = path[-1].head
        if target.code <= self.chain.tip.code:
            return None
        if target.body != body:
            raise BadMessage("false_proof", "the proof is of another manifest")
        before = path[-1].parent or path[-2].head
        if parent not in (None, before.body):
            raise BadMessage("false_proof", "the manifest sent as its parent is not its parent")
        checked = [Link(path[0].head)]
        for link in path[1:]:
            link = replace(link, certificate=link.certificate and sound(*counted(link, checked)))
            problem = step_problem(checked[-1].head, link)
            if problem:
                raise BadMessage("false_proof", problem)
            checked.append(link)
        return tuple(checked)


def counted(link: Link, before: Sequence[Link]) -> tuple[Certificate, Digest]:
    """A certificate without signatures that cannot count, so that these are not verified."""
    assert link.certificate is not None
    electors = {*reform_electors(before[-1].head), *(link.parent.voters if link.parent else ())}
    signatures = link.certificate.signatures
    counted = {peer: signatures[peer] for peer in signatures if peer in electors}
    return replace(link.certificate, signatures=counted), link.head.digest


def with_reforms(links: Sequence[Link], before: Sequence[Link]) -> tuple[Link, ...]:
    """The links that replace the links on disk, with the reforms of other branches.

    If the newest record is damaged, the previous record is read, which may be on another branch.
    Without that branch's reforms this peer would not know which heads to trust (`Chain.trusted`).
    Each reform is kept with its parent's head, from which other peers may begin their proofs.
    """
    known = {link.head.digest for link in links}
    reforms = (link for link in before if link.head.kind is Kind.REFORM)
    return (*(link for link in reforms if link.head.digest not in known), *links)


# ---------------------------------------------------------------- which links a chain keeps


def pruned(links: Sequence[Link], recent: int = 0) -> tuple[Link, ...]:
    """The links that prove the last head to every peer that has any earlier head.

    Policy: chain pruning.

    A head is left out if more than half of its voters signed the next link that is kept, so that
    one step leads there [L1]. From a kept link, one step leads past all heads up to a later link if
    none of that link's signers became a voter in between. Such a later link is searched for among
    the next `RECENT` links.

    Args:
        links: heads of one ancestry, oldest first; earlier pruning may have left out some.
        recent: number of last links that are all kept, since a later link may make all of them
            unnecessary. Of older links with equal voters, the first of each electorate is kept
            until then.
    """
    kept, at, end = [links[0]], 0, len(links) - recent
    while at < len(links) - 1:
        further = _furthest(links, at)
        if further >= end:
            kept += _first_of_each_electorate(links, at, end)
            break
        kept.append(_joined(links, at, further))
        at = further
    return tuple(kept)


def _furthest(links: Sequence[Link], at: int) -> int:
    """The furthest link that one step reaches from a link and from all heads in between."""
    electorates, furthest = [frozenset(links[at].head.voters)], at + 1
    for to in range(at + 1, len(links)):
        before, link = links[to - 1], links[to]
        if to > furthest + RECENT or not _may_step(before, link):
            break
        if all(_has_majority(electorate, link) for electorate in electorates):
            furthest = to
        if not _is_open(before, link):
            break
        if link.head.voters != before.head.voters:
            electorates.append(frozenset(link.head.voters))
    return furthest


def _first_of_each_electorate(links: Sequence[Link], at: int, end: int) -> list[Link]:
    """The links after `at`, without those before `end` that have the voters of the previous link.

    All links from `end` on are kept.
    """
    kept, last = list[Link](), at
    for to in range(at + 1, len(links)):
        if to >= end or not _is_spare(links, last, to):
            kept.append(_joined(links, last, to))
            last = to
    return kept


def _is_spare(links: Sequence[Link], last: int, at: int) -> bool:
    """Whether a link may be left out, since one step leads from its head to the next link."""
    before, link, after = links[at - 1 : at + 2]
    return (
        link.head.voters == links[last].head.voters
        and _is_open(before, link)
        and _may_step(before, link)
        and _is_open(link, after)
        and _may_step(link, after)
        and _has_majority(frozenset(link.head.voters), after)
    )


def _joined(links: Sequence[Link], last: int, at: int) -> Link:
    """A link whose predecessors were left out, with its parent's head if that was left out too."""
    link, before = links[at], links[at - 1]
    if at == last + 1:
        return link
    voters, passed = links[last].head.voters, range(last + 1, at)
    alike = all(
        links[to].head.voters == voters and _is_open(links[to - 1], links[to]) for to in passed
    ) and _is_open(before, link)
    parent = before.head if is_parent(before.head, link.head) else link.parent
    return replace(link, parent=parent, alike=alike)


def _may_step(before: Link, link: Link) -> bool:
    """Whether steps may skip a link and lead to the next one, judged by the heads."""
    head, parent = before.head, link.head
    return (
        parent.kind is not Kind.REFORM
        and (head.generation, head.lineage) == (parent.generation, parent.lineage)
        and (link.parent is not None or is_parent(head, parent))
    )


def _is_open(before: Link, link: Link) -> bool:
    """Whether all heads between two neighbors are known to have the voters of the first."""
    return link.alike or is_parent(before.head, link.head)


def _has_majority(electorate: frozenset[PeerId], link: Link) -> bool:
    """Whether more than half have signed: for exactly half, each head has its own tie-breaker."""
    signers = link.certificate.signatures if link.certificate else {}
    return 2 * len(electorate.intersection(signers)) > len(electorate)


def is_parent(before: Head, after: Head) -> bool:
    """Whether the first of two heads of one ancestry is the parent of the second.

    The codes are compared, since digests are slow to compute. An ancestry has one head of each
    code.
    """
    return before.code == place_of_parent(after)


def place_of_parent(head: Head) -> Code:
    """The code of a head's parent; a reform has the same height as its parent."""
    if head.kind is Kind.REFORM:
        return (*head.lineage[:-1], (head.height, ()))
    return (*head.lineage, (head.height - 1, ()))


@dataclass(frozen=True)
class Chain:
    """The tip's head and the earlier heads that proofs need, oldest first.

    Attributes:
        links: the links of the chain. The first link, with which the peer began, has no
            certificate. Heads between two links are left out if the later link follows from them
            (`pruned`). The codes of links are ascending, so that links are found by their codes.
        torn: digests of links that follow directly after a lost link; see
            `swarm.protocol.chain.gaps`.
    """

    links: tuple[Link, ...]
    torn: frozenset[Digest] = frozenset()

    @staticmethod
    def of(record: Record, links: Iterable[Link] = (), torn: Collection[Digest] = ()) -> Chain:
        """The chain up to a record's tip; the links may continue after the tip or end before it."""
        tip, parent = record.tip.head, record.parent
        behind = dict[Code, Link]()
        for link in links:  # on disk, a path to a tip begins with a head alone
            if is_ancestor(_code(link), tip.code) and (
                link.certificate or _code(link) not in behind
            ):
                behind[_code(link)] = link
        kept = sorted(behind.values(), key=_code)
        if kept and kept[-1].head.digest == tip.digest:
            behind_tip = kept[-1].parent or (parent.head if parent else None)
            kept[-1:] = closed(kept[:-1], [replace(kept[-1], parent=behind_tip)])
        else:
            if record.certificate is None or parent is None:
                return Chain((Link(tip),))
            kept = kept or [Link(parent.head)]
            kept += closed(kept, [Link(tip, record.certificate, parent.head)])
        return Chain(pruned(kept, RECENT), frozenset(torn))

    @property
    def tip(self) -> Head:
        """The newest head."""
        return self.links[-1].head

    @cached_property
    def trusted(self) -> frozenset[Digest]:
        """Heads from which a proof may begin: the tip, and the parents of its ancestry's reforms.

        From a reform's parent the old generation may have continued, and may return as the better
        one.
        """
        parents = (self.links[at].head.parent for at in self._reforms)
        return frozenset([self.tip.digest, *(parent for parent in parents if parent)])

    @cached_property
    def _reforms(self) -> tuple[int, ...]:
        """Places of the reforms in the tip's ancestry that are here, oldest first."""
        lineage, found = self.tip.lineage, list[int]()
        for number, (height, _) in enumerate(lineage, 1):
            at = self._place((*lineage[:number], (height, ())))
            at = min(at, len(self.links) - 1)
            if self.links[at].head.kind is Kind.REFORM:
                found.append(at)
        return tuple(found)

    @cached_property
    def _footings(self) -> tuple[Head, ...]:
        """The trusted heads that are here, oldest first."""
        found = list[Head]()
        for at in self._reforms:
            before = self.links[at - 1].head if at else None
            reform = self.links[at]
            if before is not None and is_parent(before, reform.head):
                found.append(before)
            elif reform.parent:
                found.append(reform.parent)
        return (*found, self.tip)

    def rooted(self, path: Sequence[Link]) -> Sequence[Link]:
        """A proof that begins before the trusted heads, rewritten to begin with a trusted head.

        Other peers do not have every head (chain pruning). So their proof begins with the last head
        that they have before a trusted head. The proof continues with a link that follows from all
        heads in between, so this link is judged from the trusted head.
        """
        if not path or path[0].head.digest in self.trusted:
            return path
        after = [
            replace(link, parent=link.parent or before.head) for before, link in pairwise(path)
        ]
        for footing in reversed(self._footings):
            rest = [each for each in after if _code(each) > footing.code > _code(path[0])]
            if rest and step_problem(footing, rest[0]) is None:
                return (Link(footing), *closed([Link(footing)], rest))
        return path

    def _place(self, code: Code) -> int:
        """How many links come before this code; the codes of links are ascending."""
        return bisect_left(self.links, code, key=_code)

    def grown(self, path: Iterable[Link]) -> Chain:
        """The chain with a new tip, to which the path leads; other branches are dropped."""
        new = [link for link in path if link.certificate]
        if not new:
            return self
        known = {link.head.digest for link in new}
        end = self.num_behind(new[-1].head.code)
        begin = min(end, self._place(new[0].head.code))
        between = [link for link in self.links[begin:end] if link.head.digest not in known]
        kept = self.links[:begin]
        links = (*kept, *closed(kept, sorted([*between, *new], key=_code)))
        begin = _open_from(links, begin - RECENT - 1)
        return replace(self, links=(*links[:begin], *pruned(links[begin:], RECENT)))

    def beyond(self, other: Chain) -> tuple[Link, ...]:
        """The links whose heads are not in `other`, an earlier state of this chain."""
        shortest = range(min(len(self.links), len(other.links)))
        first = bisect_left(shortest, True, key=lambda at: self.links[at] is not other.links[at])
        known = {link.head.digest for link in other.links[first:]}
        return tuple(link for link in self.links[first:] if link.head.digest not in known)

    def num_behind(self, code: Code) -> int:
        """How many of the first links are ancestors of a manifest with this code."""
        return bisect_right(self.links, False, key=lambda link: not is_ancestor(_code(link), code))

    def proof(self, since: Code | Digest | None = None) -> tuple[Link, ...]:
        """A path to the tip for a peer with another tip.

        The path begins with the last head here that is before the other tip, and follows from each
        head in between (`rooted`). So a peer that adopts the path can prove the tip to the same
        peers as this peer.

        Args:
            since: code of the other peer's tip, or digest of a head that it trusts. None: the
                oldest head.

        Empty if this peer has no head with which the other peer could begin.
        """
        at = self._beginning(since)
        if at is None:
            return ()
        return pruned((Link(self.links[at].head), *self.links[at + 1 :]))[:MAX_LINKS]

    def _beginning(self, since: Code | Digest | None) -> int | None:
        if since is None or since == self.links[0].head.digest:  # as newcomers ask
            return 0
        if not isinstance(since, str):
            return self.num_behind(since) - 1 if self.num_behind(since) else None
        back = range(len(self.links) - 1, 0, -1)
        return next((at for at in back if self.links[at].head.digest == since), None)


def _open_from(links: Sequence[Link], at: int) -> int:
    """The first link such that the voters of all heads from it up to `at` are known."""
    at = max(at, 0)
    while at and _is_open(links[at - 1], links[at]) and _may_step(links[at - 1], links[at]):
        at -= 1
    return at


def closed(kept: Sequence[Link], new: Sequence[Link]) -> list[Link]:
    """New links. The head of a parent is dropped if the link before has it, except in reforms."""
    before = kept[-1].head if kept else None
    lone = []
    for link in new:
        if before and link.parent and link.parent.digest == before.digest:
            parent = link.parent if link.head.kind is Kind.REFORM else None
            link = replace(link, parent=parent, alike=False)
        lone.append(link)
        before = link.head
    return lone


def _code(link: Link) -> Code:
    return link.head.code
