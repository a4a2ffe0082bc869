"""Strangers that write into the DHT: many keys, signed in order, past the sender's own checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer, get_dht_time

from swarm.network.dht.signed_records import SignedRecords, owner_of
from swarm.network.node.node import Node
from swarm.network.wire.identity import Identity

WAIT_S = 60.0
IN_ONE_CALL = 16


@dataclass
class Stranger:
    """One identity. All identities send through one node.

    Attributes:
        peer_id: owner of the records.
    """

    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    peer_id: str = field(init=False)

    def __post_init__(self) -> None:
        """Makes the subkey under which others find the records."""
        self.subkey = self.key.public_key().public_bytes_raw()
        self.peer_id = owner_of(self.subkey) or ""
        identity = Identity(Path(), self.peer_id, self.subkey, self.key)
        self._signer = SignedRecords(identity, lambda _: None)

    def signed(self, key: str, value: bytes, expiration: float) -> bytes:
        """The value as a storing peer receives it."""
        place = DHTID.generate(source=key).to_bytes()
        packed = MSGPackSerializer.dumps(value)
        record = DHTRecord(place, MSGPackSerializer.dumps(self.subkey), packed, expiration)
        return self._signer.sign_value(record)


def strangers(count: int) -> list[Stranger]:
    """A number of identities, sorted by peer id. The first ones come early in any sorted list."""
    return sorted((Stranger() for _ in range(count)), key=lambda one: one.peer_id)


def store(
    node: Node,
    holder: Node,
    key: str,
    values: Sequence[tuple[Stranger, bytes]],
    *,
    life_s: float = 600.0,
    in_cache: bool = False,
) -> int:
    """Sends records of strangers to a storing peer. Returns the number that it accepts."""
    kept = 0
    expiration = get_dht_time() + life_s
    for first in range(0, len(values), IN_ONE_CALL):
        part = values[first : first + IN_ONE_CALL]
        call = node._substrate.dht._node.protocol.call_store(
            PeerID.from_base58(holder.peer_id),
            keys=[DHTID.generate(source=key)] * len(part),
            values=[who.signed(key, value, expiration) for who, value in part],
            expiration_time=[expiration] * len(part),
            subkeys=[who.subkey for who, _ in part],
            in_cache=in_cache,
        )
        kept += sum(node.run(call, WAIT_S) or [])
    return kept
