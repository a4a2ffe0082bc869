"""swarm-doctor: whether this machine can take part in a run, and if not what to do."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from peers.findings import (
    Examined,
    Finding,
    Level,
    Machine,
    Needs,
    Sight,
    can_take_part,
    findings_of,
    nat_of,
)
from peers.link_check import Rates, measured_rates, verdict_for
from peers.options import Options, option, options, program
from peers.state_directory import StateDirectory
from swarm import __version__
from swarm.config import NetworkSection, RunConfig
from swarm.errors import StateError, StateLocked, SwarmError, Unreachable
from swarm.model.cost import cost_of
from swarm.network.address_book import Remembered
from swarm.network.blobs import BlobStore
from swarm.network.fetch import Downloads
from swarm.network.joining import fetch_config, find_run, newest_tip, present_peers
from swarm.network.node import Node
from swarm.network.probing import dial_back, look_at
from swarm.protocol.records import PeerRecord, RunState

logger = logging.getLogger(__name__)

START_S = 40.0
LOOK_S = 90.0
FIND_S = 8.0
SETTLE_S = 3.0
ASKED = 6
"""Peers that are asked what they see."""
MARKS = {Level.GOOD: "green", Level.WARNING: "yellow", Level.FAULT: "red"}


@program("swarm-doctor")
@options(
    "run", "initial_peers", "state_dir", "host_maddrs", "announce_maddrs", "client_mode",
    "peers", "rounds", "settings", "as_json", "log_format",
)  # fmt: skip
@option("--run-id", help="Which run, where several are announced.")
@click.pass_context
def main(context: click.Context, given: Options, run_id: str | None) -> None:
    """Whether this machine can take part in a run, and if not what to do.

    Asks peers what they see: whether they can dial this machine, its clock, rates and latency.
    Takes the addresses from --initial-peers or from the state directory; publishes nothing. With
    --run it also says whether that run fits this machine. Exit code 0: it can take part; 1: not.
    """
    logging.getLogger().setLevel(logging.ERROR)  # what is wrong is said as a finding
    network = given.peer_config().network
    machine, remembered, port = _machine(given.state_dir)
    wanted = given.run_config() if given.run else None
    examined = _examine(network, machine, remembered, port, wanted=wanted, run_id=run_id)
    findings = findings_of(examined)
    if given.as_json:
        click.echo(json.dumps(as_json(examined, findings)))
    else:
        for finding in findings:
            click.echo(line_of(finding))
        verdict = "can" if can_take_part(findings) else "cannot"
        click.echo(f"This machine {verdict} take part.")
    context.exit(0 if can_take_part(findings) else 1)


def line_of(finding: Finding) -> str:
    """A finding for people: one line, a second one with the remedy."""
    mark = click.style(finding.level.value, fg=MARKS[finding.level])
    remedy = f"\n  do: {finding.remedy}" if finding.remedy else ""
    return f"{finding.topic}: {mark}: {finding.text}{remedy}"


def as_json(examined: Examined, findings: Sequence[Finding]) -> dict[str, object]:
    """What scripts may rely on."""
    return {
        "can_take_part": can_take_part(findings),
        "nat": nat_of(examined.addresses, [s.seen_at for s in examined.sights]).value,
        "down_mbit": examined.down_mbit,
        "up_mbit": examined.up_mbit,
        "addresses": list(examined.addresses),
        "findings": [asdict(finding) | {"level": finding.level.value} for finding in findings],
        "peers": [asdict(sight) for sight in examined.sights],
    }


# ---------------------------------------------------------------- this machine


def _machine(state_dir: Path) -> tuple[Machine, tuple[Remembered, ...], int | None]:
    """This machine, and what its state directory knows of others."""
    path = state_dir.expanduser()
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
    machine = Machine(
        disk_free_bytes=_disk_free_bytes(path),
        memory_bytes=_memory_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        state_fault=fault,
        state_in_use=in_use,
        version=__version__,
    )
    return machine, remembered, port


def _disk_free_bytes(path: Path) -> int | None:
    existing = next((p for p in (path, *path.parents) if p.exists()), None)
    return shutil.disk_usage(existing).free if existing else None


def _memory_bytes() -> int | None:
    """Memory that programs can still get, by the kernel's own estimate."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _cached_bytes()
    except (OSError, ValueError):
        return None


def _cached_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    free, available = (int(sizes[key].split()[0]) for key in ("MemFree", "MemAvailable"))
    return max(available - free, 0) * 1024


# ---------------------------------------------------------------- the others


def _examine(
    network: NetworkSection,
    machine: Machine,
    remembered: tuple[Remembered, ...],
    port: int | None,
    *,
    wanted: RunConfig | None,
    run_id: str | None,
) -> Examined:
    alone = Examined(machine, None, (), (), None, None, _needs_of(wanted) if wanted else None)
    if not (network.initial_peers or remembered):
        return alone
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
    except SwarmError as error:
        if error.exit_code == 2:
            raise
        return Examined(machine, str(error), (), (), None, None, alone.needs)
    try:
        return node.run(_look_around(node, alone, wanted, run_id), LOOK_S)
    except TimeoutError:
        fault = f"the network answered too slowly (limit {LOOK_S:.0f} s)"
        return Examined(machine, fault, node.addresses, (), None, None, alone.needs)
    finally:
        node.stop(5.0)


async def _look_around(
    node: Node, alone: Examined, wanted: RunConfig | None, run_id: str | None
) -> Examined:
    await asyncio.sleep(0 if node.num_neighbours else SETTLE_S)
    if not node.num_neighbours:
        fault = "no known address answers as a peer"
        return Examined(alone.machine, fault, node.addresses, (), None, None, alone.needs)
    present, needs, rates = await _look_at_run(node, wanted, run_id)
    asked = sorted({*node.neighbours, *present} - {node.peer_id})[:ASKED]
    seen = await asyncio.gather(*(_sight(node, peer) for peer in asked))
    sights = tuple(sight for sight in seen if sight)
    return Examined(
        alone.machine,
        None if sights else "peers are there, but none answers questions",
        node.addresses,
        sights,
        *rates,
        needs or alone.needs,
    )


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
        bool(node.addresses),
        fault,
    )


async def _look_at_run(
    node: Node, wanted: RunConfig | None, run_id: str | None
) -> tuple[dict[str, PeerRecord], Needs | None, Rates]:
    """Who is in the run that is announced here, what it needs, and the rates to its peers."""
    fingerprint = wanted.fingerprint() if wanted else None
    announced = await find_run(node, fingerprint=fingerprint, wanted=run_id, deadline_s=FIND_S)
    if announced is None:
        return {}, None, (None, None)
    record = announced.record
    present = await present_peers(node, record.run)
    rates = await measured_rates(node, present)
    store = BlobStore(None)
    downloads = Downloads(node, store)
    run = await fetch_config(announced, downloads)
    if record.state is RunState.GATHERING:
        return present, _needs_of(run), rates
    tip = (await newest_tip(node, store, downloads, record, present)).tip
    cost = cost_of(run, len(tip.members) + 1)
    link = verdict_for(run, tip, present, rates)
    needs = Needs(record.run, cost.disk_bytes, cost.state_bytes_per_peer, link)
    return present, needs, rates


def _needs_of(run: RunConfig) -> Needs:
    cost = cost_of(run, run.run.peers)
    return Needs(run.run.name, cost.disk_bytes, cost.state_bytes_per_peer, None)


if __name__ == "__main__":
    main()
