"""When a convener stops waiting for offers [C3]. Pure.

No local step may be thrown away without a reason, so every peer that lives is held to its own word
of when it will be ready. Nothing here is learned from how long earlier rounds took: a wait would
lengthen the next, and who convenes for the first time, or starts again, knows of none.

A peer is not waited for longer than that pays, either, once a quorum has offered: each second of
waiting costs as many voters as have offered one second of theirs, and leaving a late peer out costs
the time that it has spent on its shared tensors in this round, and on fetching the tip before that.
Waiting may pay for several voters together though for none of them alone: a second passes once for
all.
Where rounds overlap a second of waiting costs nothing as long as those voters take their next steps
meanwhile [V8].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.manifest import PeerId

DONE, DONE_AGAIN = 8, 32
"""A peer that says that it is done and has not offered writes its offer, or hangs. It may exceed
its word by this part of it, and by less after an earlier wait for it brought nothing."""
NEW_SHARE = 4
"""Voters wait for a new trainee, after a quorum of them has offered, no longer than one such part
of what the fastest of them has worked: any newcomer may say that it will be ready soon. The
experts of a machine slower than that still count, as those that come late [O2]."""
PATIENT_EVERY = 8
"""One round in so many waits for new trainees as for voters: a slow machine gets its first round
that counts it, and after that it is waited for as long as rounds go on to count it."""
BEHIND = 2
"""In these rounds, and in all of a lone voter, members that still fetch the tip are waited for, at
most so many times what the fastest of the voters has worked: a lone voter needs nothing from
anybody, and its rounds may be shorter than others need to fetch its values; those then are never
where it is."""
UNEQUAL = 16
"""Without a quorum of offers nobody is waited for that needs so many times what the fastest did."""


@dataclass(frozen=True)
class Word:
    """What a member said of when it will have finished its local steps."""

    total_s: float
    """From the tip to the end of its steps."""
    overdue_s: float
    """Since they should have ended; negative before."""


@dataclass(frozen=True)
class Absent:
    """A member that has not offered its shared tensors yet."""

    peer: PeerId
    silent_s: float
    """Since its last READY, or since it was asked first; 0 for the convener itself."""
    remaining_s: float | None
    """Until it will have finished its local steps, as it said last; None: it did not say."""
    worked_s: float
    """How long it has worked since the tip."""
    word: Word | None = None
    """None: it did not say."""
    contributed: bool = True
    """To the tip, or nobody did; False: the last wait for the member brought nothing."""
    is_gone: bool = False
    """Whether its machine refused the last message to it."""
    is_new: bool = False
    """Whether it is a trainee that the tip did not count, and this no round that is patient."""
    votes: bool = True
    is_behind: bool = False
    """Whether it lives but still fetches the tip, in a round that waits for that."""
    fetched_s: float = 0.0
    """How long it fetched the tip before it could work: that is lost with its work, or a peer whose
    line is as slow as a round would fetch one tip after the other and never be counted."""

    @property
    def invested_s(self) -> float:
        """What is lost if it is left out."""
        return self.worked_s + self.fetched_s


class Absentees(Collection[Absent]):
    """Members that have not offered, each looked at once, and not before it is asked for.

    One that is waited for decides, so the convener of 256 looks at one or two a READY.
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
        """What is known of one of them."""
        if peer not in self._seen:
            self._seen[peer] = self._look(peer)
        return self._seen[peer]


@dataclass(frozen=True)
class OpenRoster:
    """What a convener knows when it decides whether to wait on."""

    age_s: float
    """Of the campaign."""
    waited_s: float | None
    """Since a quorum had offered; None: none has."""
    num_offers: int
    """Of voters, with shared tensors; those of peers that were left out do not count. The cost
    of waiting is counted in their seconds alone, or keys that offer at once would have a slow voter
    left out."""
    num_members: int
    quorum_answers: bool
    """Whether a quorum has answered, with an offer or without."""
    fastest_s: float
    """How long the fastest of the voters worked that have offered; 0 if none has."""
    absent: Collection[Absent]
    num_of_trainees: int = 0
    """Offers of trainees, likewise."""
    spare_s: float = 0.0
    """Where rounds overlap: until the first of the voters that have offered would wait, less what
    the transfers take. Waiting costs nothing before [V8]."""

    @property
    def num_all(self) -> int:
        """Offers with shared tensors, of voters and trainees."""
        return self.num_offers + self.num_of_trainees

    @property
    def names(self) -> str:
        """Of those that are waited for."""
        return ", ".join(absent.peer for absent in self.absent)


