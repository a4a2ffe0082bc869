"""What this peer keeps of the DHT for others: bounded, and shared fairly by those who sign.

hivemind's holder keeps whatever is signed, for as long as its writer says. All records of a key go
out in one message, and all records at once to a node that it meets: more than 4 MiB reach nobody.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.utils.timed_storage import ValueWithExpiration

from swarm.errors import TooCostly
from swarm.network.dht.signed_records import owner_of
from swarm.network.wire.ledger import Cost, Ledger
from swarm.network.wire.steady_clock import dht_clock

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
LEAST_BYTES = 2048
"""Least size that a record is charged for, here and with its senders. An empty record costs its
holders and readers a signature all the same, and honest records have 1 to 20 kB."""
MAX_HELD_RECORDS = MAX_HELD_BYTES // LEAST_BYTES
"""A member may send as many in one call, since it gives all that it holds to a node that it
meets."""
STRANGERS_RECORDS = 256
"""The most in one call of a stranger, whose account takes any single call while it is full."""
SWEEP_S = 1.0

MAX_OF_KEY = 1024
"""Records in one answer: the asking peer checks the signature of each, from five holders."""

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


class _Sums:
    """What some owners have here: in all, by network, and by network and owner."""

    def __init__(self) -> None:
        self.total = 0
        self.networks: Counter[str] = Counter()
        self.owners: dict[str, Counter[str]] = {}

    def add(self, held: Held, sign: int) -> None:
        """Counts a record that came, or with a sign of -1 one that went."""
        change, owners = sign * held.num_bytes, self.owners.setdefault(held.network, Counter())
        self.total += change
        _add(self.networks, held.network, change)
        _add(owners, held.owner, change)
        if not owners:
            del self.owners[held.network]


class LocalStorage(DHTLocalStorage):
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
        self._places: dict[Origin, dict[Place, Held]] = {}
        self._used: Counter[str] = Counter()
        """By owner."""
        self._members, self._sums = ledger.members, {True: _Sums(), False: _Sums()}
        """Sums of members (True) and of strangers; `_members` are those at the time of the sums."""
        self._network = OWN
        self._arrivals = count()
        self._swept_s = 0.0

    @property
    def num_bytes(self) -> int:
        """The room that all records take; in a message they take no more."""
        return self._sums[True].total + self._sums[False].total

    def most_records(self, sender: str) -> int:
        """How many records a sender may have stored in one call."""
        return MAX_HELD_RECORDS if self._ledger.is_member(sender) else STRANGERS_RECORDS

    @contextmanager
    def stored_by(self, sender: str, num_bytes: int, num_records: int = 1) -> Iterator[bool]:
        """Whether a sender may have so many bytes stored, which until the end are its doing.

        hivemind stores what came in one call without waiting for anything in between.
        """
        self._locate(sender)
        try:
            if num_records > self.most_records(sender):
                raise TooCostly("records_of_call", f"{num_records} records in one call")
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
        self._tell_apart()
        old = self._keys.get(key, {}).get(subkey)
        if expiration_time < now_s or (old and old.expiration >= expiration_time):
            return False
        reason = self._fault(key, subkey, value, expiration_time - now_s, old)
        if reason:
            self._refuse(reason)
            return False
        arrived = old.arrived if old else next(self._arrivals)
        self._drop((key, subkey))
        owner, room = owner_of(subkey) or "", max(_size(subkey, value), LEAST_BYTES)
        held = Held(owner, self._network, value, expiration_time, room, arrived)
        self._keys.setdefault(key, {})[subkey] = held
        self._places.setdefault((held.network, owner), {})[key, subkey] = held
        self._used[owner] += room
        self._sums[self._is_member(owner)].add(held, 1)
        return True

    def get(self, key: DHTID) -> ValueWithExpiration[DictionaryDHTValue] | None:
        """The living records of a key, `MAX_OF_KEY` at most, those of members first."""
        now_s = dht_clock()()
        self._tell_apart()
        found, records = DictionaryDHTValue(), self._keys.get(key, {})
        alive = [subkey for subkey, held in records.items() if held.expiration >= now_s]
        alive.sort(key=lambda subkey: not self._is_member(records[subkey].owner))
        for subkey in alive[:MAX_OF_KEY]:
            found.store(subkey, records[subkey].value, records[subkey].expiration)
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
        size = _size(subkey, value)
        if size > self._limits.get(key, MAX_OWNER_BYTES):
            return "record_size"
        growth = max(size, LEAST_BYTES) - (old.num_bytes if old else 0)
        has_room = self._used[owner] + growth <= MAX_OWNER_BYTES and self._make_room(owner, growth)
        return None if has_room else "record_room"

    def _is_member(self, owner: str) -> bool:
        return owner == self._me or owner in self._members

    def _tell_apart(self) -> None:
        """Works the sums out again once the run has other members."""
        if self._members is self._ledger.members:
            return
        self._members, self._sums = self._ledger.members, {True: _Sums(), False: _Sums()}
        for (_, owner), places in self._places.items():
            for held in places.values():
                self._sums[self._is_member(owner)].add(held, 1)

    def _make_room(self, owner: str, growth: int) -> bool:
        """Drops what has to give way to `growth` bytes of an owner; False if nothing has to."""
        while self._is_full(owner, growth):
            victim = self._victim(owner, growth)
            if victim is None:
                return False
            self._drop_largest(victim)
        return True

    def _is_full(self, owner: str, growth: int) -> bool:
        strangers = 0 if self._is_member(owner) else self._sums[False].total + growth
        return self.num_bytes + growth > MAX_HELD_BYTES or strangers > MAX_STRANGERS_BYTES

    def _victim(self, owner: str, growth: int) -> Origin | None:
        """What gives way to so much more of an owner, if anything has to."""
        mine, is_member = self._used[owner] + growth, self._is_member(owner)
        strangers, members = self._sums[False], self._sums[True]
        if is_member and not strangers.total:
            return _largest(
                {
                    (network, one): used
                    for network, owners in members.owners.items()
                    for one, used in owners.items()
                    if self._used[one] > mine
                }
            )
        totals = strangers.networks
        largest = _largest(totals)
        network = self._network if largest is None else largest
        is_larger = is_member or totals[network] > totals[self._network] + growth
        if not is_larger:
            network = self._network
        owners = strangers.owners.get(network, Counter())
        found = _largest(
            {
                one: used
                for one, used in owners.items()
                if one != owner and (is_larger or used > mine)
            }
        )
        return None if found is None else (network, found)

    def _drop_largest(self, origin: Origin) -> None:
        places = self._places[origin]
        self._drop(max(places, key=lambda place: (places[place].num_bytes, places[place].arrived)))

    def _drop(self, place: Place) -> None:
        key, subkey = place
        held = self._keys.get(key, {}).pop(subkey, None)
        if held is None:
            return
        _add(self._used, held.owner, -held.num_bytes)
        self._sums[self._is_member(held.owner)].add(held, -1)
        origin = held.network, held.owner
        del self._places[origin][place]
        if not self._places[origin]:
            del self._places[origin]
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


def _size(subkey: bytes, value: bytes) -> int:
    """Bytes of a record in a message."""
    return len(value) + len(subkey) + OVERHEAD_BYTES


def _add(sums: Counter[Any], name: Hashable, change: int) -> None:
    sums[name] += change
    if not sums[name]:
        del sums[name]


def _largest(used: Mapping[Name, int]) -> Name | None:
    """The owner that has most; of equals the one that came last."""
    return max(reversed(list(used)), key=used.__getitem__, default=None)


class NoCache(DHTLocalStorage):
    """Takes the place of hivemind's cache, which any writer may fill.

    A holder answers from its cache what lives longer there than in its storage: one record in it
    would hide all others of a key.
    """

    def store(self, *_record: object, **_more: object) -> bool:
        """Keeps nothing."""
        return False

    def store_subkey(self, *_record: object) -> bool:
        """Keeps nothing."""
        return False
