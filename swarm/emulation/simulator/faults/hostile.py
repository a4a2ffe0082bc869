"""Fault classes with liars, which run only by name; see swarm/emulation/README.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from swarm.emulation.simulator.faults import extended, strangers
from swarm.emulation.simulator.faults.faults import CLASSES, LONG_S, Mix, Scenario
from swarm.emulation.simulator.faults.guests import all_invited
from swarm.emulation.simulator.faults.liar import CONVENING, COPIED, OTHERS, VOTES, WORK
from swarm.emulation.simulator.faults.world import Weather, World
from swarm.emulation.simulator.peers.participant import Character, Setup
from swarm.protocol.values.manifest import PeerId


@dataclass(frozen=True)
class LyingMix(extended.ExtendedMix):
    """The ingredients of the class with a liar."""

    forgeries: tuple[int, int] = (0, 6)
    """Number of forgeries that strangers send."""
    votes_twice: bool = False
    """Whether the liar votes for everything and hides its votes."""
    overclaims: bool = False
    """Whether the liar lies only about its work and, as a convener, about invitations. Strangers
    show copies of invitations."""

    def drawing(self) -> type[extended.ExtendedDraw]:
        """The class that draws its scenarios."""
        return _LyingDraw


class _LyingDraw(extended.ExtendedDraw):
    """One scenario with a liar while it is drawn."""

    mix: LyingMix

    def scenario(self) -> Scenario:
        random, mix = self.random, self.mix
        for _ in range(random.randint(*mix.forgeries)):
            forgery = strangers.FORGERIES[random.choice(sorted(strangers.FORGERIES))]
            forgery = strangers.copied_invitation if mix.overclaims else forgery
            self._plan(random.uniform(0.0, self.heal_s), strangers.forge, forgery)
        scenario = super().scenario()
        founders = [peer for peer in self.victims if peer not in self.strangers]
        lies = {random.choice(sorted(CONVENING)), *random.sample(OTHERS, random.randint(0, 2))}
        if mix.votes_twice:
            lies |= set(VOTES)
        if mix.overclaims:
            lies = {WORK, COPIED}
        setup = replace(
            scenario.setup, liar=random.choice(founders or self.victims), lies=frozenset(lies)
        )
        return replace(scenario, setup=setup)


@dataclass(frozen=True)
class AwayMix(extended.ExtendedMix):
    """The ingredients of the class with a peer that was away."""

    step_s: tuple[float, float] = (0.3, 0.6)
    """Seconds of all local steps of a round, so that there are many rounds."""
    change_s: float = 130.0
    """Seconds between two changes of the whole membership."""
    changes: int = 3
    """Number of changes while the peer is away. One more change comes before its absence."""

    def drawing(self) -> type[extended.ExtendedDraw]:
        """The class that draws its scenarios."""
        return _AwayDraw


class _AwayDraw(extended.ExtendedDraw):
    """One scenario of a returning peer, while the scenario is drawn."""

    mix: AwayMix

    def scenario(self) -> Scenario:
        """Members come in successive groups of three. One more peer joins at the first change.

        This peer goes away while the second group is in charge, so the first group is no quorum of
        the newest tip that this peer knows. Each newcomer follows a proof with gaps, and could not
        prove its tip to a peer whose own tip is in a gap. So it fills the gaps from others.
        """
        mix, random = self.mix, self.random
        groups = [self.peers[start : start + 3] for start in range(0, 3 * (mix.changes + 2), 3)]
        away, last = self.peers[-1], mix.change_s * (mix.changes + 1)
        self.strangers = [peer for peer in self.peers if peer not in groups[0]]
        self.victims, self.stable = [], []
        scenario = super().scenario()
        self.script = []
        self.heal_s = last + 40.0
        for number, group in enumerate(groups[1:], 1):
            begins = mix.change_s * (number - 1) + 10.0
            for peer in group:
                self._plan(begins + random.uniform(0.0, 5.0), World.join_proved, peer)
            for place, peer in enumerate(groups[number - 1]):
                self._plan(begins + 20.0 + 12.0 * place, World.leave, peer)
        self._plan(12.0, World.join_proved, away)
        self._plan(90.0, World.crash, away)
        returns = last + random.uniform(5.0, 10.0)
        for _ in range(4):
            self._plan(
                returns - 1.0 + random.uniform(0.0, 30.0),
                strangers.forge,
                strangers.older_keys(away),
            )
        self._plan(returns, World.reboot, away)
        script = tuple(sorted(self.script, key=lambda line: line[0]))
        weather = Weather(delay_s=0.03)
        return replace(scenario, script=script, heal_s=self.heal_s, weather=weather, rough={})

    def _with_guests(self, setup: Setup) -> Setup:
        """Gives every peer an invitation, so that all voters change at once."""
        return replace(setup, credentials=all_invited(self.strangers, setup))

    def _character(self, peer: PeerId) -> Character:
        seconds = self.random.uniform(*self.mix.step_s)
        return replace(super()._character(peer), local_steps_s=seconds, sync_s=0.05, reduce_s=0.1)


_P = LyingMix(
    peers=(3, 8),
    minority_only=True,
    strangers=0.1,
    window_s=LONG_S,
    kinds={"crash": 2.0, "trap": 2.0, "pause": 1.0, "cut": 1.0, "leave": 1.0},
    faults=(0, 6),
    loss=0.1,
    merging=0.2,
    round_seconds=3.2,
)
LYING: dict[str, extended.ExtendedMix] = {
    "P": _P,
    "W": replace(_P, peers=(4, 4), votes_twice=True, faults=(0, 0), loss=0.0, strangers=0.0),
    "Y": replace(_P, has_deltas=True),
    "X": replace(_P, peers=(3, 8), overclaims=True, strangers=0.5, faults=(0, 3), forgeries=(2, 5)),
    "Q": AwayMix(
        peers=(16, 16),
        small=0.0,
        faults=(0, 0),
        loss=0.0,
        slow=0.0,
        merging=0.0,
        most_owners=2,
    ),
}
_WHOLE: Mapping[str, Mix] = {
    **CLASSES,
    **extended.EXTENDED,
    **extended.OVERLAPPED,
    **extended.LARGE,
    **LYING,
    **strangers.KEYS,
}
SLICED: Mapping[str, Mix] = {
    name.lower(): replace(mix, is_sliced=True) for name, mix in _WHOLE.items()
}
"""Each class again, with rounds that exchange only a slice of the units."""
ALL_CLASSES: Mapping[str, Mix] = {**_WHOLE, **SLICED}
WORDS: Mapping[str, str] = {
    "anything": "A",
    "minority": "B",
    "majority-death": "C",
    "haste": "D",
    "hasty-cuts": "E",
    "lost-disks": "F",
    "many-peers": "G",
    "clocks": "H",
    "slow-links": "J",
    "moments": "K",
    "combined": "L",
    "deafness": "M",
    "timed-rounds": "N",
    "overlap": "O",
    "liar": "P",
    "absence": "Q",
    "deltas": "R",
    "64-peers": "S",
    "256-peers": "T",
    "timed-overlap": "U",
    "vanishing-keys": "V",
    "double-votes": "W",
    "overclaims": "X",
    "liar-deltas": "Y",
}
"""Words for the fault classes. The letters stay, because schedules are drawn from them."""
SLICED_WORD = "sliced-"
"""Prefix of a class's word that means the same class with slices."""


def class_letters(names: str) -> list[str]:
    """Letters of fault classes.

    Args:
        names: words, or runs of letters, separated by commas: "liar,sliced-deltas", "ABC".

    Raises:
        KeyError: a class does not exist. The error's argument is the class.
    """
    found: list[str] = []
    for name in filter(None, names.split(",")):
        letter = WORDS.get(name.removeprefix(SLICED_WORD))
        if letter:
            found.append(letter.lower() if name.startswith(SLICED_WORD) else letter)
            continue
        if set(name) - ALL_CLASSES.keys():
            raise KeyError(name)
        found += name
    return found
