"""What a founder answers until its run can be announced, and who of several founders goes first.

Between the decision to found a run and its announcement lie minutes to hours, in which the text is
read and the first values are made. Whoever asks a founder meanwhile which run it is in is told the
fingerprint of the configuration, and waits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from swarm.protocol.digests import Buffer
from swarm.protocol.manifest import PeerId

_IS_PREPARING = re.compile(rb"preparing ([0-9a-f]{64})")


def encode_preparing(fingerprint: str) -> bytes:
    """The answer of a peer that founds a run with this configuration."""
    return f"preparing {fingerprint}".encode()


def decode_preparing(answer: Buffer) -> str | None:
    """The fingerprint in such an answer of a stranger; None of all other bytes."""
    match = _IS_PREPARING.fullmatch(answer)
    return match[1].decode() if match else None


def is_forestalled(
    me: PeerId,
    fingerprint: str,
    *,
    preparing: Mapping[PeerId, str],
    announced: Iterable[str],
    is_beside: bool,
) -> bool:
    """Whether a peer that prepares a run is to leave founding to others, or must not found.

    Of peers that prepare at the same time and ask each other, the one with the smallest id goes on
    and the others wait for it, so that neither all of them found nor all wait.

    Args:
        me: this peer.
        fingerprint: of the run that it prepares.
        preparing: who else does at the addresses that it was given, and the run's fingerprint.
        announced: fingerprints of the runs that those there are in.
        is_beside: whether a run beside others is meant, so that only equal ones count.
    """
    there = {of for peer, of in preparing.items() if peer < me}.union(announced)
    return fingerprint in there if is_beside else bool(there)
