"""Invitations are signed by the peer that they name, and prove nothing without their key."""

import json
from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.errors import HostileInput, InvitationError
from swarm.network.rounds.inbound import verified
from swarm.network.runs.signed_invitations import credential_for, invite, is_of, read_invitation
from swarm.network.wire.identity import Identity, load_or_create_identity
from swarm.protocol.messages.messages import (
    Accepted,
    Ballot,
    Header,
    Message,
    Propose,
    Ready,
    ready_statement,
)
from swarm.protocol.values.invitation import Credential, as_text, possession_statement
from tests.protocol.round_pump import found, make_rules

RUN = "run-1"
TIP = found(make_rules(), ["A", "B"])
HEADER = Header(TIP.code, TIP.digest, TIP.generation)


@pytest.fixture(scope="module")
def anchor(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return load_or_create_identity(tmp_path_factory.mktemp("anchor") / "identity.key")


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return load_or_create_identity(tmp_path_factory.mktemp("guest") / "identity.key")


@pytest.fixture(scope="module")
def thief(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return load_or_create_identity(tmp_path_factory.mktemp("thief") / "identity.key")


def messages_with(credential: Credential, peer: str) -> list[Message]:
    """All messages that may contain a credential without votes."""
    manifest = replace(TIP, invited={peer: credential})
    return [
        Ready(Ballot(0, "A"), None, None, 1.0, credential=credential),
        Ready(Ballot(0, "A"), None, Accepted(Ballot(0, "A"), manifest), 1.0),
        Propose(Ballot(0, "A"), manifest, ()),
    ]


def signed_by(identity: Identity, message: Message) -> Message:
    """The message as this peer sends it."""
    if not isinstance(message, Ready):
        return message
    statement = ready_statement(RUN, HEADER.tip, message.declared.declaration)
    return replace(message, signature=identity.sign(statement))


def is_refused(credential: Credential, peer: Identity) -> bool:
    """Whether each message in which this peer shows the invitation is refused."""
    for message in messages_with(credential, peer.peer_id):
        with pytest.raises(HostileInput, match="invitation"):
            verified(HEADER, signed_by(peer, message), peer.peer_id, RUN)
    return not is_of(credential, peer.peer_id)


def test_a_guest_that_was_given_the_key_is_taken(anchor: Identity, guest: Identity) -> None:
    private = read_invitation(as_text(invite(anchor, RUN, uses=3, last_round=7)))
    invitation = private.invitation
    assert (invitation.run, invitation.uses, invitation.last_round) == (RUN, 3, 7)
    assert invitation.invites == 0, "guests are no anchors unless the line says so"
    credential = credential_for(private, guest)
    assert is_of(credential, guest.peer_id)
    for message in messages_with(credential, guest.peer_id):
        message = signed_by(guest, message)
        assert verified(HEADER, message, guest.peer_id, RUN) == message


def test_what_was_public_or_relayed_proves_nothing_of_another_peer(
    anchor: Identity, guest: Identity, thief: Identity
) -> None:
    credential = credential_for(invite(anchor, RUN, uses=3, last_round=7), guest)
    assert is_refused(credential, thief), "the whole credential, as a manifest has it"
    statement = possession_statement(RUN, thief.peer_id)
    own = b64encode(thief.sign(statement)).decode()
    assert is_refused(replace(credential, possession=own), thief), "signed with its own key"
    bare = b64encode(guest.sign(possession_statement(RUN, guest.peer_id))).decode()
    assert is_refused(replace(credential, possession=bare), guest), "not with the invitation's"


def test_a_possession_of_another_run_is_refused(anchor: Identity, guest: Identity) -> None:
    private = invite(anchor, RUN, uses=3, last_round=7)
    other = invite(anchor, "run-2", uses=3, last_round=7, secret=private.secret)
    stolen = credential_for(other, guest).possession
    assert is_refused(Credential(private.invitation, stolen), guest)


def test_a_guest_neither_sends_nor_keeps_the_key(anchor: Identity, guest: Identity) -> None:
    private = invite(anchor, RUN, uses=3, last_round=7)
    credential = credential_for(private, guest)
    sent = json.dumps(credential, default=vars)
    assert private.secret not in sent and private.secret not in repr(private)


def test_an_invitation_for_one_peer_needs_no_secret_and_is_worth_nothing_to_another(
    anchor: Identity, guest: Identity, thief: Identity
) -> None:
    text = as_text(invite(anchor, RUN, uses=1, last_round=7, guest=guest.peer_id))
    private = read_invitation(text)
    assert not private.secret
    assert is_of(credential_for(private, guest), guest.peer_id)
    with pytest.raises(InvitationError, match="is for the peer"):
        credential_for(private, thief)


@pytest.mark.parametrize(
    "change",
    [
        {"uses": 1024},
        {"invites": 7},
        {"last_round": 10**6},
        {"run": "run-2"},
        {"key": "1" * 32},
        {"inviter": "A"},
    ],
)
def test_what_was_changed_since_is_refused(
    anchor: Identity, guest: Identity, change: dict[str, object]
) -> None:
    private = invite(anchor, RUN, uses=3, last_round=7)
    credential = credential_for(private, guest)
    changed = replace(private.invitation, **change)  # type: ignore[arg-type]
    assert is_refused(replace(credential, invitation=changed), guest)
    with pytest.raises(InvitationError, match="damaged"):
        read_invitation(as_text(replace(private, invitation=changed)))


def test_what_is_no_signature_is_refused(anchor: Identity, guest: Identity) -> None:
    credential = credential_for(invite(anchor, RUN, uses=3, last_round=7), guest)
    for text in ("abc", ""):
        assert is_refused(replace(credential, possession=text), guest)
        unsigned = replace(credential.invitation, signature=text)
        assert is_refused(replace(credential, invitation=unsigned), guest)


def test_a_line_with_the_key_of_another_is_damaged(anchor: Identity, tmp_path: Path) -> None:
    private = invite(anchor, RUN, uses=3, last_round=7)
    with pytest.raises(InvitationError, match="damaged"):
        read_invitation(as_text(replace(private, secret="1" * 64)))
