"""The results of a closed roster, and the reducers or sources that delay it.

Policies: roster deadline, roster repair.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from swarm.protocol.messages.messages import Evidence, Reduced, Report
from swarm.protocol.rounds.campaign import Campaign, ClosedRoster, Stage, Value
from swarm.protocol.rounds.contacts import Contacts
from swarm.protocol.rounds.durable_state import Role
from swarm.protocol.rounds.policies import evidence_checks
from swarm.protocol.rounds.reducer import SLOW
from swarm.protocol.values.manifest import PeerId
from swarm.protocol.values.updates import REFUSALS


@dataclass(eq=False)
class Averaging(Role):
    """Collects reducers' results and names those that will not finish."""

    contacts: Contacts

    def take(self, campaign: Campaign, source: PeerId, reduced: Reduced) -> bool:
        """Notes the results of a reducer; returns whether they belong to this roster."""
        if not self._is_result_of_roster(campaign, reduced):
            return False
        roster = campaign.roster
        for unit, result in reduced.results.items():
            if roster.plan.reducers.get(unit) != source:
                self.out.refuse(source, "REDUCED", f"the reducer of {unit} is another peer")
            elif problem := evidence_checks.result_problem(unit, result, self.rules):
                self.out.refuse(source, "REDUCED", problem)
            else:
                roster.results[unit] = result
        report = Report(source, reduced.results, reduced.signature)
        known = roster.reports.get(source, ())
        roster.reports[source] = evidence_checks.newest_results(
            (report, *known), roster.plan, self.rules
        )
        roster.reported_at[source] = self.now
        roster.missing[source] = dict(reduced.missing)
        for peer, why in reduced.missing.items():
            if why != SLOW:
                roster.missed_at.setdefault(peer, self.now)
        return True

    def _is_result_of_roster(self, campaign: Campaign, reduced: Reduced) -> bool:
        """Whether a result belongs to the closed roster, as all results of a manifest must [A6]."""
        return (
            campaign.stage is Stage.REDUCE
            and campaign.closed is not None
            and reduced.ballot == campaign.ballot
            and reduced.roster_id == campaign.closed.plan.roster_id
        )

    def composed(self, campaign: Campaign) -> Value | None:
        """The manifest to propose, once all results are here."""
        roster = campaign.roster
        plan = roster.plan
        if any(unit not in roster.results for unit in plan.reducers):
            return None
        evidence = Evidence(
            campaign.grounds.shown(self.tip, campaign.guests),
            plan.able,
            plan.roster_id,
            tuple(report for _, each in sorted(roster.reports.items()) for report in each),
        )
        brought = evidence_checks.Brought(campaign.leaving, campaign.credentials)
        manifest = evidence_checks.compose_from(self.tip, plan, evidence, brought, self.rules)
        why = (
            f"{len(plan.sources)} units of {len(plan.offers)} peers, "
            f"{len(plan.reducers)} averaged in {self.now - campaign.stage_at:.1f} s"
        )
        return Value(manifest, evidence, why)

    def refused_values(self, roster: ClosedRoster) -> dict[PeerId, str]:
        """Peers whose values arrived and were refused, so that waiting does not help.

        Policies: roster repair, update bounds.
        """
        return {
            peer: f"{reporter} refuses its values: {why}"
            for reporter in sorted(self.late_reducers(roster) & roster.missing.keys())
            for peer, why in sorted(roster.missing[reporter].items())
            if why in REFUSALS and peer in roster.plan.offers and peer != self.me
        }

    def gone_that_are_missed(self, roster: ClosedRoster) -> dict[PeerId, str]:
        """Missing peers for which the round need not wait, since their machines refuse messages."""
        late = self.late_reducers(roster)
        reported = (roster.missing.get(reporter, {}) for reporter in late)
        missed = late.union(*reported) & self.contacts.gone.keys()
        return dict.fromkeys(sorted(missed), "its machine refuses messages")

    def late_reducers(self, roster: ClosedRoster) -> set[PeerId]:
        """Reducers whose results are not here yet."""
        reducers = roster.plan.reducers.items()
        return {peer for unit, peer in reducers if unit not in roster.results}

    def whom_to_exclude(self, roster: ClosedRoster) -> dict[PeerId, str]:
        """Contributors reported missing and reducers that are silent, with the reason.

        Policy: roster repair.
        """
        late = self.late_reducers(roster)
        bad = self.silent_reducers(roster, self.timers.reduce_s / 2)
        for reporter in sorted(late & roster.missing.keys()):
            for peer, why in sorted(roster.missing[reporter].items()):
                if why == SLOW:
                    continue
                if peer == self.me:
                    bad[reporter] = f"it cannot fetch from the convener: {why}"
                elif peer in roster.plan.offers:
                    bad.setdefault(peer, f"{reporter} cannot fetch from it: {why}")
        if not bad and roster.extensions:
            late_ones = dict.fromkeys(sorted(late - {self.me}), "its results are late")
            bad = self.slow_sources(roster) or late_ones
        return bad

    def silent_reducers(self, roster: ClosedRoster, limit_s: float) -> dict[PeerId, str]:
        """Late reducers that reported nothing on this roster for `limit_s` (roster repair)."""
        said, since = roster.reported_at, self.now - limit_s
        return {
            reducer: "it is silent as a reducer"
            for reducer in sorted(self.late_reducers(roster) - {self.me})
            if max(roster.closed_at, said.get(reducer, roster.closed_at)) <= since
        }

    def missed(self, roster: ClosedRoster) -> set[PeerId]:
        """Contributors whose values late reducers could not fetch."""
        reports = (roster.missing.get(reporter, {}) for reporter in self.late_reducers(roster))
        named = {peer for each in reports for peer, why in each.items() if why != SLOW}
        return named & roster.plan.offers.keys() - {self.me}

    def accused(self, roster: ClosedRoster) -> set[PeerId]:
        """Peers whose values most reducers (at least two) could not fetch."""
        reducers = set(roster.plan.reducers.values())
        reports = (roster.missing.get(reporter, {}) for reporter in reducers)
        named = Counter(
            peer for each in reports for peer, why in each.items() if why not in REFUSALS
        )
        most = {peer: max(1, len(reducers - {peer}) / 2) for peer in named}
        return {peer for peer, count in named.items() if count > most[peer]}

    def silent_sources(self, roster: ClosedRoster, limit_s: float) -> dict[PeerId, str]:
        """Sources of missing values that were silent for `limit_s`, although each poll greets them.

        Policy: roster repair.
        """
        heard, since = self.contacts.heard, self.now - limit_s
        return {
            peer: "its values are missing, and it is silent"
            for peer in sorted(self.missed(roster))
            if max(roster.missed_at[peer], heard.get(peer, 0.0)) <= since
        }

    def slow_sources(self, roster: ClosedRoster) -> dict[PeerId, str]:
        """Peers whose values most late reducers, and at least two, wait for (roster repair).

        These reducers are late because of their sources. A single report is not enough: the reducer
        may lie, or be cut off from the peer that it names.
        """
        late = self.late_reducers(roster)
        reports = (roster.missing.get(reporter, {}) for reporter in late)
        named = Counter(peer for each in reports for peer, why in each.items() if why == SLOW)
        return {
            peer: f"{count} of {len(late)} late reducers wait for its values"
            for peer, count in sorted(named.items())
            if count > max(1, len(late) / 2)
        }
