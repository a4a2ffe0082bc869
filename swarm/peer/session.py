"""A peer of one run, for programs and notebooks: found, join or resume; train; stop; close."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from torch import Tensor

from swarm.codecs import Content
from swarm.config import ComputeSection, PeerConfig, RunConfig
from swarm.data.loader import Loader
from swarm.errors import NobodyReachable, StateError
from swarm.network.rounds.moments_exchange import MomentsExchange
from swarm.network.rounds.record_file import RecordFile
from swarm.network.rounds.round_driver import RoundDriver
from swarm.network.wire.steady_clock import passed_s
from swarm.peer.machine.cpu_threads import UnitThreads, start_threads, usable_cores
from swarm.peer.machine.machine_survey import Room, device_of, engine_for
from swarm.peer.machine.state_directory import StateDirectory, kept_credential
from swarm.peer.machine.worker_processes import num_workers
from swarm.peer.start.entry import Started, Starter
from swarm.peer.start.founding import found
from swarm.peer.start.host import Host, nothing
from swarm.peer.start.link_monitor import LinkMonitor
from swarm.peer.start.start_checks import is_to_be_founded, require_way_in
from swarm.peer.status.observing import UNOBSERVED, PeerObserver
from swarm.peer.status.publisher import Publisher, RoomsThere, announcement
from swarm.peer.text.agreed_model import Agreed, end_of_text, held_out_of, named_tensors
from swarm.peer.text.run_request import Wanted
from swarm.peer.training.expert_moments import ExpertMoments
from swarm.peer.training.leaving import Stop, StopAsked, leave, serving
from swarm.peer.training.live_model import LiveModel, merge_blobs
from swarm.peer.training.trainer import Trainer
from swarm.protocol.records.records import PeerRecord, PeerState
from swarm.protocol.rounds import LocalPeer, RoundMachine, Rules
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.manifest import Manifest, Unit
from swarm.train.fallback_engine import SteppingEngine
from swarm.train.workers.parallel_engine import ParallelEngine

logger = logging.getLogger(__name__)

STOP_S = 10.0
NO_WISH = Wanted()
ENDS_WITH_IT = (
    "This run ends with this peer: no other is vouched for. swarm-invite prints invitations, and "
    "vouches for a trainee with --for PEER."
)
THIS_MACHINE = PeerConfig()


class Peer:
    """One peer that takes part in one run, from its construction until `close`.

    A separate thread answers other peers; `train` works in the thread that made the peer. Use a
    peer in a `with` statement, or call `close`.

    Attributes:
        run: the run's configuration.
        run_id: the run's name, a hyphen and 16 hex digits.
        peer_id: id of this peer.
        addresses: addresses at which others may join; empty if this machine cannot be dialed.
        status: the status that this peer publishes.
    """

    def __init__(self, starter: Starter, started: Started) -> None:
        """Takes part in a run that was entered; see `start`, `found`, `join` and `resume`."""
        host, run = starter.host, started.run
        self.run, self.run_id, self.peer_id = run, started.run_id, host.node.peer_id
        room = Room(run, host.config.compute, started.directory.path)
        self.status, self._traffic = starter.status(run, started.directory, room), host.node.traffic
        self.addresses, self._started, self._stop = host.node.addresses, started, starter.stop
        announced = announcement(started.run_id, run, started.directory.read_founding())
        self._rooms_there = RoomsThere()
        line = LinkMonitor(host, self.status, started.run_id)
        self._publisher = Publisher(
            host.node, self.status, announced, host.state, on_present=self._on_present,
            beside=line.measure_again,
        )  # fmt: skip
        self._agreed = Agreed(started.store, started.layout)
        self._rounds = RoundDriver(
            host.node,
            started.store,
            _machine_of(starter, started, room),
            record_file=RecordFile(started.directory.record_path),
            layout=started.layout,
            settings=run.round,
            merger=self._merge,
            observer=starter.observer,
        )
        self.status.watch(self._rounds, started.run_id)
        self._exchange = _exchange_of(host, started, self._rounds)
        self._loader = _loader_of(host.config, started)
        self._engine = self._engine_of(host.config.compute, started, room)
        threads = UnitThreads(host.config.compute.threads or usable_cores())
        model = LiveModel(self.peer_id, run, self._engine, self._agreed, threads)
        self._moments = ExpertMoments(model, self._exchange, self.status)
        self._trainer = Trainer(
            model,
            self._loader,
            self._rounds,
            started.directory,
            held_out=held_out_of(started.record.tip, run, started.store),
            status=self.status,
            moments=self._moments,
            stop=self._stop,
            rooms=self._rooms_there,
        )
        if started.record.tip.vouched == {self.peer_id}:
            starter.observer.on_notice(ENDS_WITH_IT)
        if run.run.admission == "invited":
            starter.observer.on_notice("A joiner needs --invitation and what swarm-invite prints.")
        self._ending = ExitStack()
        self._ending.callback(host.close)
        self._ending.callback(self.status.ended)
        self._ending.callback(self._engine.close)
        self._ending.callback(lambda: host.node.end("the rounds", self._rounds.stop(), STOP_S))
        self._ending.callback(lambda: host.node.end("hand-overs", self._exchange.stop(), STOP_S))
        self._ending.callback(self._publisher.stop)
        host.quota.keep_back(run)
        host.reception.admit(self._rounds, self._exchange)
        self._rounds.start()
        host.reception.announce(announced)
        self._publisher.start()

    def _engine_of(
        self, compute: ComputeSection, started: Started, room: Room
    ) -> SteppingEngine | ParallelEngine:
        """The engine for this machine; `room` then knows how many experts fit.

        Policy: expert ownership.
        """
        place = started.run, compute, started.directory.path
        room()  # before the engine takes memory
        owned = sum(self.peer_id in each for each in started.record.tip.owners.values())
        engine = engine_for(*place, lambda: self._stop.remaining_s, owned)
        self.status.engine_of = engine.describe
        room.engine = engine
        return engine

    # ------------------------------------------------ ways into a run

    @classmethod
    def found(
        cls,
        run: RunConfig,
        folder: Path | str,
        *,
        config: PeerConfig = THIS_MACHINE,
        weights: Mapping[str, Tensor] | None = None,
        tokenizer: Path | str | None = None,
        observer: PeerObserver = UNOBSERVED,
    ) -> Peer:
        """Founds a run, once `config.peer.wait_for_peers` peers are present.

        Args:
            run: what is trained, and how; see `swarm.load_run`.
            folder: the state directory of this peer; made if missing.
            config: configuration of this machine.
            weights: every tensor before the first step, by Hugging Face name, as from
                `swarm.load_export`, for a run with `run.initial = "given"`; None for weights from
                the run's seed.
            tokenizer: folder with a tokenizer.json, for a run with `data.tokenizer = "file"`; it
                travels with the run.
            observer: notified of events; see `PeerObserver`.

        Raises:
            ConfigError, DataError, StateError: a person must fix the problem that the error names.
            NetworkDown: libp2p's daemon did not start.
        """

        def founding(starter: Starter) -> Started:
            return found(starter, run, weights)

        wanted = Wanted(tokenizer=Path(tokenizer) if tokenizer else None)
        return cls._enter(
            folder, config, founding, wanted=wanted, observer=observer, founds=lambda _: True
        )

    @classmethod
    def join(
        cls,
        addresses: Sequence[str],
        folder: Path | str,
        *,
        config: PeerConfig = THIS_MACHINE,
        wanted: Wanted = NO_WISH,
        observer: PeerObserver = UNOBSERVED,
    ) -> Peer:
        """Joins the run of the peers at these addresses, as a stranger.

        Args:
            addresses: addresses of peers, such as `/ip4/203.0.113.7/tcp/31330/p2p/ID`; some may be
                unreachable.
            folder: the state directory of this peer; made if missing.
            config: configuration of this machine.
            wanted: the run, if several are announced there, and the invitation, if one is needed.
            observer: notified of events.

        Raises:
            NobodyReachable: none of the addresses answers, or none announces a run.
            RunMismatch: the run is not the wanted run.
            TextMismatch, DataError: this machine's text is not the run's.
        """
        network = config.network.model_copy(update={"initial_peers": tuple(addresses)})
        config = config.model_copy(update={"network": network})

        def joining(starter: Starter) -> Started:
            joined = starter.join(wanted.run_id)
            if joined is None:
                raise NobodyReachable("no run with this configuration is announced there")
            return joined

        return cls._enter(folder, config, joining, wanted, observer=observer)

    @classmethod
    def resume(
        cls,
        folder: Path | str,
        *,
        config: PeerConfig = THIS_MACHINE,
        run_id: str | None = None,
        observer: PeerObserver = UNOBSERVED,
    ) -> Peer:
        """Resumes a run from a state directory, with or without the other peers.

        Args:
            folder: the state directory.
            config: configuration of this machine.
            run_id: id of the run. None for the run that the peer was in last.
            observer: notified of events.

        Raises:
            StateError: there is no such run in the directory.
            CorruptState: the state there is damaged, and no other peer has a copy.
        """

        def resuming(starter: Starter) -> Started:
            wanted = run_id or starter.state.last_run
            resumed = starter.resume(wanted, may_join=False) if wanted else None
            if resumed is None:
                raise StateError(f"{folder} has no state of {wanted or 'any run'}")
            return resumed

        return cls._enter(folder, config, resuming, observer=observer)

    @classmethod
    def start(
        cls,
        folder: Path | str,
        wanted: Wanted,
        *,
        config: PeerConfig = THIS_MACHINE,
        stop: Stop | None = None,
        observer: PeerObserver = UNOBSERVED,
    ) -> Peer:
        """Resumes the run in a state directory, else joins one, else founds it, as swarm-peer does.

        Args:
            folder: the state directory; made if missing.
            wanted: which run. A run with a configuration is founded if nobody announces it.
            config: configuration of this machine.
            stop: the request to leave; before the peer is in a run, it raises `Stopped`.
            observer: notified of events.

        Raises:
            Stopped: `stop` was asked before this peer was in a run.
            SwarmError: as `found`, `join` and `resume`.
        """

        def starting(starter: Starter) -> Started:
            started = starter.resume_or_join()
            if started is None:
                assert wanted.run is not None, "else it joins or fails"
                return found(starter, wanted.run)
            return started

        check = partial(require_way_in, wanted, config.network.initial_peers)
        return cls._enter(
            folder, config, starting, wanted, stop, observer=observer, check=check,
            founds=partial(is_to_be_founded, wanted),
        )  # fmt: skip

    @classmethod
    def _enter(
        cls,
        folder: Path | str,
        config: PeerConfig,
        way: Callable[[Starter], Started],
        wanted: Wanted = NO_WISH,
        stop: Stop | None = None,
        *,
        observer: PeerObserver,
        check: Callable[[StateDirectory], object] = nothing,
        founds: Callable[[StateDirectory], bool] = nothing,
    ) -> Peer:
        num_workers(config.compute, device_of(config.compute.device))  # fails if a GPU is missing
        start_threads(config.compute)
        gathers = config.peer.wait_for_peers > 1 and not config.peer.open_gathering
        host = Host.open(
            config,
            Path(folder),
            observer,
            check,
            stop,
            gathers=lambda state: gathers and founds(state),
        )
        with ExitStack() as undo:
            undo.callback(host.close)
            starter = Starter(host, wanted, observer)
            started = way(starter)
            starter.state.current_run = started.run_id
            starter.state.name_earlier_runs()
            peer = cls(starter, started)
            undo.pop_all()
            return peer

    # ------------------------------------------------ in the run

    @property
    def tip(self) -> Manifest:
        """The newest manifest that this peer has applied: round, step, members, owners, digests."""
        return self._rounds.tip

    def train(self) -> Manifest:
        """Takes part in rounds until the run is finished or `stop` is called. Call it once.

        Returns:
            The newest manifest.

        Raises:
            TrainingDiverged, SwarmError: this peer cannot continue; its state directory is intact.
        """
        with self._loader:
            try:
                self._trainer.main_loop()
            except StopAsked:
                self.status.begin(PeerState.LEAVING)
                adopted = self.status.manifest or self._started.record.tip
                logger.info("left: %s", leave(self._rounds, self._moments, adopted, self._stop))
                self._stop.raise_why()
            else:
                self.status.begin(PeerState.FINISHED)
                self.status.finished()
        return self.tip

    def stop(self) -> None:
        """Asks to leave: `train` finishes its round, hands over its experts and returns.

        May be called from any thread, and from a callback. Leaving takes at most
        `config.peer.leave_timeout_s`.
        """
        self._stop.ask()

    def serve(self, seconds: float) -> None:
        """Continues to answer other peers after the training, until `stop` is called.

        Args:
            seconds: how long to serve after the last fetch; a day in all at most.
        """
        traffic = self._traffic
        for _ in serving(self._stop, lambda: traffic.blob_bytes_sent, seconds):
            self.status.follow(self.tip)

    def weights(self) -> dict[str, Tensor]:
        """Every tensor of the agreed state at `tip`, by Hugging Face name, in its agreed type.

        Raises:
            CorruptState: a newer state has replaced this state, whose blobs were removed.
        """
        started = self._started
        return dict(named_tensors(started.layout, self.tip, started.store))

    def close(self) -> None:
        """Ends all threads and processes of this peer; it can resume from its state directory."""
        self._ending.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------ called by its parts

    def _on_present(self, present: Mapping[str, PeerRecord]) -> None:
        self._rooms_there.note(present)
        self._rounds.discovered(sorted(present))

    def _merge(self, tip: Manifest) -> dict[Unit, Content]:
        values, donors = merge_blobs(tip, self.run, self._agreed)
        self._publisher.announce_merge(tip, donors)
        return values


def _machine_of(starter: Starter, started: Started, room_of: Callable[[], int]) -> RoundMachine:
    host, config = starter.host, starter.host.config
    founding, file = started.directory.read_founding(), RecordFile(started.directory.record_path)
    started.store.pin([*started.record.tip.founding.blobs, founding.blob])
    peer = LocalPeer(
        host.node.peer_id,
        config.peer.capacity,
        Rules.of(started.run_id, started.run, started.layout),
        Timers(leave_s=config.peer.leave_timeout_s),
        now=passed_s(),
        random=random.Random(),
        sign=host.node.identity.sign,
        is_dialable=host.is_dialable,
        uplink_of=host.uplink_mbit,
        network_of=host.reception.ledger.public_network_of,
        room_of=room_of,
        fetches_ahead=True,
        credential=kept_credential(starter.credential, started.directory),
    )
    chain = file.read_chain(started.record, founding.head)
    return RoundMachine(peer, started.record, stored=started.store.digests(), chain=chain)


def _exchange_of(host: Host, started: Started, rounds: RoundDriver) -> MomentsExchange:
    store, layout, run = started.store, started.layout, started.run_id
    return MomentsExchange(host.node, store, rounds.downloads, layout, run=run)


def _loader_of(config: PeerConfig, started: Started) -> Loader:
    founding = started.record.tip.founding
    return Loader(
        started.shards,
        started.run,
        agreed_windows=founding.text.windows if founding.text else None,
        end_of_text=end_of_text(founding),
        pin_memory=device_of(config.compute.device) == "cuda",
    )
