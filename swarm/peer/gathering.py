"""The invitation with which a founder gathers the peers of a new run [R8]."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from swarm.network.identity import Identity
from swarm.network.invitations import invite
from swarm.peer.state_directory import StateDirectory
from swarm.protocol.invitation import GATHERING, MAX_USES, PrivateInvitation


@dataclass(frozen=True)
class Gathering:
    """A run that is being founded.

    Attributes:
        run: how it is called until it has an id.
        invitation: for the peers that its founder waits for.
    """

    run: str
    invitation: PrivateInvitation


def gathering_of(state: StateDirectory, identity: Identity, wait_for_peers: int) -> Gathering:
    """The same at every start until the run is founded, so that a line stays good.

    Args:
        state: of the founder.
        identity: of the founder.
        wait_for_peers: how many peers begin the run, the founder included.
    """
    kept = state.read_gathering()
    if kept is None:
        kept = secrets.token_hex(16), secrets.token_hex(32)
        state.write_gathering(*kept)
    name, secret = kept
    run, uses = f"{GATHERING}{name}", min(wait_for_peers - 1, MAX_USES)
    return Gathering(run, invite(identity, run, uses=uses, last_round=0, secret=secret))
