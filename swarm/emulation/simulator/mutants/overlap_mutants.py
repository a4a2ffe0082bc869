"""Rules of overlapping rounds and of slices, removed one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from swarm.emulation.simulator.faults.extended import OVERLAPPED
from swarm.emulation.simulator.mutants.mutants import Mutant
from swarm.emulation.simulator.peers.participant import under
from swarm.protocol.rounds import Rules
from swarm.protocol.training import Training
from swarm.protocol.training.adoption import Adoption
from swarm.protocol.training.local_progress import Ahead, Reading, Tally
from swarm.protocol.values.manifest import Digest, Manifest, Unit
from swarm.protocol.values.schedule import Schedule
from swarm.protocol.values.work import Book, Counts, next_book

# A method without its rule ignores the rule's inputs.
# ruff: noqa: ARG002


class _RestIsDealtToOthers(Rules):
    def next_book(self, book: Book, counted: Counts, quotas: Counts) -> Book:
        return next_book(book, counted, quotas)


class _ForgetsWhatIsBehind(Ahead):
    def decided(self, *, is_counted: bool, is_lost: bool) -> int:
        tokens = super().decided(is_counted=is_counted, is_lost=is_lost)
        self.behind = Tally()
        return tokens


class _CountsTwice(Ahead):
    def decided(self, *, is_counted: bool, is_lost: bool) -> int:
        return super().decided(is_counted=False, is_lost=is_lost)


class _CountsWhatIsLost(Ahead):
    def decided(self, *, is_counted: bool, is_lost: bool) -> int:
        return super().decided(is_counted=is_counted, is_lost=False)


def _loop_of(ahead: type[Ahead]) -> type[Training]:
    class Loop(Training):
        def resume(self) -> None:
            super().resume()
            known, self.ahead = self.ahead, ahead()
            self.ahead.flight, self.ahead.behind = known.flight, known.behind

    return Loop


class _AnyLineIsOwn(Reading):
    def goes_on(self, before: Manifest, after: Manifest, tokens: int) -> bool:
        return True


class _OtherLineCounted(Training):
    async def run(self) -> Manifest:
        self.reading = _AnyLineIsOwn(self.rules, self.me)
        return await super().run()


class _TwoInFlight(Training):
    def may_train(self) -> bool:
        self.ahead.flight = None
        return super().may_train()


_O = OVERLAPPED["O"]
OVERLAP_MUTANTS: Mapping[str, Mutant] = {
    "rest_dealt_to_others": Mutant(
        "overlapped deals: samples that a member has read ahead stay its own",
        rules=under(_RestIsDealtToOthers),
        mix=_O,
    ),
    "behind_forgotten": Mutant(
        "overlap accounting: steps that stay are counted, and not read again",
        training=_loop_of(_ForgetsWhatIsBehind),
        mix=_O,
    ),
    "counted_twice": Mutant(
        "overlap accounting: steps are counted once", training=_loop_of(_CountsTwice), mix=_O
    ),
    "lost_steps_counted": Mutant(
        "overlap accounting: steps that restart are not counted",
        training=_loop_of(_CountsWhatIsLost),
        mix=_O,
    ),
    "other_line_counted": Mutant(
        "overlap accounting: samples that another chain deals to others are not counted",
        training=_OtherLineCounted,
        mix=replace(OVERLAPPED["U"], is_sliced=True),
    ),
    "two_in_flight": Mutant(
        "overlapped rounds: one offer is undecided", training=_TwoInFlight, mix=_O
    ),
}


class _InSlotOnly(Schedule):
    def _is_overdue(self, tip: Manifest, unit: Unit) -> bool:
        return False


class _OverdueForgotten(Training):
    def due(self) -> Sequence[Unit]:
        return _InSlotOnly(**vars(self.rules.schedule)).due_of(self.me, self.tip)


class _Unscheduled(Rules):
    schedule = Schedule()


class _AllOffered(Training):
    def due(self) -> Sequence[Unit]:
        return Schedule().due_of(self.me, self.tip)


class _RenewedPartsKept(Training):
    def decide(self, manifest: Manifest, previous: Digest) -> Adoption:
        return replace(super().decide(manifest, previous), kept_parts=frozenset(self.part_bases))


class _PartsDropped(Training):
    def decide(self, manifest: Manifest, previous: Digest) -> Adoption:
        return replace(super().decide(manifest, previous), kept_parts=frozenset())


class _OfferForgotten(Training):
    def _find_offer(self) -> None:
        pass


class _StepsTakenForKnown(Training):
    def decide(self, manifest: Manifest, previous: Digest) -> Adoption:
        self.offers += [self.again] if self.again else []
        return super().decide(manifest, previous)


def _by_peer(me: str, schedule: Schedule) -> Schedule:
    class Own(Schedule):
        def due(self, tip: Manifest) -> frozenset[Unit]:
            return frozenset(super().due(replace(tip, round=tip.round + sum(me.encode()))))

    return Own(**vars(schedule))


class _OwnStagger(Training):
    def due(self) -> Sequence[Unit]:
        return _by_peer(self.me, self.rules.schedule).due_of(self.me, self.tip)


def _own_rules(me: str, rules: Rules) -> Rules:
    own = replace(rules)
    vars(own)["schedule"] = _by_peer(me, rules.schedule)
    return own


SLICE_MUTANTS: Mapping[str, Mutant] = {
    "overdue_forgotten": Mutant(
        "due units: a missed unit is due until it is renewed", training=_OverdueForgotten
    ),
    "units_not_due": Mutant(
        "due units: only units that are due are offered",
        rules=under(_Unscheduled),
        training=_AllOffered,
    ),
    "stagger_by_peer": Mutant(
        "slice schedule: all peers have the same schedule", rules=_own_rules, training=_OwnStagger
    ),
    "renewed_parts_kept": Mutant(
        "S3: a renewed part restarts from its mean", training=_RenewedPartsKept
    ),
    "parts_dropped": Mutant(
        "shared progress: a part that was not due keeps its steps", training=_PartsDropped
    ),
    "offer_forgotten": Mutant(
        "P6: an offer is made once, also after a crash", training=_OfferForgotten
    ),
    "steps_taken_for_known": Mutant(
        "P6: the steps behind an older offer are not in the model", training=_StepsTakenForKnown
    ),
}
