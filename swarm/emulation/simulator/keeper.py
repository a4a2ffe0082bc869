"""Moments of experts between simulated peers: copies for backups, hand-overs, and the search.

The decisions are those of `swarm.protocol.moments`; asking, announcing and fetching go as in
`swarm.network.moments`. Questions travel in order and are not lost, but they fail where a link is
cut or a peer is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from swarm.emulation.simulator.disk import Disk
from swarm.emulation.simulator.violation import Violation
from swarm.experts import expert_unit
from swarm.protocol.manifest import Kind, Manifest, PeerId
from swarm.protocol.moments import (
    Moments,
    Search,
    backup_holders,
    counts_twice,
    handed_over,
    handover_round,
    is_backup_round,
    is_in_vain,
    is_outdated,
    is_wanted,
    may_come,
    newest,
    whom_to_ask,
)

ANSWER_S = 0.3
"""How long a question to a living peer takes."""
ASK_S = 3.0
"""How long others are waited for."""
RETRY_S = 2.0
HANDOVER_S = 10.0
"""How long a new owner waits for the newest moments of an owner before it that still answers."""
MOMENTS_BYTES = 200
MAX_UNANSWERED = 5


class Shell(Protocol):
    """What a keeper needs of its peer."""

    me: PeerId
    disk: Disk
    keeper: Keeper

    def keeper_of(self, name: PeerId) -> Keeper | None:
        """Another peer's keeper, if the links work and it runs."""

    def after(self, delay_s: float, method: Callable[..., None], *arguments: object) -> None:
        """Calls the method later, unless the peer crashes first."""

    def now_s(self) -> float:
        """The time."""

    def own_experts(self) -> Collection[int]:
        """Experts that this peer trains."""

    def took(self, expert: int, round_: int | None) -> None:
        """Hears which moments an expert got that was taken up; None: zero moments."""


Found = list[tuple[PeerId, Moments]]


@dataclass
class Hunt:
    """A search that goes on."""

    search: Search
    since: float
    there: tuple[PeerId, ...] = ()
    """Peers that could be asked when this was last tried."""


