"""What this peer keeps of the DHT for others: bounded, and shared fairly by those who sign.

hivemind's holder keeps whatever is signed, for as long as its writer says. All records of a key go
out in one message, and all records at once to a node that it meets: more than 4 MiB reach nobody.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.utils.timed_storage import ValueWithExpiration

from swarm.errors import TooCostly
from swarm.network.ledger import Cost, Ledger
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

OWN = "own"
"""Network of what this peer stores itself."""

Place = tuple[DHTID, bytes]
Origin = tuple[str, str]
"""The network from which something was stored, and its owner."""
Name = TypeVar("Name", str, Origin)


@dataclass(frozen=True)
class Held:
    """A record, when it came in the order of all, and from which network it was stored."""

    owner: str
    network: str
    value: bytes
    expiration: float
    num_bytes: int
    arrived: int


class HeldRecords(DHTLocalStorage):
    """Takes the place of hivemind's storage.

    Members of the run go first. Among strangers the network from which most was stored gives way to
    those from which less was, and within it, as among members, the owner that has most; between
    equals what was there first stays. So to push out or to shut out a stranger with small records
    takes as many networks as there is room for, or as many identities of its own network.
    """

    def __init__(
        self,
        me: str,
        ledger: Ledger,
        locate: Callable[[str], None],
        refuse: Callable[[str], None],
        limits: Mapping[DHTID, int],
    ) -> None:
        """Begins empty.

        Args:
            me: counts as a member.
            ledger: says who is a member and from where, and what each sender may store.
            locate: has it looked up from where a sender is connected.
            refuse: counts a refusal by its reason.
            limits: the largest record (bytes, signed) of keys that are known.
        """
        super().__init__()
        self._me, self._ledger, self._locate = me, ledger, locate
        self._refuse, self._limits = refuse, limits
        self._keys: dict[DHTID, dict[bytes, Held]] = {}
        self._used: Counter[str] = Counter()
        self._used_from: Counter[Origin] = Counter()
        """The same by network and owner."""
        self._network = OWN
        self._arrivals = count()
        self._swept_s = 0.0

    @property
    def num_bytes(self) -> int:
        """What all records take in a message."""
        return sum(self._used.values())

    @contextmanager
    def stored_by(self, sender: str, num_bytes: int) -> Iterator[bool]:
        """Whether a sender may have so many bytes stored, which until the end are its doing.

        hivemind stores what came in one call without waiting for anything in between.
        """
        self._locate(sender)
        try:
            self._ledger.take(sender, Cost.RECORDS, num_bytes, time.monotonic())
        except TooCostly as error:
            self._refuse(error.reason)
            yield False
            return
        self._network = self._ledger.network_of(sender)
        try:
            yield True
        finally:
            self._network = OWN

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
        owner = owner_of(subkey) or ""
        held = Held(owner, self._network, value, expiration_time, size, arrived)
        self._keys.setdefault(key, {})[subkey] = held
        self._used[owner] += size
        self._used_from[held.network, owner] += size
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

    def _is_member(self, owner: str) -> bool:
        return owner == self._me or self._ledger.is_member(owner)

    def _make_room(self, owner: str, growth: int) -> bool:
        """Drops what has to give way to `growth` bytes of an owner; False if nothing has to."""
        while self._is_full(owner, growth):
            victim = self._victim(owner, growth)
            if victim is None:
                return False
            self._drop_largest(victim)
        return True

    def _is_full(self, owner: str, growth: int) -> bool:
        total = self.num_bytes + growth
        if total <= MAX_STRANGERS_BYTES or self._is_member(owner):
            return total > MAX_HELD_BYTES
        strangers = sum(used for one, used in self._used.items() if not self._is_member(one))
        return total > MAX_HELD_BYTES or strangers + growth > MAX_STRANGERS_BYTES

    def _victim(self, owner: str, growth: int) -> Origin | None:
        """What gives way to so much more of an owner, if anything has to."""
        mine, is_member = self._used[owner] + growth, self._is_member(owner)
        strangers = {at: used for at, used in self._used_from.items() if not self._is_member(at[1])}
        if is_member and not strangers:
            origins = self._used_from.items()
            return _largest({at: used for at, used in origins if self._used[at[1]] > mine})
        totals: Counter[str] = Counter()
        for (network, _), used in strangers.items():
            totals[network] += used
        largest = _largest(totals)
        network = self._network if largest is None else largest
        is_larger = is_member or totals[network] > totals[self._network] + growth
        if not is_larger:
            network = self._network
        return _largest(
            {
                at: used
                for at, used in strangers.items()
                if at[0] == network and at[1] != owner and (is_larger or used > mine)
            }
        )

    def _drop_largest(self, origin: Origin) -> None:
        places = (
            (held.num_bytes, held.arrived, (key, subkey))
            for key, records in self._keys.items()
            for subkey, held in records.items()
            if (held.network, held.owner) == origin
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
        origin = held.network, held.owner
        self._used_from[origin] -= held.num_bytes
        if not self._used_from[origin]:
            del self._used_from[origin]
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


def _largest(used: Mapping[Name, int]) -> Name | None:
    """The owner that has most; of equals the one that came last."""
    return max(reversed(list(used)), key=used.__getitem__, default=None)


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
