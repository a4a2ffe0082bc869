"""What this peer keeps of the DHT for others: bounded, and shared fairly by those who sign.

hivemind's holder keeps whatever is signed, for as long as its writer says. All records of a key go
out in one message, and all records at once to a node that it meets: more than 4 MiB reach nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.utils.timed_storage import ValueWithExpiration

from swarm.network.signed_records import owner_of
from swarm.network.steady_clock import dht_clock

MAX_HELD_BYTES = 3 * 2**20
"""Of all keys together, so that any answer, and the whole, fits hivemind's message of 4 MiB."""
MAX_STRANGERS_BYTES = MAX_HELD_BYTES // 4
"""Of that, for owners that are not members of this peer's run."""
MAX_OWNER_BYTES = 64 * 1024
"""Of one owner under all keys: more than its largest records of all kinds take together."""
MAX_LIFE_S = 930.0
"""The longest of our records, and room for clocks that differ. Below what readers refuse, since a
reader drops all that a holder sends with one record that it refuses."""
OVERHEAD_BYTES = 64
"""Of a record in a message, besides its subkey and its value."""
SWEEP_S = 1.0

Place = tuple[DHTID, bytes]


@dataclass(frozen=True)
class Held:
    """A record, and when it came in the order of all."""

    owner: str
    value: bytes
    expiration: float
    num_bytes: int
    arrived: int


class HeldRecords(DHTLocalStorage):
    """Takes the place of hivemind's storage.

    Members of the run go first. Within each group whoever holds the most gives way to who holds
    less, and between equals what was there first stays: to push out or to shut out an owner of
    small records takes as many identities as there is room for.
    """

    def __init__(
        self,
        is_member: Callable[[str], bool],
        refuse: Callable[[str], None],
        limits: Mapping[DHTID, int],
    ) -> None:
        """Begins empty.

        Args:
            is_member: whether an owner's records go before those of strangers.
            refuse: counts a refusal by its reason.
            limits: the largest record (bytes, signed) of keys that are known.
        """
        super().__init__()
        self._is_member, self._refuse, self._limits = is_member, refuse, limits
        self._keys: dict[DHTID, dict[bytes, Held]] = {}
        self._used: Counter[str] = Counter()
        self._arrivals = count()
        self._swept_s = 0.0

    @property
    def num_bytes(self) -> int:
        """What all records take in a message."""
        return sum(self._used.values())

    def take_over(self, storage: DHTLocalStorage) -> None:
        """Takes what hivemind's own storage holds, as if it came now."""
        for key, (records, _) in list(storage.items()):
            for subkey, (value, expiration) in list(records.items()):
                self.store_subkey(key, subkey, value, expiration)

    def store(
        self, key: DHTID, value: bytes, expiration_time: float, subkey: bytes | None = None
    ) -> bool:
        """Keeps a record if there is room for it; one without an owner never."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: bytes, value: bytes, expiration_time: float) -> bool:
        """Keeps a record of the subkey's owner, in place of its older one, if there is room."""
        now_s = dht_clock()()
        self._sweep(now_s)
        old = self._keys.get(key, {}).get(subkey)
        if expiration_time < now_s or (old and old.expiration >= expiration_time):
            return False
        reason = self._fault(key, subkey, value, expiration_time - now_s, old)
        if reason:
            self._refuse(reason)
            return False
        arrived = old.arrived if old else next(self._arrivals)
        self._drop((key, subkey))
        size = len(value) + len(subkey) + OVERHEAD_BYTES
        held = Held(owner_of(subkey) or "", value, expiration_time, size, arrived)
        self._keys.setdefault(key, {})[subkey] = held
        self._used[held.owner] += size
        return True

    def get(self, key: DHTID) -> ValueWithExpiration[DictionaryDHTValue] | None:
        """All living records of a key, in hivemind's form."""
        now_s = dht_clock()()
        found = DictionaryDHTValue()
        for subkey, held in self._keys.get(key, {}).items():
            if held.expiration >= now_s:
                found.store(subkey, held.value, held.expiration)
        return ValueWithExpiration(found, found.latest_expiration_time) if found else None

    def items(self) -> Iterator[tuple[DHTID, ValueWithExpiration[DictionaryDHTValue]]]:
        """`get` of every key."""
        return ((key, found) for key in list(self._keys) if (found := self.get(key)))

    def _fault(
        self, key: DHTID, subkey: bytes, value: bytes, life_s: float, old: Held | None
    ) -> str | None:
        """Why a record is not kept, None once there is room for it."""
        owner = owner_of(subkey)
        if owner is None:
            return "record_owner"
        if life_s > MAX_LIFE_S:
            return "record_expiration"
        size = len(value) + len(subkey) + OVERHEAD_BYTES
        if size > self._limits.get(key, MAX_OWNER_BYTES):
            return "record_size"
        growth = size - (old.num_bytes if old else 0)
        has_room = self._used[owner] + growth <= MAX_OWNER_BYTES and self._make_room(owner, growth)
        return None if has_room else "record_room"

    def _make_room(self, owner: str, growth: int) -> bool:
        """Drops what has to give way to `growth` bytes of an owner; False if nothing has to."""
        is_member = self._is_member(owner)
        mine = self._used[owner] + growth
        while True:
            total = self.num_bytes + growth
            if total <= MAX_STRANGERS_BYTES:
                return True
            strangers = {one: used for one, used in self._used.items() if not self._is_member(one)}
            is_over = total > MAX_HELD_BYTES
            if not is_member:
                is_over |= sum(strangers.values()) + growth > MAX_STRANGERS_BYTES
            if not is_over:
                return True
            victims = strangers
            if not (is_member and strangers):
                group = self._used if is_member else strangers
                victims = {one: used for one, used in group.items() if used > mine}
            victims.pop(owner, None)
            if not victims:
                return False
            self._drop_largest(max(reversed(victims), key=victims.__getitem__))

    def _drop_largest(self, owner: str) -> None:
        places = (
            (held.num_bytes, held.arrived, (key, subkey))
            for key, records in self._keys.items()
            for subkey, held in records.items()
            if held.owner == owner
        )
        self._drop(max(places, key=lambda place: place[:2])[2])

    def _drop(self, place: Place) -> None:
        key, subkey = place
        held = self._keys.get(key, {}).pop(subkey, None)
        if held is None:
            return
        self._used[held.owner] -= held.num_bytes
        if not self._used[held.owner]:
            del self._used[held.owner]
        if not self._keys[key]:
            del self._keys[key]

    def _sweep(self, now_s: float) -> None:
        """Forgets what has expired, at most once a second."""
        if now_s - self._swept_s < SWEEP_S:
            return
        self._swept_s = now_s
        expired = [
            (key, subkey)
            for key, records in self._keys.items()
            for subkey, held in records.items()
            if held.expiration < now_s
        ]
        for place in expired:
            self._drop(place)


class NoCache(DHTLocalStorage):
    """Takes the place of hivemind's cache, which whoever writes to it may fill.

    A holder answers from its cache what lives longer there than in its storage: one record in it
    would hide all others of a key.
    """

    def store(self, *_record: object, **_more: object) -> bool:
        """Keeps nothing."""
        return False

    def store_subkey(self, *_record: object) -> bool:
        """Keeps nothing."""
        return False
