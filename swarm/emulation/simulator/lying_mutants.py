"""Rules that only a liar tries, removed one at a time."""

# A method without its rule has no use for what the rule looked at.
# ruff: noqa: ARG002

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from swarm.emulation.simulator.hostile import LYING, LyingMix
from swarm.emulation.simulator.mutants import Mutant
from swarm.emulation.simulator.signing import Door
from swarm.protocol.manifest import Manifest, PeerId
from swarm.protocol.messages import (
    Ballot,
    Certificate,
    Commit,
    Evidence,
    Header,
    Link,
    Message,
)
from swarm.protocol.rounds.acceptor import Acceptor
from swarm.protocol.rounds.adopter import Adopter
from swarm.protocol.rounds.checks import successor_problem
from swarm.protocol.trust import RECENT, Chain


class _NothingIsShown(Acceptor):
    def proposal_problem(self, manifest: Manifest, evidence: Evidence | None) -> str | None:
        return successor_problem(manifest, self.tip, self.rules, due=self.standing.is_due(self.tip))


class _AnybodySigns(Door):
    def let_in(self, source: PeerId, header: Header, message: Message) -> Message | None:
        return message


class _AnyProof(Adopter):
    def _lacks_proof(self, commit: Commit) -> bool:
        return False

    def _unproved(self, commit: Commit) -> str | None:
        return None


class _AnyAttempt(Acceptor):
    def attempt_problem(self, source: PeerId, ballot: object) -> str | None:
        return None


class _PrunedByCount(Adopter):
    def _lengthen_chain(self, commit: Commit, certificate: Certificate | None) -> tuple[Link, ...]:
        new, links = super()._lengthen_chain(commit, certificate), self.standing.chain.links
        self.standing.chain = Chain((links[0], *links[1:][-RECENT:]))
        return new


class _ReturnsAtOnce(Acceptor):
    def turn_problem(self, source: PeerId, ballot: Ballot) -> str | None:
        return None


_P = cast(LyingMix, LYING["P"])
CALM_LIES = replace(_P, faults=(0, 0), forgeries=(0, 0), loss=0.0, merging=0.0, strangers=0.0)
"""A liar alone; whoever believes it shows it soon."""

FORGERS = replace(_P, forgeries=(4, 8))

LYING_MUTANTS: Mapping[str, Mutant] = {
    "nothing_is_shown": Mutant(
        "A6: what is voted for follows from evidence", acceptor=_NothingIsShown, mix=CALM_LIES
    ),
    "anybody_signs": Mutant(
        "A6, L1: signatures are those of their peers", door=_AnybodySigns, mix=CALM_LIES
    ),
    "any_proof": Mutant("L1: a tip is believed along certificates", adopter=_AnyProof, mix=FORGERS),
    "any_attempt": Mutant(
        "A5: one message does not use up the ballots", acceptor=_AnyAttempt, mix=CALM_LIES
    ),
    "returns_at_once": Mutant(
        "A7: whoever had a vote lets others convene", acceptor=_ReturnsAtOnce
    ),
    "pruned_by_count": Mutant(
        "L3: a chain keeps what leads on from each head", adopter=_PrunedByCount
    ),
}
