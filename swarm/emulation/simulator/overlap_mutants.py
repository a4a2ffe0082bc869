"""Rounds that overlap with local steps, with one rule removed; see `mutants.py`."""

# A method without its rule has no use for what the rule looked at.
# ruff: noqa: ARG002

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from swarm.emulation.simulator.extended import OVERLAPPED
from swarm.emulation.simulator.mutants import Mutant
from swarm.emulation.simulator.taking_part import under
from swarm.protocol.dealing import Book, Counts, next_book
from swarm.protocol.manifest import Manifest
from swarm.protocol.rounds import Rules
from swarm.protocol.training import Training
from swarm.protocol.training.ahead import Ahead, Tally
from swarm.protocol.training.reading import Reading


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
        "T5: what a member has read ahead stays its own", rules=under(_RestIsDealtToOthers), mix=_O
    ),
    "behind_forgotten": Mutant(
        "V6: steps that go on are counted, and not read again",
        training=_loop_of(_ForgetsWhatIsBehind),
        mix=_O,
    ),
    "counted_twice": Mutant("V6: steps are counted once", training=_loop_of(_CountsTwice), mix=_O),
    "lost_steps_counted": Mutant(
        "V6: steps that begin anew are not counted", training=_loop_of(_CountsWhatIsLost), mix=_O
    ),
    "other_line_counted": Mutant(
        "V6: what another line deals to others is not counted",
        training=_OtherLineCounted,
        mix=replace(OVERLAPPED["U"], is_sliced=True),
    ),
    "two_in_flight": Mutant("V1: one offer is undecided", training=_TwoInFlight, mix=_O),
}
