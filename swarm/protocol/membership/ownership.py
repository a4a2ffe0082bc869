"""Which peers train which expert in the next round (expert ownership).

Pure: every peer computes the same assignment from the parent manifest and the round's contributors,
    so no peer has to trust another's assignment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import ceil, fsum
from types import MappingProxyType

from swarm.protocol.values.manifest import ALL_EXPERTS, Manifest, PeerId, turn

NO_ROOMS: Mapping[PeerId, int] = MappingProxyType({})
GREED = 2
"""A member owns at most this many fair shares, whatever capacity it claims; a member on trial owns
at most one. A fair share is experts times owners per expert, divided by the members, rounded up.
The limit is there because claims cannot be checked, and the experts of a peer that fails are lost
or delayed."""


@dataclass(frozen=True)
class Assignment:
    """The owners of the next round, and why experts moved."""

    owners: dict[int, tuple[PeerId, ...]]
    """The owners of each expert, in peer-id order."""
    reasons: tuple[str, ...]
    """A sentence for each expert that changed owners, in the order of the decisions."""


def assign(
    previous: Mapping[int, tuple[PeerId, ...]],
    members: Mapping[PeerId, float],
    contributors: Collection[PeerId],
    *,
    stale: Collection[int],
    rooms: Mapping[PeerId, int] = NO_ROOMS,
    silent: Collection[PeerId] = (),
    on_trial: Collection[PeerId] = (),
    owners_per_expert: int,
    num_experts: int,
    seed: str,
) -> Assignment:
    """Moves only experts that have to move, or whose move makes the load more even.

    Capacities determine the shares, within limits (ownership cap). A limit is exceeded only if no
    contributor within its own limit can take an expert. No member gets an expert that does not fit
    its machine. An expert that fits no machine has no owner until a member has room for it. Each
    expert gets a first owner before any gets a second. A member that owns more experts than it has
    room for keeps the experts that no contributor can take.

    Args:
        previous: owners so far; experts may be missing.
        members: capacity of each member of the new manifest.
        contributors: peers that finished the round. Other members get only experts that fit no
            contributor.
        stale: experts that were not renewed for too many rounds. An owner that did not contribute
            loses a stale expert.
        rooms: number of experts that fit the machine of each member. Without an entry, all experts
            fit.
        silent: members that lose all their experts, though they keep their votes for a while.
        on_trial: members that joined lately.
        owners_per_expert: R; an expert has min(R, members) owners, or fewer if too few members have
            room.
        num_experts: experts 0 .. num_experts - 1.
        seed: breaks ties, so that they do not always favor the same peer.

    Returns:
        The assignment. With this result as `previous`, the function changes nothing.
    """
    if not members:
        return Assignment(dict.fromkeys(range(num_experts), ()), ())
    wanted = min(owners_per_expert, len(members))
    fair = ceil(num_experts * wanted / len(members))
    limits = {peer: fair if peer in on_trial else GREED * fair for peer in members}
    work = _Work(
        previous, members, limits, rooms, contributors=contributors, silent=silent, seed=seed
    )
    for expert in range(num_experts):
        work.keep(expert, wanted, expert in stale)
    work.fill(wanted)
    work.balance(wanted)
    return Assignment(
        {expert: tuple(sorted(work.owners[expert])) for expert in range(num_experts)},
        work.reasons(stale),
    )


class _Work:
    """The assignment while it is being made."""

    def __init__(
        self,
        previous: Mapping[int, tuple[PeerId, ...]],
        members: Mapping[PeerId, float],
        limits: Mapping[PeerId, int],
        rooms: Mapping[PeerId, int],
        *,
        contributors: Collection[PeerId],
        silent: Collection[PeerId],
        seed: str,
    ) -> None:
        self.previous = previous
        self.capacity = members
        self.peers = sorted(members)
        self.contributors = {peer for peer in self.peers if peer in contributors}
        self.silent = {peer for peer in self.peers if peer in silent}
        self.limits = limits
        self.rooms = {peer: rooms.get(peer, ALL_EXPERTS) for peer in self.peers}
        self.most = {peer: min(limits[peer], self.rooms[peer]) for peer in self.peers}
        self.seed = seed
        self.owners: dict[int, list[PeerId]] = {}
        self.losing: dict[int, list[PeerId]] = {}
        """Owners that are to lose an expert; they keep it only if no contributor can take it."""
        self.load = dict.fromkeys(self.peers, 0)
        self.turns = {peer: turn(seed, peer) for peer in self.peers}

    def keep(self, expert: int, wanted: int, is_stale: bool) -> None:
        """Keeps the valid owners; if there are too many, contributors before others."""
        valid = [peer for peer in self.previous.get(expert, ()) if peer in self.capacity]
        valid.sort(key=lambda peer: (peer not in self.contributors, peer))
        staying = [peer for peer in valid if not self._loses(peer, is_stale)]
        self.losing[expert] = [peer for peer in valid if peer not in staying]
        self.owners[expert] = staying[:wanted]
        for peer in self.owners[expert]:
            self.load[peer] += 1

    def _loses(self, peer: PeerId, is_stale: bool) -> bool:
        return peer not in self.contributors and (is_stale or peer in self.silent)

    def fill(self, wanted: int) -> None:
        """Adds the least loaded peers until each expert has its owners, or nobody has room.

        Where there is too little room, all experts get a first owner before any gets a second. An
        owner that is to lose an expert keeps it if otherwise a member that did not contribute would
        get it.
        """
        num_experts = len(self.owners)
        there = sum(min(room, num_experts) for room in self.rooms.values())
        numbers = (wanted,) if there >= wanted * num_experts else range(1, wanted + 1)
        for able in (self._contributors_for, self._losing_of, self._members_for):
            for number, expert in product(numbers, self.owners):
                while len(self.owners[expert]) < number and (best := able(expert)):
                    chosen = self._least_loaded(expert, best)
                    self.owners[expert].append(chosen)
                    self.load[chosen] += 1
        for expert, owners in self.owners.items():
            if not owners:
                self._take_from_a_second(expert)

    def _contributors_for(self, expert: int) -> list[PeerId]:
        return self._able(expert, self.contributors)

    def _losing_of(self, expert: int) -> list[PeerId]:
        return [peer for peer in self.losing[expert] if peer not in self.owners[expert]]

    def _members_for(self, expert: int) -> list[PeerId]:
        return self._able(expert, self.peers)

    def _able(self, expert: int, peers: Iterable[PeerId]) -> list[PeerId]:
        """Peers with room for an expert; if some of them are within their limits, only these."""
        fitting = [p for p in peers if p not in self.owners[expert] and self._fits(p)]
        return [peer for peer in fitting if self._has_room(peer)] or fitting

    def _least_loaded(self, expert: int, peers: Iterable[PeerId]) -> PeerId:
        shares = {peer: self._share(peer, 1) for peer in peers}
        least = min(shares.values())
        return min(
            (peer for peer, share in shares.items() if share == least),
            key=lambda peer: turn(f"{self.seed}/{expert}", peer),
        )

    def _take_from_a_second(self, expert: int) -> None:
        """Takes an owner from an expert with several owners, for an expert without one."""
        spare = [
            (peer not in self.contributors, -len(owners), other, self.turns[peer], peer)
            for other, owners in self.owners.items()
            if len(owners) > 1
            for peer in owners
            if self.load[peer] <= self.rooms[peer]
        ]
        if spare:
            *_, other, _, peer = min(spare)
            self.owners[other].remove(peer)
            self.owners[expert].append(peer)

    def balance(self, wanted: int) -> None:
        """Moves one expert at a time to a contributor whose share stays below the giver's.

        Experts beyond a member's limit or room go to any contributor that is within its own limit
        and room. The loop ends, because each move lowers the number of such experts, or keeps that
        number and lowers the shares in lexicographic order, with the largest share first. If a move
        makes room for an expert without an owner, the number of owners rises.
        """
        while self._move_one():
            self.fill(wanted)

    def _move_one(self) -> bool:
        if self._relieve_one():
            return True
        givers = sorted(
            self.peers,
            key=lambda peer: (not self._is_over(peer), -self._share(peer), self.turns[peer]),
        )
        takers = sorted(
            (peer for peer in self.contributors if self._has_room(peer)),
            key=lambda peer: (self._share(peer, 1), self.turns[peer]),
        )
        for giver in givers:
            for taker in takers:
                if not self._is_over(giver) and self._share(taker, 1) >= self._share(giver):
                    break
                if self._move(giver, taker):
                    return True
        return False

    def _relieve_one(self) -> bool:
        """Replaces an owner that is to lose its expert by a contributor that now has room."""
        for expert, losing in self.losing.items():
            owners = self.owners[expert]
            for giver in (peer for peer in losing if peer in owners):
                if takers := self._contributors_for(expert):
                    self._pass_on(expert, giver, self._least_loaded(expert, takers))
                    return True
        return False

    def _move(self, giver: PeerId, taker: PeerId) -> bool:
        movable = [
            expert
            for expert, owners in self.owners.items()
            if giver in owners and taker not in owners
        ]
        if not movable:
            return False
        # Moving an expert that the giver was assigned just now costs nothing.
        expert = min(
            movable,
            key=lambda expert: (
                giver in self.previous.get(expert, ()),
                turn(f"{self.seed}/{expert}", taker),
            ),
        )
        self._pass_on(expert, giver, taker)
        return True

    def _pass_on(self, expert: int, giver: PeerId, taker: PeerId) -> None:
        self.owners[expert].remove(giver)
        self.owners[expert].append(taker)
        self.load[giver] -= 1
        self.load[taker] += 1

    def _fits(self, peer: PeerId) -> bool:
        """Whether one more expert fits the machine."""
        return self.load[peer] < self.rooms[peer]

    def _has_room(self, peer: PeerId) -> bool:
        """Whether one more expert fits, and is within the limit."""
        return self.load[peer] < self.most[peer]

    def _is_over(self, peer: PeerId) -> bool:
        return self.load[peer] > self.most[peer]

    def _share(self, peer: PeerId, extra: int = 0) -> float:
        return (self.load[peer] + extra) / self.capacity[peer]

    def reasons(self, stale: Collection[int]) -> tuple[str, ...]:
        """A sentence for each expert whose owners changed."""
        slots = sum(len(owners) for owners in self.owners.values())
        total = fsum(self.capacity.values())
        claimed = {
            peer: ceil(slots * capacity / total - 1e-9) for peer, capacity in self.capacity.items()
        }
        sentences = []
        for expert, owners in self.owners.items():
            before = self.previous.get(expert, ())
            lost = [peer for peer in sorted(before) if peer not in owners]
            won = [peer for peer in sorted(owners) if peer not in before]
            why = [self._why_lost(peer, expert in stale, claimed.get(peer, 0)) for peer in lost]
            verb = "adopted by" if lost or before else "given to"
            why += [f"{verb} {peer}, {self._load_of(peer, claimed[peer])}" for peer in won]
            if not owners and before:
                why.append(self._why_waiting())
            if why:
                sentences.append(f"expert {expert}: {', '.join(why)}")
        return tuple(sentences)

    def _why_waiting(self) -> str:
        return waiting_text(self.rooms.values())

    def _load_of(self, peer: PeerId, claimed: int) -> str:
        """How much of its share a peer owns, and why the share is below its claimed capacity."""
        most = self.most[peer]
        if claimed <= most:
            return f"load {self.load[peer]}/{claimed}"
        return f"load {self.load[peer]}/{most}, {self._held(peer, claimed)}"

    def _held(self, peer: PeerId, claimed: int) -> str:
        limit, room = self.limits[peer], self.rooms[peer]
        if room < limit:
            return f"held to {room} instead of the {claimed} of its capacity: no more fit it"
        is_new = limit < max(self.limits.values())
        share = "the fair share, since it is new" if is_new else "nobody owns more than that"
        return f"held to {limit} instead of the {claimed} that its capacity claims: {share}"

    def _why_lost(self, peer: PeerId, is_stale: bool, claimed: int) -> str:
        if peer not in self.capacity:
            return f"peer {peer} left"
        if peer in self.silent and peer not in self.contributors:
            return f"peer {peer} is silent"
        if is_stale and peer not in self.contributors:
            return f"peer {peer} did not renew it"
        if claimed > self.most[peer]:
            return f"peer {peer} is {self._held(peer, claimed)}"
        return f"peer {peer} had more than its share"


def waiting_text(rooms: Iterable[int]) -> str:
    """Why an expert waits for an owner, with the room of all members together."""
    rooms = list(rooms)
    return f"waits for an owner: {len(rooms)} members have room for {sum(rooms)} in all"


def why_paused(tip: Manifest, rooms: Mapping[PeerId, int], least: float) -> str | None:
    """Why training pauses on a tip; None when it does not (ownership pause).

    Args:
        tip: the manifest to train from.
        rooms: experts that fit the machines of peers that are present, members or not.
        least: share of the experts that must have an owner. If fewer have an owner, training
            continues once the machines present have room for this share, since a round then assigns
            owners.
    """
    num_experts = len(tip.owners)
    wanted, owned = ceil(least * num_experts), num_experts - len(tip.ownerless)
    there = sum(min(room, num_experts) for room in rooms.values())
    if owned >= wanted or there >= wanted:
        return None
    return (
        f"{owned} of {num_experts} experts have an owner, ownership.min_owned_share asks for "
        f"{wanted}, and the machines of the {len(rooms)} peers here have room for {there}: start "
        "more peers, or some of these with more memory"
    )


def losses_survived(num_experts: int, rooms: Collection[int], least: float = 1.0) -> int | None:
    """How many members, in the worst case, may be lost while enough experts keep an owner.

    Args:
        num_experts: experts of the run.
        rooms: experts that fit the machine of each member.
        least: share of the experts that must have an owner.

    Returns:
        At most all but one member; None if the members have too little room already.
    """
    from_smallest = sorted(rooms)
    for left in range(1, len(from_smallest) + 1):
        if sum(from_smallest[:left]) >= least * num_experts:
            return len(from_smallest) - left
    return None
