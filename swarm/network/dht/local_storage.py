"""The part of the DHT that this peer stores for others: bounded, and shared fairly by owners.

hivemind's storage keeps every signed record for as long as its writer says. It sends all records of
a key in one message, and all records at once to a newly met node. A message above 4 MiB reaches
nobody.
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
"""Limit of all keys together, so that any answer, and the whole storage, fits hivemind's 4 MiB."""
MAX_STRANGERS_BYTES = MAX_HELD_BYTES // 4
"""The part of `MAX_HELD_BYTES` for owners that are not members of this peer's run."""
MAX_OWNER_BYTES = 64 * 1024
"""Limit of one owner under all keys, above the size of its largest records of all kinds
together."""
MAX_LIFE_S = 930.0
"""Longest life of a stored record: that of our longest, with a margin for clocks that differ. It is
below the readers' limit, since a reader that refuses one record drops all others that its holder
sent with it."""
OVERHEAD_BYTES = 64
"""Size of a record in a message, without subkey and value."""
LEAST_BYTES = 2048
"""Smaller records count as having this size, in this storage and in the sender's accounts. Even an
empty record costs its holders and readers a signature check, and honest records have 1 to 20 kB."""
MAX_HELD_RECORDS = MAX_HELD_BYTES // LEAST_BYTES
"""Most records in this storage, and in one call of a member, since a member sends its whole storage
to a node that it meets."""
STRANGERS_RECORDS = 256
"""Most records in one call of a stranger. Without it, a full account would allow one call of any
size."""
SWEEP_S = 1.0

MAX_OF_KEY = 1024
"""Most records in one answer. The asking peer verifies the signature of each, from five holders."""

OWN = "own"
"""The name of the network of this peer's own records."""

Place = tuple[DHTID, bytes]
Origin = tuple[str, str]
"""The network from which a record was stored, and the record's owner."""
Name = TypeVar("Name", str, Origin)


@dataclass(frozen=True)
class Held:
    """A record, its place in the order of arrival, and the network from which it was stored."""

    owner: str
    network: str
    value: bytes
    expiration: float
    num_bytes: int
    arrived: int


class _Sums:
    """Bytes of some owners: in total, by network, and by network and owner."""

    def __init__(self) -> None:
        self.total = 0
        self.networks: Counter[str] = Counter()
        self.owners: dict[str, Counter[str]] = {}

    def add(self, held: Held, sign: int) -> None:
        """Counts an added record, or with a sign of -1 a removed one."""
        change, owners = sign * held.num_bytes, self.owners.setdefault(held.network, Counter())
        self.total += change
        _add(self.networks, held.network, change)
        _add(owners, held.owner, change)
        if not owners:
            del self.owners[held.network]


class LocalStorage(DHTLocalStorage):
    """Replaces hivemind's storage.

    Records of members have precedence. Among strangers, the network that stored most loses records
    to networks that stored less. Within a network, and among members, the owner with most bytes
    loses records. Between equals, earlier records are kept. So an attacker that wants to exclude a
    stranger with small records needs as many networks as there is room for, or as many identities
    in the stranger's network.
    """

    def __init__(
        self,
        me: str,
        ledger: Ledger,
        locate: Callable[[str], None],
        refuse: Callable[[str], None],
        limits: Mapping[DHTID, int],
    ) -> None:
        """Starts empty.

        Args:
            me: counts as a member.
            ledger: knows the members and their networks, and limits what each sender may store.
            locate: starts a lookup of a sender's network address.
            refuse: counts a refusal by its reason.
            limits: the largest record (bytes, signed) of each known key.
        """
        super().__init__()
        self._me, self._ledger, self._locate = me, ledger, locate
        self._refuse, self._limits = refuse, limits
        self._keys: dict[DHTID, dict[bytes, Held]] = {}
        self._places: dict[Origin, dict[Place, Held]] = {}
        self._used: Counter[str] = Counter()
        """Bytes of each owner's records."""
        self._members, self._sums = ledger.members, {True: _Sums(), False: _Sums()}
        """Sums of members (True) and of strangers (False), by the memberships in `_members`."""
        self._network = OWN
        self._arrivals = count()
        self._swept_s = 0.0

    @property
    def num_bytes(self) -> int:
        """The bytes for which all records count; in a message they have no more."""
        return self._sums[True].total + self._sums[False].total

    def most_records(self, sender: str) -> int:
        """Limit of records that a sender may store in one call."""
        return MAX_HELD_RECORDS if self._ledger.is_member(sender) else STRANGERS_RECORDS

    @contextmanager
    def stored_by(self, sender: str, num_bytes: int, num_records: int = 1) -> Iterator[bool]:
        """Whether a sender may store so much; records stored in the block count for the sender.

        hivemind does not await anything between the records of one call.
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
        """Takes over the records in hivemind's own storage, as if they arrived now."""
        for key, (records, _) in list(storage.items()):
            for subkey, (value, expiration) in list(records.items()):
                self.store_subkey(key, subkey, value, expiration)

    def store(
        self, key: DHTID, value: bytes, expiration_time: float, subkey: bytes | None = None
    ) -> bool:
        """Keeps a record if there is room for it; a record without an owner is never kept."""
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
        """The unexpired records of a key, `MAX_OF_KEY` at most, those of members first."""
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
        """Why a record is not kept; None once there is room for it."""
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
        """Computes the sums again after the run's members have changed."""
        if self._members is self._ledger.members:
            return
        self._members, self._sums = self._ledger.members, {True: _Sums(), False: _Sums()}
        for (_, owner), places in self._places.items():
            for held in places.values():
                self._sums[self._is_member(owner)].add(held, 1)

    def _make_room(self, owner: str, growth: int) -> bool:
        """Drops records to make room for `growth` more bytes of an owner; False if impossible."""
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
        """The owner that has to lose a record for this growth of another owner, if there is one."""
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
        """Drops expired records, at most once a second."""
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
    """The owner with most bytes, or of several such owners, the last that arrived."""
    return max(reversed(list(used)), key=used.__getitem__, default=None)


class NoCache(DHTLocalStorage):
    """Replaces hivemind's cache, which any writer could fill.

    A holder answers from its cache if an entry there lives longer than the entries in its storage.
    So one cached record would hide all other records of a key.
    """

    def store(self, *_record: object, **_more: object) -> bool:
        """Keeps nothing."""
        return False

    def store_subkey(self, *_record: object) -> bool:
        """Keeps nothing."""
        return False
