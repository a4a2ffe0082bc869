"""swarm-peer that kills itself with -9 where state becomes durable: `--crash PLACE@ROUND`.

It dies there the first time in a round of at least that number. A trailing `m` means a merge, as in
`accepted@2m`. Without the option it is a normal swarm-peer. Unlike the traps of `peers/emulated.py`
it needs no other process, so that all peers of a swarm can die alike.

| place | dies |
|---|---|
| joined | the state of the run is fetched, there is no record of it yet |
| accepted | the vote is durable, ACCEPT was not sent |
| applying | the manifest is decided and durable, the record still names the tip before |
| applied | the record names the new tip, the live model was not swapped |
| swapped | the live model was swapped, the history does not say so |
"""

import os
import signal
import sys
from collections.abc import Sequence

from peers.peer import main
from swarm.network.rounds.record_file import RecordFile
from swarm.peer.training.live_model import LiveModel
from swarm.protocol.messages.events import Record
from swarm.protocol.messages.messages import Link
from swarm.protocol.training.adoption import Adoption
from swarm.protocol.values.manifest import Kind, Manifest


class Crash:
    """The place where this process dies."""

    def __init__(self, text: str) -> None:
        self.place, _, where = text.partition("@")
        self.kind = Kind.MERGE if where.endswith("m") else Kind.QUORUM
        self.round = int(where.removesuffix("m"))

    def at(self, place: str, manifest: Manifest) -> None:
        """Dies if this is the place."""
        is_due = manifest.round >= self.round and manifest.kind is self.kind
        if is_due and place == self.place:
            os.kill(os.getpid(), signal.SIGKILL)


def arm(crash: Crash) -> None:
    """Inserts the crash into the places where state becomes durable."""
    write, adopt = RecordFile.write, LiveModel.adopt

    def crashing_write(self: RecordFile, record: Record, links: Sequence[Link] = ()) -> None:
        before = self.read() if self.path.exists() else None
        is_new_tip = before is not None and before.tip.digest != record.tip.digest
        if before is None:
            crash.at("joined", record.tip)
        if is_new_tip and record.accepted is None:
            crash.at("applying", record.tip)
        write(self, record, links)
        if record.accepted is not None:
            crash.at("accepted", record.accepted.manifest)
        elif is_new_tip:
            crash.at("applied", record.tip)

    def crashing_adopt(
        self: LiveModel, manifest: Manifest, decision: Adoption, before: Manifest | None = None
    ) -> None:
        adopt(self, manifest, decision, before)
        crash.at("swapped", manifest)

    RecordFile.write = crashing_write  # type: ignore[method-assign]
    LiveModel.adopt = crashing_adopt  # type: ignore[method-assign]


if __name__ == "__main__":
    if "--crash" in sys.argv:
        position = sys.argv.index("--crash")
        arm(Crash(sys.argv[position + 1]))
        del sys.argv[position : position + 2]
    main()
