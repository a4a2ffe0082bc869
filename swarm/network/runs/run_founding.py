"""How a run begins: its founder gathers peers, writes manifest 0 and announces it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf

from swarm.config import RunConfig
from swarm.errors import NobodyReachable
from swarm.network.node.node import Node
from swarm.network.runs.joiner import present_peers, publish_peer
from swarm.network.runs.run_records import heard, publish
from swarm.network.runs.run_search import POLL_S, Announced, announced_runs, runs_of
from swarm.network.runs.signed_invitations import proves
from swarm.protocol.membership.ownership import NO_ROOMS, assign
from swarm.protocol.records.records import PeerRecord, RunRecord, RunState, runs_key, shortened
from swarm.protocol.rounds.policies.deals import first_book
from swarm.protocol.rounds.policies.rules import Rules
from swarm.protocol.values import manifest
from swarm.protocol.values.layout import Layout

logger = logging.getLogger(__name__)

FOUNDER_SILENT_S = 60.0
"""A gathering run without an announcement of its founder for this long will not begin."""
SAY_AGAIN_S = 60.0
"""Interval at which a peer logs that the founder does not count it."""
NOT_COUNTED = (
    "the run gathers {} peers and counts only those with its founder's invitation, which this peer "
    "lacks: start this peer with the founder's whole line, --invitation included, or wait until "
    "the run has begun"
)
"""A peer without the invitation logs this sentence and puts it into its record."""


def founding_manifest(
    founding: manifest.Founding,
    run: RunConfig,
    layout: Layout,
    initial: Mapping[manifest.Unit, tuple[manifest.Digest, int]],
    present: Mapping[manifest.PeerId, float],
    *,
    rooms: Mapping[manifest.PeerId, int] = NO_ROOMS,
) -> manifest.Manifest:
    """Manifest 0: the initial state, with the peers that are present as its electorate.

    Args:
        founding: the founder, the configuration and the held-out tokens.
        run: the run configuration.
        layout: units of the run.
        initial: digest and size of every unit's initial value.
        present: capacity of each member.
        rooms: number of experts that fit each member's machine; without a number, all fit.
    """
    members = {
        peer: manifest.Member(0, present[peer], room=rooms.get(peer, manifest.ALL_EXPERTS))
        for peer in sorted(present)
    }
    owners = assign(
        {},
        present,
        sorted(present),
        stale=(),
        rooms=rooms,
        owners_per_expert=run.ownership.owners_per_expert,
        num_experts=run.model.num_experts,
        seed=founding.nonce,
    ).owners
    book = first_book(founding, members, Rules.of("", run, layout))
    return manifest.Manifest(
        run="",
        generation=manifest.FOUNDING_GENERATION,
        height=0,
        round=0,
        kind=manifest.Kind.FOUNDING,
        parent=None,
        founding=founding,
        step=0,
        tokens=0,
        merged=0,
        members=members,
        contributors=tuple(sorted(present)),
        sources={},
        owners=owners,
        entries={
            unit.unit: manifest.Entry(*initial[unit.unit], 0, founding.founder, unit.codec)
            for unit in layout.units
        },
        cursor=book.cursor,
        holes=book.holes,
        dealt=book.dealt,
    )


async def gather(
    node: Node,
    announcement: RunRecord,
    mine: Callable[[], PeerRecord],
) -> dict[manifest.PeerId, PeerRecord]:
    """Announces a gathering run and waits for its peers; returns their records."""
    said_s = 0.0
    while True:
        await heard(_announce(node, announcement, mine), None)
        here = await heard(present_peers(node, announcement.run), {})
        present = {
            peer: said for peer, said in here.items() if _is_counted(peer, said, announcement)
        }
        present[node.peer_id] = mine()
        if len(present) >= announcement.wait_for_peers:
            kept = [node.peer_id, *sorted(present.keys() - {node.peer_id})]
            return {peer: present[peer] for peer in kept[: announcement.wait_for_peers]}
        others = len({*here} - {*present})
        if time.monotonic() - said_s > 10:
            said_s = time.monotonic()
            logger.info(
                "waiting for peers: %d of %d are here%s",
                len(present),
                announcement.wait_for_peers,
                f", and {others} without the invitation" if others else "",
            )
        await asyncio.sleep(POLL_S)


def _is_counted(peer: manifest.PeerId, said: PeerRecord, announcement: RunRecord) -> bool:
    """Whether a peer counts at the founding, since it has the invitation or gathering is open."""
    key, run = announcement.key, announcement.run
    return not key or (said.possession != "" and proves(said.possession, key, run, peer))


async def keep_gathering(
    node: Node, announcement: RunRecord, mine: Callable[[], PeerRecord]
) -> None:
    """Repeats the announcement of a run that has gathered its peers, until cancelled."""
    while True:
        await heard(_announce(node, announcement, mine), None)
        await asyncio.sleep(POLL_S)


async def _announce(node: Node, announcement: RunRecord, mine: Callable[[], PeerRecord]) -> None:
    await publish(node, runs_key(node.peer_id), announcement)
    await publish_peer(node, announcement.run, mine())


async def await_founding(
    node: Node,
    gathering: RunRecord,
    mine: Callable[[], PeerRecord],
) -> Announced:
    """Waits in a gathering run for the founder's announcement of manifest 0, and returns it.

    If the founder was restarted and gathers under another name, this peer follows it. A peer that
    the founder does not count gives the reason in its record, and logs it once a minute.

    Raises:
        NobodyReachable: the founder's announcement expired.
    """
    last_seen_s, said_s, newest = time.monotonic(), -inf, gathering
    while True:
        shown = mine()
        if not _is_counted(node.peer_id, shown, newest):
            why = NOT_COUNTED.format(newest.wait_for_peers)
            shown = replace(shown, reason=shortened(why))
            if time.monotonic() - said_s > SAY_AGAIN_S:
                said_s = time.monotonic()
                logger.warning("%s", why)
        await heard(publish_peer(node, newest.run, shown), None)
        told = await heard(runs_of(node, [gathering.founder]), [])
        told = told or await heard(announced_runs(node), [])
        announced = [run for run in told if _is_of(run, gathering)]
        if announced and announced[0].record.state is RunState.RUNNING:
            return announced[0]
        if announced:
            last_seen_s, newest = time.monotonic(), announced[0].record
        if time.monotonic() - last_seen_s > FOUNDER_SILENT_S:
            raise NobodyReachable("the founder of the run disappeared before the run began")
        await asyncio.sleep(POLL_S)


def _is_of(announced: Announced, gathering: RunRecord) -> bool:
    """Whether the founder itself announces the run that it gathers for."""
    said, record = gathering, announced.record
    return gathering.founder in announced.publishers and (
        (said.founder, said.name, said.fingerprint, said.config)
        == (record.founder, record.name, record.fingerprint, record.config)
    )
