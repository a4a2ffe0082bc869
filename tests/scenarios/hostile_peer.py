"""swarm-peer of a lying member, with another fault in every round.

| after round | lie |
|---|---|
| 1 | offers experts that are NaN, which nobody averages |
| 2 | offers values of a wrong size |
| 3 | serves its values with a flipped byte |
| 4 | announces its values as far larger than they are |
| 5 | ends its streams in the middle of a value |
| 6 | offers shared parts that are NaN |

It always sends COMMITs without certificate. It announces the merge after round 2 with false donors,
does not announce the merge after round 4, and announces the one after round 6 too late.
"""

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from peers.peer import main
from swarm.codecs import Content
from swarm.experts import expert_of_unit
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.blob_server import BlobServer
from swarm.network.fetch.bulk import Head
from swarm.network.rounds.round_driver import RoundDriver
from swarm.peer.status.publisher import Publisher
from swarm.peer.training.offering import Offering
from swarm.protocol.messages.events import Apply
from swarm.protocol.messages.messages import Commit, Header
from swarm.protocol.rounds.contributor import Contributor
from swarm.protocol.values.manifest import Digest, Kind, Manifest, Unit

VALUE_BYTES = 8192
"""Smaller blobs are offers or manifests, which it serves unchanged."""
LATE_S = 5.0
rounds_done = 0


def lie_in_offers() -> None:
    """Offers NaN after rounds 1 and 6, and a wrong size after round 2, without its own checks."""

    def lying(
        self: Offering, tip: Manifest, unit: Unit, value: Content, _: int
    ) -> tuple[Digest, int]:
        if tip.round == (6 if expert_of_unit(unit) is None else 1):
            nan = np.full(value.num_bytes // 4, np.nan, dtype="<f4")
            value = Content.of(nan.tobytes())
        elif tip.round == 2:
            value = Content.of(value.whole()[:-4])
        return self.rounds.store_value(value)

    Offering.store = lying  # type: ignore[method-assign]
    Contributor._why_not_offer = lambda self, offer: None  # type: ignore[method-assign]


def is_serving() -> bool:
    """Whether this is the network's loop. The peer's own reads run in other threads."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def lie_in_streams() -> None:
    """Serves flipped bytes after round 3, large heads after round 4, half values after round 5."""
    read, answer, encode = BlobStore.read, BlobServer._answer, Head.encode

    def flipping(
        self: BlobStore, digest: str, offset: int, length: int
    ) -> bytes | memoryview | None:
        part = read(self, digest, offset, length)
        if part is None or rounds_done not in (3, 5) or length < VALUE_BYTES or not is_serving():
            return part
        if rounds_done == 5:
            return part[: length // 2]
        return bytes([part[0] ^ 1]) + part[1:]

    def boasting(self: Head) -> bytes:
        if rounds_done == 4 and self.num_bytes >= VALUE_BYTES:
            return encode(dataclasses.replace(self, num_bytes=self.num_bytes * 1000))
        return encode(self)

    async def ending(self: BlobServer, *arguments: Any) -> bool:
        answered = await answer(self, *arguments)
        if rounds_done == 5:
            raise ConnectionError("ends in the middle")
        return answered

    BlobStore.read = flipping  # type: ignore[method-assign]
    BlobStore.file_of = lambda self, digest: None  # type: ignore[method-assign]
    Head.encode = boasting  # type: ignore[method-assign]
    BlobServer._answer = ending  # type: ignore[method-assign]


def lie_about_decisions() -> None:
    """Sends every member an undecided manifest after each round."""
    apply = RoundDriver._apply

    async def lying(self: RoundDriver, effect: Apply) -> None:
        global rounds_done
        await apply(self, effect)
        tip = effect.manifest
        rounds_done = tip.round
        forged = dataclasses.replace(
            tip,
            run=self.machine.rules.run,
            kind=Kind.QUORUM,
            height=tip.height + 100,
            parent=tip.digest,
        )
        header = Header(forged.code, forged.digest, forged.generation)
        payload = self.outbound.encode(header, Commit(forged, None, tip))
        for peer in sorted(tip.members.keys() - {self.node.peer_id}):
            self._work.spawn(self._post(peer, payload))

    RoundDriver._actions = {**RoundDriver._actions, Apply: lying}


def lie_about_merges() -> None:
    """Announces each expert as its own and only donor, then nothing, then too late."""
    announce = Publisher.announce_merge

    def lying(self: Publisher, tip: Manifest, donors: Sequence[Sequence[Sequence[int]]]) -> None:
        if tip.round == 2:
            announce(self, tip, [[(expert,) for expert in range(len(layer))] for layer in donors])
        elif tip.round > 4:
            threading.Timer(LATE_S, announce, (self, tip, donors)).start()

    Publisher.announce_merge = lying  # type: ignore[method-assign]


if __name__ == "__main__":
    lie_in_offers()
    lie_in_streams()
    lie_about_decisions()
    lie_about_merges()
    main()
