"""The newest tip of a run, proved by members to a peer without a tip, or with an old one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from pydantic import TypeAdapter

from swarm.canonical import canonical
from swarm.errors import BadManifest, BadMessage, HostileInput, NobodyReachable, Unreachable
from swarm.network.fetch.fetcher import Downloads, Want
from swarm.network.node.node import Node
from swarm.network.rounds.inbound import open_message, verified
from swarm.protocol.chain.trust import Chain, proof_problem
from swarm.protocol.messages.events import Record
from swarm.protocol.messages.message_bytes import foreign_manifest
from swarm.protocol.messages.messages import Commit, Header, Link, Message
from swarm.protocol.messages.schemas import IS_DIGEST, CodeText, parse
from swarm.protocol.records.records import RunRecord
from swarm.protocol.values.manifest import Code, Digest, Manifest, PeerId

logger = logging.getLogger(__name__)

ASK_DEADLINE_S = 5.0
BLOB_DEADLINE_S = 60.0
GRACE_S = 5.0
"""How long others may still show a newer tip after the first proved one. A member that names a blob
which nobody serves causes no longer delay."""
MAX_ASKED = 8
"""Number of members asked for their tip; the newest proved one counts."""
TIP_QUESTION = b"tip "

Answer = TypeVar("Answer")
_CODE: TypeAdapter[Code] = TypeAdapter(CodeText)


@dataclass(frozen=True)
class Shown:
    """A tip that a peer showed, and the links that prove it."""

    record: Record
    path: tuple[Link, ...] = ()


@dataclass(frozen=True)
class Trust:
    """The head that a peer trusts before it sees a tip.

    Attributes:
        begin: head from which others must prove their tip.
        chain: chain of a peer that has a tip. Others may have dropped the head of that tip, and
            then prove their tip from its position (chain pruning).
        is_new: whether the peer has no tip of its own, see `swarm.protocol.chain.trust`.
    """

    begin: Digest
    chain: Chain | None = None
    is_new: bool = True

    @staticmethod
    def own(chain: Chain) -> Trust:
        """The trust of a peer with a tip of its own."""
        return Trust(chain.tip.digest, chain, is_new=False)

    def question(self, run: str) -> bytes:
        """The question for members of a run."""
        place = canonical(self.chain.tip.code).decode() if self.chain else self.begin
        return TIP_QUESTION + f"{run} {place}".encode()

    def rooted(self, path: Sequence[Link]) -> tuple[Link, ...]:
        """A proof from the trusted head, see `Chain.rooted`."""
        return tuple(self.chain.rooted(path) if self.chain else path)

    def problem(self, commit: Commit) -> str | None:
        """Why a tip with a rooted proof is not believed; None when it is."""
        heads = {self.begin, *(self.chain.trusted if self.chain else ())}
        return proof_problem(commit.path, commit.manifest.head, heads, is_new=self.is_new)


def asked_tip(payload: bytes, run: str) -> Code | Digest | None:
    """The head that a stranger trusts, if the payload is its question for the run's tip.

    A newcomer names the digest of a head, and a peer with a tip the tip's position.
    """
    question, _, trusted = payload.rpartition(b" ")
    if question != TIP_QUESTION + run.encode():
        return None
    if IS_DIGEST.match(digest := trusted.decode("ascii", "replace")):
        return digest
    try:
        return parse(_CODE, trusted, "tip_question")
    except BadMessage:
        return None


async def newest_tip(
    node: Node,
    downloads: Downloads,
    run: RunRecord,
    peers: Collection[PeerId],
    trust: Trust | None = None,
    *,
    grace_s: float = GRACE_S,
) -> Shown:
    """The best tip that members proved in time.

    Args:
        node: sends the questions.
        downloads: fetches manifests and proofs.
        run: the run as announced; its id binds manifest 0.
        peers: whom to ask.
        trust: where proofs begin; None for manifest 0.
        grace_s: how long to wait for other answers once one tip is proved.

    Raises:
        NobodyReachable: no member proved a tip.
    """
    asked = [peer for peer in sorted(peers) if peer != node.peer_id][:MAX_ASKED]
    trust = trust or Trust(await _founding_head(downloads, run, asked))
    questions = [_ask_tip(node, downloads, run, trust, peer) for peer in asked]
    answers = await first_and_soon(questions, lambda each: isinstance(each, Shown), grace_s)
    best = max(
        (shown for shown in answers if isinstance(shown, Shown)),
        key=lambda shown: shown.record.tip.code,
        default=None,
    )
    if best is None:
        reasons = sorted({answer for answer in answers if isinstance(answer, str)})
        raise NobodyReachable(
            f"none of {len(asked)} members of {run.run} proved its tip: {'; '.join(reasons)}"
        )
    return best


async def first_and_soon(
    questions: Sequence[Awaitable[Answer]], is_good: Callable[[Answer], bool], grace_s: float
) -> list[Answer]:
    """The answers up to `grace_s` after the first good one; the other questions are cancelled.

    Args:
        questions: all asked at once.
        is_good: whether an answer limits the wait for others to `grace_s`.
        grace_s: seconds.
    """
    tasks = [asyncio.ensure_future(question) for question in questions]
    loop, pending, end_s = asyncio.get_running_loop(), set(tasks), float("inf")
    try:
        while pending and loop.time() < end_s:
            left_s = None if end_s == float("inf") else end_s - loop.time()
            done, pending = await asyncio.wait(
                pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            if any(is_good(task.result()) for task in done):
                end_s = min(end_s, loop.time() + grace_s)
        return [task.result() for task in tasks if task not in pending]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _founding_head(downloads: Downloads, run: RunRecord, peers: Sequence[PeerId]) -> Digest:
    """The head of manifest 0, whose blob the run id binds."""
    known = downloads.store.get(run.founding)
    if known is None:
        wanted = Want(run.founding, run.founding_bytes, tuple(peers))
        known = await downloads.fetch_one(wanted, timeout_s=BLOB_DEADLINE_S)
    return foreign_manifest(bytes(known)).digest


async def _ask_tip(
    node: Node, downloads: Downloads, run: RunRecord, trust: Trust, peer: PeerId
) -> Shown | str:
    """The tip that a peer proves, or why it did not."""
    question = trust.question(run.run)
    try:
        async with asyncio.timeout(BLOB_DEADLINE_S):
            payload = await node.request(peer, question, ASK_DEADLINE_S)
            if not payload:
                return "no answer"
            header, message = await open_message(peer, payload, downloads.store, downloads)
            # A proof may have tens of thousands of signatures, which take seconds.
            prove = partial(_proved_tip, header, message, peer, run, trust)
            return await asyncio.get_running_loop().run_in_executor(None, prove)
    except (TimeoutError, Unreachable) as error:
        logger.info("peer=%s showed no tip: %s", peer[-6:], error)
        return "no answer"
    except HostileInput as error:
        node.traffic.refuse(error.reason)
        logger.warning("peer=%s tip refused: %s", peer[-6:], error)
        return str(error)


def _proved_tip(
    header: Header, message: Message, peer: PeerId, run: RunRecord, trust: Trust
) -> Shown:
    """The tip that a COMMIT proves; signatures are verified last."""
    _checked_tip(message, run, trust)
    return _checked_tip(verified(header, message, peer, run.run), run, trust)


def _checked_tip(message: object, run: RunRecord, trust: Trust) -> Shown:
    if not isinstance(message, Commit):
        raise BadMessage("not_a_tip", "the answer is no tip")
    tip, message = message.manifest, replace(message, path=trust.rooted(message.path))
    problem = trust.problem(message)
    if problem:
        raise BadManifest("no_proof", problem)
    if tip.founding.config != run.config or (tip.run or run.run) != run.run:
        raise BadManifest("foreign_run", f"the tip belongs to {tip.run}")
    certificate = message.path[-1].certificate
    return Shown(Record(tip, certificate, _parent_of(message)), message.path)


def _parent_of(commit: Commit) -> Manifest | None:
    """The parent that came with a COMMIT, if it is the manifest's."""
    parent = commit.parent
    return parent if parent and parent.digest == commit.manifest.parent else None
