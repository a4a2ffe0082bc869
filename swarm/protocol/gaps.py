"""Heads that a chain lacks, and how it gets them from others. Pure.

Who comes along a proof has passed over heads, and can prove nothing to a peer whose own tip is one
of them. It asks members for the heads of such a *gap* afterwards. They come from the newest to the
oldest, a *page* at a time: each must be the parent of what is there already, so that nobody can
send another past, and each needs the certificate that others will ask for. Pages are kept aside
until the gap is closed, since a part of it may prove less than the step that passed over all of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pydantic import TypeAdapter

from swarm.canonical import canonical
from swarm.errors import BadMessage
from swarm.protocol.digests import Buffer
from swarm.protocol.manifest import Code, Digest, Head, Kind
from swarm.protocol.messages import Link
from swarm.protocol.recording import decode_link, encode_link
from swarm.protocol.schemas import MAX_LINKS, CodeText, DigestText, OnWire, parse
from swarm.protocol.trust import Chain, Sound, counted, step_problem

MAX_PAGE_BYTES = 900_000
"""Of one answer over the control path; some 25 links at 256 members."""


@dataclass(frozen=True)
class Question(OnWire):
    """Which heads a peer lacks: those after one, up to and with another."""

    since: DigestText
    until: DigestText
    place: CodeText
    """The code of `until`, so that it is found without going through the chain."""


@dataclass(frozen=True)
class Filling:
    """A gap between two neighbours of a chain, and what has come of it: its newest part."""

    before: Link
    after: Link
    links: tuple[Link, ...] = ()

    @property
    def ends(self) -> tuple[Digest, Digest]:
        """Digests of the neighbours: which gap it is, whatever has come of it."""
        return self.before.head.digest, self.after.head.digest

    @property
    def is_whole(self) -> bool:
        """Whether nothing is lacking any more."""
        return bool(self.links) and self.links[0].head.parent == self.before.head.digest

    @property
    def question(self) -> Question:
        """What to ask for next."""
        oldest = self.links[0] if self.links else self.after
        assert oldest.head.parent is not None, "only manifest 0 has no parent"
        return Question(self.before.head.digest, oldest.head.parent, _place_of_parent(oldest.head))

    def extended(self, page: Sequence[Link], sound: Sound) -> Filling:
        """With a page that a member has sent; of certificates only what is right is kept.

        Args:
            page: links that follow from each other, the last is what was asked for. The first has
                its parent's head, unless that is the head before the gap.
            sound: a certificate without the signatures that are wrong, for the head's digest.

        Raises:
            BadMessage: reason `false_heads`: they do not lead to what this peer has.
        """
        if not page or page[-1].head.digest != self.question.until:
            raise BadMessage("false_heads", "the heads do not lead to the one that was asked for")
        if page[0].head.code <= self.before.head.code:
            raise BadMessage("false_heads", "the heads go on beyond the gap")
        reaches = page[0].head.parent == self.before.head.digest
        parent = self.before.head if reaches else page[0].parent
        if parent is None:
            raise BadMessage("false_heads", "the head before the first is missing")
        checked: list[Link] = []
        for link in page:
            certificate = link.certificate and sound(*counted(link, [Link(parent)]))
            link = Link(link.head, certificate)
            problem = _next_problem(parent, link)
            if problem:
                raise BadMessage("false_heads", problem)
            checked.append(link)
            parent = link.head
        return replace(self, links=(*checked, *self.links))


def gaps(chain: Chain) -> tuple[Filling, ...]:
    """The gaps of a chain, oldest first: neighbours of which one is not the other's parent."""
    return tuple(
        Filling(before, after)
        for before, after in pairwise(chain.links)
        if not _is_next(before.head, after.head)
    )


