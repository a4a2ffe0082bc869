"""Lost links of a chain, and how links from other peers replace them. Pure.

A chain leaves out heads on purpose (chain pruning). But where a line of its file was damaged, it
has a *gap*: the next link no longer follows from the last sound link, or perhaps not from each head
between the two. The peer asks members for the links after its last sound link, a *page* at a time,
oldest first. Each link must be a step [L1] from the previous one. Once one of the peer's own links
follows from the new links, these replace its own links before that one. Until then the pages are
kept apart from the chain.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pydantic import TypeAdapter

from swarm.canonical import canonical
from swarm.errors import BadMessage
from swarm.protocol.chain.chain_record import decode_link, encode_link
from swarm.protocol.chain.trust import Chain, Sound, closed, counted, is_parent, step_problem
from swarm.protocol.messages.messages import Link
from swarm.protocol.messages.schemas import MAX_LINKS, CodeText, OnWire, parse
from swarm.protocol.values.digests import Buffer
from swarm.protocol.values.manifest import Digest

MAX_PAGE_BYTES = 900_000
"""Limit of one answer over the control path; some 20 links at 256 members."""


@dataclass(frozen=True)
class Question(OnWire):
    """Asks for the links that a peer lacks: after one code and up to another code."""

    since: CodeText
    until: CodeText


@dataclass(frozen=True)
class Filling:
    """A gap between two neighbors of a chain, with the links received for its oldest part."""

    before: Link
    after: Link
    links: tuple[Link, ...] = ()

    @property
    def ends(self) -> tuple[Digest, Digest]:
        """Digests of the neighbors; they identify the gap, whatever has been received."""
        return self.before.head.digest, self.after.head.digest

    @property
    def path(self) -> tuple[Link, ...]:
        """The link before the gap, and the links received so far."""
        return (self.before, *self.links)

    @property
    def question(self) -> Question:
        """The next question to ask."""
        newest = self.path[-1].head.code
        return Question(newest, max(newest, self.after.head.code))

    def extended(self, page: Sequence[Link], sound: Sound) -> Filling:
        """The gap with a page from a member; only valid signatures of certificates are kept.

        Args:
            page: links, each a step from the previous one; the first is a step from the newest link
                here.
            sound: drops the invalid signatures of a certificate, given the head's digest.

        Raises:
            BadMessage: reason `false_heads`: the links are not steps from the newest one here.
        """
        if not page:
            raise BadMessage("false_heads", "there are no heads")
        checked = [self.path[-1]]
        for link in page:
            if link.certificate:
                link = replace(link, certificate=sound(*counted(link, checked)))
            problem = step_problem(checked[-1].head, link)
            if problem:
                raise BadMessage("false_heads", problem)
            checked.append(link)
        return replace(self, links=(*self.links, *checked[1:]))


def gaps(chain: Chain) -> tuple[Filling, ...]:
    """The gaps of a chain, oldest first."""
    return tuple(
        Filling(before, after)
        for before, after in pairwise(chain.links)
        if _is_gap(chain, before, after)
    )


def between(chain: Chain, question: Question) -> tuple[Link, ...]:
    """The links of a chain after one code, up to the first link at or beyond another code.

    At most `MAX_LINKS` and `MAX_PAGE_BYTES`. The first link has its parent's head. Empty if no head
    here is in the ancestry of the first code, or no link comes after that code.
    """
    at, page, num_bytes = chain.num_behind(question.since), list[Link](), 0
    for before, link in pairwise(chain.links[at - 1 :] if at else ()):
        if not page:
            link = _whole(before, link)
        num_bytes += len(encode_link(link))
        if page and num_bytes > MAX_PAGE_BYTES:
            break
        page.append(link)
        if link.head.code >= question.until or len(page) == MAX_LINKS:
            break
    return tuple(page)


def filled(chain: Chain, path: Sequence[Link]) -> tuple[Chain, str | None]:
    """The chain with a gap closed. If the links close no gap: the same chain, and the reason.

    Args:
        chain: this peer's chain, which may have changed since the links were asked for.
        path: the link before the gap, which this peer has, and steps from there, oldest first;
            wrong signatures have been dropped from them.
    """
    first, *links = path
    at = chain.num_behind(first.head.code)
    is_mine = at and chain.links[at - 1].head.digest == first.head.digest
    if not links or not is_mine or first.head.digest == chain.tip.digest:
        return chain, f"nothing follows from height {first.head.height}"
    tip = chain.tip
    links = [each for each in links if each.head.code < tip.code or each.head.digest == tip.digest]
    newest = links[-1] if links else first
    further = bisect_right(chain.links, newest.head.code, key=lambda link: link.head.code)
    # A link that was torn stays torn if it still follows the same link of this peer.
    is_own = further > at and chain.links[further - 1].head.digest == newest.head.digest
    closing = chain.links[at : further if is_own else further + 1]
    replaced = {link.head.digest for link in closing}
    if not any(gap.after.head.digest in replaced for gap in gaps(chain)):
        return chain, f"there is no gap after height {first.head.height}"
    kept, rest = chain.links[:at], chain.links[further:]
    if rest:
        links.append(_whole(chain.links[further - 1], rest[0]))
    for before, link in pairwise([kept[-1], *links]):
        if problem := step_problem(before.head, link):
            return chain, problem
    return Chain((*kept, *closed(kept, links), *rest[1:]), chain.torn - replaced), None


def _is_gap(chain: Chain, before: Link, after: Link) -> bool:
    is_torn = after.head.digest in chain.torn and not is_parent(before.head, after.head)
    return is_torn or step_problem(before.head, after) is not None


def _whole(before: Link, link: Link) -> Link:
    """A link, completed by its parent's head if that is known here."""
    if link.parent is None and is_parent(before.head, link.head):
        return replace(link, parent=before.head)
    return link


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
