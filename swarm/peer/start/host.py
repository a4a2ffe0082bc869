"""The parts of a peer that need no run: state directory, network node, answers to requests."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from swarm.config import PeerConfig
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.blob_server import BlobServer
from swarm.network.fetch.bulk import PROTOCOL
from swarm.network.fetch.fetcher import Downloads
from swarm.network.node.node import Handlers, Node
from swarm.network.node.peer_probe import PROTOCOL as MEASURE
from swarm.network.node.peer_probe import QUESTION, Prober, dial_fault
from swarm.network.rounds.moments_exchange import MomentsExchange
from swarm.network.rounds.round_driver import RoundDriver
from swarm.network.runs.run_search import RUN_QUESTION, encode_preparing
from swarm.network.runs.signed_invitations import invite
from swarm.network.runs.tips import asked_tip
from swarm.network.wire.identity import Identity
from swarm.network.wire.ledger import Ledger
from swarm.peer.machine.state_directory import StateDirectory, keep, with_kept
from swarm.peer.machine.worker_processes import ready_for_nodes
from swarm.peer.start.quota import QuotaWatch, require_quota
from swarm.peer.start.start_checks import path_of_key
from swarm.peer.status.observing import PeerObserver
from swarm.peer.status.round_log import up_mbit
from swarm.peer.training.leaving import Stop
from swarm.protocol.records.records import RunRecord, encode_record, shortened
from swarm.protocol.values.invitation import GATHERING, MAX_USES, PrivateInvitation, as_text
from swarm.protocol.values.manifest import Digest, PeerId

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gathering:
    """A run that is being founded.

    Attributes:
        run: the run's name until it has an id.
        invitation: invitation for the peers for which the founder waits.
    """

    run: str
    invitation: PrivateInvitation


def gathering_of(state: StateDirectory, identity: Identity, wait_for_peers: int) -> Gathering:
    """The gathering, which is the same at every start until its run is founded.

    So the join command that an earlier start printed stays valid.

    Args:
        state: state directory of the founder.
        identity: identity of the founder.
        wait_for_peers: how many peers begin the run, the founder included.
    """
    kept = state.read_gathering()
    if kept is None:
        kept = secrets.token_hex(16), secrets.token_hex(32)
        state.write_gathering(*kept)
    name, secret = kept
    run, uses = f"{GATHERING}{name}", min(wait_for_peers - 1, MAX_USES)
    return Gathering(run, invite(identity, run, uses=uses, last_round=0, secret=secret))


NETWORK_START_S = 60.0
NETWORK_STOP_S = 10.0
DIAL_BACK_S = 40.0


def nothing(_: StateDirectory) -> bool:
    """Default for `check` and `gathers`: accepts any state on disk, and gathers no peers."""
    return False


class Reception:
    """Answers other peers in the node's loop, from the start of the network to its end.

    Before `open` it answers nothing. Before `admit` it answers only requests for its run, probes
    and blobs.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.server = BlobServer(
            on_ask=self._on_ask,
            ledger=self.ledger,
            is_control=lambda digest: self._rounds is not None and digest in self._rounds.outbound,
            is_moments=lambda digest: self._moments is not None and self._moments.holds(digest),
            may_wait=lambda d: self._rounds is not None and self._rounds.outbound.may_wait(d),
        )
        self._prober = Prober(self.ledger)
        self._node: Node | None = None
        self._announced: RunRecord | None = None
        self._preparing: str | None = None
        self._rounds: RoundDriver | None = None
        self._moments: MomentsExchange | None = None

    def handlers(self) -> Handlers:
        """The callbacks for a node."""
        return Handlers(
            on_message=self._on_message,
            on_request=self._on_request,
            streams={PROTOCOL: self.server.serve, MEASURE: self._prober.serve},
            ledger=self.ledger,
        )

    def open(self, node: Node) -> None:
        """Lets others probe this peer and its link from now on. Call it once the network is up."""
        self._node = node

    def prepare(self, fingerprint: str | None) -> None:
        """Until `announce`, answers that this peer prepares a run with this fingerprint."""
        self._preparing = fingerprint

    def announce(self, record: RunRecord) -> None:
        """Sets the answer to peers that ask which run this peer is in."""
        self._announced = record

    def admit(self, rounds: RoundDriver, moments: MomentsExchange) -> None:
        """Call once this peer takes part in a run: from now on messages are handled."""
        self._moments, self._rounds = moments, rounds

    def _on_ask(self, source: PeerId, digest: Digest) -> None:
        if self._rounds:
            self._rounds.asked_for(source, digest)

    async def _on_message(self, source: PeerId, payload: bytes) -> None:
        if self._rounds:
            self._rounds.inbound.take(source, payload)

    async def _on_request(self, source: PeerId, payload: bytes) -> bytes:
        if payload.startswith(QUESTION) and self._node:
            return await self._prober.answer(self._node, source, payload)
        if payload == RUN_QUESTION:
            if self._announced:
                return encode_record(self._announced)
            return encode_preparing(self._preparing) if self._preparing else b""
        if self._moments:
            answer = await self._moments.answer(source, payload)
            if answer is not None:
                return answer
        rounds = self._rounds
        if rounds and (trusted := asked_tip(payload, rounds.machine.rules.run)):
            return rounds.heads.commit_of_tip(trusted)
        return await rounds.heads.answer(source, payload) if rounds else b""


