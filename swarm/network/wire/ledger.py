"""Limits of the cost of other peers, with accounts per peer, per network, and of all strangers."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from swarm.errors import TooCostly
from swarm.protocol.values.manifest import PeerId

STRANGERS_SHARE = 1 / 4
"""The strangers' share of each common limit; the rest is reserved for members of the tip."""
PREFIX_SHARE = 1 / 2
"""The part of the strangers' share for one /24 of IPv4 or /48 of IPv6, the smallest networks that
are assigned as a whole. It is as large as a half, since many honest peers may be behind one
address."""
MAX_KNOWN = 4096
"""Most remembered accounts and addresses. A forgotten peer starts with a full account, but still
draws from the strangers' common account."""


class Cost(StrEnum):
    """Kinds of cost; refusals name these words."""

    MESSAGES = "messages"  # calls over the control path
    LETTERS = "letters"  # calls with an envelope of another peer
    BYTES = "bytes"  # attachments to fetch
    PROOFS = "proofs"  # proofs of strangers to fetch
    MANIFESTS = "manifests"  # bytes of manifests that a stranger has proved
    SECONDS = "seconds"  # processor time for parsing and decoding
    PENDING = "pending"  # messages in progress
    STREAMS = "streams"  # streams being served
    ASKS = "asks"  # requests on served streams, whether or not the blob is here
    OPENING = "opening"  # streams relayed to this peer without an envelope so far
    ADMITTING = "admitting"  # direct connections of peers not yet known
    FORWARDS = "forwards"  # messages being relayed for others
    RELAYED = "relayed"  # streams being relayed for others
    MEASURING = "measuring"  # running measurements
    MEASURED = "measured"  # bytes that only measure a link
    RECORDS = "records"  # bytes of records to store in this peer's part of the DHT
    DIALS = "dials"  # connections tried at a peer's request


@dataclass(frozen=True)
class Rate:
    """An amount, and how much of it returns per second. With 0, it returns only if given back."""

    most: float
    per_s: float = 0.0

    def part(self, share: float) -> Rate:
        """A share of the amount and of its return per second."""
        return Rate(self.most * share, self.per_s * share)


@dataclass(frozen=True)
class Limit:
    """Limits of one cost: for all peers together, for one member, and for one stranger."""

    shared: Rate
    member: Rate
    stranger: Rate


