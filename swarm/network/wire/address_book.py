"""Addresses of other peers, and when to try each. The caller keeps them on disk.

DHTs that were separated, or formed separately, merge as soon as a peer of one pings a peer of the
other (measured). So each peer keeps trying all peers that it has ever met, members first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from swarm.errors import ConfigError
from swarm.network.wire.daemon import Address
from swarm.protocol.timing.backoff import backoff_s

MAX_ADDRESSES = 256
RECENT_S = 14 * 86_400.0
"""A peer that answered within this time is tried as often as one that has just left. A peer that
was off for a week needs this: for it, all others have been silent for as long."""
ALONE_EVERY_S = 2.0
"""Interval of tries with an empty routing table, since peers that were all killed start one by
one."""
MISSING_EVERY_S = 30.0
CONNECTED_EVERY_S = 60.0
LONGEST_S = 600.0


class Remembered(NamedTuple):
    """An address, and when a peer last answered there (seconds since 1970; 0 if never)."""

    text: str
    answered_at: float = 0.0


@dataclass(frozen=True)
class Entry:
    """The known facts of one address.

    Attributes:
        address: the address.
        answered_at: see `Remembered`.
        is_given: whether a person named it, so that it is never forgotten.
        failures: failed tries since a peer last answered.
        tried_s: time of the last try, by a clock of this process; None if there was none.
    """

    address: Address
    answered_at: float = 0.0
    is_given: bool = False
    failures: int = 0
    tried_s: float | None = None

    @property
    def remembered(self) -> Remembered:
        """The part that is saved on disk."""
        return Remembered(self.address.text, self.answered_at)


@dataclass(frozen=True)
class Moment:
    """The present, by the clock of the process and by the wall clock."""

    clock_s: float
    wall: float


@dataclass(frozen=True)
class Introduction:
    """An address to connect to and ping now, and why."""

    address: Address
    reason: str


def introductions(
    entries: Iterable[Entry], neighbours: Collection[str], now: Moment, count: int
) -> list[Introduction]:
    """The addresses to try now: first those of missing peers, and of these the longest untried.

    Args:
        entries: all known addresses.
        neighbours: peer ids in the routing table.
        now: the time.
        count: limit of the result.
    """
    due = []
    for entry in entries:
        is_missing = entry.address.peer_id not in neighbours
        every_s = _every_s(entry, is_missing, not neighbours, now.wall)
        waited_s = None if entry.tried_s is None else now.clock_s - entry.tried_s
        if waited_s is None or waited_s >= every_s:
            since = -1.0 if entry.tried_s is None else entry.tried_s
            due.append((not is_missing, since, entry.address, every_s))
    return [
        Introduction(
            address,
            f"{'not ' if not is_known else ''}in the routing table: tried every {every_s:.0f} s",
        )
        for is_known, _, address, every_s in sorted(due)[:count]
    ]


def _every_s(entry: Entry, is_missing: bool, is_alone: bool, wall: float) -> float:
    """Interval between tries, which never end, since a separated half may return at any time."""
    if is_alone:
        return ALONE_EVERY_S
    if not is_missing:
        return CONNECTED_EVERY_S
    if entry.is_given or (entry.answered_at and abs(wall - entry.answered_at) < RECENT_S):
        return MISSING_EVERY_S
    return backoff_s(entry.failures + 1, MISSING_EVERY_S, LONGEST_S)


def freshest(*lists: Iterable[Remembered], limit: int) -> tuple[Remembered, ...]:
    """Addresses of all lists, each once with its latest answer, the latest first."""
    newest: dict[str, float] = {}
    for text, answered_at in (one for several in lists for one in several):
        newest[text] = max(answered_at, newest.get(text, 0.0))
    ordered = sorted(newest.items(), key=lambda item: -item[1])
    return tuple(Remembered(*item) for item in ordered[:limit])


class AddressBook:
    """The addresses known to one peer; `introductions` decides about them."""

    def __init__(self, own_peer_id: str) -> None:
        self._own = own_peer_id
        self._entries: dict[Address, Entry] = {}

    def add(self, texts: Iterable[str], *, are_given: bool = False) -> None:
        """Adds valid addresses of other peers; drops the worst if there are too many."""
        self.recall((Remembered(text) for text in texts), are_given=are_given)

    def recall(self, remembered: Iterable[Remembered], *, are_given: bool = False) -> None:
        """Adds addresses, each with the time of its last answer."""
        for text, answered_at in remembered:
            try:
                address = Address.parse(text)
            except ConfigError:
                continue
            if address.peer_id == self._own:
                continue
            entry = self._entries.get(address) or Entry(address)
            self._entries[address] = replace(
                entry,
                answered_at=max(entry.answered_at, answered_at),
                is_given=entry.is_given or are_given,
            )
        for entry in self._best()[MAX_ADDRESSES:]:
            del self._entries[entry.address]

    def next(self, neighbours: Collection[str], now: Moment, count: int) -> list[Introduction]:
        """The addresses to try now, which count as tried."""
        chosen = introductions(self._entries.values(), neighbours, now, count)
        for address in (one.address for one in chosen):
            self._entries[address] = replace(self._entries[address], tried_s=now.clock_s)
        return chosen

    def tried(self, address: Address, answered: bool, wall: float) -> None:
        """Notes the result of a try."""
        entry = self._entries.get(address)
        if entry is None:
            return
        self._entries[address] = (
            replace(entry, failures=0, answered_at=wall)
            if answered
            else replace(entry, failures=entry.failures + 1)
        )

    def addresses(self) -> list[Address]:
        """All addresses, the most reliable first."""
        return [entry.address for entry in self._best()]

    def known(self) -> tuple[Remembered, ...]:
        """All addresses, the most reliable first."""
        return tuple(entry.remembered for entry in self._best())

    def _best(self) -> Sequence[Entry]:
        return sorted(
            self._entries.values(),
            key=lambda e: (not e.is_given, e.failures, -e.answered_at, e.address),
        )
