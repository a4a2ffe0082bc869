"""Which DHT records a peer accepts: small, soon to expire, and signed by the peer they name."""

from __future__ import annotations

from collections.abc import Callable

from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey

from swarm.network.bounded_msgpack import is_bytes
from swarm.network.identity import Identity, peer_id_of_ssh_key
from swarm.network.steady_clock import dht_clock

MAX_RECORD_BYTES = 22 * 1024
"""With signature: the largest of our records, and a key and a signature."""
MAX_TTL_S = 3600.0
"""What a reader refuses; holders keep nothing that lives nearly as long, see `holder.py`."""


class SignedRecords(RSASignatureValidator):
    """Accepts a record only under the subkey that is exactly its owner's key.

    hivemind's own rule protects any subkey that *contains* a key, so that one owner could store any
    number of records under one key, and lets records without owner pass.
    """

    def __init__(self, identity: Identity, refuse: Callable[[str], None]) -> None:
        key = RSAPrivateKey.__new__(RSAPrivateKey)
        key._private_key = identity.private_key
        super().__init__(key)
        self._refuse = refuse

    def validate(self, record: DHTRecord) -> bool:
        """Whether the record is kept or read; a refusal is counted."""
        reason = self._fault(record)
        if reason:
            self._refuse(reason)
        return reason is None

    def _fault(self, record: DHTRecord) -> str | None:
        # In a dictionary that came as a whole these may be anything.
        if not (isinstance(record.value, bytes) and isinstance(record.expiration_time, float)):
            return "record_schema"
        if len(record.value) > MAX_RECORD_BYTES:
            return "record_size"
        # Written so that NaN is refused too.
        if not record.expiration_time <= dht_clock()() + MAX_TTL_S:
            return "record_expiration"
        owners = self._PUBLIC_KEY_RE.findall(record.subkey)
        if len(owners) != 1 or record.subkey != MSGPackSerializer.dumps(b"[owner:%b]" % owners[0]):
            return "record_owner"
        if peer_id_of_ssh_key(owners[0]) is None:
            return "record_owner"
        if not super().validate(record):
            return "record_signature"
        return None if is_bytes(self.strip_value(record)) else "record_nesting"


def owner_of(subkey: object) -> str | None:
    """The peer id whose key a subkey is, or None."""
    if not isinstance(subkey, bytes):
        return None
    if not (subkey.startswith(b"[owner:") and subkey.endswith(b"]")):
        return None
    return peer_id_of_ssh_key(subkey[len(b"[owner:") : -1])
