"""What the peers at the given addresses say, and what it means that none of them says anything.

An address that was given is a word about which run is meant. Where nobody is there, a run on disk
may still be gone on with by the addresses of its own peers, as after all of them were killed; by
others' it must not be, nor may a run be founded beside them.
"""

from __future__ import annotations

import logging

from swarm.errors import CorruptState, NobodyReachable
from swarm.network.finding import told_by
from swarm.network.record_file import RecordFile
from swarm.peer.host import Host
from swarm.peer.state_directory import RunDirectory, StateDirectory
from swarm.protocol.manifest import PeerId

logger = logging.getLogger(__name__)

NEW_S = 6.0
"""How long peers that were never met are asked; others once, as they may well be gone for good."""


async def runs_there(host: Host, run_id: str) -> bool:
    """Whether the run on disk is that of the given addresses, as far as anybody there says.

    Args:
        host: with a run on disk.
        run_id: of that run.

    Raises:
        NobodyReachable: nobody there says anything, and none of them was met in that run.
    """
    entrances = others_at(host)
    is_new = bool(entrances) and met_in(run_id, host.state).isdisjoint(entrances)
    told = await told_by(host.node, entrances, NEW_S if is_new else 0.0)
    same = [run for run in told.runs if run.record.run == run_id]
    is_other = bool(told.runs or told.preparing) and not same
    if is_other:
        logger.info("run=%s is not what runs there; joining what does", run_id)
        return False
    for run in same:
        host.state.run(run_id).add_entered_by(run.publishers)
    if is_new and not same:
        raise NobodyReachable(
            f"no peer at {_addresses(host)} says which run it is in, and none of them was met in "
            f"{run_id}, the run in --state-dir {host.state.path}",
            hint="check the address, and that the other peer runs; without --initial-peers this "
            f"peer goes on with {run_id}",
        )
    return True


def require_reached(host: Host) -> None:
    """Refuses to found a run beside addresses at which there may be others that train it.

    Raises:
        NobodyReachable: nobody at the given addresses answers.
    """
    entrances = others_at(host)
    if entrances and host.node.neighbours.isdisjoint(entrances):
        raise NobodyReachable(
            f"no peer answers at {_addresses(host)}, so no run is founded",
            hint="check the address, and that the other peer runs; without --initial-peers the run "
            "is founded",
        )


def others_at(host: Host) -> list[PeerId]:
    """The other peers at the given addresses: all machines may be given the same ones."""
    return [peer for peer in host.node.entrances if peer != host.node.peer_id]


def met_in(run_id: str, state: StateDirectory) -> frozenset[PeerId]:
    """Peers whose addresses may have led into a run on disk.

    They are the members in its record, its founder, those by whom it was entered, and all that have
    ever answered this peer, but for the members of other runs on disk.
    """
    directory = state.run(run_id)
    others = (_members_in(state.run(other)) for other in state.run_ids if other != run_id)
    answered = {text.rpartition("/")[2] for text, answered_at in state.known_peers if answered_at}
    entered_by = directory.read_entered_by()
    return _members_in(directory).union(entered_by, answered.difference(*others))


def _members_in(directory: RunDirectory) -> frozenset[PeerId]:
    try:
        record = RecordFile(directory.record_path).read()
    except CorruptState:  # told by whoever goes on with it
        record = None
    return frozenset({*record.tip.members, record.tip.founding.founder} if record else ())


def _addresses(host: Host) -> str:
    return ", ".join(host.config.network.initial_peers)
