"""A real node with every interface of a peer that others can reach, and strangers around it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.blob_server import BlobServer
from swarm.network.fetch.bulk import PROTOCOL
from swarm.network.node.node import Handlers, Node
from swarm.network.rounds.inbound import Inbound
from swarm.network.rounds.transfers import Transfers
from swarm.network.wire.ledger import Ledger
from swarm.protocol.chain.trust import Chain, Foothold
from swarm.protocol.messages.events import Event, Received, Record
from swarm.protocol.messages.messages import Ballot, Offer, Ready, ready_statement
from swarm.protocol.values.manifest import Manifest, PeerId
from tests.network.conftest import LOOPBACK, Peers
from tests.network.rounds.test_round_driver import LAYOUT
from tests.protocol.round_pump import found, make_rules

RUN = "run-1"
WAIT_S = 60.0


class Victim:
    """Serves a store on disk, takes messages, and knows its members."""

    def __init__(
        self,
        peers: Peers,
        folder: Path,
        is_apart: Callable[[str], bool] | None = None,
        uplink_mbit: float | None = None,
    ) -> None:
        """Starts its node. Blobs in `apart` count as moments in its traffic."""
        self.ledger, self.store = Ledger(), BlobStore(folder)
        self.events: list[Event] = []
        self.heard = 0
        server = BlobServer(ledger=self.ledger, is_moments=is_apart)
        server.attach(self.store)
        self.node = peers.node(
            Handlers(
                on_message=self._on_message,
                streams={PROTOCOL: server.serve},
                ledger=self.ledger,
            ),
            network=LOOPBACK.model_copy(update={"max_upload_mbit": uplink_mbit}),
        )
        self.transfers = Transfers(self.node, self.store, LAYOUT, self.events.append)
        tip = replace(found(make_rules(), [self.node.peer_id]), run=RUN)
        self.chain = Chain.of(Record(tip, None, None))
        self.inbound = Inbound(
            self.transfers,
            self.ledger,
            RUN,
            self.events.append,
            foothold=lambda: Foothold(self.chain),
        )

    async def _on_message(self, source: str, payload: bytes) -> None:
        self.heard += 1
        self.inbound.take(source, payload)

    def received_from(self, peer: Node) -> int:
        """Valid messages of a peer."""
        events = [event for event in self.events if isinstance(event, Received)]
        return sum(event.source == peer.peer_id for event in events)

    def settle(self) -> None:
        """Returns when no message is being worked on."""
        wait_until(lambda: not self.inbound._tasks)


def post(sender: Node, to: Victim, *payloads: bytes) -> int:
    """Posts messages, all at once. Returns the number of accepted ones."""

    async def post_all() -> int:
        posts = (sender.post(to.node.peer_id, payload, 30.0) for payload in payloads)
        results = await asyncio.gather(*posts, return_exceptions=True)
        return results.count(None)

    return sender.run(post_all(), WAIT_S)


def signed_ready(
    sender: Node, run: str, tip: Manifest, *, to: PeerId, offer: Offer | None = None, **more: Any
) -> Ready:
    """A READY under the sender's own key for the first attempt of a convener."""
    ready = Ready(Ballot(0, to), offer, None, 1.0, **more)
    statement = ready_statement(run, tip.digest, ready.declared.declaration)
    return replace(ready, signature=sender.identity.sign(statement))


def wait_until(is_so: Callable[[], bool]) -> None:
    """Waits for a condition, and fails after a minute."""
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.01)
