"""Which peers train which expert in the next round [R4].

Pure: every peer computes the same assignment from the parent manifest and the round's
contributors, so nobody has to be believed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import ceil, fsum

from swarm.protocol.manifest import PeerId, turn

GREED = 2
"""A member owns at most so many fair shares, whatever capacity it claims. Nobody can check what a
machine is able to do, and what one peer owns is what is lost, or held back, with it."""


@dataclass(frozen=True)
class Assignment:
    """Who owns what next, and why anything moved."""

    owners: dict[int, tuple[PeerId, ...]]
    """Of each expert, in peer-id order."""
    reasons: tuple[str, ...]
    """A sentence per expert and peer that changed hands, in the order of the decisions."""


def assign(
    previous: Mapping[int, tuple[PeerId, ...]],
    members: Mapping[PeerId, float],
    contributors: Collection[PeerId],
    *,
    stale: Collection[int],
    silent: Collection[PeerId] = (),
    on_trial: Collection[PeerId] = (),
    owners_per_expert: int,
    num_experts: int,
    seed: str,
) -> Assignment:
    """Keeps what is where it is and moves only what must move or strictly balances the load.

    Capacities say who gets how much, within limits: the fair share is all places divided by the
    members, rounded up. Nobody owns more than twice that, and who is on trial no more than that,
    as long as contributors within their own limits can take the rest.

    Args:
        previous: owners so far; experts may be missing.
        members: capacity of each member of the new manifest.
        contributors: peers known to have finished the round; only they are given more.
        stale: experts that were not renewed for too many rounds; their owners that did not
            contribute lose them.
        silent: members that lose all their experts, though they may come back in time to vote.
        on_trial: members that were taken in lately.
        owners_per_expert: R; every expert gets min(R, number of members) owners.
        num_experts: experts 0 .. num_experts - 1.
        seed: breaks ties, so that they do not always favour the same peer.

    Returns:
        The assignment. Idempotent: feeding it back changes nothing.
    """
    if not members:
        return Assignment(dict.fromkeys(range(num_experts), ()), ())
    wanted = min(owners_per_expert, len(members))
    fair = ceil(num_experts * wanted / len(members))
    limits = {peer: fair if peer in on_trial else GREED * fair for peer in members}
    work = _Work(previous, members, limits, contributors=contributors, silent=silent, seed=seed)
    for expert in range(num_experts):
        work.keep(expert, wanted, expert in stale)
    for expert in range(num_experts):
        work.fill(expert, wanted)
    work.balance()
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
        self.seed = seed
        self.owners: dict[int, list[PeerId]] = {}
        self.load = dict.fromkeys(self.peers, 0)
        self.turns = {peer: turn(seed, peer) for peer in self.peers}

    def keep(self, expert: int, wanted: int, is_stale: bool) -> None:
        """Takes over the valid owners, contributors first if there are too many."""
        valid = [peer for peer in self.previous.get(expert, ()) if peer in self.capacity]
        valid.sort(key=lambda peer: (peer not in self.contributors, peer))
        staying = [peer for peer in valid if not self._loses(peer, is_stale)]
        # An owner that is to lose it stays only in a place that no contributor is left to take.
        places = max(0, wanted - len(self.contributors | set(staying)))
        losing = [peer for peer in valid if peer not in staying][:places]
        self.owners[expert] = [*staying, *losing][:wanted]
        for peer in self.owners[expert]:
            self.load[peer] += 1

    def _loses(self, peer: PeerId, is_stale: bool) -> bool:
        return peer not in self.contributors and (is_stale or peer in self.silent)

    def fill(self, expert: int, wanted: int) -> None:
        """Adds the least loaded peers until the expert has its owners."""
        owners = self.owners[expert]
        while len(owners) < wanted:
            candidates = [peer for peer in self.peers if peer not in owners]
            candidates = [p for p in candidates if p in self.contributors] or candidates
            candidates = [p for p in candidates if self._has_room(p)] or candidates
            least = min(self._share(peer, 1) for peer in candidates)
            chosen = min(
                (peer for peer in candidates if self._share(peer, 1) == least),
                key=lambda peer: turn(f"{self.seed}/{expert}", peer),
            )
            owners.append(chosen)
            self.load[chosen] += 1

    def balance(self) -> None:
        """Moves one expert at a time to a contributor whose share stays below the giver's.

        What somebody has beyond its limit goes to any contributor within its own. Ends, since each
        move lowers what is beyond limits, or leaves it and lowers the shares, sorted from the
        largest, lexicographically.
        """
        while self._move_one():
            pass

    def _move_one(self) -> bool:
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

    def _move(self, giver: PeerId, taker: PeerId) -> bool:
        movable = [
            expert
            for expert, owners in self.owners.items()
            if giver in owners and taker not in owners
        ]
        if not movable:
            return False
        # What the giver would only be adopting costs nothing to give to another.
        expert = min(
            movable,
            key=lambda expert: (
                giver in self.previous.get(expert, ()),
                turn(f"{self.seed}/{expert}", taker),
            ),
        )
        self.owners[expert].remove(giver)
        self.owners[expert].append(taker)
        self.load[giver] -= 1
        self.load[taker] += 1
        return True

    def _has_room(self, peer: PeerId) -> bool:
        return self.load[peer] < self.limits[peer]

    def _is_over(self, peer: PeerId) -> bool:
        return self.load[peer] > self.limits[peer]

    def _share(self, peer: PeerId, extra: int = 0) -> float:
        return (self.load[peer] + extra) / self.capacity[peer]

    def reasons(self, stale: Collection[int]) -> tuple[str, ...]:
        """A sentence for every expert whose owners differ from the previous ones."""
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
            if why:
                sentences.append(f"expert {expert}: {', '.join(why)}")
        return tuple(sentences)

    def _load_of(self, peer: PeerId, claimed: int) -> str:
        """How much a peer owns of its share, and why that is less than its capacity claims."""
        limit = self.limits[peer]
        if claimed <= limit:
            return f"load {self.load[peer]}/{claimed}"
        return f"load {self.load[peer]}/{limit}, {self._held(peer, claimed)}"

    def _held(self, peer: PeerId, claimed: int) -> str:
        limit = self.limits[peer]
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
        if claimed > self.limits[peer]:
            return f"peer {peer} is {self._held(peer, claimed)}"
        return f"peer {peer} had more than its share"
