"""When a convener stops waiting for offers (roster deadline). Pure.

No local step may be lost without a reason. So the convener waits for every live peer as long as
that peer's own estimate. It does not use the durations of earlier rounds, since each long wait
would allow a longer one in the next round. A peer that convenes for the first time, or after a
restart, knows no earlier round.

Once a quorum has offered, the convener waits for a peer only as long as the wait pays. Each second
of waiting costs one second of every voter that has offered. Leaving a late peer out costs the time
that it has spent on its steps in this round, and on fetching the tip. A wait may pay for several
late voters together, though for none alone, since all use the same seconds. Where rounds overlap,
waiting costs nothing while the voters that have offered take their next steps (stall deadline).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.manifest import PeerId

DONE, DONE_AGAIN = 8, 32
"""A peer whose announced time is over, but which has not offered, writes its offer or hangs. It may
exceed the announced time by an eighth, or by a 32nd if the last wait for it was useless."""
NEW_SHARE = 4
"""Once a quorum has offered, voters wait for a new trainee for at most a quarter of the time that
the fastest voter has worked, since any newcomer may claim to be ready soon. The experts of a slower
machine still count, as late offers do (late offers)."""
PATIENT_EVERY = 8
"""One round in `PATIENT_EVERY` is *patient*: it waits for new trainees like voters. Such a round
can count a slow machine for the first time. Later rounds then wait for the machine as long as
rounds keep counting it."""
BEHIND = 2
"""Patient rounds, and all rounds of a lone voter, wait for members that still fetch the tip, for at
most this many times the time that the fastest voter has worked. The rounds of a lone voter may be
shorter than the time in which others fetch its values. Without this wait the others would never
reach its tip."""
UNEQUAL = 16
"""Without a quorum of offers, the roster gives up a peer that needs this many times the fastest
peer's time."""


@dataclass(frozen=True)
class Word:
    """A member's estimate (its word) of when its local steps will end."""

    total_s: float
    """Time from the tip to the end of the member's steps."""
    overdue_s: float
    """Time since its steps should have ended; negative before."""


@dataclass(frozen=True)
class Absent:
    """A member that has not offered its shared tensors yet."""

    peer: PeerId
    silent_s: float
    """Time since its last READY, or since it was first asked; 0 for the convener itself."""
    remaining_s: float | None
    """Time to the end of its local steps, by its last estimate; None: it gave none."""
    worked_s: float
    """How long the member has worked on the tip."""
    word: Word | None = None
    """None: it gave no estimate."""
    contributed: bool = True
    """Whether it contributed to the tip, or nobody did. If not, the last wait for it was
    useless."""
    is_gone: bool = False
    """Whether its machine refused the last message."""
    is_new: bool = False
    """Whether it is a trainee that the tip did not count, in a round that is not patient."""
    votes: bool = True
    is_behind: bool = False
    """Whether it lives but still fetches the tip, in a round that waits for such peers."""
    fetched_s: float = 0.0
    """How long it fetched the tip before its steps. This time counts as lost together with its
    work. Otherwise a peer whose fetch takes as long as a round would never be counted."""

    @property
    def invested_s(self) -> float:
        """Seconds of work and fetching that are lost if the member is left out."""
        return self.worked_s + self.fetched_s


class Absentees(Collection[Absent]):
    """Members that have not offered. The state of each is computed once, and only when needed.

    One member to wait for is enough to keep the roster open. So at each READY, the convener of 256
    members computes the state of only one or two.
    """

    def __init__(self, peers: Collection[PeerId], look: Callable[[PeerId], Absent]) -> None:
        self.peers = peers
        self._look = look
        self._seen: dict[PeerId, Absent] = {}

    def __len__(self) -> int:
        return len(self.peers)

    def __iter__(self) -> Iterator[Absent]:
        return map(self.of, self.peers)

    def __contains__(self, absent: object) -> bool:
        return absent in tuple(self)

    def of(self, peer: PeerId) -> Absent:
        """The state of one of these members."""
        if peer not in self._seen:
            self._seen[peer] = self._look(peer)
        return self._seen[peer]


