"""swarm-peer inside a drill: it can be caught at a phase, and its clock and steps obey the drill.

Not for people: `swarm-local --faults` and the scenarios start it instead of `peers.peer`. It
changes nothing but when things happen.

| phase | caught |
|---|---|
| local_steps | after a local step |
| save | the offered values are stored, the private state is not durable |
| offer | the private state is durable, nothing was offered |
| roster | as convener before the first ROSTER is sent, as reducer when it came |
| reduce | the values of a unit are here, their mean is not |
| propose | as convener, before the first PROPOSE |
| fetch | a fetch has begun; a joiner's: of the first blob |
| accept | the vote is durable, ACCEPT was not sent |
| commit | as convener: decided and applied, but no COMMIT went out |
| apply | the record names the new tip, the live model was not swapped |
| merge | a merge is due, nothing of it is computed |
| leave | asked to leave, nobody knows of it |
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.peer import main
from peers.start import Started, Starter
from swarm.emulation.controls import (
    FOLDER_VARIABLE,
    INDEX_VARIABLE,
    Caught,
    ControlFolder,
    Trap,
)
from swarm.network.blobs import BlobStore
from swarm.network.round_driver import RoundDriver
from swarm.peer import trainer
from swarm.peer.state_directory import RunDirectory
from swarm.peer.status import PeerStatus
from swarm.protocol.events import Apply, ComputeMerge, Event, Fetch, Persist, Received, Reduce, Send
from swarm.protocol.manifest import Digest, Manifest, PeerId
from swarm.protocol.messages import Commit, Offer, Propose, Roster
from swarm.protocol.records import PeerState
from swarm.protocol.rounds import RoundMachine
from swarm.train.checkpoint import PrivateState, Saving, save_private
from swarm.train.engine import StepStats

NO_ROUND = 2**31
SETTLE_S = 0.1
REFRESH_S = 0.25
"""How soon a running peer does what it is told."""


@dataclass(frozen=True)
class Spot:
    """The round that a peer works on, and what it is in it."""

    round: int
    roles: tuple[str, ...]


class Emulation:
    """What this process knows of the drill that it is part of."""

    def __init__(self, folder: ControlFolder, peer: int) -> None:
        self.folder, self.peer = folder, peer
        self.controls = folder.controls(peer)
        self.driver: RoundDriver | None = None
        self.is_joiner = False
        """This life came as a stranger and has not contributed yet."""
        self.step_began_s = time.monotonic()
        """When the local step under way began."""
        self.reduces_on: Digest = ""
        """Tip on which this peer is a reducer."""
        self.unsent: list[Send] = []
        """COMMITs of a decision that are held back until it is applied here."""
        self.real_time = time.time
        self._is_true = threading.local()

    def follow(self) -> None:
        """Looks up what the drill says, as long as the process lives."""

        def refresh() -> None:
            while True:
                time.sleep(REFRESH_S)
                self.controls = self.folder.controls(self.peer)

        threading.Thread(target=refresh, name="emulation", daemon=True).start()

    def clock(self) -> float:
        """Seconds since 1970 by this peer's wall clock."""
        if getattr(self._is_true, "on", False):
            return self.real_time()
        return self.real_time() + self.controls.skew_s

    def stretch_step(self) -> None:
        """Waits until the local step that was just computed has taken as long as it should."""
        told = self.controls
        took_s = time.monotonic() - self.step_began_s
        time.sleep(max(0.0, max(took_s, told.step_s) * told.slow - took_s))
        self.step_began_s = time.monotonic()

    @contextmanager
    def true_time(self) -> Iterator[None]:
        """The history is read by the drill: its times are true ones."""
        self._is_true.on = True
        try:
            yield
        finally:
            self._is_true.on = False

    # ------------------------------------------------ traps

    def at(self, phase: str, spot: Spot | None = None) -> None:
        """Stops this process if a trap is set here; it goes on when the drill says so."""
        spot = spot or self.spot()
        for trap in self.folder.armed():
            if not self._is_for_me(trap, phase, spot):
                continue
            caught = Caught(trap.name, self.peer, spot.round, self.real_time())
            if self.folder.take(trap, caught):
                os.kill(os.getpid(), signal.SIGSTOP)
                # Another thread may be the one that takes the signal: this one must not go on.
                time.sleep(SETTLE_S)
                return

    def expects(self, phase: str, spot: Spot) -> bool:
        """Whether a trap for this phase would catch this peer there."""
        return any(self._is_for_me(trap, phase, spot) for trap in self.folder.armed())

    def _is_for_me(self, trap: Trap, phase: str, spot: Spot) -> bool:
        return trap.catches(phase=phase, number=spot.round, peer=self.peer, roles=spot.roles)

    def spot(self) -> Spot:
        """Where this peer is at this moment."""
        if self.driver is None:
            # A stranger knows no round: any trap for later ones is meant.
            return Spot(NO_ROUND, self._roles_outside())
        machine = self.driver.machine
        return self.spot_on(machine.tip, machine.campaign.convener)

    def spot_on(self, tip: Manifest, convener: PeerId) -> Spot:
        """Where this peer is while the manifest after a tip is worked on."""
        assert self.driver is not None
        me, roles = self.driver.node.peer_id, self._roles_outside()
        if self.reduces_on == tip.digest:
            roles += ("reducer",)
        if me not in tip.members:
            return Spot(tip.round + 1, roles)
        if convener == me:
            return Spot(tip.round + 1, (*roles, "convener"))
        owns = any(me in owners for owners in tip.owners.values())
        return Spot(tip.round + 1, (*roles, "contributor", *(["owner"] if owns else [])))

    def _roles_outside(self) -> tuple[str, ...]:
        roles = ("bootstrap",) if self.peer == 0 else ()
        return (*roles, "joiner") if self.is_joiner else roles


