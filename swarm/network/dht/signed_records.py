"""The DHT records that a peer accepts: small, short-lived, and signed by the peer they name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace

from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer

from swarm.network.dht.bounded_msgpack import is_bytes
from swarm.network.wire.identity import KEY_BYTES, SIGNATURE_BYTES, Identity, peer_id_of, verify
from swarm.network.wire.steady_clock import dht_clock

MAX_SIGNED_BYTES = 20 * 1024
"""Limit of a record with its signature: the largest of our records, with a margin."""
MAX_TTL_S = 3600.0
"""A reader's limit of a record's life. Holders keep only far shorter ones, see
`local_storage.py`."""
_PACKED = MSGPackSerializer.dumps(bytes(KEY_BYTES))[:-KEY_BYTES]
"""The prefix that msgpack puts before a subkey."""


class SignedRecords(RecordValidatorBase):
    """Accepts a record only under the subkey that is its owner's key, and signed by that key.

    A record's value ends with the signature over the rest of the record. hivemind's own validator
    knows only RSA keys, and accepts records without an owner.
    """

    def __init__(self, identity: Identity, refuse: Callable[[str], None]) -> None:
        """Signs as `identity`, and calls `refuse` with the reason for each refused record."""
        self._identity, self._refuse = identity, refuse

    @property
    def subkey(self) -> bytes:
        """The subkey of this peer's own records: its public key, 32 bytes."""
        return self._identity.public_key

    def validate(self, record: DHTRecord) -> bool:
        """Whether the record is kept or read; a refusal is counted."""
        reason = self._fault(record)
        if reason:
            self._refuse(reason)
        return reason is None

    def sign_value(self, record: DHTRecord) -> bytes:
        """The value with this peer's signature behind it."""
        return bytes(record.value + self._identity.sign(_statement(record)))

    def strip_value(self, record: DHTRecord) -> bytes:
        """The value without its signature."""
        return bytes(record.value[:-SIGNATURE_BYTES])

    @property
    def priority(self) -> int:
        """Runs before validators that look into a value."""
        return 10

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """Merges with any validator of signatures, since two of them are equivalent."""
        return isinstance(other, SignedRecords)

    def _fault(self, record: DHTRecord) -> str | None:
        # In a dictionary that arrived as a whole, the fields may have any type.
        if not (isinstance(record.value, bytes) and isinstance(record.expiration_time, float)):
            return "record_schema"
        if len(record.value) > MAX_SIGNED_BYTES:
            return "record_size"
        # This form refuses NaN too; the lower bound refuses values that JSON cannot have.
        if not 0.0 <= record.expiration_time <= dht_clock()() + MAX_TTL_S:
            return "record_expiration"
        owner = _owner_of_packed(record.subkey)
        if owner is None:
            return "record_owner"
        value, signature = self.strip_value(record), record.value[-SIGNATURE_BYTES:]
        if not verify(owner, _statement(replace(record, value=value)), signature):
            return "record_signature"
        return None if is_bytes(value) else "record_nesting"


def owner_of(subkey: object) -> str | None:
    """The peer id of the key in a subkey, or None."""
    return peer_id_of(subkey) if isinstance(subkey, bytes) else None


def _owner_of_packed(subkey: object) -> str | None:
    if not (isinstance(subkey, bytes) and subkey.startswith(_PACKED)):
        return None
    return peer_id_of(subkey[len(_PACKED) :])


def _statement(record: DHTRecord) -> bytes:
    return b"swarm record " + bytes(MSGPackSerializer.dumps(astuple(record)))
