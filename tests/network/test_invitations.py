"""Invitations are signed by the peer that they name."""

from dataclasses import replace

import pytest

from swarm.errors import HostileInput
from swarm.network.identity import Identity, load_or_create_identity
from swarm.network.inbound import verified
from swarm.network.invitations import invite, is_signed
from swarm.protocol.invitation import Invitation, as_text, from_text
from swarm.protocol.messages import (
    Accepted,
    Ballot,
    Header,
    Message,
    Propose,
    Ready,
    ready_statement,
)
from tests.protocol.round_pump import found, make_rules

RUN = "run-1"
TIP = found(make_rules(), ["A", "B"])
HEADER = Header(TIP.code, TIP.digest, TIP.generation)


@pytest.fixture(scope="module")
def anchor(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return load_or_create_identity(tmp_path_factory.mktemp("anchor") / "identity.key")


def messages_with(invitation: Invitation) -> list[Message]:
    """All messages that may hold an invitation which nobody has voted for yet."""
    manifest = replace(TIP, invited={"B": invitation})
    return [
        Ready(Ballot(0, "A"), None, None, 1.0, invitation=invitation),
        Ready(Ballot(0, "A"), None, Accepted(Ballot(0, "A"), manifest), 1.0),
        Propose(Ballot(0, "A"), manifest, ()),
    ]


def signed_by(identity: Identity, message: Message) -> Message:
    """The message as this peer sends it."""
    if not isinstance(message, Ready):
        return message
    statement = ready_statement(RUN, HEADER.tip, message.declared.declaration)
    return replace(message, signature=identity.sign(statement))


def test_what_an_anchor_signed_is_taken(anchor: Identity) -> None:
    invitation = from_text(as_text(invite(anchor, RUN, uses=3, last_round=7)))
    assert is_signed(invitation)
    assert (invitation.run, invitation.uses, invitation.last_round) == (RUN, 3, 7)
    for message in messages_with(invitation):
        message = signed_by(anchor, message)
        assert verified(HEADER, message, anchor.peer_id, RUN) == message


@pytest.mark.parametrize(
    "change",
    [
        {"uses": 1024},
        {"last_round": 10**6},
        {"run": "run-2"},
        {"nonce": "1" * 32},
        {"inviter": "A"},
    ],
)
def test_what_was_changed_since_is_refused(anchor: Identity, change: dict[str, object]) -> None:
    invitation = replace(invite(anchor, RUN, uses=3, last_round=7), **change)  # type: ignore[arg-type]
    assert not is_signed(invitation)
    for message in messages_with(invitation):
        with pytest.raises(HostileInput, match="invitation"):
            verified(HEADER, message, "B", RUN)


def test_what_is_no_signature_is_refused(anchor: Identity) -> None:
    invitation = invite(anchor, RUN, uses=3, last_round=7)
    assert not is_signed(replace(invitation, signature="abc"))
    assert not is_signed(replace(invitation, signature=""))