def arm_trainer(emulation: Emulation) -> None:
    """Puts the traps into the trainer's thread, and makes local steps as long as asked."""
    begin, on_step, save = PeerStatus.begin, PeerStatus.on_step, save_private
    offer, leave = RoundDriver.offer, RoundDriver.leave
    join, append = Starter.join, RunDirectory.append_event

    def noted_begin(self: PeerStatus, state: PeerState) -> None:
        emulation.step_began_s = time.monotonic()
        begin(self, state)

    def timed_step(self: PeerStatus, number: int, stats: StepStats) -> None:
        on_step(self, number, stats)
        emulation.stretch_step()
        emulation.at("local_steps")

    def trapped_save(path: Path, state: PrivateState, begun: Saving) -> None:
        emulation.at("save")
        save(path, state, begun)

    def trapped_offer(self: RoundDriver, offered: Offer) -> None:
        emulation.at("offer")
        offer(self, offered)

    def trapped_leave(self: RoundDriver) -> None:
        emulation.at("leave")
        leave(self)

    def noted_join(self: Starter, *arguments: Any) -> Started | None:
        emulation.is_joiner = True
        return join(self, *arguments)

    def true_append(self: RunDirectory, kind: str, /, **fields: Any) -> None:
        with emulation.true_time():
            append(self, kind, **fields)

    _replace(PeerStatus, "begin", noted_begin)
    _replace(PeerStatus, "on_step", timed_step)
    _replace(trainer, "save_private", trapped_save)
    _replace(RoundDriver, "offer", trapped_offer)
    _replace(RoundDriver, "leave", trapped_leave)
    _replace(Starter, "join", noted_join)
    _replace(RunDirectory, "append_event", true_append)


