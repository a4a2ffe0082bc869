"""Which blobs a collection must leave, beside those that its caller names: pins and leases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

LEASE_S = 600.0
MAX_LEASES = 2


@dataclass(frozen=True)
class _Lease:
    digests: frozenset[str]
    until: float


class Holds:
    """Pins and leases of a store, which serialises all calls."""

    def __init__(self) -> None:
        self._pins: Counter[str] = Counter()
        self._leases: dict[str, _Lease] = {}

    def pin(self, digests: Iterable[str]) -> None:
        """Holds blobs until they are unpinned as often."""
        self._pins.update(list(digests))  # a mapping would be taken for counts

    def unpin(self, digests: Iterable[str]) -> None:
        """Takes back one `pin` of each."""
        for digest in digests:
            self._pins[digest] -= 1
            if not self._pins[digest]:
                del self._pins[digest]

    def lease(self, name: str, digests: Iterable[str], now: float) -> bool:
        """See `BlobStore.lease`."""
        self._leases = {n: lease for n, lease in self._leases.items() if lease.until > now}
        if name not in self._leases and len(self._leases) < MAX_LEASES:
            self._leases[name] = _Lease(frozenset(digests), now + LEASE_S)
        return name in self._leases

    def held(self, now: float) -> set[str]:
        """Everything that is pinned, or leased at this time."""
        held = set(self._pins)
        for lease in self._leases.values():
            held |= lease.digests if lease.until > now else frozenset()
        return held
