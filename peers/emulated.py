"""swarm-peer inside a drill: it can be caught at a phase, and its clock and steps obey the drill.

Not for people: `swarm-local --faults` and the scenarios start it instead of `peers.peer`. It
watches the peer as any observer may, and changes nothing but when things happen.

| phase | caught |
|---|---|
| local_steps | after a local step |
| save | the offered values are stored, the private state is not durable |
| offer | the private state is durable, nothing was offered |
| roster | as convener before the first ROSTER is sent, as reducer when it came |
| reduce | the values of a unit are here, their mean is not |
| propose | as convener, before the first PROPOSE |
| fetch | a fetch has begun; a joiner's: the first blob of the model is here |
| accept | the vote is durable, ACCEPT was not sent |
| commit | as convener: decided and applied, but no COMMIT went out |
| apply | the record names the new tip, the live model was not swapped |
| merge | a merge is due, nothing of it is computed |
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
"""How soon a running peer follows its controls."""


@dataclass(frozen=True)
class Spot:
    """The round that a peer works on, and its roles in that round."""

    round: int
    roles: tuple[str, ...]


class Emulation(Printed):
    """What this process knows of the drill that it is part of, and its traps."""

    def __init__(self, folder: controls.ControlFolder, peer: int) -> None:
        self.folder, self.peer = folder, peer
        self.controls = folder.controls(peer)
        self.machine: RoundMachine | None = None
        """Of the rounds, once they have begun."""
        self.record_file: RecordFile | None = None
        self.is_joiner = False
        """This life came as a stranger and has not contributed yet."""
        self.step_began_s = time.monotonic()
        """When the local step under way began."""
        self.reduces_on: Digest = ""
        """Tip on which this peer is a reducer."""
        self.unsent: list[events.Send] = []
        """COMMITs of a decision that are held back until it is applied here."""
        self.real_time = time.time

    def follow(self) -> None:
        """Looks up what the drill says, as long as the process lives."""

        def refresh() -> None:
            while not SYSTEM.wait(self.following.stopping, REFRESH_S):
                self.controls = self.folder.controls(self.peer)

        self.following = SupervisedThread("emulation", refresh)
        self.following.start()

    def clock(self) -> float:
        """Seconds since 1970 by this peer's wall clock."""
        return self.real_time() + self.controls.skew_s

    def stretch_step(self) -> None:
        """Waits until the local step that was just computed has taken as long as it should."""
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
                # Another thread may be the one that takes the signal: this one must not go on.
                time.sleep(SETTLE_S)
                return

    def expects(self, phase: str, spot: Spot) -> bool:
        """Whether a trap for this phase would catch this peer there."""
        return any(self._is_for_me(trap, phase, spot) for trap in self.folder.armed())

    def _is_for_me(self, trap: controls.Trap, phase: str, spot: Spot) -> bool:
        return trap.catches(phase=phase, number=spot.round, peer=self.peer, roles=spot.roles)

    def spot(self) -> Spot:
        """Where this peer is at this moment."""
        if self.machine is None:
            # A stranger knows no round: any trap for later ones is meant.
            return Spot(NO_ROUND, self._roles_outside())
        return self.spot_on(self.machine.tip, self.machine.campaign.convener)

    def spot_on(self, tip: Manifest, convener: PeerId) -> Spot:
        """Where this peer is while the manifest after a tip is worked on."""
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
        """It comes as a stranger."""
        self.is_joiner = True

    def on_fetched(self, here: int, total: int) -> None:  # noqa: ARG002 - an observer's
        """A joiner's fetch is under way."""
        if self.is_joiner:
            self.at("fetch")

    def on_rounds(self, machine: RoundMachine, record_file: RecordFile) -> None:
        """From now on it is known where the peer is."""
        self.machine, self.record_file = machine, record_file

    def on_state(self, state: PeerState) -> None:  # noqa: ARG002 - likewise
        """The first local step of a round begins now, if it does."""
        self.step_began_s = time.monotonic()

    def on_step(self, step: int, stats: StepStats) -> None:  # noqa: ARG002 - likewise
        """Makes a step take as long as the controls say."""
        self.stretch_step()
        self.at("local_steps")

    def on_saving(self) -> None:
        """See the table."""
        self.at("save")

    def before_offer(self) -> None:
        """See the table."""
        self.at("offer")

    def before_leave(self) -> None:
        """See the table."""
        self.at("leave")

    def before_event(self, event: events.Event) -> None:
        """A reducer hears of it by the ROSTER."""
        message, machine = (
            event.message if isinstance(event, events.Received) else None,
            self.machine,
        )
        if machine and isinstance(message, Roster) and machine.me in message.reducers:
            self.reduces_on = machine.tip.digest
            self.at("roster")

    async def carry_out(self, effect: events.Effect, act: CarryOut) -> None:
        """Traps before and after what the round machine has done, one effect after another."""
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
        """Whether a COMMIT waits until it is applied here, as somebody is to be caught between."""
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
        """Where a convener is that announces what its own record does not name yet."""
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
    """What makes a peer part of a drill; this process has the wall clock that the drill says."""
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
