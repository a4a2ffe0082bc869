"""The measurements of swarm-doctor: this machine, the given options, and answers of peers."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, fsum
from pathlib import Path
from typing import TypeVar

import click

from peers.actions.findings import Examined, Local, Needs, Sight
from peers.actions.tensorboard import writer_type
from peers.command_line.options import Options, require_founder
from swarm import errors
from swarm.config import CorpusSection, NetworkSection, PeerConfig, RunConfig
from swarm.model.cost import cost_of, owned_per_peer
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.fetcher import Downloads
from swarm.network.node.node import Node
from swarm.network.node.peer_probe import dial_back, greeting, look_at
from swarm.network.runs.joiner import present_peers
from swarm.network.runs.run_search import find_run, whom_to_ask
from swarm.network.runs.signed_invitations import read_invitation, require_guest
from swarm.network.runs.tips import Trust, newest_tip
from swarm.network.wire.address_book import Remembered
from swarm.network.wire.daemon import connection_fault, hosts_of
from swarm.network.wire.identity import load_or_create_identity
from swarm.network.wire.tcp_listener import port_beside
from swarm.peer.machine.engine_plan import held_bytes
from swarm.peer.machine.machine_survey import plan_here, processor
from swarm.peer.machine.state_directory import (
    RunDirectory,
    StateDirectory,
    credential_to,
    with_kept,
)
from swarm.peer.start.link_monitor import Rates, measured_rates, verdict_for
from swarm.peer.start.quota import require_quota
from swarm.peer.start.start_checks import path_of_key, require_finished, require_way_in, run_on_disk
from swarm.peer.text.run_request import Wanted, require_admission
from swarm.peer.text.run_start import founders_tokenizer, founders_weights
from swarm.peer.text.run_text import corpus_of
from swarm.protocol.membership.ownership import GREED
from swarm.protocol.records.records import PeerRecord, RunState
from swarm.protocol.timing.fitness import LinkVerdict
from swarm.protocol.values.invitation import Credential
from swarm.protocol.values.manifest import PeerId
from swarm.version import __version__

logger = logging.getLogger(__name__)


Result = TypeVar("Result")


@dataclass(frozen=True)
class Asked:
    """A person's request, with the facts about it in the state directory.

    Attributes:
        wanted: the run that is meant.
        trust: the manifest to trust as the run's starting point. None: manifest 0.
        invitation: text of the invitation that was given now, if any.
        state: the state directory.
        others: peers known from earlier starts.
        port: the port that was used at the first start.
        peer_id: id of this peer. "" if it has none yet.
        here: the run on disk that this peer would resume, unless given addresses lead elsewhere.
        is_led: whether the person gave addresses.
        founds: whether `wanted` is founded even if the addresses have other runs.
    """

    wanted: Wanted
    trust: Trust | None
    invitation: str | None
    state: StateDirectory
    others: tuple[Remembered, ...]
    port: int | None
    peer_id: str
    here: str | None
    is_led: bool
    founds: bool

    @classmethod
    def of(
        cls, given: Options, network: NetworkSection, wanted: Wanted, state: StateDirectory
    ) -> Asked:
        """The request in the options of this start and of earlier ones."""
        begun = unless_refused(partial(run_on_disk, wanted, state), None)
        is_led = bool(network.initial_peers)
        return cls(
            wanted,
            Trust(given.tip) if given.tip else None,
            given.invitation,
            state,
            unless_refused(lambda: state.known_peers, ()),
            unless_refused(lambda: state.port, None),
            unless_refused(partial(own_id, network, state), ""),
            begun if begun and begun in state.run_ids else None,
            is_led,
            wanted.run is not None and (wanted.beside_others or not (begun or is_led)),
        )

    @property
    def resumed(self) -> str | None:
        """The run on disk that is resumed, whatever run others are in. None if there is none."""
        says_which = self.wanted.run or self.wanted.run_id or not self.is_led
        return self.here if says_which else None

    def credential_to(self, me: PeerId, run_id: str, run: RunConfig) -> Credential | None:
        """The credential with which this peer would join: given now, or saved if the run needs one.

        Raises:
            InvitationError: the given text is no invitation, or is for another peer.
        """
        private = read_invitation(self.invitation) if self.invitation else None
        if private:
            require_guest(private, me)
        given = Credential(private.invitation, "") if private else None
        return unless_refused(partial(credential_to, run, given, self.state.run(run_id)), given)


@dataclass(frozen=True)
class Entry:
    """How a peer would enter a run, as far as can be known before it starts.

    Attributes:
        run: the run that the peer would enter. None if not known.
        directory: the run's files on this disk, if there may be any.
        founds: whether this peer would found the run.
    """

    run: RunConfig | None = None
    directory: RunDirectory | None = None
    founds: bool = False


def entry_of(asked: Asked, run: RunConfig | None, run_id: str | None, *, is_silent: bool) -> Entry:
    """How a peer would enter its run, by its state directory and by the answers of others.

    Args:
        asked: the person's request.
        run: the announced run, if it is the run that is meant.
        run_id: id of this run. None while it gathers peers.
        is_silent: whether no peer could be asked, although addresses are known.
    """
    wanted, here, directory_of = asked.wanted, asked.here, asked.state.run
    if here and (run is None or run_id == here):
        return Entry(
            unless_refused(directory_of(here).read_config, run or wanted.run), directory_of(here)
        )
    if run:
        return Entry(run, directory_of(run_id) if run_id else None)
    is_lost = asked.is_led and is_silent  # no run is founded while the given peers are silent
    return Entry(wanted.run, founds=wanted.run is not None and not is_lost)


def wanted_of(given: Options) -> Wanted:
    """The run that the options mean.

    Raises:
        ConfigError: an option or the run file is wrong.
    """
    run = given.run_config() if given.run else None
    return Wanted(
        run=run,
        run_id=given.run_id,
        settings={} if run else given.asked_of_run(),
        beside_others=given.new_run,
    )


def own_id(network: NetworkSection, state: StateDirectory) -> str:
    """This peer's id. "" if it has none yet.

    Raises:
        StateError: the key of the peer cannot be read, or is missing although the directory has
            runs.
    """
    key = path_of_key(network.identity_path, state)
    return load_or_create_identity(key).peer_id if key.exists() else ""


def unless_refused(what: Callable[[], Result], instead: Result) -> Result:
    """The result of a call that reads the disk, or `instead` on errors, which checks report."""
    try:
        return what()
    except (errors.SwarmError, OSError):
        return instead


def refusals(
    given: Options, config: PeerConfig, state: StateDirectory, wanted: Wanted, entry: Entry
) -> tuple[str, ...]:
    """The reasons why a peer would refuse to start, a sentence each.

    Args:
        given: the options.
        config: configuration of this machine, by the options of this start and of earlier starts.
        state: the state directory.
        wanted: the run that is meant.
        entry: how the peer would enter the run.
    """
    run, network = entry.run, config.network
    checks: list[Callable[[], object]] = [
        partial(require_founder, given),
        partial(require_quota, network, state),
        partial(own_id, network, state),
        partial(_require_way_in, wanted, network.initial_peers, state),
    ]
    if given.invitation:
        checks.append(partial(read_invitation, given.invitation))
    if given.tensorboard:
        checks.append(writer_type)
    if entry.founds:
        checks.append(partial(require_finished, wanted, state))
    elif run:
        checks.append(partial(wanted.require, run))
    if run:
        checks.append(partial(_require_text, run, config.corpus, entry.directory))
    if run and (given.tokenizer or entry.founds):
        checks.append(partial(founders_tokenizer, run, given.tokenizer))
    if run and entry.founds:
        checks.append(partial(founders_weights, run, given.initialise_from))
    return tuple(dict.fromkeys(why for check in checks if (why := _refusal(check))))


def _require_way_in(wanted: Wanted, addresses: Collection[str], state: StateDirectory) -> None:
    if wanted.run_id or state.run_ids:  # otherwise swarm-doctor examines a machine for any run
        require_way_in(wanted, addresses, state)


def _require_text(run: RunConfig, corpus: CorpusSection, directory: RunDirectory | None) -> None:
    remembered = directory.read_text_folder() if directory else None
    folder = remembered if corpus.folder is None else corpus.folder
    corpus_of(run, folder, follow_links=corpus.follow_links)


def _refusal(check: Callable[[], object]) -> str | None:
    try:
        check()
    except errors.SwarmError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return None


START_S = 40.0
LOOK_S = 90.0
FIND_S = 8.0
SETTLE_S = 3.0
SETTINGS = Path("/proc/sys/net/ipv4")
ASKED = 6
"""Number of peers that are asked about their view of this machine."""


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
    if local.state_in_use:  # the running peer occupies the ports
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
    except errors.StateLocked:
        in_use = True
    except (errors.StateError, OSError) as error:
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
    """A kernel setting of IPv4, which applies to IPv6 too. None if the system does not have it."""
    try:
        return (SETTINGS / name).read_text().strip()
    except OSError:
        return None


def _needs(run: RunConfig, around: Around, config: PeerConfig, folder: Path) -> Needs:
    """The needs of the run, if this machine joins as a further peer."""
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
    """The number of experts that a peer of this capacity comes to own, rounded up.

    Policy: expert ownership.

    Args:
        run: the run.
        capacity: capacity of the peer.
        others: capacities of all other members.
    """
    fair = owned_per_peer(run, len(others) + 1)
    owners = min(run.ownership.owners_per_expert, len(others) + 1)
    claimed = run.model.num_experts * owners * capacity / fsum((*others, capacity))
    return min(ceil(claimed - 1e-9), GREED * fair, run.model.num_experts)


# ---------------------------------------------------------------- the others


@dataclass(frozen=True)
class Around:
    """Findings about the network around this machine.

    Attributes:
        fault: why the network could not be examined.
        addresses: addresses on which this machine listens.
        sights: views of the peers that answered.
        rates: rates down and up.
        run: the announced run; `run_id` is its id, and `capacities` are those of its other members.
        link: judgement of the rates for this run.
        refused: why the run would not admit this peer, or why this peer would not start.
        door_port: the port for blobs. 0: none, or any free port.
        door_taken: why this peer cannot listen on this port.
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
    except errors.ConfigError:
        raise
    except errors.SwarmError as error:
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
    except (
        errors.NobodyReachable,
        errors.RunMismatch,
    ) as error:  # neighbors can still report their view of this machine
        if isinstance(error, errors.RunMismatch) and not (asked.founds or asked.resumed):
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
        if network.direct_port:  # a peer refuses to start without a port that was named
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
    except errors.Unreachable as error:
        logger.info("peer=%s: %s", peer[-6:], error)
        return None
    try:
        door_fault = await dial_back(node, peer, door) if door else None
    except errors.Unreachable as error:
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
    """Finds the announced run, judges this link for it, and returns the run's present peers."""
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
    present.pop(asked.peer_id, None)  # this peer may be running, and is not to measure itself
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
        if record.run != asked.here:  # otherwise this peer returns to its own run
            require_admission(record.run, run, tip, me, asked.credential_to(me, record.run, run))
    except errors.InvitationError as error:
        return replace(found, refused=(str(error),)), present
    except errors.NobodyReachable as error:
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