KIB, MIB = 2**10, 2**20
LIMITS: Mapping[Cost, Limit] = {
    # With polls every 1.5 s, 1,024 members send 683 answers a second to a convener. A stranger that
    # joins sends a READY and some HELLOs in 3 s, and before that a burst of questions.
    Cost.MESSAGES: Limit(Rate(2048, 1024), Rate(512, 64), Rate(32, 8)),
    # A relay sends messages of many peers; each message is charged to its origin when opened.
    Cost.LETTERS: Limit(Rate(2048, 1024), Rate(512, 256), Rate(32, 8)),
    # The offers of a roster are charged to the convener. A stranger's proof has 1 MiB at most.
    Cost.BYTES: Limit(Rate(32 * MIB, 8 * MIB), Rate(24 * MIB, 6 * MIB), Rate(2 * MIB, MIB / 16)),
    # A proof of any size takes a stream and 7 ms of CPU time, so all strangers together get a tenth
    # of a core. One COMMIT brings an absent peer up to date; the COMMITs of others say the same.
    Cost.PROOFS: Limit(Rate(256, 64), Rate(64, 16), Rate(8, 1)),
    # A COMMIT has two manifests of up to 8 MiB each; manifests are fetched only if proved.
    Cost.MANIFESTS: Limit(Rate(128 * MIB, MIB), Rate(32 * MIB, MIB / 4), Rate(16 * MIB, MIB / 8)),
    # A roster of 256 peers takes a second. Strangers get a tenth of a core.
    Cost.SECONDS: Limit(Rate(8.0, 0.4), Rate(4.0, 0.1), Rate(0.5, 0.02)),
    Cost.PENDING: Limit(Rate(2048), Rate(32), Rate(4)),
    # An honest peer fetches over two streams, and measures over one.
    Cost.STREAMS: Limit(Rate(256), Rate(8), Rate(4)),
    # Each ask takes up to 50 us of CPU time, so all together take a fifth of a core. A peer that
    # fetches 1,000 units which are not yet here asks for each five times in the first 15 s, then
    # every 15 s.
    Cost.ASKS: Limit(Rate(65_536, 4096), Rate(16_384, 1024), Rate(4096, 256)),
    Cost.OPENING: Limit(Rate(128), Rate(16), Rate(4)),
    # A dialing peer is unknown until its envelope has arrived, after one round trip. Until then its
    # network is charged.
    Cost.ADMITTING: Limit(Rate(1024), Rate(128), Rate(64)),
    Cost.FORWARDS: Limit(Rate(256), Rate(16), Rate(4)),
    Cost.RELAYED: Limit(Rate(64), Rate(8), Rate(4)),
    # More measurements at a time would disturb each other. An honest peer makes one at a time, but
    # its previous one may not have ended here. Peers that gather for a run in one network are
    # strangers to each other.
    Cost.MEASURING: Limit(Rate(16), Rate(4), Rate(2)),
    # One measurement moves 8 MiB, one per direction. A starting peer asks three peers to dial it.
    Cost.MEASURED: Limit(Rate(1024 * MIB, 16 * MIB), Rate(64 * MIB, MIB), Rate(32 * MIB, MIB / 2)),
    # A peer has 52 kB of records at most and renews them every 8 s. A peer that meets another node
    # sends it all that it stores, 3 MiB. A record counts as 2 KiB at least, see
    # `network/dht/local_storage.py`.
    Cost.RECORDS: Limit(Rate(32 * MIB, MIB), Rate(8 * MIB, 128 * KIB), Rate(256 * KIB, 16 * KIB)),
    Cost.DIALS: Limit(Rate(512, 8), Rate(16, 0.5), Rate(8, 0.125)),
}

Account = tuple[Cost, str, str]
"""The cost, the kind of owner (`member`, `trainees`, `members`, `stranger`, `prefix` or
`strangers`), and the name of the owner."""


@dataclass(frozen=True)
class Held:
    """An amount to give back, and the accounts from which it was taken."""

    accounts: tuple[Account, ...]
    amount: float


@dataclass(frozen=True)
class _Place:
    """The network address of a peer's connection."""

    host: str
    prefix: str


@dataclass
class _Balance:
    left: float
    at_s: float


