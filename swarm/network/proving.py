"""COMMITs of strangers: the proof is fetched and judged first, the manifest only if it holds [L1].

All of it comes into a store in memory. Whoever proves what is better than the tip has shown what
this peer wants to have, so the manifest may be as large as any, and comes from its signers as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from swarm.errors import BadMessage
from swarm.network.blobs import BlobStore
from swarm.network.costs import LARGE_BYTES, Costs
from swarm.network.fetch import Downloads, Want
from swarm.network.ledger import Cost
from swarm.protocol.claims import Claim
from swarm.protocol.manifest import Digest, PeerId
from swarm.protocol.messages import Commit, Header, Hello, Link, Message
from swarm.protocol.proofs import decode_proof
from swarm.protocol.trust import Foothold, Sound
from swarm.protocol.wire import decode

MAX_SOURCES = 16


class Proving:
    """Opens COMMITs of strangers."""

    def __init__(
        self, aside: Downloads, own: BlobStore, foothold: Callable[[], Foothold], sound: Sound
    ) -> None:
        """Waits for them.

        Args:
            aside: fetches into memory.
            own: what this peer has already.
            foothold: what it believes now.
            sound: drops signatures that are wrong.
        """
        self._aside, self._own = aside, own
        self._foothold, self._sound = foothold, sound

    async def open(
        self, source: PeerId, payload: bytes, claim: Claim, costs: Costs
    ) -> tuple[Header, Message]:
        """The COMMIT with all signatures checked, or a HELLO if it has nothing to prove here.

        The HELLO says what the header does: that the sender is ahead, say, and may be asked.

        Raises:
            HostileInput: the proof does not hold, or its sender has cost too much.
        """
        (body, body_bytes), (proof, proof_bytes), *more = claim.attachments
        parent = more[0][0] if more else None
        with self._pinned([digest for digest, _ in claim.attachments]):
            blob = await self._proof(source, proof, proof_bytes, costs)
            judge = partial(self._proved, blob, body, parent)
            path = await costs.parsing(judge, off_loop=proof_bytes > LARGE_BYTES)
            if path is None:
                assert claim.header is not None
                return claim.header, Hello(ask=False)
            await self._fetch(source, path, [(body, body_bytes), *more], costs)
            blobs = {digest: self._blob(digest) for digest, _ in claim.attachments}
            size = sum(map(len, blobs.values()))
            header, commit = await costs.parsing(
                partial(decode, payload, blobs), off_loop=size > LARGE_BYTES
            )
        assert isinstance(commit, Commit)
        if commit.manifest.digest != path[-1].head.digest:
            raise BadMessage("false_proof", "the manifest has another head than was proved")
        return header, replace(commit, certificate=path[-1].certificate, path=path)

    async def _proof(self, source: PeerId, digest: Digest, num_bytes: int, costs: Costs) -> bytes:
        if not self._aside.store.has(digest):
            costs.fetching(1, Cost.PROOFS)
            costs.fetching(num_bytes)
            await self._bring([Want(digest, num_bytes, (source,))])
        return self._blob(digest)

    def _proved(self, proof: bytes, body: Digest, parent: Digest | None) -> tuple[Link, ...] | None:
        path = decode_proof(proof).path
        return self._foothold().proved(path, body, parent, self._sound)

    async def _fetch(
        self,
        source: PeerId,
        path: Sequence[Link],
        manifests: Sequence[tuple[Digest, int]],
        costs: Costs,
    ) -> None:
        """Brings manifests that are known to be right from who has them: one uplink is little."""
        certificate = path[-1].certificate
        signers = sorted(certificate.signatures) if certificate else []
        sources = tuple(dict.fromkeys([source, *signers]))[:MAX_SOURCES]
        missing = [(name, size) for name, size in manifests if not self._aside.store.has(name)]
        if missing:
            costs.fetching(sum(size for _, size in missing), Cost.MANIFESTS)
            await self._bring([Want(digest, size, sources) for digest, size in missing])

    async def _bring(self, wants: Sequence[Want]) -> None:
        await self._aside.fetch(wants)

    def _blob(self, digest: Digest) -> bytes:
        return bytes(self._aside.store.get(digest) or b"")

    @contextmanager
    def _pinned(self, digests: Sequence[Digest]) -> Iterator[None]:
        """Keeps blobs, and those that this peer has, in memory meanwhile and no longer."""
        store = self._aside.store
        store.pin(digests)
        try:
            for digest in digests:
                if (blob := self._own.get(digest)) is not None:
                    store.put(blob, digest)
            yield
        finally:
            store.unpin(digests)
            store.collect(())
