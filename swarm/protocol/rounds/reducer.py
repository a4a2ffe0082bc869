"""Reducer: fetches offered values of its units and has them averaged [D1]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swarm.protocol.events import BlobWanted, CancelFetch, Fetch, Purpose, Reduce, UnitReduced
from swarm.protocol.manifest import Digest, PeerId, Unit
from swarm.protocol.messages import Reduced, Roster, reduced_statement
from swarm.protocol.rounds.acceptor import Acceptor
from swarm.protocol.rounds.deals import work_of
from swarm.protocol.rounds.reduction import Job
from swarm.protocol.rounds.rosters import assign_reducers, sources_of
from swarm.protocol.schemas import MAX_MISSING, MAX_RESULTS
from swarm.protocol.weights import weights


class Reducer(Acceptor):
    """Averages the units that fall to this peer."""

    def _on_roster(self, source: PeerId, roster: Roster) -> None:
        if not self._hear_convener(source, "ROSTER", roster.ballot) or not roster.offers:
            return  # without offers it is only a heartbeat
        if self._job and self._job.roster_id == roster.roster_id:
            self._job.ballot = roster.ballot
            self._report()
            return
        problem = self._roster_problem(roster)
        if problem:
            self._refuse(source, "ROSTER", problem)
            return
        self._start_job(roster)

    def _roster_problem(self, roster: Roster) -> str | None:
        for peer, offer in roster.offers.items():
            problem = self._offer_problem(peer, offer)
            if problem:
                return f"offer of {peer}: {problem}"
        return None

    def _start_job(self, roster: Roster) -> None:
        self._cancel_job()
        reducers = assign_reducers(roster.offers, roster.reducers, self.rules.unit_bytes)
        sources = sources_of(roster.offers)
        inputs = {unit: sources[unit] for unit, peer in reducers.items() if peer == self.me}
        if not inputs:
            return
        job = self._job = Job(roster.ballot, roster.roster_id, inputs, work_of(roster.offers))
        offers: dict[str, dict[PeerId, None]] = {}
        wants: list[tuple[Unit, Digest]] = []
        for unit, values in inputs.items():
            for peer, digest in values:
                offers.setdefault(digest, {})[peer] = None
                if digest not in self._stored and len(offers[digest]) == 1:
                    wants.append((unit, digest))
        if wants:
            job.is_fetching = True
            self._effects.append(
                Fetch(
                    Purpose.REDUCE,
                    tuple(
                        BlobWanted(
                            unit,
                            digest,
                            self.rules.unit_bytes[unit],
                            tuple(offers[digest]),
                            self._bound(unit, offers[digest], job.work),
                        )
                        for unit, digest in wants
                    ),
                )
            )
        self._reduce_complete_units()

    def _cancel_job(self) -> None:
        if self._job and self._job.is_fetching:
            self._effects.append(CancelFetch(Purpose.REDUCE))
        self._job = None

    def _reduce_complete_units(self) -> None:
        job = self._job
        if job is None:
            return
        for unit, values in job.inputs.items():
            if unit in job.asked or any(digest not in self._stored for _, digest in values):
                continue
            job.asked.add(unit)
            weighed = self._weights(job.work, [peer for peer, _ in values])
            self._effects.append(Reduce(job.roster_id, unit, values, weighed))

    def _weights(
        self, work: Mapping[PeerId, int], peers: Sequence[PeerId]
    ) -> tuple[int, ...] | None:
        """What the values of a unit weigh: the tokens of their sources [W1]."""
        return weights(work, peers)

    def _on_unit_reduced(self, event: UnitReduced) -> None:
        self._have([event.result.digest])
        job = self._job
        if job is None or job.roster_id != event.roster_id or event.unit not in job.inputs:
            return
        job.results[event.unit] = event.result
        if job.is_done:
            self._report()

    def _report(self) -> None:
        """Tells the convener what is done and whose values could not be had."""
        job = self._job
        assert job is not None
        missing: dict[PeerId, str] = {}
        for values in job.inputs.values():
            for _, digest in values:
                if digest not in self._stored:
                    missing |= job.failed.get(digest, {})
        missing.pop(self.me, None)
        # Once the first are left out, the next round's roster meets the others.
        missing = dict(sorted(missing.items())[:MAX_MISSING])
        units = sorted(job.results)
        # In several messages if need be: each must stay under 64 KiB.
        for start in range(0, max(1, len(units)), MAX_RESULTS):
            results = {unit: job.results[unit] for unit in units[start : start + MAX_RESULTS]}
            signed = self._sign(reduced_statement(self.rules.run, job.roster_id, results))
            self._post(
                job.ballot.convener, Reduced(job.ballot, job.roster_id, results, missing, signed)
            )