@dataclass(frozen=True)
class OpenRoster:
    """The facts by which a convener decides whether to wait longer."""

    age_s: float
    """Age of the campaign."""
    waited_s: float | None
    """Time since a quorum of voters had offered; None if no quorum has offered."""
    num_offers: int
    """Offers of voters with shared tensors, without those of peers that were left out. Only the
    seconds of these voters count as the cost of waiting. Otherwise anybody with many keys that
    offer at once could have a slow voter left out."""
    num_members: int
    quorum_answers: bool
    """Whether a quorum has answered, with an offer or without."""
    fastest_s: float
    """How long the fastest of the voters with an offer has worked; 0 if none has offered."""
    absent: Collection[Absent]
    num_of_trainees: int = 0
    """Offers of trainees with shared tensors, without those of peers that were left out."""
    spare_s: float = 0.0
    """Where rounds overlap: the time until the first voter with an offer has no steps left, minus
    the time of the transfers. Until then waiting costs nothing (stall deadline)."""

    @property
    def num_all(self) -> int:
        """Offers with shared tensors, of voters and trainees."""
        return self.num_offers + self.num_of_trainees

    @property
    def names(self) -> str:
        """Names of the members for which the roster waits."""
        return ", ".join(absent.peer for absent in self.absent)


def why_close(roster: OpenRoster, timers: Timers) -> str | None:
    """Why the roster waits for no more offers, with the numbers; None while it waits."""
    if not roster.num_all:
        return None
    why = _why(roster, timers)
    return why and (f"roster closed with {roster.num_all} of {roster.num_members} offers: {why}")


def keeps_word(roster: OpenRoster, timers: Timers) -> bool:
    """Whether there is a member to wait for, so that the campaign may grow older.

    Policy: campaign end.
    """
    is_awaited = any(_why_not(absent, roster, timers) is None for absent in roster.absent)
    return is_awaited or _pays_together(roster, timers)


def _why(roster: OpenRoster, timers: Timers) -> str | None:
    if not roster.absent:
        return "nobody else is waited for"
    if roster.waited_s is None and not roster.quorum_answers:
        return None
    if keeps_word(roster, timers):
        return None
    return ", ".join(f"peer {each.peer} {_why_not(each, roster, timers)}" for each in roster.absent)


def _why_not(absent: Absent, roster: OpenRoster, timers: Timers) -> str | None:
    """Why the roster does not wait for a member; None while it does."""
    if absent.is_new and (why := _why_no_longer(roster, timers)):
        return why
    if roster.waited_s is None:
        return _why_silent(absent, timers.roster_late_s) or _why_hopeless(absent, roster, timers)
    if absent.is_behind:
        return _why_left_behind(roster)
    return (
        _why_unheard(absent, timers)
        or _why_late(absent, roster, timers)
        or _why_overdue(absent, roster, timers)
    )


def _pays_together(roster: OpenRoster, timers: Timers) -> bool:
    """Whether waiting pays for several late voters together, the soonest first.

    A trainee is judged by itself. Otherwise many late keys together could delay a few voters.
    """
    if roster.waited_s is None:
        return False
    late = [absent for absent in roster.absent if _is_only_late(absent, roster, timers)]
    invested_s = 0.0
    for absent in sorted(late, key=lambda absent: _wait_s(absent, roster)):
        invested_s += absent.invested_s
        if _wait_s(absent, roster) * roster.num_offers <= invested_s:
            return True
    return False


def _is_only_late(absent: Absent, roster: OpenRoster, timers: Timers) -> bool:
    """Whether the length of the wait is the only reason not to wait for a voter."""
    is_voter = absent.votes and not absent.is_new
    if not is_voter or absent.is_behind or absent.remaining_s is None:
        return False
    return not (_why_unheard(absent, timers) or _why_overdue(absent, roster, timers))


def _why_unheard(absent: Absent, timers: Timers) -> str | None:
    """Why no offer is expected of a member once a quorum has offered; None while one is."""
    return _why_silent(absent, timers.grace_s if absent.is_gone else timers.silence_s)


def _why_no_longer(roster: OpenRoster, timers: Timers) -> str | None:
    """Why the roster no longer waits for new trainees, whatever they announce."""
    if roster.waited_s is None:
        return "is new, and the voters have given up waiting for a quorum"
    limit_s = max(timers.silence_s, roster.fastest_s / NEW_SHARE)
    if roster.waited_s < limit_s:
        return None
    return f"is new, and voters wait for {roster.waited_s:.1f} s (limit {limit_s:.1f})"


