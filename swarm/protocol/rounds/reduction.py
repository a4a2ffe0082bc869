"""What a reducer remembers of its work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from swarm.protocol.manifest import Digest, PeerId, Unit
from swarm.protocol.messages import Ballot, ReducedUnit
from swarm.protocol.updates import REFUSALS

MUCH_MORE = 2
SLOW = "has not come yet"
"""Why a value is missing that nobody has failed to give."""


@dataclass
class Job:
    """The units of one roster that this peer averages."""

    me: PeerId
    ballot: Ballot
    roster_id: Digest
    inputs: dict[Unit, tuple[tuple[PeerId, Digest], ...]]
    """Of each unit: the values to average, in peer-id order."""
    work: Mapping[PeerId, int]
    """Tokens of each offer in the roster: what its values weigh."""
    asked: set[Unit] = field(default_factory=set)
    """Units whose averaging was started."""
    results: dict[Unit, ReducedUnit] = field(default_factory=dict)
    failed: dict[Digest, dict[PeerId, str]] = field(default_factory=dict)
    """Inputs that a peer did not give, with the reason."""
    refused: set[PeerId] = field(default_factory=set)
    """Peers whose values were reported as refused."""
    is_fetching: bool = False
    since: float = 0.0
    """When it was begun."""
    ahead: frozenset[Digest] = frozenset()
    """What is fetched beside, before it is proposed [D2]."""

    @property
    def is_done(self) -> bool:
        """Whether every unit has its mean."""
        return len(self.results) == len(self.inputs)

    @property
    def asked_of(self) -> set[PeerId]:
        """Other peers whose values are averaged here."""
        return {peer for values in self.inputs.values() for peer, _ in values} - {self.me}

    def unserved(self, stored: Container[Digest]) -> set[PeerId]:
        """Peers whose values could not be had, or not nearly all; refused ones did come [C8]."""
        failed = {
            peer
            for digest, reasons in self.failed.items()
            for peer, why in reasons.items()
            if digest not in stored and why not in REFUSALS
        }
        return (failed | self.slow(stored)) & self.asked_of

    def slow(self, stored: Container[Digest]) -> set[PeerId]:
        """Peers of whose values much more is still out than of a usual peer's [C4].

        Where as much is out of most, the line may be this one's own.
        """
        out = Counter[PeerId]()
        for values in self.inputs.values():
            out.update({peer: digest not in stored for peer, digest in values if peer != self.me})
        usual = sorted(out.values())[(len(out) - 1) // 2] if out else 0
        return {peer for peer, num in out.items() if num > MUCH_MORE * usual}
