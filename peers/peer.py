"""swarm-peer: trains in a run; founds it with --run, joins it with only --initial-peers."""

from __future__ import annotations

import logging
import random
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click

from peers.found import found
from peers.join_line import say_how_to_join
from peers.local_faults import raise_file_limit
from peers.options import Options, as_toml, options, program
from peers.preparing import prepared
from peers.run_text import RunText
from peers.start import (
    Started,
    Starter,
    Stopped,
    announcement,
)
from swarm.codecs import Content
from swarm.config import PeerConfig, RunConfig
from swarm.data.loader import Loader
from swarm.errors import CorruptState, RunMismatch
from swarm.network.blobs import BlobStore
from swarm.network.bulk import PROTOCOL
from swarm.network.fetch import Downloads
from swarm.network.finding import RUN_QUESTION, runs_of
from swarm.network.invitations import read_invitation
from swarm.network.ledger import Ledger
from swarm.network.moments import MomentsExchange
from swarm.network.node import Handlers, Node
from swarm.network.probing import PROTOCOL as MEASURE
from swarm.network.probing import QUESTION, Prober, dial_fault
from swarm.network.record_file import RecordFile
from swarm.network.round_driver import RoundDriver
from swarm.network.serve import BlobServer
from swarm.network.shelf import Shelf
from swarm.network.steady_clock import passed_s
from swarm.network.tips import asked_tip
from swarm.peer.agreement import explain_difference, require_settings
from swarm.peer.leaving import Stop, leave
from swarm.peer.live_model import Agreed, LiveModel, merge_blobs, validation_batch
from swarm.peer.machine import device_of, engine_for
from swarm.peer.moments import MomentsKeeper
from swarm.peer.publisher import Publisher
from swarm.peer.state_directory import StateDirectory
from swarm.peer.status import PeerStatus
from swarm.peer.threads import start_threads
from swarm.peer.trainer import StopAsked, Trainer
from swarm.protocol.deadlines import Timers
from swarm.protocol.invitation import Invitation
from swarm.protocol.manifest import Digest, Manifest, PeerId, Unit
from swarm.protocol.records import PeerState, RunRecord, encode_record
from swarm.protocol.rounds import RoundMachine, Rules

logger = logging.getLogger(__name__)

NETWORK_START_S = 60.0
LINGER_LOOK_S = 0.5
DIAL_BACK_S = 40.0


