"""swarm-peer that kills itself with -9 at a chosen place: `--crash PLACE@ROUND`, once a life.

Places are named after what is durable when the process dies; ROUND is that of the manifest
concerned, and a merge is meant with a trailing `m`, as in `accepted@2m`.

| place | dies |
|---|---|
| offering | the private state is saved, nothing was offered |
| accepting | all blobs of a proposal are durable, the vote is not |
| accepted | the vote is durable, ACCEPT was not sent |
| applying | the manifest is decided and durable, the record still names the tip before |
| applied | the record names the new tip, the live model was not swapped |
| swapped | the live model was swapped, the history does not say so |
"""

import os
import signal
import sys
from pathlib import Path

import peers.trainer
from peers.live_model import LiveModel
from peers.peer import main
from swarm.network.record_file import RecordFile
from swarm.protocol.adoption import Adoption
from swarm.protocol.events import Record
from swarm.protocol.manifest import Kind, Manifest
from swarm.protocol.messages import Offer
from swarm.train.checkpoint import PrivateState


class Crash:
    """Where this process dies."""

    def __init__(self, text: str) -> None:
        self.place, _, where = text.partition("@")
        self.kind = Kind.MERGE if where.endswith("m") else Kind.QUORUM
        self.round = int(where.removesuffix("m"))

    def at(self, place: str, manifest: Manifest) -> None:
        """Dies if this is the place."""
        self.at_round(place, manifest.round, manifest.kind)

    def at_round(self, place: str, number: int, kind: Kind = Kind.QUORUM) -> None:
        """Dies if this is the place."""
        if (place, number, kind) == (self.place, self.round, self.kind):
            os.kill(os.getpid(), signal.SIGKILL)


def arm(crash: Crash) -> None:
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
    position = sys.argv.index("--crash")
    arm(Crash(sys.argv[position + 1]))
    del sys.argv[position : position + 2]
    main()
