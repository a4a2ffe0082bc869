"""Scores as people see them: who says so, members before others, newer rounds before older ones."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from swarm.protocol.manifest import Digest, PeerId
from swarm.protocol.records import ScoreRecord

MAX_SCORES = 200
"""That are shown and remembered."""


@dataclass(frozen=True)
class ScoreRow:
    """A score, and who says so."""

    publisher: PeerId
    member: bool | None
    """Whether that is a member by the newest manifest; None: nobody gave the manifest."""
    manifest_digest: Digest
    round: int
    task: str
    metric: str
    value: float
    samples: int

    @property
    def what(self) -> tuple[PeerId, Digest, str, str]:
        """Of scores that are equal in this the later one counts."""
        return self.publisher, self.manifest_digest, self.task, self.metric


def score_rows(
    records: Mapping[PeerId, ScoreRecord], members: Container[PeerId] | None
) -> tuple[ScoreRow, ...]:
    """The scores of all records, in order; `members` are those of the newest manifest."""
    return in_order(
        ScoreRow(peer, None if members is None else peer in members, **vars(score))
        for peer, record in records.items()
        for score in record.scores
    )


def in_order(scores: Iterable[ScoreRow]) -> tuple[ScoreRow, ...]:
    """At most `MAX_SCORES`. Members' come first, so that nobody else pushes them out."""
    found = sorted(
        scores,
        key=lambda s: (s.member is not True, -s.round, s.task, s.metric, s.publisher, s.value),
    )
    return tuple(found[:MAX_SCORES])
