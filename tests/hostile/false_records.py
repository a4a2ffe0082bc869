"""Strangers that write into the DHT: many keys, signed in order, past the sender's own checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from swarm.network.node import Node
from swarm.network.signed_records import owner_of

WAIT_S = 60.0
IN_ONE_CALL = 16
EXPONENT = 65537


def rsa_keys(count: int) -> list[rsa.RSAPrivateKey]:
    """Keys that share primes: as good as any to whoever checks a signature, and made in no time."""
    primes: list[int] = []
    while len(primes) * (len(primes) - 1) // 2 < 2 * count:  # products may lack a bit
        numbers = rsa.generate_private_key(EXPONENT, 2048).private_numbers()
        primes += [numbers.p, numbers.q]
    products = [(p, q) for p, q in combinations(primes, 2) if (p * q).bit_length() == 2048]
    return [_key(p, q) for p, q in products[:count]]


def _key(p: int, q: int) -> rsa.RSAPrivateKey:
    d = pow(EXPONENT, -1, (p - 1) * (q - 1))
    public = rsa.RSAPublicNumbers(EXPONENT, p * q)
    parts = rsa.rsa_crt_dmp1(d, p), rsa.rsa_crt_dmq1(d, q), rsa.rsa_crt_iqmp(p, q)
    numbers = rsa.RSAPrivateNumbers(p, q, d, *parts, public)
    return numbers.private_key(unsafe_skip_rsa_key_validation=True)


@dataclass
class Stranger:
    """One identity; all of them send through one node.

    Attributes:
        peer_id: whose records these are.
    """

    key: rsa.RSAPrivateKey
    peer_id: str = field(init=False)

    def __post_init__(self) -> None:
        """Makes the subkey under which others find the records."""
        wrapped = RSAPrivateKey.__new__(RSAPrivateKey)
        wrapped._private_key = self.key
        self._signer = RSASignatureValidator(wrapped)
        self.subkey = self._signer.local_public_key
        self.peer_id = owner_of(self.subkey) or ""

    def signed(self, key: str, value: bytes, expiration: float) -> bytes:
        """The value as a holder gets it."""
        place = DHTID.generate(source=key).to_bytes()
        packed = MSGPackSerializer.dumps(value)
        record = DHTRecord(place, MSGPackSerializer.dumps(self.subkey), packed, expiration)
        return self._signer.sign_value(record)


def strangers(count: int) -> list[Stranger]:
    """So many identities, by peer id: the first come before most others in any sorted list."""
    return sorted((Stranger(key) for key in rsa_keys(count)), key=lambda one: one.peer_id)


def store(
    node: Node,
    holder: Node,
    key: str,
    values: Sequence[tuple[Stranger, bytes]],
    *,
    life_s: float = 600.0,
    in_cache: bool = False,
) -> int:
    """Sends records of strangers to a holder; how many it says that it keeps."""
    kept = 0
    expiration = get_dht_time() + life_s
    for first in range(0, len(values), IN_ONE_CALL):
        part = values[first : first + IN_ONE_CALL]
        call = node._dht._node.protocol.call_store(
            holder._p2p.peer_id,
            keys=[DHTID.generate(source=key)] * len(part),
            values=[who.signed(key, value, expiration) for who, value in part],
            expiration_time=[expiration] * len(part),
            subkeys=[who.subkey for who, _ in part],
            in_cache=in_cache,
        )
        kept += sum(node.run(call, WAIT_S) or [])
    return kept