@dataclass
class Peer:
    """One process in one run: everything it opened, closed in reverse order."""

    config: PeerConfig
    state: StateDirectory
    stop: Stop
    driver: RoundDriver | None = None
    exchange: MomentsExchange | None = None
    invitation: Invitation | None = None
    announced: RunRecord | None = None
    """What this peer says, when asked which run it is in."""

    def __post_init__(self) -> None:
        """Prepares to serve blobs and to answer questions."""
        self.ledger = Ledger()
        self.prober = Prober(self.ledger)
        self.text = RunText(self.config.corpus.folder, self.state.data_path)
        self.server = BlobServer(
            on_ask=self._on_ask,
            ledger=self.ledger,
            is_control=lambda digest: self.driver is not None and digest in self.driver.outbound,
            is_moments=lambda digest: (
                self.exchange is not None and self.exchange.shelf.holds(digest)
            ),
        )

    # ------------------------------------------------ the network

    def start_node(self, deadline_s: float = NETWORK_START_S) -> Node:
        """Starts the network; with a tip on disk the peer starts even when nobody answers."""
        network = self.config.network
        identity = network.identity_path
        self.node = Node.start(
            identity_path=Path(identity) if identity else self.state.identity_path,
            network=network,
            known_peers=network.initial_peers,
            remembered=self.state.known_peers,
            port=self.state.port,
            handlers=Handlers(
                on_message=self._on_message,
                on_request=self._on_request,
                streams={PROTOCOL: self.server.serve, MEASURE: self.prober.serve},
                ledger=self.ledger,
            ),
            deadline_s=deadline_s,
            must_reach=bool(network.initial_peers) and self.state.current_run is None,
        )
        if self.node.port and self.state.port is None:
            self.state.port = self.node.port
        say_how_to_join(self.node.addresses)
        fault = self.node.run(dial_fault(self.node), DIAL_BACK_S)
        if fault:
            logger.warning("nobody can dial this peer, it works through others: %s", fault)
        self.is_dialable = not (network.client_mode or fault)
        return self.node

    def _on_ask(self, source: PeerId, digest: Digest) -> None:
        if self.driver:
            self.driver.asked_for(source, digest)

    async def _on_message(self, source: PeerId, payload: bytes) -> None:
        if self.driver:
            self.driver.inbound.take(source, payload)

    async def _on_request(self, source: PeerId, payload: bytes) -> bytes:
        if payload.startswith(QUESTION) and hasattr(self, "node"):
            return await self.prober.answer(self.node, source, payload)
        if payload == RUN_QUESTION:
            return encode_record(self.announced) if self.announced else b""
        driver = self.driver
        if self.exchange:
            answer = await self.exchange.answer(source, payload)
            if answer is not None:
                return answer
        if driver and (trusted := asked_tip(payload, driver.machine.rules.run)):
            return driver.heads.commit_of_tip(trusted)
        return await driver.heads.answer(source, payload) if driver else b""

    def serve(self, store: BlobStore) -> Downloads:
        """Makes a store's blobs available to others and returns what fetches into it."""
        self.server.attach(store)
        return Downloads(self.node, store)

    # ------------------------------------------------ the run

    def start_run(self, wanted: RunConfig | None, options: Options) -> Started:
        """Resumes, joins or founds, in this order."""
        starter = Starter(
            self.node,
            self.state,
            self.config,
            self.stop,
            self.serve,
            self._status,
            self.text,
            self._announce,
            invitation=self.invitation,
            founds_beside=options.new_run,
            vouched=options.tip,
        )
        current = self._run_to_resume(wanted, options.run_id)
        if current and (started := starter.resume(current, may_join=wanted is None)):
            _require(started.run, wanted, options)
            return started
        if self.config.network.initial_peers or wanted is None:
            joined = starter.join(
                wanted, options.run_id or current, lambda run: _require(run, wanted, options)
            )
            if joined:
                return joined
        assert wanted is not None
        return found(starter, wanted)

    def _announce(self, record: RunRecord) -> None:
        self.announced = record

    def _run_to_resume(self, wanted: RunConfig | None, run_id: str | None) -> str | None:
        """The run on disk, unless the person, or the swarm they named, means another one."""
        current = run_id or self.state.current_run
        if current is None or not self.state.run(current).path.exists():
            return None
        if wanted:
            try:
                run = self.state.run(current).read_config()
            except CorruptState:  # mended, and compared, once it is resumed
                return current
            return current if run.fingerprint() == wanted.fingerprint() else None
        if run_id or not self.config.network.initial_peers:
            return current
        told = self.node.run(runs_of(self.node, self.node.entrances), 30)
        if told and current not in {run.record.run for run in told}:
            logger.info("run=%s is not what runs there; joining what does", current)
            return None
        return current

    def _status(self, run: RunConfig) -> PeerStatus:
        name = self.config.peer.name or f"{socket.gethostname()}-{self.node.peer_id[-4:]}"
        return PeerStatus(
            self.node,
            run,
            name=name,
            capacity=self.config.peer.capacity,
        )

    # ------------------------------------------------ training

    def train(self, started: Started) -> None:
        """Takes part in the run until it is finished or the person stops this peer."""
        run, layout = started.run, started.layout
        if run.run.admission == "invited":
            click.echo("Who joins needs an invitation: --invitation and what swarm-invite prints.")
        agreed = Agreed(started.store, layout)
        status = self._status(run)
        status.directory = started.directory
        announced = announcement(started.run_id, run, started.directory.read_founding())
        publisher = Publisher(
            self.node,
            status,
            announced,
            self.state,
            on_present=lambda peers: self.driver.discovered(peers) if self.driver else None,
        )
        self.driver = RoundDriver(
            self.node,
            started.store,
            self._machine(started),
            record_file=RecordFile(started.directory.record_path),
            layout=layout,
            settings=run.round,
            merger=lambda tip: self._merge(tip, run, agreed, publisher),
        )
        status.watch(self.driver, started.run_id)
        self.exchange = self._exchange(started, self.driver)
        engine = engine_for(run, self.config.compute, started.directory.path)
        on_gpu = device_of(self.config.compute.device) == "cuda"
        text = started.record.tip.founding.text
        agreed_windows = text.windows if text else None
        loader = Loader(self.text.shards, run, agreed_windows=agreed_windows, pin_memory=on_gpu)
        model = LiveModel(self.node.peer_id, run, engine, agreed)
        keeper = MomentsKeeper(model, self.exchange, status)
        trainer = Trainer(
            model,
            loader,
            self.driver,
            started.directory,
            validation_BT1=validation_batch(started.record.tip, run, started.store),
            status=status,
            moments=keeper,
            stop=self.stop,
        )
        with loader:
            self.driver.start()
            self._announce(announced)
            publisher.start()
            try:
                trainer.train()
                self._linger(status)
            except StopAsked:
                status.begin(PeerState.LEAVING)
                adopted = status.manifest or started.record.tip
                logger.info("left: %s", leave(self.driver, keeper, adopted, self.stop))
            finally:
                publisher.stop()
                self.node.run(self.exchange.stop(), 10)
                self.node.run(self.driver.stop(), 10)
                engine.close()
                status.ended()

    def _exchange(self, started: Started, driver: RoundDriver) -> MomentsExchange:
        return MomentsExchange(
            self.node,
            Shelf(started.store, started.directory.moments_path),
            driver.downloads,
            started.layout,
            run=started.run_id,
            tip=lambda: driver.tip,
        )

    def _machine(self, started: Started) -> RoundMachine:
        run = started.run
        rules = Rules.of(started.run_id, run, started.layout)
        founding = started.record.tip.founding
        pinned = [founding.config, founding.validation, started.directory.read_founding().blob]
        started.store.pin(pinned)
        return RoundMachine(
            self.node.peer_id,
            self.config.peer.capacity,
            rules,
            Timers(leave_s=self.config.peer.leave_timeout_s),
            started.record,
            stored=started.store.digests(),
            now=passed_s(),
            random=random.Random(),
            sign=self.node.identity.sign,
            is_dialable=self.is_dialable,
            chain=RecordFile(started.directory.record_path).read_chain(started.record),
            invitation=self.invitation,
        )

    def _merge(
        self, tip: Manifest, run: RunConfig, agreed: Agreed, publisher: Publisher
    ) -> dict[Unit, Content]:
        values, donors = merge_blobs(tip, run, agreed)
        publisher.announce_merge(tip, donors)
        return values

    # ------------------------------------------------ the end

    def _linger(self, status: PeerStatus) -> None:
        status.begin(PeerState.FINISHED)
        status.finished()
        linger_s = self.config.peer.linger_s
        logger.info("finished; serving others for %.0f s (Ctrl+C ends it)", linger_s)
        assert self.driver is not None
        end_s = time.monotonic() + linger_s
        while time.monotonic() < end_s and not self.stop.wait(LINGER_LOOK_S):
            status.follow(self.driver.tip)