def _why_left_behind(roster: OpenRoster) -> str | None:
    """Why the roster does not wait for members that still fetch the tip; None while it does.

    Without the wait, such members miss all rounds until the next patient round.
    """
    assert roster.waited_s is not None
    num_behind = sum(absent.is_behind for absent in roster.absent)
    worth = num_behind * PATIENT_EVERY / 2 / max(1, roster.num_offers)
    limit_s = roster.fastest_s * min(BEHIND, worth)
    if roster.waited_s < limit_s:
        return None
    return f"still fetches the tip, {roster.waited_s:.1f} s after a quorum (limit {limit_s:.1f})"


def is_patient(round_number: int) -> bool:
    """Whether this round waits for new trainees like voters, and for peers that fetch.

    Policy: roster deadline.
    """
    return round_number % PATIENT_EVERY == 0


def _why_silent(absent: Absent, limit_s: float) -> str | None:
    if absent.silent_s < limit_s:
        return None
    gone = "refuses messages, " if absent.is_gone else ""
    return f"{gone}silent for {absent.silent_s:.1f} s (limit {limit_s:.1f})"


def _why_late(absent: Absent, roster: OpenRoster, timers: Timers) -> str | None:
    """Why a wait costs more than it is worth; overdue time counts, so that each wait ends."""
    if absent.remaining_s is None or absent.remaining_s <= timers.grace_s:
        return None
    if _wait_s(absent, roster) * roster.num_offers <= absent.invested_s:
        return None
    overdue_s = _overdue_s(absent)
    overdue = f", {overdue_s:.1f} s after its word" if overdue_s else ""
    spare = f", {roster.spare_s:.1f} s of it during their steps" if roster.spare_s else ""
    return (
        f"needs {absent.remaining_s:.1f} s more{overdue}{spare}, which costs {roster.num_offers} "
        f"peers more than its {absent.invested_s:.1f} s of work are worth"
    )


def _wait_s(absent: Absent, roster: OpenRoster) -> float:
    """How long others wait for a member that has given an estimate (stall deadline)."""
    return max(0.0, (absent.remaining_s or 0.0) + _overdue_s(absent) - roster.spare_s)


def _overdue_s(absent: Absent) -> float:
    return max(0.0, absent.word.overdue_s) if absent.word else 0.0


def _why_overdue(absent: Absent, roster: OpenRoster, timers: Timers) -> str | None:
    """How a member exceeded its estimate. Without an estimate, it should be as fast as a quorum."""
    assert roster.waited_s is not None
    waited_s = roster.waited_s
    word = absent.word or Word(max(0.0, absent.worked_s - waited_s), waited_s)
    limit_s = _slack_s(absent, word, roster, timers)
    if word.overdue_s < limit_s:
        return None
    if absent.word is None:
        return (
            f"did not say when, {waited_s:.1f} s after a quorum had offered (limit {limit_s:.1f})"
        )
    return f"not ready {word.overdue_s:.1f} s after its word (limit {limit_s:.1f})"


def _slack_s(absent: Absent, word: Word, roster: OpenRoster, timers: Timers) -> float:
    """By how much a member may exceed its estimate while a quorum waits."""
    floor_s = timers.roster_s
    if absent.word is None:
        floor_s = timers.roster_late_s if absent.contributed else floor_s
        return max(floor_s, word.total_s / DONE_AGAIN)
    if not absent.remaining_s:
        return max(floor_s, word.total_s / (DONE if absent.contributed else DONE_AGAIN))
    worth_s = absent.invested_s / max(1, roster.num_offers)
    return max(timers.grace_s, min(word.total_s * (timers.straggler_factor - 1), worth_s))


def _why_hopeless(absent: Absent, roster: OpenRoster, timers: Timers) -> str | None:
    """Why the roster does not wait for a member while no quorum has offered; None while it does."""
    word = absent.word
    if word is None:
        if roster.age_s < timers.wordless_s:
            return None
        return f"did not say when for {roster.age_s:.1f} s (limit {timers.wordless_s:.1f})"
    limit_s = max(timers.wordless_s, UNEQUAL * roster.fastest_s)
    if roster.num_offers and word.total_s > limit_s and roster.age_s >= timers.wordless_s:
        return f"needs {word.total_s:.1f} s in all (limit {limit_s:.1f})"
    slack_s = max(timers.roster_late_s, word.total_s * (timers.straggler_factor - 1))
    if word.overdue_s < slack_s:
        return None
    return f"not ready {word.overdue_s:.1f} s after its word (limit {slack_s:.1f})"
