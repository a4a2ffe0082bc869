"""swarm-invite prints input for swarm-peer, and a refused joiner learns the reason."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from peers.invite import hours_of
from peers.invite import main as swarm_invite
from swarm import durable
from swarm.config import RunConfig, parse_config
from swarm.errors import ConfigError, InvitationError, StateError
from swarm.network.rounds.record_file import RecordFile
from swarm.network.runs.signed_invitations import invite, read_invitation
from swarm.network.wire.identity import load_or_create_identity
from swarm.peer.text.run_request import require_admission, require_closed_founding
from swarm.protocol.messages.events import Record
from swarm.protocol.values.invitation import Credential, PrivateInvitation, Used, as_text, from_text
from swarm.protocol.values.manifest import Manifest, Member
from tests.protocol.round_pump import found, make_rules

RUN = "demo-0123456789abcdef"
DEMO = Path(__file__).parents[2] / "configs" / "runs" / "demo.toml"


def state_of(folder: Path, founder: str | None = None) -> tuple[Path, Manifest]:
    """A state directory of a peer at round 40 of a run, which it or another peer has founded."""
    me = load_or_create_identity(folder / "identity.key").peer_id
    tip = replace(found(make_rules(), [founder or me, me]), run=RUN, round=40, height=40)
    run = folder / "runs" / RUN
    run.mkdir(parents=True)
    RecordFile(run / "record").write(Record(tip, None, None))
    durable.write_file(folder / "current_run", f"{RUN}\n".encode())
    events = [{"event": "applied", "round": n, "time": 100.0 * n} for n in range(10, 41)]
    lines = [json.dumps(event) for event in events] + ['{"torn']
    (run / "events.jsonl").write_text("\n".join(lines))
    return folder, tip


def run_invite(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(swarm_invite, ["--state-dir", str(folder), *options])


def test_the_founder_prints_one_line_that_a_joiner_takes(tmp_path: Path) -> None:
    folder, tip = state_of(tmp_path)
    result = run_invite(folder, "--uses", "3", "--rounds", "72")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    private = read_invitation(line)
    invitation = private.invitation
    assert len(private.secret) == 64
    assert (invitation.run, invitation.uses, invitation.last_round) == (RUN, 3, 112)
    assert "until round 112, 72 from now, about 2.0 hours" in result.stderr
    assert tip.is_anchor(invitation.inviter)


def test_the_key_that_a_peer_was_given_once_signs_for_it(tmp_path: Path) -> None:
    folder, _ = state_of(tmp_path / "peer")
    key = (folder / "identity.key").rename(tmp_path / "mine.key")
    (folder / "settings").write_text(json.dumps({"network.identity_path": str(key)}))
    result = run_invite(folder)
    assert result.exit_code == 0, result.output
    assert (
        read_invitation(result.stdout.strip()).invitation.inviter
        == load_or_create_identity(key).peer_id
    )


def test_who_is_no_anchor_is_refused(tmp_path: Path) -> None:
    folder, _ = state_of(tmp_path, founder="F")
    result = run_invite(folder)
    assert result.exit_code == InvitationError.exit_code == 13
    assert "no anchor" in result.stderr and not result.stdout


def test_the_founder_vouches_for_a_member_by_its_id(tmp_path: Path) -> None:
    folder, _ = state_of(tmp_path / "peer")
    guest = load_or_create_identity(tmp_path / "guest.key")
    result = run_invite(folder, "--for", guest.peer_id, "--invites", "4")
    assert result.exit_code == 0, result.output
    private = read_invitation(result.stdout.strip())
    assert not private.secret, "the line is useless to others"
    assert (private.invitation.key, private.invitation.invites) == (guest.peer_id, 4)
    for options in (("--for", "somebody"), ("--for", guest.peer_id, "--uses", "2")):
        result = run_invite(folder, *options)
        assert result.exit_code == InvitationError.exit_code and "by its id" in result.stderr


def test_a_guest_invites_as_many_as_its_own_invitation_says(tmp_path: Path) -> None:
    folder, tip = state_of(tmp_path, founder="F")
    me = load_or_create_identity(folder / "identity.key").peer_id
    members = {"F": Member(0, 1.0), me: Member(0, 1.0, invites=3, given=1)}
    tip = replace(tip, members=members)
    RecordFile(folder / "runs" / RUN / "record").write(Record(tip, None, None))
    assert run_invite(folder, "--uses", "2").exit_code == 0
    for options in (("--uses", "3"), ("--invites", "2")):
        result = run_invite(folder, *options)
        assert result.exit_code == InvitationError.exit_code
        assert "may let in 2 more peers, and this invitation takes 3" in result.stderr


def test_a_directory_without_a_peer_of_a_run_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    assert run_invite(tmp_path).exit_code == StateError.exit_code
    assert not list(tmp_path.iterdir()), "no key was made"
    folder, _ = state_of(tmp_path / "peer")
    (folder / "identity.key").unlink()
    assert run_invite(folder).exit_code == StateError.exit_code
    assert run_invite(folder, "--run-id", "../../etc").exit_code == StateError.exit_code


def test_hours_follow_from_the_last_rounds() -> None:
    assert hours_of(10, []) is None and hours_of(10, [(1, 5.0)]) is None
    assert hours_of(10, [(1, 5.0), (1, 9.0)]) is None, "a merge is no round"
    assert hours_of(36, [(1, 0.0), (3, 200.0)]) == pytest.approx(1.0)
    assert hours_of(36, [(0, -1e9), *((n, 100.0 * n) for n in range(1, 33))]) == pytest.approx(1.0)


# ---------------------------------------------------------------- the joiner


def shown(private: PrivateInvitation) -> Credential:
    """A joiner's credential. Its signature is not checked here."""
    return Credential(private.invitation, "")