def _require(run: RunConfig, wanted: RunConfig | None, options: Options) -> None:
    if wanted is None:
        require_settings(run, options.asked_of_run())
    elif difference := explain_difference(wanted, run):
        raise RunMismatch(difference)


@program("swarm-peer")
@options(
    "run", "config", "initial_peers", "run_id", "new_run", "tip", "invitation", "state_dir",
    "rounds", "peers", "settings",
    "host_maddrs", "announce_maddrs", "identity_path", "client_mode", "relay", "name", "capacity",
    "wait_for_peers", "linger", "leave_timeout", "device", "threads", "engine",
    "corpus", "print_config", "log_format", "log_level",
)  # fmt: skip
def main(options: Options) -> None:
    """Trains one peer of a swarm.

    \b
    Found a run:    swarm-peer --run configs/runs/demo.toml
    Join a run:     swarm-peer --initial-peers ADDRESS
    Go on with one: swarm-peer --state-dir DIR

    Every start prints the line with which others join, and which text they need. The first Ctrl+C
    or SIGTERM finishes the round and hands the experts over, within --leave-timeout; the second
    leaves at once.
    """  # noqa: D301 - click reads the backspace
    config = options.peer_config()
    wanted = options.run_config() if options.run else None
    if options.print_config:
        click.echo(as_toml(*([wanted] if wanted else []), config))
        return
    invitation = read_invitation(options.invitation) if options.invitation else None
    device_of(config.compute.device)  # a missing GPU ends it before it begins
    start_threads(config.compute)
    # The network's thread must not wait long for the trainer's (measured: x1.0-1.3 on a step).
    sys.setswitchinterval(0.0002)
    raise_file_limit()
    state = StateDirectory(options.state_dir)
    config = prepared(config, state, options)
    peer = Peer(config, state, Stop(config.peer.leave_timeout_s), invitation=invitation)
    try:
        node = peer.start_node()
    except BaseException:
        state.close()
        raise
    try:
        started = peer.start_run(wanted, options)
        say_how_to_join(node.addresses, started.run_id)
        peer.train(started)
    except Stopped:
        logger.info("stopped before the run began")
    finally:
        state.known_peers = (*node.known_addresses, *state.known_peers)
        node.stop(10)
        state.close()


if __name__ == "__main__":
    main()
