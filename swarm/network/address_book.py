"""Which addresses of other peers are worth trying: kept on disk by the caller, tried for ever."""

from __future__ import annotations

from collections.abc import Iterable

from swarm.errors import ConfigError
from swarm.network.daemon import Address

MAX_ADDRESSES = 256


class AddressBook:
    """Addresses with the number of failures since somebody last answered there."""

    def __init__(self, own_peer_id: str) -> None:
        self._own = own_peer_id
        self._failures: dict[Address, int] = {}
        self._last_try: dict[Address, int] = {}
        self._tries = 0

    def add(self, texts: Iterable[str]) -> None:
        """Remembers addresses; malformed ones and one's own are left out, the worst make room."""
        for text in texts:
            try:
                address = Address.parse(text)
            except ConfigError:
                continue
            if address.peer_id != self._own:
                self._failures.setdefault(address, 0)
        for address in self._best()[MAX_ADDRESSES:]:
            del self._failures[address]
            self._last_try.pop(address, None)

    def tried(self, address: Address, answered: bool) -> None:
        """Notes what came of a try."""
        if address in self._failures:
            self._failures[address] = 0 if answered else self._failures[address] + 1

    def next(self, count: int) -> list[Address]:
        """The addresses to try now: those whose last try is longest ago."""
        chosen = sorted(self._failures, key=lambda a: (self._last_try.get(a, -1), a))[:count]
        self._tries += 1
        self._last_try |= dict.fromkeys(chosen, self._tries)
        return chosen

    def known(self) -> tuple[str, ...]:
        """All addresses, the most reliable first."""
        return tuple(address.text for address in self._best())

    def _best(self) -> list[Address]:
        return sorted(self._failures, key=lambda a: (self._failures[a], a))