def between(chain: Chain, question: Question) -> tuple[Link, ...]:
    """What a chain has of the heads that are asked for: the newest that follow from each other.

    At most `MAX_LINKS` and `MAX_PAGE_BYTES`; the first link has its parent's head, unless that is
    where the question begins. Empty if the newest of them is not here.
    """
    links, page, num_bytes = chain.links, list[Link](), 0
    at, wanted = _place(chain, question.place), question.until
    while 0 <= at < len(links) and wanted != question.since and len(page) < MAX_LINKS:
        link, before = links[at], links[at - 1] if at else None
        if link.certificate is None or link.head.digest != wanted:
            break
        if before and _is_next(before.head, link.head):
            link = replace(link, parent=before.head)
        num_bytes += len(encode_link(link))
        if link.parent is None or (page and num_bytes > MAX_PAGE_BYTES):
            break
        page.append(link)
        wanted, at = link.parent.digest, at - 1
    lone = [replace(link, parent=None) for link in reversed(page)]
    if page and wanted != question.since:
        lone[0] = page[-1]
    return tuple(lone)


def filled(chain: Chain, links: Sequence[Link]) -> tuple[Chain, str | None]:
    """The chain with one of its gaps closed; as it is, with the reason, if the links do not fit.

    Args:
        chain: of this peer; it may have changed since the links were asked for.
        links: all heads of the gap, oldest first; wrong signatures have been dropped from them.
    """
    if not links:
        return chain, "there are none"
    at = _place(chain, links[0].head.code)
    if not 0 < at < len(chain.links):
        return chain, f"no gap is at height {links[0].head.height}"
    before, after = chain.links[at - 1], chain.links[at]
    if links[-1].head.digest != after.head.parent:
        return chain, f"they do not lead to height {after.head.height}"
    parent = before.head
    for link in links:
        problem = _next_problem(parent, link)
        if problem:
            return chain, problem
        parent = link.head
    new = [Link(link.head, link.certificate) for link in links]
    closed = (*new, replace(after, parent=None))
    return Chain((*chain.links[:at], *closed, *chain.links[at + 1 :])), None


def _place(chain: Chain, code: Code) -> int:
    """Where in a chain a head of this code is, or would be."""
    return bisect_left(chain.links, code, key=lambda link: link.head.code)


def _next_problem(parent: Head, link: Link) -> str | None:
    """Why a link does not follow from its parent, without any head between; None if it does."""
    if link.head.parent != parent.digest:
        return f"height {link.head.height} does not follow from height {parent.height}"
    return step_problem(parent, link)


def _is_next(before: Head, after: Head) -> bool:
    """Whether of two heads of one ancestry the first is the parent of the second.

    By their codes: one ancestry has one head of each, and digests of ten thousands take a while.
    """
    return before.code == _place_of_parent(after)


def _place_of_parent(head: Head) -> Code:
    """The code of a head's parent: a reform repeats the height of its own."""
    if head.kind is Kind.REFORM:
        return (*head.lineage[:-1], (head.height, ()))
    return (*head.lineage, (head.height - 1, ()))


# ---------------------------------------------------------------- as bytes


_QUESTION = TypeAdapter(Question)


def encode_question(question: Question) -> bytes:
    """A question as canonical JSON."""
    return canonical(vars(question))


def decode_question(encoded: Buffer) -> Question:
    """A question from foreign bytes.

    Raises:
        BadMessage: not of the schema.
    """
    return parse(_QUESTION, encoded, "heads_question")


def encode_page(links: Sequence[Link]) -> bytes:
    """Links as they travel: one a line."""
    return b"\n".join(map(encode_link, links))


def decode_page(encoded: bytes) -> tuple[Link, ...]:
    """Links from foreign bytes.

    Raises:
        BadMessage: too many, too large, or not of the schema.
    """
    if not encoded:
        return ()
    lines = encoded.split(b"\n", MAX_LINKS)
    if len(lines) > MAX_LINKS or len(encoded) > 2 * MAX_PAGE_BYTES:
        raise BadMessage("heads_size", f"{len(encoded)} bytes of heads are too many")
    return tuple(map(decode_link, lines))
