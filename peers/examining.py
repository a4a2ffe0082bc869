"""What swarm-doctor looks at: this machine, and the peers that it asks what they see."""

from __future__ import annotations

import asyncio
import logging
import resource
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import click

from peers.findings import Examined, Local, Needs, Sight
from peers.options import Options
from swarm.config import ComputeSection, NetworkSection, RunConfig
from swarm.errors import (
    ConfigError,
    NobodyReachable,
    StateError,
    StateLocked,
    SwarmError,
    Unreachable,
)
from swarm.model.cost import cost_of, owned_per_peer
from swarm.network.address_book import Remembered
from swarm.network.blobs import BlobStore
from swarm.network.fetch import Downloads
from swarm.network.finding import find_run, whom_to_ask
from swarm.network.joining import present_peers
from swarm.network.node import Node
from swarm.network.probing import dial_back, look_at
from swarm.network.tips import newest_tip
from swarm.peer.link_check import Rates, measured_rates, verdict_for
from swarm.peer.machine import plan_here, processor
from swarm.peer.planning import held_bytes
from swarm.peer.state_directory import StateDirectory
from swarm.protocol.fitness import LinkVerdict
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
    config, folder = given.peer_config(), given.state_dir.expanduser()
    local, remembered, port = _local(folder)
    wanted = given.run_config() if given.run else None
    around = Around()
    if config.network.initial_peers or remembered:
        click.echo(f"asking peers, for at most {START_S + LOOK_S:.0f} s ...", err=True)
        around = _look_around(config.network, remembered, port, Asked(wanted, given.run_id))
    run = around.run or wanted
    return Examined(
        local,
        around.fault,
        around.addresses,
        around.sights,
        *around.rates,
        _needs(run, around, config.compute, folder) if run else None,
    )


# ---------------------------------------------------------------- this machine


def _local(path: Path) -> tuple[Local, tuple[Remembered, ...], int | None]:
    """This machine, and what its state directory knows of others."""
    fault, in_use = None, False
    remembered: tuple[Remembered, ...] = ()
    port = None
    try:
        state = StateDirectory(path)
        remembered, port = state.known_peers, state.port
        (path / "doctor").write_bytes(b"can be written")
        (path / "doctor").unlink()
        state.close()
    except StateLocked:
        in_use = True
    except (StateError, OSError) as error:
        fault = str(error)
    existing = next((p for p in (path, *path.parents) if p.exists()), None)
    local = Local(
        disk_free_bytes=shutil.disk_usage(existing).free if existing else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        state_fault=fault,
        state_in_use=in_use,
        version=__version__,
        computes_with=processor(),
        congestion=_setting("tcp_congestion_control"),
        congestion_known=tuple((_setting("tcp_available_congestion_control") or "").split()),
    )
    return local, remembered, port


def _setting(name: str) -> str | None:
    """What the kernel says of IPv4, which counts for IPv6 too; None on other systems."""
    try:
        return (SETTINGS / name).read_text().strip()
    except OSError:
        return None


def _needs(run: RunConfig, around: Around, compute: ComputeSection, folder: Path) -> Needs:
    """What the run asks of this machine, as one peer more in it."""
    num_peers = around.num_members + 1 if around.num_members else run.run.peers
    owned = owned_per_peer(run, num_peers)
    _, plan = plan_here(run, owned, compute, folder)
    device, process = plan.need.crowded / 1e9, plan.peaks.highest / 1e9
    peaks = f"device {device:.1f} GB, the whole process {process:.1f} GB"
    return Needs(
        around.run_id or run.run.name,
        cost_of(run, num_peers).disk_bytes,
        f"{plan.reason} ({peaks})",
        plan.fits,
        around.link,
        held_bytes(folder, run),
    )


# ---------------------------------------------------------------- the others


@dataclass(frozen=True)
class Asked:
    """The run that a person asked about."""

    wanted: RunConfig | None
    run_id: str | None


@dataclass(frozen=True)
class Around:
    """What there is beside this machine.

    Attributes:
        fault: why nothing could be found out.
        addresses: that this machine listens on.
        sights: what peers saw.
        rates: down and up.
        run: that is announced here; with its id, its number of members, what its rates mean.
    """

    fault: str | None = None
    addresses: tuple[str, ...] = ()
    sights: tuple[Sight, ...] = ()
    rates: Rates = (None, None)
    run: RunConfig | None = None
    run_id: str | None = None
    num_members: int = 0
    link: LinkVerdict | None = None


def _look_around(
    network: NetworkSection, remembered: tuple[Remembered, ...], port: int | None, asked: Asked
) -> Around:
    try:
        node = Node.start(
            identity_path=None,
            network=network,
            known_peers=network.initial_peers,
            remembered=remembered,
            port=port,
            deadline_s=START_S,
            must_reach=False,
        )
    except ConfigError:
        raise
    except SwarmError as error:
        return Around(fault=str(error))
    try:
        return node.run(_ask_others(node, asked), LOOK_S)
    except TimeoutError:
        return Around(fault=f"the network answered too slowly (limit {LOOK_S:.0f} s)")
    finally:
        node.stop(5.0)


async def _ask_others(node: Node, asked: Asked) -> Around:
    await asyncio.sleep(0 if node.num_neighbours else SETTLE_S)
    found = Around(addresses=node.addresses)
    if not node.num_neighbours:
        return replace(found, fault="no known address answers as a peer")
    present: dict[str, PeerRecord] = {}
    try:
        found, present = await _look_at_run(node, found, asked)
    except NobodyReachable as error:  # its neighbours can still say what they see
        logger.info("the run was not looked at: %s", error)
    peers = sorted({*node.neighbours, *present} - {node.peer_id})[:ASKED]
    seen = await asyncio.gather(*(_sight(node, peer) for peer in peers))
    sights = tuple(sight for sight in seen if sight)
    fault = None if sights else "peers are there, but none answers questions"
    return replace(found, fault=fault, sights=sights)


async def _sight(node: Node, peer: str) -> Sight | None:
    try:
        look = await look_at(node, peer)
        fault = await dial_back(node, peer, node.port) if node.port else None
    except Unreachable as error:
        logger.info("peer=%s: %s", peer[-6:], error)
        return None
    return Sight(
        peer,
        round(look.rtt_ms, 2),
        round(look.clock_offset_s, 3),
        look.about.version,
        look.about.seen_at,
        bool(node.port),
        fault,
    )


async def _look_at_run(
    node: Node, found: Around, asked: Asked
) -> tuple[Around, dict[str, PeerRecord]]:
    """The run that is announced here, what it means for this link, and who is in it."""
    fingerprint = asked.wanted.fingerprint() if asked.wanted else None
    store = BlobStore(None)
    downloads = Downloads(node, store)
    opened = await find_run(
        node, downloads, fingerprint=fingerprint, wanted=asked.run_id, deadline_s=FIND_S
    )
    if opened is None:
        return found, {}
    run, record = opened.run, opened.announced.record
    present = await present_peers(node, record.run)
    rates = await measured_rates(node, present)
    found = replace(found, rates=rates, run=run)
    if record.state is RunState.GATHERING:
        return found, present
    peers = whom_to_ask(node, opened.announced, present)
    tip = (await newest_tip(node, downloads, record, peers)).record.tip
    members = {peer: present[peer] for peer in present if peer in tip.members}
    link = verdict_for(run, tip, members, rates)
    return (
        replace(found, run_id=record.run, num_members=len(tip.members), link=link),
        present,
    )
