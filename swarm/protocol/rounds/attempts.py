"""Which numbers of attempts are believed [A5]: one message must not use up what is left of them.

Ballots are compared, so whoever promises a high one can follow no lower one. Honest attempts grow
by one at a takeover, and a takeover takes a poll period at least. One member that leaps to the last
number there is would end all rounds of a height for ever.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm.protocol.manifest import PeerId
from swarm.protocol.messages import MAX_ATTEMPT, Ballot

LEAP = 1024
"""Attempts that others may have made without this peer: more than an hour of takeovers without a
pause. A peer that was away for longer believes the second member that says so."""


def attempt_problem(
    ballot: Ballot,
    source: PeerId,
    claims: Mapping[PeerId, int],
    *,
    passed_s: float,
    takeover_s: float,
) -> str | None:
    """Why a ballot's attempt cannot have come about by takeovers, or None.

    It may exceed what another member has named by `LEAP`, and by what takeovers could add since
    this peer is at this height. An attempt that its sender named counts for nothing: so a liar
    gets on only as honest members do, by `LEAP` a takeover, and needs half a year at one height for
    2^31.

    Args:
        ballot: of a message.
        source: the member that sent it.
        claims: the highest attempt that each member has named at this height, believed or not.
        passed_s: since this peer has the tip, or has started.
        takeover_s: the least time between two attempts.
    """
    others = max((attempt for peer, attempt in claims.items() if peer != source), default=0)
    limit = min(others + LEAP + int(passed_s / takeover_s), MAX_ATTEMPT)
    if ballot.attempt <= limit:
        return None
    return (
        f"attempt {ballot.attempt} is implausible: no other member has named more than {others} "
        f"in {passed_s:.0f} s (limit {limit})"
    )
