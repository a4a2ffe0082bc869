"""swarm-peer that kills itself with -9 at a chosen place: `--crash PLACE@ROUND`.

It dies there the first time in a round of at least that number, with a leading `+` counted from
the first round that this life contributed to; a merge is meant with a trailing `m`, as in
`accepted@2m`. Without the option it is swarm-peer.

| place | dies |
|---|---|
| offering | the private state is saved, nothing was offered |
| offered | the convener has the offer |
| reducing | the roster is here and the values of a unit, the mean is not |
| proposing | as convener, before the first PROPOSE |
| deciding | as convener: decided and applied, but no COMMIT went out |
| accepting | all blobs of a proposal are durable, the vote is not |
| accepted | the vote is durable, ACCEPT was not sent |
| applying | the manifest is decided and durable, the record still names the tip before |
| applied | the record names the new tip, the live model was not swapped |
| swapped | the live model was swapped, the history does not say so |
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import peers.trainer
from peers.live_model import LiveModel
from peers.peer import main
from swarm.network.record_file import RecordFile
from swarm.network.round_driver import RoundDriver
from swarm.protocol.adoption import Adoption
from swarm.protocol.events import Apply, Record, Reduce, Send
from swarm.protocol.manifest import Kind, Manifest
from swarm.protocol.messages import Commit, Offer, Propose, Ready
from swarm.train.checkpoint import PrivateState


class Crash:
    """Where this process dies."""

    def __init__(self, text: str) -> None:
        self.place, _, where = text.partition("@")
        self.kind = Kind.MERGE if where.endswith("m") else Kind.QUORUM
        self.round = int(where.removesuffix("m"))
        self.is_relative = where.startswith("+")
        self.secret = ""
        """Digest of a decided manifest that this convener told nobody."""

    def at(self, place: str, manifest: Manifest) -> None:
        """Dies if this is the place."""
        self.at_round(place, manifest.round, manifest.kind)

    def at_round(self, place: str, number: int, kind: Kind = Kind.QUORUM) -> None:
        """Dies if this is the place."""
        if self.is_at(place, number, kind):
            os.kill(os.getpid(), signal.SIGKILL)

    def is_at(self, place: str, number: int, kind: Kind = Kind.QUORUM) -> bool:
        """Whether this is the place."""
        is_due = not self.is_relative and number >= self.round
        return is_due and (place, kind) == (self.place, self.kind)

    def count_from(self, manifest: Manifest, me: str) -> None:
        """Relative rounds count from the first one that this life contributed to."""
        if self.is_relative and me in manifest.contributors:
            self.round, self.is_relative = self.round + manifest.round, False

    def keeps_secret(self, manifest: Manifest, driver: RoundDriver) -> bool:
        """Whether a convener sends its first COMMIT of a manifest, and is to die before that."""
        recorded = driver.record_file.read()
        is_first = recorded is not None and recorded.tip.digest != manifest.digest
        is_due = not self.is_relative and manifest.round >= self.round
        if is_first and is_due and self.place == "deciding":
            self.secret = manifest.digest
        return manifest.digest == self.secret


def arm_network(crash: Crash) -> None:
    """Puts the crash into the places where this peer acts for the others."""
    send, reduce_unit, apply = (
        RoundDriver._send,
        RoundDriver._reduce_unit,
        RoundDriver._apply,
    )

    async def counting_apply(self: RoundDriver, effect: Apply) -> None:
        crash.count_from(effect.manifest, self.node.peer_id)
        await apply(self, effect)

    async def crashing_send(self: RoundDriver, effect: Send) -> None:
        message, number = effect.message, self.machine.tip.round + 1
        if isinstance(message, Propose):
            crash.at("proposing", message.manifest)
        if isinstance(message, Commit) and crash.keeps_secret(message.manifest, self):
            return
        await send(self, effect)
        if isinstance(message, Ready) and message.offer:
            if crash.is_at("offered", number):
                await asyncio.sleep(1.0)  # for the convener to fetch the offer
            crash.at_round("offered", number)

    async def crashing_reduce(self: RoundDriver, effect: Reduce) -> None:
        crash.at_round("reducing", self.machine.tip.round + 1)
        await reduce_unit(self, effect)

    # The driver finds what carries an effect out in its table.
    RoundDriver._actions = {
        **RoundDriver._actions,
        Send: crashing_send,
        Apply: counting_apply,
    }
    RoundDriver._reduce_unit = crashing_reduce  # type: ignore[method-assign]


def arm_disk(crash: Crash) -> None:
    """Puts the crash into the places where state becomes durable."""
    write, adopt, save = RecordFile.write, LiveModel.adopt, peers.trainer.save_private

    def crashing_write(self: RecordFile, record: Record) -> None:
        before = self.read() if self.path.exists() else None
        is_vote = record.accepted is not None
        is_new_tip = before is not None and before.tip.digest != record.tip.digest
        if is_vote:
            crash.at("accepting", record.accepted.manifest)
        elif is_new_tip:
            crash.at("applying", record.tip)
        write(self, record)
        if is_vote:
            crash.at("accepted", record.accepted.manifest)
        elif is_new_tip:
            crash.at("applied", record.tip)
            if record.tip.digest == crash.secret:
                crash.at("deciding", record.tip)

    def crashing_adopt(
        self: LiveModel, manifest: Manifest, *, previous: str, offer: Offer | None
    ) -> Adoption:
        adoption = adopt(self, manifest, previous=previous, offer=offer)
        crash.at("swapped", manifest)
        return adoption

    def crashing_save(path: Path, state: PrivateState) -> None:
        save(path, state)
        crash.at_round("offering", state.round)

    RecordFile.write = crashing_write  # type: ignore[method-assign]
    LiveModel.adopt = crashing_adopt  # type: ignore[method-assign]
    peers.trainer.save_private = crashing_save


if __name__ == "__main__":
    if "--crash" in sys.argv:
        position = sys.argv.index("--crash")
        crash_here = Crash(sys.argv[position + 1])
        del sys.argv[position : position + 2]
        arm_disk(crash_here)
        arm_network(crash_here)
    main()