def arm_network(emulation: Emulation) -> None:
    """Puts the traps into the places where this peer serves the others."""
    start, writer = RoundDriver.start, BlobStore.writer
    handle, reduce_unit = RoundMachine.handle, RoundDriver._reduce_unit

    def noted_start(self: RoundDriver) -> None:
        emulation.driver = self
        start(self)

    def trapped_writer(self: BlobStore, *arguments: Any) -> Any:
        if emulation.driver is None and emulation.is_joiner:
            emulation.at("fetch")
        return writer(self, *arguments)

    def trapped_handle(self: RoundMachine, event: Event, now: float) -> Any:
        message = event.message if isinstance(event, Received) else None
        if isinstance(message, Roster) and self.me in message.reducers:
            emulation.reduces_on = self.tip.digest
            emulation.at("roster")
        return handle(self, event, now)

    async def trapped_reduce(self: RoundDriver, effect: Reduce) -> None:
        emulation.at("reduce")
        await reduce_unit(self, effect)

    _replace(RoundDriver, "start", noted_start)
    _replace(RoundDriver, "_reduce_unit", trapped_reduce)
    _replace(RoundMachine, "handle", trapped_handle)
    _replace(BlobStore, "writer", trapped_writer)


def arm_effects(emulation: Emulation) -> None:
    """Puts the traps into what the round machine has done, one effect after another."""
    actions = RoundDriver._actions

    async def trapped_send(self: RoundDriver, effect: Send) -> None:
        message = effect.message
        if isinstance(message, Roster) and message.offers:
            emulation.at("roster")
        if isinstance(message, Propose):
            emulation.at("propose")
        spot = _of_news(emulation, message) if isinstance(message, Commit) else None
        if spot and emulation.expects("commit", spot):
            emulation.unsent.append(effect)
            return
        await actions[Send](self, effect)

    async def trapped_persist(self: RoundDriver, effect: Persist) -> None:
        before = self.record_file.read() if self.record_file.path.exists() else None
        await actions[Persist](self, effect)
        record = effect.record
        if before is None:
            return
        if before.tip.digest != record.tip.digest:
            decided = record.certificate
            spot = emulation.spot_on(before.tip, decided.ballot.convener if decided else "")
            if emulation.unsent:
                emulation.at("commit", spot)
            held, emulation.unsent = emulation.unsent, []
            emulation.at("apply", spot)
            for send in held:
                await actions[Send](self, send)
        elif record.accepted and before.accepted != record.accepted:
            spot = emulation.spot_on(before.tip, record.accepted.ballot.convener)
            emulation.at("accept", spot)

    async def trapped_fetch(self: RoundDriver, effect: Fetch) -> None:
        await actions[Fetch](self, effect)
        emulation.at("fetch")

    async def trapped_merge(self: RoundDriver, effect: ComputeMerge) -> None:
        emulation.at("merge")
        await actions[ComputeMerge](self, effect)

    async def noted_apply(self: RoundDriver, effect: Apply) -> None:
        if self.node.peer_id in effect.manifest.contributors:
            emulation.is_joiner = False
        await actions[Apply](self, effect)

    trapped = {Send: trapped_send, Persist: trapped_persist, Fetch: trapped_fetch}
    trapped |= {ComputeMerge: trapped_merge, Apply: noted_apply}
    _replace(RoundDriver, "_actions", {**actions, **trapped})


def _of_news(emulation: Emulation, message: Commit) -> Spot | None:
    """Where a convener is that announces what its own record does not name yet."""
    driver, decided = emulation.driver, message.certificate
    if driver is None or decided is None or decided.ballot.convener != driver.node.peer_id:
        return None
    recorded = driver.record_file.read()
    if recorded is None or recorded.tip.digest != message.manifest.parent:
        return None
    return emulation.spot_on(recorded.tip, decided.ballot.convener)


def _replace(owner: Any, name: str, replacement: Callable[..., Any] | Any) -> None:
    assert hasattr(owner, name), f"{owner} has no {name} any more"
    setattr(owner, name, replacement)


def emulate(folder: Path, peer: int) -> None:
    """Makes this process part of a drill."""
    emulation = Emulation(ControlFolder(folder), peer)
    _replace(time, "time", emulation.clock)
    arm_trainer(emulation)
    arm_network(emulation)
    arm_effects(emulation)
    emulation.follow()


if __name__ == "__main__":
    emulate(Path(os.environ[FOLDER_VARIABLE]), int(os.environ[INDEX_VARIABLE]))
    main()
