"""swarm-peer in a drill, which can stop it at a phase and set its clock and step times.

Not for people: `swarm-local --faults` and the scenarios start it instead of `peers.peer`. An
observer of the peer stops it, and changes only the times of events.

| phase | caught |
|---|---|
| local_steps | after a local step |
| save | the offered values are stored, the private state is not durable |
| offer | the private state is durable, nothing was offered |
| roster | as convener before the first ROSTER is sent, as reducer once it has arrived |
| reduce | the values of a unit are here, their mean is not |
| propose | as convener, before the first PROPOSE |
| fetch | a fetch has begun; for a joiner: the first blob of the model is here |
| accept | the vote is durable, ACCEPT was not sent |
| commit | as convener: the round is decided and applied, no COMMIT was sent |
| apply | the record names the new tip, the live model was not swapped |
| merge | a merge is due, and no part of it is computed |
| leave | asked to leave, nobody knows of it |
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from peers.actions.printed import Printed
from peers.peer import main
from swarm.background import SYSTEM, SupervisedThread
from swarm.emulation import controls
from swarm.network.rounds.record_file import RecordFile
from swarm.network.rounds.round_driver import CarryOut
from swarm.protocol.messages import events
from swarm.protocol.messages.messages import Commit, Propose, Roster
from swarm.protocol.records.records import PeerState
from swarm.protocol.rounds import RoundMachine
from swarm.protocol.values.manifest import Digest, Manifest, PeerId
from swarm.train.engine.engine import StepStats

NO_ROUND = 2**31
SETTLE_S = 0.1
REFRESH_S = 0.25
"""Seconds between two reads of the controls."""


@dataclass(frozen=True)
class Spot:
    """The round that a peer works on, and its roles in that round."""

    round: int
    roles: tuple[str, ...]


class Emulation(Printed):
    """The drill's controls of this process, and its traps."""

    def __init__(self, folder: controls.ControlFolder, peer: int) -> None:
        self.folder, self.peer = folder, peer
        self.controls = folder.controls(peer)
        self.machine: RoundMachine | None = None
        """The machine of the rounds. None before they begin."""
        self.record_file: RecordFile | None = None
        self.is_joiner = False
        """Whether this process joined as a stranger and has not contributed yet."""
        self.step_began_s = time.monotonic()
        """When the present local step began."""
        self.reduces_on: Digest = ""
        """Tip after which this peer is a reducer."""
        self.unsent: list[events.Send] = []
        """COMMITs of a decision that wait until the decision is applied here."""
        self.real_time = time.time

    def follow(self) -> None:
        """Reads the drill's controls repeatedly, as long as the process lives."""

        def refresh() -> None:
            while not SYSTEM.wait(self.following.stopping, REFRESH_S):
                self.controls = self.folder.controls(self.peer)

        self.following = SupervisedThread("emulation", refresh)
        self.following.start()

    def clock(self) -> float:
        """Seconds since 1970 by this peer's wall clock."""
        return self.real_time() + self.controls.skew_s

    def stretch_step(self) -> None:
        """Waits until the computed local step has taken as long as the controls want."""
        told = self.controls
        took_s = time.monotonic() - self.step_began_s
        time.sleep(max(0.0, max(took_s, told.step_s) * told.slow - took_s))
        self.step_began_s = time.monotonic()

    # ------------------------------------------------ traps

    def at(self, phase: str, spot: Spot | None = None) -> None:
        """Stops this process if a trap is set here, until the drill continues it."""
        spot = spot or self.spot()
        for trap in self.folder.armed():
            if not self._is_for_me(trap, phase, spot):
                continue
            caught = controls.Caught(trap.name, self.peer, spot.round, self.real_time())
            if self.folder.take(trap, caught):
                os.kill(os.getpid(), signal.SIGSTOP)
                # Another thread may receive the signal, so this thread must wait.
                time.sleep(SETTLE_S)
                return

    def expects(self, phase: str, spot: Spot) -> bool:
        """Whether a trap for this phase would catch this peer at a spot."""
        return any(self._is_for_me(trap, phase, spot) for trap in self.folder.armed())

    def _is_for_me(self, trap: controls.Trap, phase: str, spot: Spot) -> bool:
        return trap.catches(phase=phase, number=spot.round, peer=self.peer, roles=spot.roles)

    def spot(self) -> Spot:
        """The present spot of this peer."""
        if self.machine is None:
            # A stranger knows no round, so traps for all later rounds match.
            return Spot(NO_ROUND, self._roles_outside())
        return self.spot_on(self.machine.tip, self.machine.campaign.convener)

    def spot_on(self, tip: Manifest, convener: PeerId) -> Spot:
        """The spot of this peer during the round after a tip."""
        assert self.machine is not None
        me, roles = self.machine.me, self._roles_outside()
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

    # ------------------------------------------------ called by the peer

    def on_joining(self) -> None:
        """Records that the peer joins as a stranger."""
        self.is_joiner = True

    def on_fetched(self, here: int, total: int) -> None:  # noqa: ARG002 - an observer's
        """Trap during a joiner's fetch."""
        if self.is_joiner:
            self.at("fetch")

    def on_rounds(self, machine: RoundMachine, record_file: RecordFile) -> None:
        """Takes the machine and the record, from which the peer's spot is known."""
        self.machine, self.record_file = machine, record_file

    def on_state(self, state: PeerState) -> None:  # noqa: ARG002 - likewise
        """Starts the clock of the round's first local step, in case this step begins now."""
        self.step_began_s = time.monotonic()

    def on_step(self, step: int, stats: StepStats) -> None:  # noqa: ARG002 - likewise
        """Makes a step take as long as the controls say."""
        self.stretch_step()
        self.at("local_steps")

    def on_saving(self) -> None:
        """The trap `save` in the module's table."""
        self.at("save")

    def before_offer(self) -> None:
        """The trap `offer` in the module's table."""
        self.at("offer")

    def before_leave(self) -> None:
        """The trap `leave` in the module's table."""
        self.at("leave")

    def before_event(self, event: events.Event) -> None:
        """Notes that this peer is a reducer once the ROSTER arrives."""
        message, machine = (
            event.message if isinstance(event, events.Received) else None,
            self.machine,
        )
        if machine and isinstance(message, Roster) and machine.me in message.reducers:
            self.reduces_on = machine.tip.digest
            self.at("roster")

    async def carry_out(self, effect: events.Effect, act: CarryOut) -> None:
        """Carries out the effects of the round machine one by one, with traps before and after."""
        if isinstance(effect, events.Persist):
            await self._persist(effect, act)
            return
        if isinstance(effect, events.Send) and self._holds_back(effect):
            return
        if isinstance(effect, events.Reduce):
            self.at("reduce")
        elif isinstance(effect, events.ComputeMerge):
            self.at("merge")
        elif isinstance(effect, events.Apply) and self.machine:
            self.is_joiner &= self.machine.me not in effect.manifest.contributors
        await act(effect)
        if isinstance(effect, events.Fetch):
            self.at("fetch")

    def _holds_back(self, effect: events.Send) -> bool:
        """Whether a COMMIT waits until its manifest is applied, because a trap lies in between."""
        message = effect.message
        if isinstance(message, Roster) and message.offers:
            self.at("roster")
        if isinstance(message, Propose):
            self.at("propose")
        spot = self._spot_of_news(message) if isinstance(message, Commit) else None
        if spot and self.expects("commit", spot):
            self.unsent.append(effect)
            return True
        return False

    async def _persist(self, effect: events.Persist, act: CarryOut) -> None:
        file = self.record_file
        assert file is not None, "rounds have begun"
        before = file.read() if file.path.exists() else None
        await act(effect)
        record = effect.record
        if before is None:
            return
        if before.tip.digest != record.tip.digest:
            decided = record.certificate
            spot = self.spot_on(before.tip, decided.ballot.convener if decided else "")
            if self.unsent:
                self.at("commit", spot)
            held, self.unsent = self.unsent, []
            self.at("apply", spot)
            for send in held:
                await act(send)
        elif record.accepted and before.accepted != record.accepted:
            self.at("accept", self.spot_on(before.tip, record.accepted.ballot.convener))

    def _spot_of_news(self, message: Commit) -> Spot | None:
        """The spot of a convener that announces a decision before its own record names it."""
        decided = message.certificate
        if not (self.machine and self.record_file and decided):
            return None
        recorded = self.record_file.read()
        if decided.ballot.convener != self.machine.me or recorded is None:
            return None
        if recorded.tip.digest != message.manifest.parent:
            return None
        return self.spot_on(recorded.tip, decided.ballot.convener)


def emulate(folder: Path, peer: int) -> Emulation:
    """Makes this process part of a drill, and sets its wall clock to the drill's."""
    emulation = Emulation(controls.ControlFolder(folder), peer)
    time.time = emulation.clock
    emulation.follow()
    return emulation


if __name__ == "__main__":
    main(
        obj=emulate(
            Path(os.environ[controls.FOLDER_VARIABLE]), int(os.environ[controls.INDEX_VARIABLE])
        )
    )
