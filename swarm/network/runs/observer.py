"""An observer that only reads: it finds a run, reads its records, fetches its newest model.

It only dials out and does not keep its identity, so it disturbs no peer. It publishes only scores,
and only on request, under the key of the person who measured them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from swarm.background import Tasks
from swarm.config import NetworkSection, RunConfig
from swarm.errors import NetworkDown, NobodyReachable
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.fetcher import Downloads
from swarm.network.node.node import Node
from swarm.network.runs.joiner import fetch_state
from swarm.network.runs.run_records import fetch_dated, fetch_records, publish
from swarm.network.runs.run_search import Announced, answers_of, fetch_config, find_run, whom_to_ask
from swarm.network.runs.tips import Trust, newest_tip
from swarm.network.wire.identity import Identity
from swarm.network.wire.steady_clock import dht_clock
from swarm.protocol.records import records
from swarm.protocol.values.layout import Layout
from swarm.protocol.values.manifest import Digest, Manifest, PeerId

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
GRACE_S = 1.0
"""Wait for a newer tip than the first shown; shorter than a joiner's, because observers look
again."""
RENEW_S = records.EVENT_TTL_S / 3
"""Interval at which scores are published again; they outlive two failed attempts."""


@dataclass(frozen=True)
class Seen:
    """Records of one run that have not expired, by the peer that signed them.

    Attributes:
        published: when a peer published its presence, in seconds since 1970 by its own clock.
        at: when the records were read, in seconds since 1970 by this machine's clock.
    """

    peers: Mapping[PeerId, records.PeerRecord]
    merges: Mapping[PeerId, records.MergeRecord]
    validations: Mapping[PeerId, records.ValidationRecord]
    published: Mapping[PeerId, float] = field(default_factory=dict)
    at: float = 0.0
    scores: Mapping[PeerId, records.ScoreRecord] = field(default_factory=dict)


class Observer:
    """See the module. Every call has a deadline, and any thread but the node's may call."""

    def __init__(
        self,
        node: Node,
        store: BlobStore,
        vouched: Digest | None = None,
        signer: Identity | None = None,
    ) -> None:
        self._node, self._store = node, store
        self._signer = signer.peer_id if signer else node.peer_id
        self._trust = Trust(vouched) if vouched else None
        self._downloads = Downloads(node, store)
        self._renewing = Tasks("the scores")

    @classmethod
    def start(
        cls,
        known_peers: Sequence[str],
        store: BlobStore,
        deadline_s: float,
        vouched: Digest | None = None,
        signer: Identity | None = None,
    ) -> Observer:
        """Enters the network through any of these addresses; fetched blobs go into the store.

        Tips are proved from the `vouched` head, or from manifest 0. Scores are signed by `signer`,
        or by a temporary identity.

        Raises:
            NobodyReachable: none of the addresses answers.
            NetworkDown: libp2p's daemon did not start.
            ConfigError: an address is malformed.
        """
        node = Node.start(
            identity_path=None,
            network=NetworkSection(client_mode=True),
            known_peers=known_peers,
            deadline_s=deadline_s,
            signer=signer,
        )
        return cls(node, store, vouched, signer)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Leaves the network."""
        self._node.stop(timeout_s)

    def find(self, wanted: str | None, deadline_s: float) -> Announced:
        """The run with this id, or the only run.

        Raises:
            NobodyReachable: no such run is announced, perhaps since its founder still prepares it;
                or the network does not answer.
            RunMismatch: several runs are announced, and none was named.
        """
        node, none = self._node, f"no peer announces {wanted or 'a run'}"

        async def found() -> Announced:
            opened = await find_run(
                node, self._downloads, fingerprint=None, wanted=wanted, deadline_s=deadline_s / 2
            )
            if opened:
                return opened.announced
            if founder := await self._founder(deadline_s / 8):
                raise NobodyReachable(
                    f"{none} yet: peer {founder[-6:]} prepares a run",
                    hint="it begins once that peer has read its text: look again later",
                )
            raise NobodyReachable(none, hint="is a peer of it running?")

        return self._within(deadline_s, "runs", found)

    async def _founder(self, within_s: float) -> PeerId | None:
        """A peer at the given addresses that answers, in time, that it prepares a run."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                told = await answers_of(self._node, self._node.entrances)
                return next(iter(told.preparing), None)
        return None

    def look(self, run: str, deadline_s: float) -> Seen:
        """All records of a run.

        Raises:
            NobodyReachable: the network does not answer.
        """

        async def read() -> Seen:
            node = self._node
            peers, merges, validations, scores = await asyncio.gather(
                fetch_dated(node, records.PeerRecord, records.peers_keys(run)),
                fetch_records(node, records.MergeRecord, records.merges_keys(run)),
                fetch_records(node, records.ValidationRecord, records.validation_keys(run)),
                fetch_records(node, records.ScoreRecord, records.scores_keys(run)),
            )
            # The given peers may end, and libp2p then forgets the addresses that it learned from
            # them.
            node.remember([a for _, record in peers.values() for a in record.addresses])
            return Seen(
                {peer: record for peer, (_, record) in peers.items()},
                merges,
                validations,
                {peer: expires - records.RECORD_TTL_S for peer, (expires, _) in peers.items()},
                dht_clock()(),
                scores,
            )

        return self._within(deadline_s, "records", read)

    def tip(
        self, announced: Announced, peers: Mapping[PeerId, records.PeerRecord], deadline_s: float
    ) -> Manifest:
        """The newest manifest that a member proves from manifest 0, or from the trusted head.

        Raises:
            NobodyReachable: no member proved one in time.
        """
        asked = whom_to_ask(self._node, announced, peers)

        async def ask() -> Manifest:
            shown = await newest_tip(
                self._node,
                self._downloads,
                announced.record,
                asked,
                self._trust,
                grace_s=GRACE_S,
            )
            return shown.record.tip

        return self._within(deadline_s, "the newest manifest", ask)

    def config(self, announced: Announced, deadline_s: float) -> RunConfig:
        """The run's configuration.

        Raises:
            NobodyReachable: no member sent the configuration in time.
            RunMismatch: the received configuration differs from the announced one.
        """
        return self._within(
            deadline_s, "the run configuration", lambda: fetch_config(announced, self._downloads)
        )

    def fetch_model(
        self,
        manifest: Manifest,
        layout: Layout,
        *,
        sources: Sequence[PeerId],
        on_blob: Callable[[int, int], None],
        deadline_s: float,
    ) -> None:
        """Fetches every blob of a manifest into the store, checked.

        Args:
            manifest: the state to fetch.
            layout: sizes that its values must have.
            sources: peers that may have it.
            on_blob: called with bytes here and bytes in all, in the node's thread.
            deadline_s: time limit for the whole model.

        Raises:
            NobodyReachable: not all arrived in time.
        """
        self._within(
            deadline_s,
            "the model",
            lambda: fetch_state(
                self._downloads,
                self._store,
                layout,
                manifest,
                sources=sources,
                on_blob=on_blob,
            ),
        )

    def publish_scores(self, run: str, record: records.ScoreRecord, deadline_s: float) -> None:
        """Publishes scores to all observers of the run, in place of those published before.

        The scores are published repeatedly until this observer stops, and expire `EVENT_TTL_S`
        later.

        Raises:
            NobodyReachable: no peer keeps them.
        """
        key = records.scores_key(run, self._signer)

        async def store() -> bool:
            await self._renewing.stop()
            self._renewing.supervise(partial(self._renew, key, record))
            return await publish(self._node, key, record)

        if not self._within(deadline_s, "a place for scores", store):
            raise NobodyReachable("no peer keeps the scores", hint="is the run still active?")

    async def _renew(self, key: str, record: records.ScoreRecord) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await publish(self._node, key, record)
            except (NobodyReachable, NetworkDown) as error:
                logger.warning("the scores were not repeated; trying again: %s", error)

    def _within(
        self, deadline_s: float, what: str, work: Callable[[], Awaitable[Result]]
    ) -> Result:
        async def bounded() -> Result:
            async with asyncio.timeout(deadline_s):
                return await work()

        try:
            # The outer limit only matters when the loop itself hangs.
            return self._node.run(bounded(), deadline_s + 2)
        except TimeoutError as error:
            raise NobodyReachable(f"{what}: no answer within {deadline_s:.0f} s") from error
