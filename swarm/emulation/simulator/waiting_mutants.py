"""Rules of waiting [C3, C7, D5, K1, F3], removed one at a time.

They cost time and never agreement, so no invariant notices; the directed scenarios of
`long_rounds.py` do.
"""

# A method without its rule has no use for what the rule looked at.
# ruff: noqa: ARG002

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from swarm.emulation.simulator.mutants import Mutant
from swarm.protocol.manifest import PeerId
from swarm.protocol.messages import Prepare
from swarm.protocol.rounds.acceptor import Acceptor
from swarm.protocol.rounds.campaign import Campaign
from swarm.protocol.rounds.closing import Absent, Absentees, OpenRoster
from swarm.protocol.rounds.collector import Collector
from swarm.protocol.rounds.reformer import Reformer
from swarm.protocol.rounds.thin import Loads


class _WordsIgnored(Collector):
    def _note_word(
        self, campaign: Campaign, peer: PeerId, remaining_s: float, worked_s: float
    ) -> None:
        return


class _LastWordCounts(Collector):
    def _note_word(
        self, campaign: Campaign, peer: PeerId, remaining_s: float, worked_s: float
    ) -> None:
        campaign.words.pop(peer, None)
        super()._note_word(campaign, peer, remaining_s, worked_s)


class _AlwaysTrusted(Collector):
    def _absent(self, campaign: Campaign, peer: PeerId, *, is_behind: bool) -> Absent:
        return replace(super()._absent(campaign, peer, is_behind=is_behind), contributed=True)


class _ThinLinesAwaited(Collector):
    def _too_thin(
        self, campaign: Campaign, loads: Loads, late: Absentees | None = None
    ) -> dict[PeerId, str]:
        return {}


class _ThinAbsenteesAwaited(Collector):
    def _thin_absentees(
        self, campaign: Campaign, roster: OpenRoster, absentees: Absentees
    ) -> dict[PeerId, str]:
        return {}


class _WaitingAgesCampaign(Collector):
    def _why_close_roster(self, campaign: Campaign) -> str | None:
        why = super()._why_close_roster(campaign)
        campaign.awaited_at = 0.0
        return why


class _CollectingAgesAttempt(Acceptor):
    def on_prepare(self, source: PeerId, prepare: Prepare) -> None:
        before = self.succession.collected_at
        super().on_prepare(source, prepare)
        self.succession.collected_at = before


class _ReformsAtWork(Reformer):
    def _is_at_work(self) -> bool:
        return False


WAITING_MUTANTS: Mapping[str, Mutant] = {
    "words_ignored": Mutant("C3: who said when is waited for", collector=_WordsIgnored),
    "last_word_counts": Mutant("C3: a word does not slip for ever", collector=_LastWordCounts),
    "always_trusted": Mutant("C3: nobody is waited for in vain again", collector=_AlwaysTrusted),
    "thin_lines_awaited": Mutant("D5: no line holds up the others", collector=_ThinLinesAwaited),
    "thin_absentees_awaited": Mutant(
        "D5: nor is a peer waited for whose line will have it left out",
        collector=_ThinAbsenteesAwaited,
    ),
    "waiting_ages_campaign": Mutant(
        "C7: a campaign ages when nobody is waited for", collector=_WaitingAgesCampaign
    ),
    "collecting_ages_attempt": Mutant(
        "K1: an attempt ages when nothing is collected", acceptor=_CollectingAgesAttempt
    ),
    "reforms_at_work": Mutant("F3: who is at work does not reform", reformer=_ReformsAtWork),
}