@dataclass(frozen=True)
class Host:
    """The parts of a peer that do not depend on a run; `close` releases them.

    Attributes:
        config: configuration of this machine.
        state: the peer's state directory, locked.
        node: the node in the network.
        reception: answers others.
        is_dialable: whether others can open connections to this peer, as far as known.
        stop: the request to leave.
        quota: counts the node's traffic since its start.
    """

    config: PeerConfig
    state: StateDirectory
    node: Node
    reception: Reception
    is_dialable: bool
    stop: Stop
    quota: QuotaWatch

    def uplink_mbit(self) -> int:
        """Measured upload rate of this machine's link, in Mbit/s; 0 if it is not known."""
        mbit = up_mbit(self.node.lines, self.node.traffic)
        return max(1, round(mbit)) if mbit else 0

    @classmethod
    def open(
        cls,
        config: PeerConfig,
        folder: Path,
        observer: PeerObserver,
        check: Callable[[StateDirectory], object] = nothing,
        stop: Stop | None = None,
        *,
        gathers: Callable[[StateDirectory], bool] = nothing,
    ) -> Host:
        """Locks a state directory and starts the network with the identity in it.

        If a run is on disk, the peer starts even if no other peer answers. Settings that `config`
        leaves open keep their values from an earlier start (`peer/machine/state_directory.py`).

        Args:
            config: configuration of this machine.
            folder: the state directory; made if missing.
            observer: notified how others may join.
            check: called before the network starts; raises if the state on disk is unsuitable.
            stop: the request to leave; None makes a new one.
            gathers: whether this start waits for invited peers.

        Raises:
            ConfigError: this peer cannot listen for workers of other machines at the given address.
            StateError, StateLocked: the directory cannot be used, or lacks the key of its runs.
            NobodyReachable, NetworkDown: no given address answered; libp2p did not start.
            DataQuotaSpent: the month's bytes are used up.
        """
        reception = Reception()
        with ExitStack() as undo:
            state = StateDirectory(folder)
            undo.callback(state.close)
            check(state)
            ready_for_nodes(config.compute, state.path)
            given, config = config, with_kept(config, state.settings_path)
            network = config.network
            require_quota(network, state)
            node = Node.start(
                identity_path=path_of_key(network.identity_path, state),
                network=network,
                known_peers=network.initial_peers,
                remembered=state.known_peers,
                port=state.port,
                handlers=reception.handlers(),
                deadline_s=NETWORK_START_S,
                must_reach=bool(network.initial_peers) and not state.run_ids,
            )
            undo.callback(node.stop, NETWORK_STOP_S)
            keep(given, state.settings_path)
            stop = stop or Stop(config.peer.leave_timeout_s)
            quota = QuotaWatch(network, state, node, stop)
            undo.callback(quota.end)
            reception.open(node)
            if node.port and state.port is None:
                state.port = node.port
            _tell_how_to_join(observer, state, node, config.peer.wait_for_peers * gathers(state))
            undo.pop_all()
            is_dialable = _can_be_dialled(node) and not network.client_mode
            return cls(config, state, node, reception, is_dialable, stop, quota)

    @property
    def name(self) -> str:
        """Display name: the configured one, or the host's name and the end of the peer id."""
        host, end = socket.gethostname(), self.node.peer_id[-4:]
        return self.config.peer.name or f"{shortened(host, 64 - 5)}-{end}"

    def serve(self, store: BlobStore) -> Downloads:
        """Makes a store's blobs available to others; returns the `Downloads` into it."""
        self.reception.server.attach(store)
        return Downloads(self.node, store)

    def remember_peers(self) -> None:
        """Saves the peers' addresses known now for the next start.

        Addresses belong to a run, so call this once the run is known to be the wanted one.
        """
        self.state.known_peers = (*self.node.known_addresses, *self.state.known_peers)

    def close(self) -> None:
        """Leaves the network and releases the state directory."""
        self.quota.end()
        self.node.stop(NETWORK_STOP_S)
        self.state.close()


def _tell_how_to_join(
    observer: PeerObserver, state: StateDirectory, node: Node, num_gathered: int
) -> None:
    """Reports the address; a founder that waits for others first reports the invitation."""
    if num_gathered > 1:
        gathering = gathering_of(state, node.identity, num_gathered)
        observer.on_invitation(as_text(gathering.invitation))
    for address in node.addresses[:1]:
        observer.on_address(address)


def _can_be_dialled(node: Node) -> bool:
    """Asks other peers to dial this peer. False only if some tried and none succeeded."""
    fault = node.run(dial_fault(node), DIAL_BACK_S)
    if fault:
        logger.warning("nobody can dial this peer, so it communicates through others: %s", fault)
    return not fault
