"""Reducer: fetches offered values of its units and has them averaged [D1], others ahead [D2]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm.protocol.events import (
    BlobWanted,
    CancelFetch,
    Fetch,
    Purpose,
    Reduce,
    UnitReduced,
    Unobtainable,
)
from swarm.protocol.manifest import Digest, PeerId, Unit
from swarm.protocol.messages import Reduced, Roster, reduced_statement
from swarm.protocol.rounds.acceptor import Acceptor
from swarm.protocol.rounds.blobs import Blobs
from swarm.protocol.rounds.contributor import Contributor
from swarm.protocol.rounds.deals import work_of
from swarm.protocol.rounds.fetching_ahead import wanted_ahead
from swarm.protocol.rounds.reduction import SLOW, Job
from swarm.protocol.rounds.rosters import Sources, assign_reducers, sources_of
from swarm.protocol.rounds.standing import Role
from swarm.protocol.rounds.state import Work
from swarm.protocol.rounds.withholding import Withholding
from swarm.protocol.schemas import MAX_MISSING, MAX_RESULTS
from swarm.protocol.updates import REFUSALS

RELIEF_ROUNDS = 4
"""A reducer that got stuck is one again only after so many rounds."""


@dataclass(eq=False)
class Reducer(Role):
    """Averages the units that fall to this peer."""

    blobs: Blobs
    work: Work
    contributor: Contributor
    acceptor: Acceptor
    withholding: Withholding
    job: Job | None = field(init=False, default=None)

    def forget_height(self) -> None:
        """Ends the job with the height."""
        if self.job and not self.job.is_done:
            # The round did without: peers that it did not reach now it will not in a minute [C4].
            self.work.reduces_from = self.tip.round + RELIEF_ROUNDS
        self._cancel_job()

    def on_roster(self, source: PeerId, roster: Roster) -> None:
        """Starts to average what falls to this peer; a repeated one gets the same report."""
        if not self.acceptor.hear_convener(source, "ROSTER", roster.ballot):
            return
        if not roster.offers:  # only a heartbeat, maybe of a roster in which this peer has no part
            if self.job and self.job.roster_id != roster.roster_id:
                self._suspect_dropped(roster)
            return
        if self.job and self.job.roster_id == roster.roster_id:
            self.job.ballot = roster.ballot
            self.withholding.greet(self.job.unserved(self.blobs.stored))
            self._report(self.job)
            return
        problem = self._roster_problem(roster)
        if problem:
            self.out.refuse(source, "ROSTER", problem)
            return
        self._start_job(roster)

    def _roster_problem(self, roster: Roster) -> str | None:
        for peer, offer in roster.offers.items():
            problem = self.contributor.offer_problem(peer, offer)
            if problem:
                return f"offer of {peer}: {problem}"
        return None

    def _suspect_dropped(self, roster: Roster) -> None:
        """Two witnesses: this peer got no values of them, and the round goes on without [C8]."""
        job = self.job
        if job and self.now - job.since >= self.timers.reduce_s / 2:
            dropped = job.unserved(self.blobs.stored) - roster.offers.keys()
            self.withholding.suspect(dropped, job.asked_of)

    def _start_job(self, roster: Roster) -> None:
        self._suspect_dropped(roster)
        self._cancel_job()
        sources = sources_of(roster.offers)
        sizes, always = self.rules.moved_bytes, self.rules.averaged_deltas
        reducers = assign_reducers(roster.offers, roster.reducers, sizes, always, sources)
        inputs = {unit: sources[unit] for unit, peer in reducers.items() if peer == self.me}
        if not inputs:
            return
        job = self.job = Job(
            self.me,
            roster.ballot,
            roster.roster_id,
            inputs,
            work_of(roster.offers),
            since=self.now,
        )
        offers: dict[str, dict[PeerId, None]] = {}
        wants: list[tuple[Unit, Digest]] = []
        for unit, values in inputs.items():
            for peer, digest in values:
                offers.setdefault(digest, {})[peer] = None
                if digest not in self.blobs.stored and len(offers[digest]) == 1:
                    wants.append((unit, digest))
        if wants:
            job.is_fetching = True
            fetched = tuple(
                BlobWanted(
                    unit,
                    digest,
                    self.rules.offered_bytes[unit],
                    tuple(offers[digest]),
                    self.blobs.bound(unit, offers[digest], job.work),
                    unit in self.rules.averaged_deltas,
                )
                for unit, digest in wants
            )
            self.out.emit(Fetch(Purpose.REDUCE, fetched))
        if self.peer.fetches_ahead:
            self._fetch_ahead(job, roster, sources, reducers)
        self._reduce_complete_units(job)

    def _fetch_ahead(
        self, job: Job, roster: Roster, sources: Sources, averaged: Mapping[Unit, PeerId]
    ) -> None:
        """Fetches what is proposed as it was offered while means are computed [D2]."""
        stored, tip, rules = self.blobs.stored, self.tip, self.rules
        wants = wanted_ahead(
            roster, sources, averaged, self.me, stored=stored, tip=tip, rules=rules
        )
        if wants:
            job.ahead = frozenset(want.digest for want in wants)
            self.out.emit(Fetch(Purpose.AHEAD, wants))

    def _cancel_job(self) -> None:
        if self.job and self.job.is_fetching:
            self.out.emit(CancelFetch(Purpose.REDUCE))
        if self.job and self.job.ahead:
            self.out.emit(CancelFetch(Purpose.AHEAD))
        self.job = None

    def note_missing(self, event: Unobtainable) -> None:
        """An input that a peer did not give; a refused one is reported at once [C4, U1]."""
        job = self.job
        if job is None or event.digest in self.blobs.stored or event.digest in job.ahead:
            return  # what is missing of a proposal is its acceptors' matter
        job.failed.setdefault(event.digest, {})[event.peer] = event.reason
        if event.reason in REFUSALS and event.peer not in job.refused:
            job.refused.add(event.peer)
            self._report(job)

    def after_blob(self) -> None:
        """Something arrived."""
        if self.job and self.job.is_fetching:
            self._reduce_complete_units(self.job)

    def _reduce_complete_units(self, job: Job) -> None:
        for unit, values in job.inputs.items():
            if unit in job.asked or any(digest not in self.blobs.stored for _, digest in values):
                continue
            job.asked.add(unit)
            weighed = self.rules.weights(job.work, [peer for peer, _ in values], self.tip)
            base = None
            if unit in self.rules.averaged_deltas:
                base = self.tip.entries[unit].digest
            self.out.emit(Reduce(job.roster_id, unit, values, weighed, base))

    def on_unit_reduced(self, event: UnitReduced) -> None:
        """Reports to the convener once every unit has its mean."""
        result = event.result
        self.blobs.have([result.digest, *([result.delta] if result.delta else [])])
        job = self.job
        if job is None or job.roster_id != event.roster_id or event.unit not in job.inputs:
            return
        job.results[event.unit] = event.result
        if job.is_done:
            self._report(job)

    def _report(self, job: Job) -> None:
        """Tells the convener what is done and whose values could not be had."""
        missing = dict.fromkeys(job.slow(self.blobs.stored), SLOW)
        for values in job.inputs.values():
            for _, digest in values:
                if digest not in self.blobs.stored:
                    missing |= job.failed.get(digest, {})
        missing.pop(self.me, None)
        # Once the first are left out, the next round's roster meets the others.
        missing = dict(sorted(missing.items())[:MAX_MISSING])
        units = sorted(job.results)
        # In several messages if need be: each must stay under 64 KiB.
        for start in range(0, max(1, len(units)), MAX_RESULTS):
            results = {unit: job.results[unit] for unit in units[start : start + MAX_RESULTS]}
            signed = self.peer.sign(reduced_statement(self.rules.run, job.roster_id, results))
            self.out.post(
                job.ballot.convener, Reduced(job.ballot, job.roster_id, results, missing, signed)
            )
