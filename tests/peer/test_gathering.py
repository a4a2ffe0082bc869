"""The invitation of a founder stays the same until its run is founded."""

from pathlib import Path

from swarm.network.identity import load_or_create_identity
from swarm.network.invitations import read_invitation
from swarm.peer.gathering import gathering_of
from swarm.peer.state_directory import StateDirectory
from swarm.protocol.invitation import GATHERING, as_text


def test_a_founder_that_is_started_again_gathers_with_the_same_line(tmp_path: Path) -> None:
    identity = load_or_create_identity(tmp_path / "key")
    state = StateDirectory.unlocked(tmp_path)
    first = gathering_of(state, identity, 3)
    assert gathering_of(state, identity, 3) == first
    assert first.run.startswith(GATHERING) and first.invitation.invitation.uses == 2
    assert read_invitation(as_text(first.invitation)) == first.invitation
    assert (tmp_path / "gathering").stat().st_mode & 0o777 == 0o600
    state.end_gathering()
    state.end_gathering()
    second = gathering_of(state, identity, 3)
    assert second.run != first.run and second.invitation.secret != first.invitation.secret
    (tmp_path / "gathering").write_text("damaged")
    assert gathering_of(state, identity, 3).run != second.run
