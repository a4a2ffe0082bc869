"""What swarm-doctor looks at: this machine, and the peers that it asks what they see."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, fsum
from pathlib import Path

import click

from peers.asked import Asked, entry_of, unless_refused, wanted_of
from peers.findings import Examined, Local, Needs, Sight
from peers.options import Options
from peers.refusals import refusals
from swarm.config import NetworkSection, PeerConfig, RunConfig
from swarm.errors import (
    ConfigError,
    InvitationError,
    NobodyReachable,
    RunMismatch,
    StateError,
    StateLocked,
    SwarmError,
    Unreachable,
)
from swarm.model.cost import cost_of, owned_per_peer
from swarm.network.blobs import BlobStore
from swarm.network.daemon import connection_fault, hosts_of
from swarm.network.direct_door import port_beside
from swarm.network.fetch import Downloads
from swarm.network.finding import find_run, whom_to_ask
from swarm.network.joining import present_peers
from swarm.network.node import Node
from swarm.network.probing import dial_back, greeting, look_at
from swarm.network.tips import newest_tip
from swarm.peer.agreement import require_admission
from swarm.peer.kept_settings import with_kept
from swarm.peer.link_check import Rates, measured_rates, verdict_for
from swarm.peer.machine import plan_here, processor
from swarm.peer.planning import held_bytes
from swarm.peer.state_directory import StateDirectory
from swarm.protocol.fitness import LinkVerdict
from swarm.protocol.ownership import GREED
from swarm.protocol.records import PeerRecord, RunState
from swarm.version import __version__

logger = logging.getLogger(__name__)

START_S = 40.0
LOOK_S = 90.0
FIND_S = 8.0
SETTLE_S = 3.0
SETTINGS = Path("/proc/sys/net/ipv4")
ASKED = 6
"""Peers that are asked what they see."""


def examine(given: Options) -> Examined:
    """Looks at this machine and, where a peer's address is known, asks peers for up to 130 s.

    Args:
        given: the program's options.

    Raises:
        ConfigError: an option or a run file is wrong.
    """
    state = StateDirectory.unlocked(given.state_dir)
    config = with_kept(given.peer_config(), state.settings_path)
    wanted, local, around = wanted_of(given), _local(state.path), Around()
    asked, network = Asked.of(given, config.network, wanted, state), config.network
    if local.state_in_use:  # the peer that runs has its ports
        free = tuple(f"{text.rpartition('/')[0]}/0" for text in network.host_maddrs)
        network = network.model_copy(update={"host_maddrs": free, "direct_port": 0})
    if network.initial_peers or asked.others:
        click.echo(f"asking peers, for at most {START_S + LOOK_S:.0f} s ...", err=True)
        around = _look_around(network, asked)
    entry = entry_of(asked, around.run, around.run_id, is_silent=around.fault is not None)
    beforehand = refusals(given, config, state, wanted, entry)
    return Examined(
        local,
        around.fault,
        around.addresses,
        around.sights,
        *around.rates,
        _needs(entry.run, around, config, state.path) if entry.run else None,
        tuple(dict.fromkeys((*around.refused, *beforehand))),
        around.door_port,
        around.door_taken,
    )


# ---------------------------------------------------------------- this machine


def _local(path: Path) -> Local:
    """This machine, and whether a peer could write its state."""
    fault, in_use = None, False
    try:
        with closing(StateDirectory(path)):
            (path / "doctor").write_bytes(b"can be written")
            (path / "doctor").unlink()
    except StateLocked:
        in_use = True
    except (StateError, OSError) as error:
        fault = str(error)
    existing = next((p for p in (path, *path.parents) if os.path.exists(p)), None)
    return Local(
        disk_free_bytes=shutil.disk_usage(existing).free if existing else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        state_fault=fault,
        state_in_use=in_use,
        version=__version__,
        computes_with=processor(),
        congestion=_setting("tcp_congestion_control"),
        congestion_known=tuple((_setting("tcp_available_congestion_control") or "").split()),
    )


def _setting(name: str) -> str | None:
    """What the kernel says of IPv4, which counts for IPv6 too; None on other systems."""
    try:
        return (SETTINGS / name).read_text().strip()
    except OSError:
        return None


def _needs(run: RunConfig, around: Around, config: PeerConfig, folder: Path) -> Needs:
    """What the run asks of this machine, as one peer more in it."""
    others = around.capacities or (1.0,) * (run.run.peers - 1)
    owned = share_of(run, config.peer.capacity, others)
    _, plan = plan_here(run, owned, config.compute, folder)
    device, process = plan.need.crowded / 1e9, plan.peaks.highest / 1e9
    peaks = f"device {device:.1f} GB, the whole process {process:.1f} GB"
    return Needs(
        around.run_id or run.run.name,
        cost_of(run, len(others) + 1).disk_bytes,
        f"{plan.reason}, with {owned} of {run.model.num_experts} experts ({peaks})",
        plan.fits,
        around.link,
        unless_refused(partial(held_bytes, folder, run), 0),
    )


def share_of(run: RunConfig, capacity: float, others: Sequence[float]) -> int:
    """Experts that a peer of this capacity comes to own beside others of theirs, rounded up [R4].

    Args:
        run: what is trained.
        capacity: of the peer.
        others: capacities of all other members.
    """
    fair = owned_per_peer(run, len(others) + 1)
    owners = min(run.ownership.owners_per_expert, len(others) + 1)
    claimed = run.model.num_experts * owners * capacity / fsum((*others, capacity))
    return min(ceil(claimed - 1e-9), GREED * fair, run.model.num_experts)


# ---------------------------------------------------------------- the others


@dataclass(frozen=True)
class Around:
    """What there is beside this machine.

    Attributes:
        fault: why nothing could be found out.
        addresses: that this machine listens on.
        sights: what peers saw.
        rates: down and up.
        run: that is announced here; with its id, the capacities of its other members, what the
            rates mean for it, and why it would not take this peer in.
        door_port: where blobs would be taken; 0: nowhere, or at a free port.
        door_taken: why that port is not to be had here.
    """

    fault: str | None = None
    addresses: tuple[str, ...] = ()
    sights: tuple[Sight, ...] = ()
    rates: Rates = (None, None)
    run: RunConfig | None = None
    run_id: str | None = None
    capacities: tuple[float, ...] = ()
    link: LinkVerdict | None = None
    refused: tuple[str, ...] = ()
    door_port: int = 0
    door_taken: str | None = None


def _look_around(network: NetworkSection, asked: Asked) -> Around:
    try:
        node = Node.start(
            identity_path=None,
            network=network,
            known_peers=network.initial_peers,
            remembered=asked.others,
            port=asked.port,
            deadline_s=START_S,
            must_reach=False,
        )
    except ConfigError:
        raise
    except SwarmError as error:
        return Around(fault=str(error))
    try:
        return node.run(_ask_others(node, network, asked), LOOK_S)
    except TimeoutError:
        return Around(fault=f"the network answered too slowly (limit {LOOK_S:.0f} s)")
    finally:
        node.stop(5.0)


async def _ask_others(node: Node, network: NetworkSection, asked: Asked) -> Around:
    await asyncio.sleep(0 if node.num_neighbours else SETTLE_S)
    found = Around(addresses=node.addresses)
    if not node.num_neighbours:
        return replace(found, fault="no known address answers as a peer")
    present: dict[str, PeerRecord] = {}
    try:
        found, present = await _look_at_run(node, found, asked)
    except (NobodyReachable, RunMismatch) as error:  # its neighbours can still say what they see
        if isinstance(error, RunMismatch) and not (asked.founds or asked.resumed):
            raise
        logger.info("the run was not looked at: %s", error)
    peers = sorted({*node.neighbours, *present} - {node.peer_id, asked.peer_id})[:ASKED]
    hosts = hosts_of(network) if network.direct and node.port else ()
    door = (network.direct_port or port_beside(network)) if hosts else 0
    try:
        async with greeting(hosts if door else (), door):
            sights = await _sights(node, peers, door)
    except OSError as error:
        why = f"port {door}: {connection_fault(error)}"
        if network.direct_port:  # a peer insists on a port that was named
            found, door = replace(found, refused=(*found.refused, f"--direct-port: {why}")), 0
        else:
            found = replace(found, door_taken=why)
        sights = await _sights(node, peers, 0)
    fault = "peers are there, but none answers questions" if peers and not sights else None
    return replace(found, fault=fault, sights=sights, door_port=door)


async def _sights(node: Node, peers: Sequence[str], door: int) -> tuple[Sight, ...]:
    seen = await asyncio.gather(*(_sight(node, peer, door) for peer in peers))
    return tuple(sight for sight in seen if sight)


async def _sight(node: Node, peer: str, door: int) -> Sight | None:
    try:
        look = await look_at(node, peer)
        fault = await dial_back(node, peer, node.port) if node.port else None
    except Unreachable as error:
        logger.info("peer=%s: %s", peer[-6:], error)
        return None
    try:
        door_fault = await dial_back(node, peer, door) if door else None
    except Unreachable as error:
        door_fault = str(error)
    return Sight(
        peer,
        round(look.rtt_ms, 2),
        round(look.clock_offset_s, 3),
        look.about.version,
        look.about.seen_at,
        bool(node.port),
        fault,
        door_fault,
    )


async def _look_at_run(
    node: Node, found: Around, asked: Asked
) -> tuple[Around, dict[str, PeerRecord]]:
    """The run that is announced here, what it means for this link, and who is in it."""
    wanted, resumed = asked.wanted, asked.resumed
    fingerprint = wanted.run.fingerprint() if wanted.run and not asked.founds else None
    store = BlobStore(None)
    downloads = Downloads(node, store)
    opened = await find_run(
        node,
        downloads,
        fingerprint=fingerprint,
        wanted=wanted.run_id or resumed,
        deadline_s=FIND_S,
    )
    if opened is None:
        return found, {}
    run, record = opened.run, opened.announced.record
    present = dict(await present_peers(node, record.run))
    present.pop(asked.peer_id, None)  # it may be running: others can tell more
    rates = await measured_rates(node, present)
    found = replace(found, rates=rates)
    if asked.founds:
        return found, present
    found = replace(found, run=run)
    if record.state is RunState.GATHERING:
        return found, present
    found = replace(found, run_id=record.run)
    peers = whom_to_ask(node, opened.announced, present)
    me = asked.peer_id or node.peer_id
    try:
        tip = (await newest_tip(node, downloads, record, peers, asked.trust)).record.tip
        if record.run != asked.here:  # else it comes back with what it has
            require_admission(record.run, run, tip, me, asked.credential_to(me, record.run, run))
    except InvitationError as error:
        return replace(found, refused=(str(error),)), present
    except NobodyReachable as error:
        logger.info("no tip was shown: %s", error)
        return replace(found, refused=(str(error),) if asked.trust else ()), present
    members = {peer: present[peer] for peer in present if peer in tip.members}
    return (
        replace(
            found,
            capacities=tuple(m.capacity for peer, m in tip.members.items() if peer != me),
            link=verdict_for(run, tip, members, rates),
        ),
        present,
    )