class Ledger:
    """The accounts of one peer. All methods but `admit` must run in one thread."""

    def __init__(self, limits: Mapping[Cost, Limit] = LIMITS) -> None:
        """Knows no member yet, so every peer is a stranger."""
        self._rates = {
            (cost, whose): rate
            for cost, limit in limits.items()
            for whose, rate in _rates(limit).items()
        }
        self._members: frozenset[PeerId] = frozenset()
        self._trainees: frozenset[PeerId] = frozenset()
        self._places: OrderedDict[PeerId, _Place] = OrderedDict()
        self._balances: OrderedDict[Account, _Balance] = OrderedDict()

    def admit(self, members: Iterable[PeerId], trainees: Iterable[PeerId] = ()) -> None:
        """Sets the members, trainees included; all other peers are strangers."""
        self._members, self._trainees = frozenset(members), frozenset(trainees)

    @property
    def members(self) -> frozenset[PeerId]:
        """Peers that draw from the members' share; the same object until they change."""
        return self._members

    def is_trainee(self, peer: PeerId) -> bool:
        """Whether a peer is a member without a vote."""
        return peer in self._trainees

    def is_member(self, peer: PeerId) -> bool:
        """Whether a peer draws from the members' share."""
        return peer in self._members

    def standing_of(self, peer: PeerId) -> str:
        """The group with which a peer shares limits: members, trainees or strangers."""
        if not self.is_member(peer):
            return "strangers"
        return "trainees" if self.is_trainee(peer) else "members"

    def most_of_all(self, peer: PeerId, cost: Cost) -> float:
        """The limit of a peer's group as a whole."""
        return self._rates[cost, self.standing_of(peer)].most

    def locate(self, peer: PeerId, address: str) -> None:
        """Notes the address of a peer's connection in libp2p's form; names are ignored."""
        prefix = prefix_of(address)
        if prefix is None:
            return
        self._places[peer] = _Place(host_of(address), prefix)
        self._places.move_to_end(peer)
        while len(self._places) > MAX_KNOWN:
            self._places.popitem(last=False)

    def is_located(self, peer: PeerId) -> bool:
        """Whether a peer's network is known."""
        return peer in self._places

    def member_at(self, address: str) -> PeerId | None:
        """A member connected from the host of an address; None if none is known."""
        host, places = host_of(address), self._places
        at = (peer for peer in self._members if peer in places and places[peer].host == host)
        return next(at, None)

    def network_of(self, peer: PeerId) -> str:
        """The network of a stranger, empty if it is unknown; each member counts as one network."""
        if self.is_member(peer):
            return peer
        place = self._places.get(peer)
        return place.prefix if place else ""

    def public_network_of(self, peer: PeerId) -> str | None:
        """The network of any peer, if it is known and on the internet."""
        place = self._places.get(peer)
        return place.prefix if place and ipaddress.ip_network(place.prefix).is_global else None

    def take(self, peer: PeerId, cost: Cost, amount: float, now_s: float) -> Held:
        """Takes an amount out of all of a peer's accounts, or out of none.

        A full account gives even more than its limit, and is then in debt. Otherwise a large
        request of an honest peer would never succeed.

        Args:
            peer: the peer to charge.
            cost: kind of the amount.
            amount: how much; 0 only asks whether anything is left.
            now_s: seconds of a clock that never goes back.

        Raises:
            TooCostly: an account has too little left; reason `COST_of_ACCOUNT`.
        """
        accounts = self._accounts(peer, cost)
        for account in accounts:
            left = self._left(account, now_s)
            if left <= 0 or left < min(amount, self._rate(account).most):
                raise TooCostly(
                    f"{cost}_of_{account[1]}",
                    f"{peer[-6:]} asks for {amount:g} {cost}, {max(left, 0.0):g} left "
                    f"of its {account[1]} account",
                )
        self._add(accounts, -amount, now_s)
        return Held(accounts, amount)

    def give_back(self, held: Held, now_s: float) -> None:
        """Returns an amount that was taken for a time to the same accounts."""
        self._add(held.accounts, held.amount, now_s)

    def charge(self, peer: PeerId, cost: Cost, amount: float, now_s: float) -> None:
        """Takes an amount that was already spent; the accounts may end in debt."""
        self._add(self._accounts(peer, cost), -amount, now_s)

    def left(self, peer: PeerId, cost: Cost, now_s: float) -> float:
        """The amount that a peer could take now; below 0 in debt."""
        return min(self._left(account, now_s) for account in self._accounts(peer, cost))

    def _accounts(self, peer: PeerId, cost: Cost) -> tuple[Account, ...]:
        if self.is_member(peer):
            together = ((cost, "trainees", ""),) if self.is_trainee(peer) else ()
            return ((cost, "member", peer), *together, (cost, "members", ""))
        # Strangers of unknown network (not yet located, or behind a relay) count as one network.
        network = (cost, "prefix", self.network_of(peer))
        return ((cost, "stranger", peer), network, (cost, "strangers", ""))

    def _rate(self, account: Account) -> Rate:
        return self._rates[account[:2]]

    def _left(self, account: Account, now_s: float) -> float:
        rate, balance = self._rate(account), self._balances.get(account)
        if balance is None:
            return rate.most
        return min(rate.most, balance.left + rate.per_s * max(0.0, now_s - balance.at_s))

    def _add(self, accounts: Iterable[Account], amount: float, now_s: float) -> None:
        for account in accounts:
            left = self._left(account, now_s) + amount
            if left >= self._rate(account).most:
                self._balances.pop(account, None)  # like an unused one
            else:
                self._balances[account] = _Balance(left, now_s)
                self._balances.move_to_end(account)
        self._forget(now_s)

    def _forget(self, now_s: float) -> None:
        """Drops accounts that are full again, then the oldest, but none that waits for a return."""
        if len(self._balances) <= MAX_KNOWN:
            return
        kept = MAX_KNOWN * 3 // 4  # many at once, since each call looks at all accounts
        rates = [account for account in self._balances if self._rate(account).per_s]
        rates.sort(key=lambda a: self._left(a, now_s) < self._rate(a).most)
        for account in rates[: len(self._balances) - kept]:
            del self._balances[account]


