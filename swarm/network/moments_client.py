"""Asks other peers for moments of experts and fetches them: size, digest and values are checked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable

from swarm.codecs import Content, check_moments
from swarm.errors import BadBlob, HostileInput, NetworkDown, Unreachable
from swarm.experts import UnitLayout
from swarm.network.blobs import BlobStore
from swarm.network.contents import content_of
from swarm.network.fetch import Downloads, Want
from swarm.network.node import Node
from swarm.protocol.handover import (
    Moments,
    decode_answer,
    encode_question,
    layout_of_size,
    transfer_limit_s,
)
from swarm.protocol.layout import Layout
from swarm.protocol.manifest import Digest, PeerId

logger = logging.getLogger(__name__)

MOMENTS_QUESTION = b"moments "
ASK_S = 3.0
MAX_FAILURES = 3
"""A giver from which a blob did not come so often is not waited for."""


class MomentsClient:
    """What a peer wants of others; runs in the node's loop."""

    def __init__(
        self, node: Node, downloads: Downloads, store: BlobStore, layout: Layout, run: str
    ) -> None:
        self.prefix = MOMENTS_QUESTION + run.encode() + b" "
        self._node, self._downloads, self._store, self._layout = node, downloads, store, layout

    async def fetch(self, moments: Moments, giver: PeerId) -> bool:
        """Whether a blob of another peer is here, checked and pinned once."""
        layout = layout_of_size(self._layout, moments.expert, moments.num_bytes)
        if layout is None:
            self._node.traffic.refuse("moments_size")
            return False
        store = self._store
        store.pin([moments.digest])
        if store.has(moments.digest) and not _is_sound(layout, content_of(store, moments.digest)):
            self._node.traffic.refuse("moments_values")
        elif await self._download(moments, layout, giver):
            self._node.traffic.moments_bytes_received += moments.num_bytes
            return True
        store.unpin([moments.digest])
        logger.info("moments of expert %d did not come", moments.expert)
        return False

    async def _download(self, moments: Moments, layout: UnitLayout, giver: PeerId) -> bool:
        """Brings a blob here; gives up when it is refused, late, or failed thrice."""
        loop = asyncio.get_running_loop()
        is_hopeless = asyncio.Event()
        failures = 0

        def check(_: Digest, content: Content) -> None:
            try:
                check_moments(layout, content)
            except BadBlob:
                loop.call_soon_threadsafe(is_hopeless.set)
                raise

        def failed(_: Digest, __: PeerId, ___: str) -> None:
            nonlocal failures
            failures += 1
            if failures >= MAX_FAILURES:
                is_hopeless.set()

        want = Want(moments.digest, moments.num_bytes, (giver,))
        fetching = loop.create_task(
            self._downloads.fetch([want], check=check, on_blob=_ignore, on_failure=failed)
        )
        gives_up = loop.create_task(is_hopeless.wait())
        limit_s = transfer_limit_s(moments.num_bytes)
        try:
            await asyncio.wait(
                [fetching, gives_up], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
            return fetching.done() and fetching.exception() is None
        finally:
            for task in (fetching, gives_up):
                task.cancel()
            await asyncio.gather(fetching, gives_up, return_exceptions=True)

    async def ask_all(self, peers: Iterable[PeerId]) -> dict[PeerId, tuple[Moments, ...]]:
        """The answers of those that answer."""
        asked = list(peers)
        answers = await asyncio.gather(*(self.ask(peer) for peer in asked))
        return {p: a for p, a in zip(asked, answers, strict=True) if a is not None}

    async def ask(
        self, peer: PeerId, settled: Collection[Digest] = ()
    ) -> tuple[Moments, ...] | None:
        """What a peer hands over to this one; None if it does not answer in time, or not in order.

        Args:
            peer: an owner before.
            settled: blobs of it that are here by now, or are needed no more.
        """
        payload = self.prefix + encode_question(settled)
        try:
            answer = await self._node.request(peer, payload, ASK_S)
            return decode_answer(answer) if answer else None
        except (Unreachable, NetworkDown) as error:
            logger.debug("peer=%s not asked for moments: %s", peer[-6:], error)
        except HostileInput as error:
            self._node.traffic.refuse(error.reason)
        return None


def _is_sound(layout: UnitLayout, content: Content) -> bool:
    """Whether a blob that came here as something else may be taken for moments."""
    try:
        check_moments(layout, content)
    except BadBlob:
        return False
    return True


def _ignore(_: Digest) -> None:
    """A single blob is waited for, so its arrival is no news."""