def demo(*overrides: str) -> RunConfig:
    return parse_config(RunConfig, DEMO.read_text(), source="demo", overrides=overrides)


def test_admission_is_a_setting_that_all_peers_share() -> None:
    assert demo().run.admission == "open"
    assert demo("run.admission=invited").fingerprint() != demo().fingerprint()
    with pytest.raises(ConfigError, match="admission"):
        demo("run.admission=closed")


def test_a_run_for_peers_that_are_invited_gathers_no_strangers() -> None:
    """Every peer that is present when a run is founded gets a vote."""
    closed, is_open = demo("run.admission=invited"), demo()
    with pytest.raises(ConfigError, match="strangers would be let in") as refused:
        require_closed_founding(closed, is_open=True)
    assert "the whole line" in str(refused.value.hint)
    require_closed_founding(closed, is_open=False)
    require_closed_founding(is_open, is_open=True)


def test_a_joiner_is_told_why_a_run_would_not_take_it_in(tmp_path: Path) -> None:
    _, tip = state_of(tmp_path)
    anchor = load_or_create_identity(tmp_path / "identity.key")
    good = shown(invite(anchor, RUN, uses=1, last_round=41))
    closed, is_open = demo("run.admission=invited"), demo()

    def refusal(run: RunConfig, given: Credential | None, at: Manifest = tip) -> str:
        with pytest.raises(InvitationError) as refused:
            require_admission(RUN, run, at, "Z", given)
        return str(refused.value)

    require_admission(RUN, closed, tip, "Z", good)
    require_admission(RUN, is_open, tip, "Z", None)
    require_admission(RUN, closed, tip, anchor.peer_id, None)
    assert "no invitation; the run takes in only peers that are invited" in refusal(closed, None)
    late = replace(tip, round=41)
    used = replace(tip, invitations={good.invitation.name: Used(41, ("Y",))})
    for run in (closed, is_open):
        assert "expired: it was good until round 41" in refusal(run, good, late)
        assert "used up" in refusal(run, good, used)
        other = shown(invite(anchor, "demo-fedcba9876543210", uses=1, last_round=41))
        assert "another run" in refusal(run, other)
    assert "without --invitation" in refusal(is_open, good, late)


@pytest.mark.parametrize("spoil", [lambda t: t[:-4] + "AAAA", lambda t: t[:-40], lambda t: "x" + t])
def test_a_damaged_line_is_a_typed_error(tmp_path: Path, spoil: Callable[[str], str]) -> None:
    anchor = load_or_create_identity(tmp_path / "identity.key")
    line = as_text(invite(anchor, RUN, uses=1, last_round=41))
    with pytest.raises(InvitationError, match=r"damaged|not an invitation"):
        read_invitation(spoil(line))
    assert from_text(line)