class Keeper:
    """One peer's moments: those it keeps for others, and those it looks for."""

    def __init__(self, shell: Shell, every: int) -> None:
        self.shell = shell
        self.every = every
        self._copies: list[Moments] = []
        self._wanted: dict[Moments, list[PeerId]] = {}
        """What is announced, and who has not got it yet."""
        self._unanswered: dict[PeerId, int] = {}
        self._is_announcing = False
        self._hunts: list[Hunt] = []

    @property
    def searches(self) -> tuple[Search, ...]:
        """What is looked for, to be saved with the moments that it will be added to."""
        return tuple(hunt.search for hunt in self._hunts)

    @property
    def shelf(self) -> dict[int, Moments]:
        """Expert -> the moments that are kept here, durably."""
        return self.shell.disk.shelf

    # ------------------------------------------------------------ giving

    def offered(self, tip: Manifest) -> None:
        """Copies the moments for the backups, in a round in which that is due."""
        number = tip.round + 1
        if is_backup_round(number, self.every):
            holders, sought = backup_holders(tip), self.sought()
            mine = [e for e in self._mine() if e in holders and e not in sought]
            self._copies = [self._put(e, number) for e in mine]

    def before_adopt(self, previous: Manifest, manifest: Manifest) -> None:
        """Puts out the moments of experts that others own from `manifest` on."""
        me = self.shell.me
        number = handover_round(me, previous, manifest)
        for expert, peers in handed_over(me, previous, manifest).items():
            if expert in self.shell.own_experts():
                self._announce(self._put(expert, number), peers)

    def adopted(self, taken: Iterable[int], previous: Manifest, manifest: Manifest) -> None:
        """Tells backups what is here for them, and looks for the moments of what is new here."""
        if self._copies and manifest.kind is Kind.QUORUM:
            holders, mine = backup_holders(manifest), self._mine()
            for moments in self._copies:
                if moments.expert in mine and moments.expert in holders:
                    self._announce(moments, [holders[moments.expert]])
            self._copies = []
        self._look_only_for(self.shell.own_experts())
        self._look_for(Search(tuple(taken), previous, manifest))
        for moments in list(self.shelf.values()):
            version = manifest.entries[expert_unit(moments.expert)].version
            if is_outdated(moments, version, self.every):
                del self.shelf[moments.expert]

    def leave(self, tip: Manifest) -> None:
        """Offers everything to those who would adopt it."""
        for expert, peer in backup_holders(tip).items():
            if expert in self.shell.own_experts():
                number = handover_round(self.shell.me, tip, tip)
                self._announce(self._put(expert, number), [peer])

    def _mine(self) -> list[int]:
        return sorted(self.shell.own_experts())

    def _put(self, expert: int, number: int) -> Moments:
        digest = f"moments-{expert}-{number}-{self.shell.me}"
        self.shelf[expert] = moments = Moments(expert, number, digest, MOMENTS_BYTES)
        return moments

    def _announce(self, moments: Moments, peers: Iterable[PeerId]) -> None:
        self._wanted[moments] = [peer for peer in peers if peer != self.shell.me]
        if not self._is_announcing:
            self._is_announcing = True
            self.shell.after(ANSWER_S, self._tell_news)

    def _tell_news(self) -> None:
        self._wanted = {
            moments: left
            for moments, peers in self._wanted.items()
            if self.shelf.get(moments.expert) == moments
            and (left := [p for p in peers if self._unanswered.get(p, 0) < MAX_UNANSWERED])
        }
        for peer in sorted({peer for peers in self._wanted.values() for peer in peers}):
            other = self.shell.keeper_of(peer)
            self._unanswered[peer] = 0 if other else self._unanswered.get(peer, 0) + 1
            settled = other.look(self.shell.me, tuple(self.shelf.values())) if other else ()
            for moments in settled:
                self._wanted[moments] = [p for p in self._wanted.get(moments, []) if p != peer]
        self._is_announcing = bool(self._wanted)
        if self._wanted:
            self.shell.after(RETRY_S, self._tell_news)

    def look(self, source: PeerId, offered: Sequence[Moments]) -> list[Moments]:
        """Takes what this peer keeps as a backup; returns what the source may forget."""
        me, tip = self.shell.me, self.shell.disk.record.tip
        settled = []
        for moments in offered:
            if not is_wanted(me, source, moments.expert, tip):
                continue
            kept = self.shelf.get(moments.expert)
            if me not in tip.owners[moments.expert] and not (
                kept and (kept.digest == moments.digest or kept.round > moments.round)
            ):
                self.shelf[moments.expert] = moments
            settled.append(moments)
        return settled

    # ------------------------------------------------------------ taking up

    def resume(self, searches: Iterable[Search], tip: Manifest) -> None:
        """Looks again for what the private state lacks, unless nobody keeps it by now."""
        for search in searches:
            late = {e for e in search.experts if is_in_vain(search, e, tip, self.every)}
            for expert in sorted(late):
                self.shell.took(expert, None)
            left = tuple(expert for expert in search.experts if expert not in late)
            self._look_for(replace(search, experts=left))

    def stepped(self) -> None:
        """The experts were trained: what comes from now on is added to what they have got."""
        for hunt in self._hunts:
            hunt.search = replace(hunt.search, steps=hunt.search.steps + 1)

    def sought(self) -> set[int]:
        """Experts whose moments are looked for."""
        return {expert for search in self.searches for expert in search.experts}

    def _look_for(self, search: Search) -> None:
        if search.experts:
            self._hunts.append(Hunt(search, self.shell.now_s()))
            self._ask(self._hunts[-1])

    def _look_only_for(self, experts: Collection[int]) -> None:
        for hunt in self._hunts:
            left = tuple(expert for expert in hunt.search.experts if expert in experts)
            hunt.search = replace(hunt.search, experts=left)
        self._hunts = [hunt for hunt in self._hunts if hunt.search.experts]

    def _ask(self, hunt: Hunt) -> None:
        asked = self._whom(hunt.search)
        able = self._able(hunt.search)
        hunt.there = tuple(peer for peer in able if self.shell.keeper_of(peer) is not None)
        answering = tuple(peer for peer in asked if peer in hunt.there)
        delay_s = ANSWER_S if len(answering) == len(asked) else ASK_S
        self.shell.after(delay_s, self._answered, hunt, answering)

    def _whom(self, search: Search) -> list[PeerId]:
        return self._able(search)

    def _able(self, search: Search) -> list[PeerId]:
        """Peers that may have what is looked for."""
        me = self.shell.me
        several = (
            whom_to_ask(me, expert, search.previous, search.manifest) for expert in search.experts
        )
        return list(dict.fromkeys(peer for peers in several for peer in peers))

    def _held_by(self, peer: PeerId) -> tuple[Moments, ...]:
        keeper = self.shell.keeper_of(peer)
        return tuple(keeper.shelf.values()) if keeper else ()

    def _answered(self, hunt: Hunt, asked: tuple[PeerId, ...]) -> None:
        search = hunt.search
        answers = {
            peer: self._held_by(peer) for peer in asked if self.shell.keeper_of(peer) is not None
        }
        age_s, sought = self.shell.now_s() - hunt.since, self.sought()
        for expert in search.experts:
            found = [f for f in self._found(expert, answers) if not counts_twice(search, f[1])]
            if age_s < HANDOVER_S and self._may_come(expert, search, answers, found):
                continue
            sought.remove(expert)
            moments = self._choose(found)
            self.shell.took(expert, moments.round if moments else None)
            self._judge(expert, hunt, moments)
        self._look_only_for(sought)
        if hunt.search.experts:
            self.shell.after(RETRY_S, self._ask, hunt)

    def _found(self, expert: int, answers: Mapping[PeerId, tuple[Moments, ...]]) -> Found:
        """Who has which moments of an expert; this peer's own backup among them."""
        found = [(p, m) for p, several in sorted(answers.items()) for m in several]
        found += [(self.shell.me, moments) for moments in self.shelf.values()]
        return [(peer, moments) for peer, moments in found if moments.expert == expert]

    def _may_come(
        self, expert: int, search: Search, answers: Collection[PeerId], found: Found
    ) -> bool:
        """Whether a living owner so far has yet to put its newest moments out."""
        return may_come(expert, search.previous, search.manifest, answers, found)

    def _choose(self, found: Found) -> Moments | None:
        best = newest(found)
        return best[1] if best else None

    # ------------------------------------------------------------ what must hold

    def _judge(self, expert: int, hunt: Hunt, moments: Moments | None) -> None:
        """The newest moments that a living peer has were found, or those still to come."""
        me, round_, search = self.shell.me, moments.round if moments else -1, hunt.search
        age_s = self.shell.now_s() - hunt.since
        for peer in (me, *hunt.there):
            keeper = self if peer == me else self.shell.keeper_of(peer)
            held = keeper.shelf.get(expert) if keeper else None
            if held and held.round > round_ and not counts_twice(search, held):
                why = f"took moments of round {round_}, {peer} has those of {held.round}"
                raise Violation("N2", f"{me}, expert {expert}: {why}")
        for owner in search.previous.owners.get(expert, ()):
            wanted = handover_round(owner, search.previous, search.manifest)
            answers = owner in hunt.there and self.shell.keeper_of(owner) is not None
            if answers and wanted > round_ and age_s < HANDOVER_S:
                why = f"did not wait for round {wanted} of {owner}, only {age_s:.1f} s"
                raise Violation("N4", f"{me}, expert {expert}: {why}")
