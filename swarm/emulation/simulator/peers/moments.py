"""Moments of experts between simulated peers, with the `Giving` and `Taking` of a real peer.

Questions arrive in order and are not lost, but fail if a link is cut or a peer is down.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from swarm.emulation.simulator.symbols.crash_disk import Shell
from swarm.emulation.simulator.symbols.values import Violation
from swarm.experts import expert_unit
from swarm.protocol.exchange import handover
from swarm.protocol.values.manifest import Digest, Manifest, PeerId

ANSWER_S = 0.3
"""Seconds that a question to a living peer takes."""
ASK_S = 3.0
"""Seconds for which an answer of others is awaited."""
RETRY_S = 2.0
FETCH_S = 0.5
MOMENTS_BYTES = 200


class ExchangeShell(Shell, Protocol):
    """The parts of its peer that an exchange needs."""

    exchange: Exchange

    def exchange_of(self, name: PeerId) -> Exchange | None:
        """Another peer's exchange, if the peer runs and the links work."""

    def own_experts(self) -> Collection[int]:
        """Experts that this peer trains."""

    def took(self, expert: int, round_: int | None) -> None:
        """Notes the round of the moments that an adopted expert got. None: zero moments."""


class Exchange:
    """One peer's hand-overs and searches, in one life of its process."""

    def __init__(
        self, shell: ExchangeShell, giving: handover.Giving, taking: handover.Taking, copy_s: float
    ) -> None:
        """Starts empty. Moments can be fetched `copy_s` after a manifest was adopted."""
        self.shell, self.giving, self.taking, self.copy_s = shell, giving, taking, copy_s
        self._copied_s: dict[handover.Moments, float] = {}
        self._taken_up: dict[int, tuple[float, int]] = {}
        """For each expert, when it was taken over, and the round of its weights."""
        self._is_looking = False

    # ------------------------------------------------------------ giving

    def before_adopt(self, previous: Manifest, manifest: Manifest) -> None:
        """Offers the moments of experts that others own from `manifest` on."""
        me, now_s = self.shell.me, self.shell.now_s()
        number = handover.handover_round(me, previous, manifest)
        for expert, peers in handover.handed_over(me, previous, manifest).items():
            if expert in self.shell.own_experts():
                digest = f"moments-{expert}-{number}-{me}"
                moments = handover.Moments(expert, number, digest, MOMENTS_BYTES)
                self._copied_s[moments] = now_s + self.copy_s
                self.giving.put(moments, peers, now_s + self.copy_s)

    def asked(self, peer: PeerId, settled: Collection[Digest] = ()) -> tuple[handover.Moments, ...]:
        """Moments that a peer that asks may fetch, as far as they are still here."""
        now_s = self.shell.now_s()
        return tuple(
            moments
            for moments in self.giving.asked(peer, settled, now_s)
            if self._copied_s[moments] <= now_s and self.giving.waits_for(moments, now_s)
        )

    # ------------------------------------------------------------ taking

    def adopted(self, taken: Iterable[int], previous: Manifest, manifest: Manifest) -> None:
        """Searches for the moments of newly owned experts."""
        now_s, taken = self.shell.now_s(), tuple(taken)
        self.taking.keep_only(self.shell.own_experts())
        self.taking.take_up(self.shell.me, taken, previous, manifest, now_s)
        for expert in taken:
            self._taken_up[expert] = (now_s, manifest.entries[expert_unit(expert)].version)
        if self.taking.is_looking and not self._is_looking:
            self._is_looking = True
            self._ask()

    def _ask(self) -> None:
        self._is_looking = self.taking.is_looking
        if self._is_looking:
            asked = self.taking.whom_to_ask()
            living = [peer for peer in asked if self.shell.exchange_of(peer)]
            delay_s = ANSWER_S if len(living) == len(asked) else ASK_S
            self.shell.after(delay_s, self._answered, living)

    def _answered(self, asked: Iterable[PeerId]) -> None:
        answers = {
            peer: other.asked(self.shell.me)
            for peer in asked
            if (other := self.shell.exchange_of(peer)) is not None
        }
        for choice in self.taking.choose(answers, self.shell.now_s()):
            if choice.found:
                self._judge_found(choice.found[1])
                self.shell.after(FETCH_S, self._fetched, choice)
            else:
                self._judge_none(choice.search)
                self.shell.took(choice.search.expert, None)
        self.shell.after(RETRY_S, self._ask)

    def _fetched(self, choice: handover.Choice) -> None:
        assert choice.found is not None
        giver, moments = choice.found
        other = self.shell.exchange_of(giver)
        is_here = other is not None and moments in other.asked(self.shell.me)
        if self.taking.fetched(choice, self.shell.now_s(), is_here=is_here):
            self.shell.took(moments.expert, moments.round)
        if other:
            other.asked(self.shell.me, [moments.digest])

    # ------------------------------------------------------------ invariants

    def _judge_found(self, moments: handover.Moments) -> None:
        """Requires moments that are no older than their weights."""
        _, version = self._taken_up[moments.expert]
        if moments.round < version:
            why = f"moments of round {moments.round} for weights of round {version}"
            raise Violation("N2", f"{self.shell.me}, expert {moments.expert}: {why}")

    def _judge_none(self, search: handover.Search) -> None:
        """Requires that this peer waited for an earlier owner that lives."""
        age_s = self.shell.now_s() - self._taken_up[search.expert][0]
        living = [peer for peer in search.givers if self.shell.exchange_of(peer)]
        if living and age_s < handover.PATIENCE_S:
            why = f"{living[0]} was not waited for, only {age_s:.1f} s"
            raise Violation("N4", f"{self.shell.me}, expert {search.expert}: {why}")