def why_close(roster: OpenRoster, timers: Timers) -> str | None:
    """Why no more offers are waited for, with the numbers; None while they are."""
    if not roster.num_all:
        return None
    why = _why(roster, timers)
    return why and (f"roster closed with {roster.num_all} of {roster.num_members} offers: {why}")


def keeps_word(roster: OpenRoster, timers: Timers) -> bool:
    """Whether there is somebody to wait for, so that a campaign may be as old as it is [C7]."""
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
    """Why a member is not waited for; None while it is."""
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
    """Whether it pays to wait for some voters that are all late: the soonest, as many as it takes.

    Trainees are worth what each is by itself, or many keys that are late would hold up few voters.
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
    """Whether all that speaks against waiting for a voter is how long that would take."""
    is_voter = absent.votes and not absent.is_new
    if not is_voter or absent.is_behind or absent.remaining_s is None:
        return False
    return not (_why_unheard(absent, timers) or _why_overdue(absent, roster, timers))


def _why_unheard(absent: Absent, timers: Timers) -> str | None:
    """Why nothing is to be expected of a member once a quorum has offered."""
    return _why_silent(absent, timers.grace_s if absent.is_gone else timers.silence_s)


def _why_no_longer(roster: OpenRoster, timers: Timers) -> str | None:
    """Why no new trainee is waited for any more, whatever it says."""
    if roster.waited_s is None:
        return "is new, and the voters have given up waiting for a quorum"
    limit_s = max(timers.silence_s, roster.fastest_s / NEW_SHARE)
    if roster.waited_s < limit_s:
        return None
    return f"is new, and voters wait for {roster.waited_s:.1f} s (limit {limit_s:.1f})"


def _why_left_behind(roster: OpenRoster) -> str | None:
    """A peer that is left behind loses all rounds until the next patient one; half is put on it."""
    assert roster.waited_s is not None
    num_behind = sum(absent.is_behind for absent in roster.absent)
    worth = num_behind * PATIENT_EVERY / 2 / max(1, roster.num_offers)
    limit_s = roster.fastest_s * min(BEHIND, worth)
    if roster.waited_s < limit_s:
        return None
    return f"still fetches the tip, {roster.waited_s:.1f} s after a quorum (limit {limit_s:.1f})"


def is_patient(round_number: int) -> bool:
    """Whether this round waits for new trainees as for voters, and for those that fetch [3.4]."""
    return round_number % PATIENT_EVERY == 0


def _why_silent(absent: Absent, limit_s: float) -> str | None:
    if absent.silent_s < limit_s:
        return None
    gone = "gone, " if absent.is_gone else ""
    return f"{gone}silent for {absent.silent_s:.1f} s (limit {limit_s:.1f})"


def _why_late(absent: Absent, roster: OpenRoster, timers: Timers) -> str | None:
    """By its own word it needs longer than pays; overdue time counts, or no wait would end."""
    if absent.remaining_s is None or absent.remaining_s <= timers.grace_s:
        return None
    if _wait_s(absent, roster) * roster.num_offers <= absent.invested_s:
        return None
    overdue_s = _overdue_s(absent)
    overdue = f", {overdue_s:.1f} s after its word" if overdue_s else ""
    spare = f", {roster.spare_s:.1f} s of it beside their steps" if roster.spare_s else ""
    return (
        f"needs {absent.remaining_s:.1f} s more{overdue}{spare}, which costs {roster.num_offers} "
        f"peers more than its {absent.invested_s:.1f} s of work are worth"
    )


def _wait_s(absent: Absent, roster: OpenRoster) -> float:
    """How long others wait for a member that has said how long it needs [V8]."""
    return max(0.0, (absent.remaining_s or 0.0) + _overdue_s(absent) - roster.spare_s)


def _overdue_s(absent: Absent) -> float:
    return max(0.0, absent.word.overdue_s) if absent.word else 0.0


def _why_overdue(absent: Absent, roster: OpenRoster, timers: Timers) -> str | None:
    """It has not kept its word; a member that gave none is expected to be as fast as a quorum."""
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
    """By how much a word may be exceeded while a quorum waits."""
    floor_s = timers.roster_s
    if absent.word is None:
        floor_s = timers.roster_late_s if absent.contributed else floor_s
        return max(floor_s, word.total_s / DONE_AGAIN)
    if not absent.remaining_s:
        return max(floor_s, word.total_s / (DONE if absent.contributed else DONE_AGAIN))
    worth_s = absent.invested_s / max(1, roster.num_offers)
    return max(timers.grace_s, min(word.total_s * (timers.straggler_factor - 1), worth_s))


def _why_hopeless(absent: Absent, roster: OpenRoster, timers: Timers) -> str | None:
    """Without a quorum of offers a word is what counts: others depend on it, not on the fastest."""
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
