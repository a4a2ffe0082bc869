"""swarm-invite: prints an invitation to a run, which swarm-peer --invitation takes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from peers.command_line.options import Options, option, options, program
from swarm import durable
from swarm.errors import InvitationError, StateError
from swarm.protocol.values.invitation import MAX_INVITES, MAX_ROUND, MAX_USES, MAX_WEIGHT, as_text

if TYPE_CHECKING:
    from swarm.peer.machine.state_directory import RunDirectory
    from swarm.protocol.values.manifest import Manifest

PACE_ROUNDS = 32
"""Number of the last rounds whose mean is the present pace."""
DEFAULT_ROUNDS = 1000


@program("swarm-invite")
@options("state_dir", "identity_path", "run_id", "log_format", "log_level")
@option("--uses", type=click.IntRange(1, MAX_USES), default=1, help="How many peers may join.")
@option(
    "--rounds",
    dest="good_for",
    type=click.IntRange(min=1),
    default=DEFAULT_ROUNDS,
    help="Valid for this many rounds from now.",
)
@option(
    "--invites",
    type=click.IntRange(0, MAX_INVITES),
    default=0,
    help="How many peers each guest may invite in turn.",
)
@option(
    "--weight",
    type=click.IntRange(1, MAX_WEIGHT),
    default=1,
    help="Trust each guest with the work of this many members: 8 for a node of eight GPUs.",
)
@option(
    "--for",
    dest="guest",
    metavar="PEER",
    help="Vouch for this peer alone, which may be a member: start it with --invitation.",
)
def main(
    given: Options, *, uses: int, good_for: int, invites: int, weight: int, guest: str | None
) -> None:
    """Prints one line with which others join this peer's run and vote at once.

    The founder of a run may invite, and so may guests whose invitation allows it. The program needs
    only the state directory, also while the peer runs. Anybody who has the line may join with it,
    so pass it on in private. A line of --for is worth nothing to other peers.

    The work that a member may claim is limited by that of the others. A guest with a larger
    --weight may claim more. If that guest lies, its values have this share of every mean.

    An invitation ends with a round and not at an hour, since all peers must agree on whether it is
    valid. stderr shows the hour, estimated from the run's present pace.
    """
    from swarm.network.rounds.record_file import RecordFile  # loads hivemind and torch
    from swarm.network.runs.signed_invitations import invite  # loads hivemind and torch
    from swarm.network.wire.identity import load_or_create_identity, public_key_of  # not for --help
    from swarm.peer.machine.state_directory import (
        current_run_of,  # loads hivemind and torch
        identity_path_of,  # loads hivemind and torch
    )

    folder = given.state_dir.expanduser()
    run_id, directory = current_run_of(folder, given.run_id)
    path = identity_path_of(folder, given.identity_path)
    if not path.exists():
        raise StateError(
            f"{path} is missing",
            hint="name the --state-dir of a peer of the run, or its key with --identity-path",
        )
    identity = load_or_create_identity(path)
    record = RecordFile(directory.record_path).read()
    if record is None:
        raise StateError(f"{directory.path} has no record: this peer has not joined yet")
    tip = record.tip
    require_anchor(tip, identity.peer_id, (1 if guest else uses) * (weight + invites))
    if guest and (uses != 1 or not public_key_of(guest)):
        raise InvitationError(
            f"--for {guest} names one peer by its id",
            hint="leave --uses out; a peer's id is in its log and in swarm-monitor",
        )
    last_round = min(tip.round + good_for, MAX_ROUND)
    invitation = invite(
        identity,
        run_id,
        uses=uses,
        last_round=last_round,
        invites=invites,
        guest=guest,
        weight=weight,
    )
    hours = hours_of(good_for, events_of(directory))
    pace = f", about {hours:.1f} hours at the run's present pace" if hours is not None else ""
    click.echo(
        f"Good for {uses} peer(s) until round {last_round}, {good_for} from now{pace}:", err=True
    )
    click.echo(as_text(invitation))


def require_anchor(tip: Manifest, me: str, needed: int) -> None:
    """Refuses to write an invitation that no peer would accept.

    Args:
        tip: newest manifest of the run.
        me: id of the inviter.
        needed: number of peers that the invitation takes from the inviter's allowance.

    Raises:
        InvitationError: this peer may not invite, or not this many peers.
    """
    if not tip.is_anchor(me):
        raise InvitationError(
            "this peer is no anchor of the run: it did not found it, and its invitation does not "
            "let it invite others",
            hint=f"ask its founder, {tip.founding.founder}",
        )
    member = tip.members.get(me)
    if me != tip.founding.founder and member and needed > member.invites - member.given:
        raise InvitationError(
            f"this peer may let in {member.invites - member.given} more peers, and this "
            f"invitation takes {needed}",
            hint="give a smaller --uses, --invites or --weight",
        )


def events_of(directory: RunDirectory) -> list[tuple[int, float]]:
    """Round and time (in seconds) of each manifest in a run's history. Skips incomplete lines."""
    seen = []
    for line in durable.read_lines(directory.events_path):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("event") == "applied":
            seen.append((int(event["round"]), float(event["time"])))
    return seen


def hours_of(rounds: int, seen: Iterable[tuple[int, float]]) -> float | None:
    """Hours of a number of rounds, by the last rounds in the history. None if they are too few."""
    last = list(seen)[-PACE_ROUNDS:]
    if len(last) < 2 or last[-1][0] <= last[0][0]:
        return None
    seconds = (last[-1][1] - last[0][1]) / (last[-1][0] - last[0][0])
    return rounds * seconds / 3600


if __name__ == "__main__":
    main()
