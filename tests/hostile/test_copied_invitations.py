"""An invitation copied from a manifest or a READY is worthless."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from peers.invite import main as swarm_invite
from swarm.network.node.node import Node
from swarm.network.runs.signed_invitations import credential_for, invite
from swarm.protocol.messages.message_bytes import encode
from swarm.protocol.values.invitation import Credential, PrivateInvitation, credential_of
from tests.hostile.forger import Forger, forger
from tests.hostile.victim import RUN, Victim, post, signed_ready, wait_until
from tests.network.conftest import Peers
from tests.protocol.round_pump import header_of
from tests.scenarios.swarms import ROUND_S, has_rounds, peer_id, read_record, rounds, started_swarm

Steal = Callable[[PrivateInvitation, Node, Node], Credential]
"""The invitation, the guest's node and the thief's -> the thief's credential."""


def whole(private: PrivateInvitation, guest: Node, thief: Node) -> Credential:
    """The whole credential from a manifest or a READY."""
    return credential_for(private, guest.identity)


def signed_by_the_thief(private: PrivateInvitation, guest: Node, thief: Node) -> Credential:
    """The invitation, with a possession by a key that the thief has."""
    mine = replace(private.invitation, key=thief.peer_id)
    own = credential_for(PrivateInvitation(mine, ""), thief.identity)
    return replace(own, invitation=private.invitation)


def renamed(private: PrivateInvitation, guest: Node, thief: Node) -> Credential:
    """The same, and the invitation says that the thief's key is its own."""
    mine = replace(private.invitation, key=thief.peer_id)
    return credential_for(PrivateInvitation(mine, ""), thief.identity)


def of_another_run(private: PrivateInvitation, guest: Node, thief: Node) -> Credential:
    """A possession by the right key, for the thief, in another run."""
    other = replace(private, invitation=replace(private.invitation, run="run-2"))
    return replace(credential_for(other, thief.identity), invitation=private.invitation)


def say_ready(sender: Node, victim: Victim, credential: Credential) -> None:
    tip = victim.chain.tip
    ready = signed_ready(sender, RUN, tip, to=victim.node.peer_id, credential=credential)
    post(sender, victim, encode(header_of(tip), ready)[0])


@pytest.mark.parametrize("steal", [whole, signed_by_the_thief, renamed, of_another_run])
def test_a_live_peer_refuses_what_a_thief_has_copied(
    peers: Peers, victim: Victim, steal: Steal
) -> None:
    guest, thief = peers.node(), peers.node()
    private = invite(victim.node.identity, RUN, uses=9, last_round=9)
    say_ready(guest, victim, credential_for(private, guest.identity))
    wait_until(lambda: victim.received_from(guest) == 1)
    say_ready(thief, victim, steal(private, guest, thief))
    wait_until(lambda: victim.inbound.refused["bad_signature"] == 1)
    assert victim.received_from(thief) == 0


@pytest.mark.exhaustive  # half a minute of real peers
@pytest.mark.scenario
def test_a_thief_gets_no_vote_and_is_no_anchor_in_a_run_of_real_peers(tmp_path: Path) -> None:
    settings = ["run.rounds=100000", 'run.admission="invited"', "merging.alpha=0.0"]
    with started_swarm(tmp_path, 1, settings) as swarm:
        founder = swarm.peers[0]
        swarm.wait_until(has_rounds(1), what="a round", timeout_s=2 * ROUND_S)
        options = ["--state-dir", str(founder.folder), "--uses", "2", "--invites", "3"]
        line = CliRunner().invoke(swarm_invite, options).stdout.strip()
        friend = swarm.add(["--initial-peers", founder.join_address(), "--invitation", line])
        swarm.wait_until(lambda _: bool(rounds(friend)), what="the friend", timeout_s=2 * ROUND_S)
        (path,) = friend.folder.glob("runs/*/credential")
        copied = credential_of(path.read_bytes())
        assert copied is not None
        with forger([founder.join_address()]) as liar:
            seen = rounds(founder)[-1]["round"]
            for _ in range(4):
                ask_to_join(liar, copied)
                seen += 1
                swarm.wait_until(
                    lambda _, seen=seen: rounds(founder)[-1]["round"] >= seen,
                    what="rounds",
                    timeout_s=2 * ROUND_S,
                )
            thief = liar.node.peer_id
        tip = read_record(founder).tip
        assert tip.members.keys() == {peer_id(founder), peer_id(friend)}
        assert not tip.is_anchor(thief) and tip.is_anchor(peer_id(friend))
        assert tip.voters == tip.members.keys()


def ask_to_join(liar: Forger, credential: Credential) -> None:
    """Sends each member a READY that is right except for the credential."""
    tip = liar.look()
    me = liar.node
    ready = signed_ready(me, liar.run.run, tip, to=me.peer_id, credential=credential)
    liar.say(header_of(tip), ready)