def _rates(limit: Limit) -> dict[str, Rate]:
    strangers = limit.shared.part(STRANGERS_SHARE)
    return {
        "member": limit.member,
        "members": limit.shared.part(1 - STRANGERS_SHARE),
        # A third of the members' share, since any key may become a trainee; the rest is for voters.
        "trainees": strangers,
        "stranger": limit.stranger,
        "prefix": strangers.part(PREFIX_SHARE),
        "strangers": strangers,
    }


def host_of(address: str) -> str:
    """The host of a libp2p address such as `/ip4/192.0.2.7/tcp/4001`."""
    return [*address.strip("/").split("/"), ""][1]


def prefix_of(address: str) -> str | None:
    """The network of a libp2p address such as `/ip4/192.0.2.7/tcp/4001`; None for a name.

    A mapped IPv4 address counts as its IPv4 address.
    """
    kind, host = [*address.strip("/").split("/"), ""][:2]
    if kind not in ("ip4", "ip6"):
        return None
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = getattr(found, "ipv4_mapped", None)
    found = mapped or found
    bits = 24 if found.version == 4 else 48
    return str(ipaddress.ip_network(f"{found}/{bits}", strict=False))


LARGE_BYTES = 2**18
"""Larger messages are decoded in another thread, since a roster of 256 peers takes a second."""

Result = TypeVar("Result")


class Costs:
    """Charges the sender of one message."""

    def __init__(self, source: PeerId, ledger: Ledger, turn: asyncio.Lock | None = None) -> None:
        """Has charged nothing yet.

        Args:
            source: the peer to charge.
            ledger: has the accounts of this peer.
            turn: a lock shared by messages, so that other threads work on one message at a time. If
                many peers send equal content, only the first message is computed and charged; the
                others find the result in a cache.
        """
        self._source, self._ledger, self._turn = source, ledger, turn or asyncio.Lock()

    def fetching(self, amount: int, cost: Cost = Cost.BYTES) -> None:
        """Charges attachments that are not here, by bytes or number; raises TooCostly."""
        self._ledger.take(self._source, cost, amount, time.monotonic())

    async def parsing(self, work: Callable[[], Result], *, off_loop: bool = False) -> Result:
        """Runs `work`, in another thread with `off_loop`, and charges its CPU time."""
        spent_s: list[float] = []
        try:
            if off_loop:
                loop = asyncio.get_running_loop()
                async with self._turn:
                    return await loop.run_in_executor(None, _timed, work, spent_s)
            return _timed(work, spent_s)
        finally:
            self._ledger.charge(self._source, Cost.SECONDS, sum(spent_s), time.monotonic())


def _timed(work: Callable[[], Result], spent_s: list[float]) -> Result:
    began_s = time.thread_time()
    try:
        return work()
    finally:
        spent_s.append(time.thread_time() - began_s)
