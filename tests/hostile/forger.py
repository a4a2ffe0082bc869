"""A forger: a node with its own key, outside of any run, that sends and serves invented data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from swarm.config import NetworkSection
from swarm.errors import NobodyReachable, Unreachable
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.blob_server import BlobServer
from swarm.network.fetch.bulk import PROTOCOL
from swarm.network.fetch.fetcher import Downloads
from swarm.network.node.node import Handlers, Node
from swarm.network.runs.joiner import present_peers
from swarm.network.runs.run_search import announced_runs
from swarm.network.runs.tips import newest_tip
from swarm.protocol.messages.message_bytes import encode
from swarm.protocol.messages.messages import (
    Ballot,
    Certificate,
    Commit,
    Header,
    Link,
    Message,
    accept_statement,
)
from swarm.protocol.records.records import RunRecord
from swarm.protocol.values.manifest import Kind, Manifest, PeerId

WAIT_S = 60.0
AGAIN_S = 0.25

Result = TypeVar("Result")


@dataclass
class Forger:
    """See the module. Its messages are made with the project's own functions."""

    node: Node
    store: BlobStore
    run: RunRecord = field(init=False)
    members: list[PeerId] = field(init=False)

    def look(self) -> Manifest:
        """Finds the run, its members and its newest tip, as any guest can."""
        runs = self.node.run(announced_runs(self.node), WAIT_S)
        self.run = runs[0].record
        present = self.node.run(present_peers(self.node, self.run.run), WAIT_S)
        self.members = sorted(present)
        downloads = Downloads(self.node, self.store)

        def ask() -> Manifest:
            question = newest_tip(self.node, downloads, self.run, self.members)
            return self.node.run(question, WAIT_S).record.tip

        return self._patiently(ask)

    def sign(self, manifest: Manifest) -> Certificate:
        """A certificate with the forger's own signature, the only one that it can make."""
        ballot, identity = Ballot(0, self.node.peer_id), self.node.identity
        signed = identity.sign(accept_statement(self.run.run, ballot, manifest.digest))
        return Certificate(ballot, {self.node.peer_id: signed})

    def say(self, header: Header, message: Message) -> int:
        """Sends a message to all members. Returns the number that accepted it."""
        payload, attachments = encode(header, message)
        for digest, blob in attachments.items():
            self.store.put(blob, digest)
            self.store.pin([digest])
        posts = [partial(self._post, peer, payload) for peer in self.members]
        return sum(self._patiently(post) for post in posts)

    def _post(self, peer: PeerId, payload: bytes) -> bool:
        self.node.run(self.node.post(peer, payload, timeout_s=5.0), WAIT_S)
        return True

    def _patiently(self, call: Callable[[], Result]) -> Result:
        """Repeats a call that is refused for too many requests, as strangers' calls soon are."""
        end_s = time.monotonic() + WAIT_S
        while True:
            try:
                return call()
            except (Unreachable, NobodyReachable):
                if time.monotonic() > end_s:
                    raise
                time.sleep(AGAIN_S)

    def zeros(self, tip: Manifest, **changes: object) -> Manifest:
        """A manifest whose values are all zero and whose only member is this stranger."""
        entries = {}
        for unit, entry in tip.entries.items():
            digest = self.store.put(bytes(entry.num_bytes))
            entries[unit] = replace(entry, digest=digest)
        mine = {self.node.peer_id: next(iter(tip.members.values()))}
        return replace(
            tip,
            run=self.run.run,
            kind=Kind.QUORUM,
            members=mine,
            contributors=(self.node.peer_id,),
            owners=dict.fromkeys(tip.owners, (self.node.peer_id,)),
            entries=entries,
            **changes,  # type: ignore[arg-type]
        )

    def commit(self, manifest: Manifest, parent: Manifest, path: tuple[Link, ...] = ()) -> Commit:
        """A COMMIT that claims that the manifest was decided."""
        return Commit(manifest, self.sign(manifest), parent, path)


@contextmanager
def forger(addresses: Sequence[str]) -> Iterator[Forger]:
    """Enters the network by these addresses."""
    store, server = BlobStore(None), BlobServer()
    server.attach(store)
    node = Node.start(
        identity_path=None,
        network=NetworkSection(host_maddrs=("/ip4/127.0.0.1/tcp/0",)),
        known_peers=addresses,
        handlers=Handlers(streams={PROTOCOL: server.serve}),
    )
    try:
        yield Forger(node, store)
    finally:
        node.stop(5.0)
