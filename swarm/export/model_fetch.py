"""Fetches agreed models from the peers of a run, and disturbs training as little as possible."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from swarm.config import RunConfig
from swarm.errors import NobodyReachable
from swarm.export.facts import ExportFacts, Form
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.runs.observer import Observer, Seen
from swarm.network.runs.run_search import Announced
from swarm.network.wire.bounded_tables import recalled
from swarm.peer.guest import PEERS_A_SECOND
from swarm.peer.text.agreed_model import AgreedModel
from swarm.progress import fetching
from swarm.protocol.exchange.sourcing import WHOLE_S
from swarm.protocol.records.records import Losses, PeerRecord, PeerState, RunState, told_losses
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.manifest import Manifest, PeerId

logger = logging.getLogger(__name__)


IDLE = (PeerState.FINISHED, PeerState.TRAINING)
"""States in which a peer's link is idle, the best first: a finished peer's cores are idle as well,
and a training peer sends nothing."""


def idle_sources(peers: Mapping[PeerId, PeerRecord], manifest: Manifest) -> list[PeerId]:
    """Peers that have applied a manifest and can send it without disturbing training.

    Returns the peers that have finished the run, or if there are none, the training peers. The
    fetcher then prefers the peer with the fewest bytes left to send
    (`swarm.protocol.exchange.sourcing`).

    Args:
        peers: records of the present peers.
        manifest: manifest of the wanted blobs.
    """
    having = {peer: r.state for peer, r in peers.items() if r.manifest_digest == manifest.digest}
    tiers = ([peer for peer in sorted(having) if having[peer] is state] for state in IDLE)
    return next((tier for tier in tiers if tier), [])


ASK_S = 30.0
START_S = 600.0
"""Longest wait for a run whose founder still gathers peers."""
POLL_S = 2.0
LOOK_EVERY_S = 5.0
"""Seconds between looks at all records, which peers repeat every 8 s. A look costs every peer some
milliseconds of a core."""
TURN_S = 60.0
"""Seconds after which the sources of a fetch are chosen again, by the newest records."""
EMPTY_TURNS = 5
"""Turns without a piece of a blob after which a state counts as no longer available."""
MAX_NAMES = 4096
"""Most peers whose names are kept for model cards: the last heard peers."""
LOSS_S = 15.0
"""Longest wait for the held-out loss of a fetched state. After that, the card has no loss."""


class FromPeers:
    """See the module, and `swarm.export.run_follower.Source`.

    Attributes:
        run_id: id of the found run.
        run: configuration of this run.
        store: store of fetched blobs.
    """

    def __init__(
        self,
        observer: Observer,
        store: BlobStore,
        wanted: str | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Finds the run.

        Raises:
            NobodyReachable: no peer announces a run, or its founder has gathered peers for too
                long.
            RunMismatch: several runs are announced, and the person named none.
        """
        self._observer, self.store = observer, store
        self._clock, self._sleep = clock, sleep
        self._announced = self._running(wanted)
        self.run_id = self._announced.record.run
        self.run: RunConfig = observer.config(self._announced, ASK_S)
        self._told = Losses()
        self._num_heard = 0
        self._names: dict[PeerId, str] = {}

    @property
    def pause_s(self) -> float:
        """See `Source`. 5 s, and longer in a run of more than 80 peers."""
        return max(LOOK_EVERY_S, self._all_said_s)

    @property
    def _all_said_s(self) -> float:
        """Seconds for which one look at all peers uses up a guest's share of the DHT's traffic."""
        return self._num_heard / PEERS_A_SECOND

    def newest(self, least_round: int) -> Manifest | None:
        """See `Source`. Asks for a proof only if a record shows that there is a new manifest."""
        seen = self._read()
        if seen.peers and all(record.round < least_round for record in seen.peers.values()):
            return None
        return self._observer.tip(self._announced, seen.peers, ASK_S)

    def bring(self, manifest: Manifest, form: Form, within_s: float = WHOLE_S) -> ExportFacts:
        """See `Source`. Fetches in turns, because idle links change during a fetch.

        Peers with busy links are asked if no link is idle, or after a turn without a new byte. The
        bytes of a turn survive a kill.
        """
        wanted = manifest.sizes
        most = here = self.bytes_here(manifest)
        total = sum(wanted.values())
        logger.info(
            "round=%d %.1f MB of %.1f MB are already here",
            manifest.round, here / 1e6, total / 1e6,
        )  # fmt: skip
        say, end_s, empty = fetching(), self._clock() + within_s, 0
        while True:
            seen = self._look()
            idle = idle_sources(seen.peers, manifest) if not empty else []
            everybody = sorted({*self._announced.publishers, *seen.peers})
            try:
                self._observer.fetch_model(
                    manifest,
                    layout_of(self.run),
                    sources=idle or everybody,
                    on_blob=say,
                    deadline_s=TURN_S,
                )
                break
            except NobodyReachable:
                here = self.bytes_here(manifest)
                self.store.sync(digest for digest in wanted if self.store.has(digest))
                # If all bytes are here, the disk is slow, not the peers.
                empty = 0 if here > most or here == total else empty + 1
                most = max(most, here)
                if empty == EMPTY_TURNS or self._clock() > end_s:
                    raise
        self._await_loss(manifest)
        return ExportFacts(
            AgreedModel(self.run, manifest, self.store), form, self._told, self._names
        )

    def bytes_here(self, manifest: Manifest) -> int:
        """See `Source`. Includes pieces of a large blob, because it may take many turns."""
        return sum(self.store.bytes_here(*each) for each in manifest.sizes.items())

    def _await_loss(self, manifest: Manifest) -> None:
        """Reads the published losses until this state's loss is among them or `LOSS_S` is over.

        A peer begins to measure the loss when the manifest is decided, but may leave before the
        result.
        """
        end_s = self._clock() + LOSS_S
        while True:
            seen = self._look()
            self._told = self._told.with_newer(told_losses(seen.validations, manifest))
            if manifest.digest in self._told.by_manifest or self._clock() > end_s:
                return
            self._sleep(max(POLL_S, self._all_said_s))

    def _look(self) -> Seen:
        """The records. Empty if no peer answers, because the bytes may come nevertheless."""
        try:
            seen = self._read()
        except NobodyReachable as error:
            logger.info("%s", error)
            return Seen({}, {}, {})
        for peer, record in seen.peers.items():
            recalled(self._names, peer, str, MAX_NAMES)
            self._names[peer] = record.name
        return seen

    def _read(self) -> Seen:
        seen = self._observer.look(self.run_id, ASK_S)
        self._num_heard = len(seen.peers)
        return seen

    def _running(self, wanted: str | None) -> Announced:
        """Waits until the run has begun: it has no manifest while its founder gathers peers."""
        end_s = self._clock() + START_S
        while True:
            announced = self._observer.find(wanted, ASK_S)
            if announced.record.state is RunState.RUNNING:
                return announced
            if self._clock() > end_s:
                name, hint = announced.record.name, "start again once the run has begun"
                why = f"the founder of {name} has gathered peers for {START_S:.0f} s"
                raise NobodyReachable(why, hint=hint)
            logger.info("the founder of %s still gathers peers", announced.record.name)
            self._sleep(POLL_S)
