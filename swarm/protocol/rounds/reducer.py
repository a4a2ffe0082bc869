"""Reducer: fetches and averages the values of its units (reduction), and fetches experts ahead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace

from swarm.protocol.messages import events
from swarm.protocol.messages.messages import Ballot, Reduced, ReducedUnit, Roster, reduced_statement
from swarm.protocol.messages.schemas import MAX_MISSING, MAX_RESULTS
from swarm.protocol.rounds.acceptor import Acceptor
from swarm.protocol.rounds.blobs import Blobs
from swarm.protocol.rounds.contributor import Contributor
from swarm.protocol.rounds.durable_state import Role
from swarm.protocol.rounds.policies.deals import work_of
from swarm.protocol.rounds.policies.rosters import Sources, assign_reducers, sources_of
from swarm.protocol.rounds.policies.rules import Rules
from swarm.protocol.rounds.policies.slow_links import Relays, relays_among
from swarm.protocol.rounds.policies.update_bounds import update_bound
from swarm.protocol.rounds.state import Work
from swarm.protocol.rounds.withholding import Withholding
from swarm.protocol.values.manifest import Digest, Manifest, PeerId, Unit
from swarm.protocol.values.updates import REFUSALS

MUCH_MORE = 2
SLOW = "has not come yet"
"""Reason for a value that is missing although no peer has failed to send it."""


@dataclass
class Job:
    """The units of one roster that this peer averages."""

    me: PeerId
    ballot: Ballot
    roster_id: Digest
    inputs: dict[Unit, tuple[tuple[PeerId, Digest], ...]]
    """For each unit, the values to average, ordered by peer id."""
    work: Mapping[PeerId, int]
    """Tokens of each offer in the roster; they decide the weight of its values."""
    asked: set[Unit] = field(default_factory=set)
    """Units whose averaging was started."""
    results: dict[Unit, ReducedUnit] = field(default_factory=dict)
    failed: dict[Digest, dict[PeerId, str]] = field(default_factory=dict)
    """Inputs that a peer did not send, with the reason."""
    refused: set[PeerId] = field(default_factory=set)
    """Peers whose values were reported as refused."""
    is_fetching: bool = False
    since: float = 0.0
    """When the job began."""
    ahead: frozenset[Digest] = frozenset()
    """Blobs that are fetched during the job, before they are proposed (fetch ahead)."""

    @property
    def is_done(self) -> bool:
        """Whether every unit has its mean."""
        return len(self.results) == len(self.inputs)

    @property
    def asked_of(self) -> set[PeerId]:
        """Other peers whose values this peer averages."""
        return {peer for values in self.inputs.values() for peer, _ in values} - {self.me}

    def unserved(self, stored: Container[Digest]) -> set[PeerId]:
        """Peers that did not send values, or are far behind. A refused value counts as sent.

        Policy: withholding exclusion.
        """
        failed = {
            peer
            for digest, reasons in self.failed.items()
            for peer, why in reasons.items()
            if digest not in stored and why not in REFUSALS
        }
        return (failed | self.slow(stored)) & self.asked_of

    def slow(self, stored: Container[Digest]) -> set[PeerId]:
        """Peers with far more outstanding values than the median peer (roster repair).

        If most peers have many outstanding values, none is named, since this peer's own link may be
        slow.
        """
        out = Counter[PeerId]()
        for values in self.inputs.values():
            out.update({peer: digest not in stored for peer, digest in values if peer != self.me})
        usual = sorted(out.values())[(len(out) - 1) // 2] if out else 0
        return {peer for peer, num in out.items() if num > MUCH_MORE * usual}


def wanted_ahead(
    roster: Roster,
    sources: Sources,
    averaged: Mapping[Unit, PeerId],
    me: PeerId,
    *,
    stored: Collection[Digest],
    tip: Manifest,
    rules: Rules,
) -> tuple[events.BlobWanted, ...]:
    """Experts that a manifest of this roster would take verbatim, to be fetched early.

    Their values are checked with the bound for a peer that trained no tokens in this round. The
    proposal's bound is never narrower, whatever work the roster claims. So these blobs need no
    second check (update bounds).

    Args:
        roster: a valid roster of the tip.
        sources: the sources of each unit of its offers.
        averaged: the reducer of each averaged unit.
        me: this peer, which has its own values. Each peer begins with another writer.
        stored: blobs that are here.
        tip: the manifest from which the offers were trained.
        rules: the run's rules.

    Returns:
        The delta of a unit that moves by a delta, otherwise the value. Its sources are relays, or
        the writer if there are no relays (blob relays). After the proposal, the writer is asked
        too.
    """
    relays = relays_among(averaged.values(), roster.reducers)
    wanted = _wants(roster, sources, averaged, tip, rules)
    wants = [want for want in wanted if want.digest not in stored and want.sources != (me,)]
    after = [want for want in wants if want.sources[0] > me]
    before = [want for want in wants if want.sources[0] < me]
    return tuple(_through(relays, want, me) for want in (*after, *before))


def _through(relays: Relays, want: events.BlobWanted, me: PeerId) -> events.BlobWanted:
    (writer,) = want.sources
    others = relays.before(want.digest, writer, me)
    return replace(want, sources=others) if others else want


def _wants(
    roster: Roster, sources: Sources, averaged: Collection[Unit], tip: Manifest, rules: Rules
) -> Iterator[events.BlobWanted]:
    for unit, ((writer, value), *others) in sources.items():
        if unit not in rules.expert_units or unit in averaged or others:
            continue
        delta = roster.offers[writer].units[unit].delta
        bound = update_bound(unit, [writer], {}, tip, rules)
        size = rules.moved_bytes[unit]
        yield events.BlobWanted(unit, delta or value, size, (writer,), bound, delta is not None)


RELIEF_ROUNDS = 4
"""Rounds for which a reducer that was stuck reduces nothing."""


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
            # The round ended without this job's results. Peers that this one cannot reach now will
            # still be out of reach in a minute (roster repair).
            self.work.reduces_from = self.tip.round + RELIEF_ROUNDS
        self._cancel_job()

    def on_roster(self, source: PeerId, roster: Roster) -> None:
        """Starts to average this peer's units; a repeated roster gets the same report."""
        if not self.acceptor.hear_convener(source, "ROSTER", roster.ballot):
            return
        if not roster.offers:  # a heartbeat: the roster gives this peer no units, or there is none
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
        """Suspects peers that sent this peer no values and are not in the new roster.

        Policy: withholding exclusion.

        Both the convener and this peer have missed the values of such peers. The heartbeat of a new
        roster lists no peer, so all count as dropped.
        """
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
                events.BlobWanted(
                    unit,
                    digest,
                    self.rules.offered_bytes[unit],
                    tuple(offers[digest]),
                    self.blobs.bound(unit, offers[digest], job.work),
                    unit in self.rules.averaged_deltas,
                )
                for unit, digest in wants
            )
            self.out.emit(events.Fetch(events.Purpose.REDUCE, fetched))
        if self.peer.fetches_ahead:
            self._fetch_ahead(job, roster, sources, reducers)
        self._reduce_complete_units(job)

    def _fetch_ahead(
        self, job: Job, roster: Roster, sources: Sources, averaged: Mapping[Unit, PeerId]
    ) -> None:
        """Fetches, while means are computed, the experts that will be proposed as offered.

        Policy: fetch ahead.
        """
        stored, tip, rules = self.blobs.stored, self.tip, self.rules
        wants = wanted_ahead(
            roster, sources, averaged, self.me, stored=stored, tip=tip, rules=rules
        )
        if wants:
            job.ahead = frozenset(want.digest for want in wants)
            self.out.emit(events.Fetch(events.Purpose.AHEAD, wants))

    def _cancel_job(self) -> None:
        if self.job and self.job.is_fetching:
            self.out.emit(events.CancelFetch(events.Purpose.REDUCE))
        if self.job and self.job.ahead:
            self.out.emit(events.CancelFetch(events.Purpose.AHEAD))
        self.job = None

    def note_missing(self, event: events.Unobtainable) -> None:
        """Notes an input that a peer did not send; a refused input is reported at once.

        Policies: roster repair, update bounds.
        """
        job = self.job
        if job is None or event.digest in self.blobs.stored or event.digest in job.ahead:
            return  # the acceptor handles missing blobs of a proposal
        job.failed.setdefault(event.digest, {})[event.peer] = event.reason
        if event.reason in REFUSALS and event.peer not in job.refused:
            job.refused.add(event.peer)
            self._report(job)

    def after_blob(self) -> None:
        """Starts the averaging of units whose inputs are complete."""
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
            self.out.emit(events.Reduce(job.roster_id, unit, values, weighed, base))

    def on_unit_reduced(self, event: events.UnitReduced) -> None:
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
        """Reports the finished means, and the peers whose values are missing, to the convener."""
        missing = dict.fromkeys(job.slow(self.blobs.stored), SLOW)
        for values in job.inputs.values():
            for _, digest in values:
                if digest not in self.blobs.stored:
                    missing |= job.failed.get(digest, {})
        missing.pop(self.me, None)
        # The convener gets the others in a report after it has left these out.
        missing = dict(sorted(missing.items())[:MAX_MISSING])
        units = sorted(job.results)
        # The results may need several messages, since each must stay under 64 KiB.
        for start in range(0, max(1, len(units)), MAX_RESULTS):
            results = {unit: job.results[unit] for unit in units[start : start + MAX_RESULTS]}
            signed = self.peer.sign(reduced_statement(self.rules.run, job.roster_id, results))
            self.out.post(
                job.ballot.convener, Reduced(job.ballot, job.roster_id, results, missing, signed)
            )
