"""Follows a run, and writes an export for each due round until the run's last round."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swarm.config import RunConfig
from swarm.errors import NobodyReachable, SwarmError
from swarm.export.facts import ExportFacts, Form
from swarm.export.manager import ExportManager, Extra, nothing_more, write_export
from swarm.network.blobs.blob_store import BlobStore
from swarm.progress import duration
from swarm.protocol.exchange.sourcing import FetchAttempts
from swarm.protocol.values.manifest import Manifest
from swarm.protocol.values.schedule import merge_due

logger = logging.getLogger(__name__)

SAY_S = 60.0
"""Seconds between two lines for people about the present wait."""
LOST_S = 1800.0
"""The follower gives up when no peer of the run answers for this long."""
STILL_S = 24 * 3600.0
"""The follower gives up when the run agrees on nothing for this long."""
LATE_S = 72 * 3600.0
"""The follower gives up when no agreed model can be fetched for this long."""
EARLY_S = 3600.0
"""Seconds between requests for a manifest before the due round. Such a manifest shows that the run
continues, but its proof costs peers too much to be requested at each look."""


class Source(Protocol):
    """A source of agreed models."""

    run_id: str
    run: RunConfig
    store: BlobStore

    @property
    def pause_s(self) -> float:
        """Seconds to wait between calls of `newest`, which reads the records of all peers."""
        ...

    def newest(self, least_round: int) -> Manifest | None:
        """The newest agreed manifest. None while no peer announces `least_round` or a later round.

        Raises:
            NobodyReachable: no peer of the run answered.
        """
        ...

    def bring(self, manifest: Manifest, form: Form, within_s: float) -> ExportFacts:
        """Fetches the missing blobs of a manifest, in one attempt of at most `within_s`.

        Raises:
            NobodyReachable: the blobs did not come. The caller may ask for a newer manifest.
        """
        ...

    def bytes_here(self, manifest: Manifest) -> int:
        """Bytes of a manifest's values that are here, including pieces of large values."""
        ...


def next_due(every: int, exported: int, rounds: int) -> int:
    """The next round to export: the next multiple of `every`, or the run's last round.

    Args:
        every: rounds between two exports.
        exported: the newest exported round, 0 before the first.
        rounds: rounds of the run.
    """
    return min((exported // every + 1) * every, rounds)


def is_ready(manifest: Manifest, due: int, run: RunConfig) -> bool:
    """Whether a manifest can be exported for the due round.

    The manifest must be of this round, or of a later round if this round was missed. If the round's
    merge is still due, the export waits for the merge, which must come next.
    """
    return manifest.round >= due and not merge_due(manifest, run.merging)


class Waiting:
    """Decisions while one export is due. Pure: no clock, no requests, no fetches.

    One instance lasts from the moment when an export is due until a model for it is here. So a
    failed attempt does not restart a time limit. Times are in seconds of one monotonic clock.
    """

    def __init__(self, due: int, run: RunConfig, now_s: float) -> None:
        """Begins to wait for a model of round `due` or later."""
        self.due, self._run = due, run
        self._agreed_s = self._early_s = self._said_s = now_s
        self._silent_s: float | None = None
        self._why = f"the swarm has not agreed on round {due} yet"
        self._newest: Manifest | None = None
        self._wanted: Manifest | None = None
        self._attempts: FetchAttempts | None = None
        self._given_up: Manifest | None = None
        self._failure = ""
        self._failing_s: float | None = None

    def least_round(self, now_s: float) -> int:
        """The least round of requested manifests. Every `EARLY_S` seconds it is 0, any round."""
        if now_s - self._early_s < EARLY_S:
            return self.due
        self._early_s = now_s
        return 0

    def unheard(self, error: NobodyReachable, now_s: float) -> None:
        """Records that no peer of the run answered a look."""
        self._why = str(error)
        self._silent_s = now_s if self._silent_s is None else self._silent_s

    def heard(self, found: Manifest | None, now_s: float) -> None:
        """Records that peers answered, with the manifest `found` or with none."""
        self._silent_s = None
        self._why = f"the swarm has not agreed on round {self.due} yet"
        if found is None:
            return
        if self._newest is None or found.digest != self._newest.digest:
            self._newest, self._agreed_s = found, now_s
        if self._given_up and found.code <= self._given_up.code:
            self._why = f"round {self._given_up.round} is given up, and there is no newer one"
        elif is_ready(found, self.due, self._run):
            if self._wanted is None or found.code > self._wanted.code:
                self._wanted, self._attempts, self._failure = found, None, ""
            self._why = self._failure
        elif found.round >= self.due:
            self._why = f"the merge of round {found.round} is still due"

    def to_fetch(self, now_s: float, num_bytes: Callable[[Manifest], int]) -> Manifest | None:
        """The manifest to fetch now. None while there is no such manifest or an attempt must wait.

        Args:
            now_s: the time.
            num_bytes: gives the bytes of a manifest that are here.
        """
        if self._wanted is None:
            return None
        if self._attempts is None:
            self._attempts = FetchAttempts.begun(now_s, num_bytes(self._wanted))
        return self._wanted if now_s >= self._attempts.next_s else None

    def left_s(self, now_s: float) -> float:
        """Time limit of the fetch of the wanted manifest."""
        assert self._attempts is not None, "it is to be fetched"
        return self._attempts.left_s(now_s)

    def failed(self, error: NobodyReachable, now_s: float, num_bytes: int) -> str | None:
        """Records a failed attempt and the bytes that are here. Returns a line for people, or None.

        The line tells a manifest's first failure, or that the manifest is given up.
        """
        assert self._wanted is not None and self._attempts is not None
        number, is_first = self._wanted.round, not self._attempts.has_failed
        self._failing_s = now_s if self._failing_s is None else self._failing_s
        self._attempts = self._attempts.failed(now_s, num_bytes)
        if why := self._attempts.why_given_up(now_s):
            self._why = f"round {number} is given up, since {why}: {error}"
            self._given_up, self._wanted, self._attempts = self._wanted, None, None
            return self._why
        self._why = self._failure = f"round {number} cannot be fetched: {error}"
        return f"{self._why}; retrying until there is a newer one" if is_first else None

    def line(self, now_s: float) -> str | None:
        """A line for people about the present wait. None if the last line was recent."""
        if now_s - self._said_s < SAY_S:
            return None
        self._said_s = now_s
        return f"waiting for round {self.due}: {self._why}"

    def why_end(self, now_s: float) -> str | None:
        """Why the wait has ended. None while it lasts."""
        if self._given_up and self._given_up.round >= self._run.run.rounds:
            return f"round {self._given_up.round} is the run's last, and {self._why}"
        if self._silent_s is not None and now_s - self._silent_s > LOST_S:
            since_s = self._silent_s
        elif now_s - self._agreed_s > STILL_S and self._wanted is None:
            since_s = self._agreed_s
        elif self._failing_s is not None and now_s - self._failing_s > LATE_S:
            since_s = self._failing_s
        else:
            return None
        return f"waited {duration(now_s - since_s)} for round {self.due}: {self._why}"


@dataclass
class Follower:
    """See the module. All waits are bounded, and a line for people gives each wait's reason."""

    source: Source
    manager: ExportManager
    every: int
    form: Form
    extras: Sequence[Extra] = ()
    published: Extra = nothing_more
    """Called for each export in its final place. A `SwarmError` from the call is logged only."""
    say: Callable[[str], None] = logger.info
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def follow(self) -> None:
        """Exports until the run's last round is exported. Continues after the newest export.

        Raises:
            NobodyReachable: nobody answered for `LOST_S`, nothing was agreed for `STILL_S`, no
                agreed model came for `LATE_S`, or the last round's model is given up.
            ConfigError: the folder has another run's exports.
            OSError: the disk refused. The existing exports stay.
        """
        self.manager.require_run(self.source.run_id)
        # Blobs that the disk has damaged are removed and so fetched again.
        self.source.store.verify(self.source.store.digests())
        rounds = self.source.run.run.rounds
        while (exported := self._exported()) < rounds:
            due = next_due(self.every, exported, rounds)
            self._write(*self._obtained(Waiting(due, self.source.run, self.clock())), due)
        self.say(f"the run's last round {rounds} is exported")

    def _exported(self) -> int:
        exports = self.manager.exports
        return exports[-1].round if exports else 0

    def _obtained(self, waiting: Waiting) -> tuple[ExportFacts, float]:
        """The model of the due round or of a later one, and the time when its fetch began."""
        while True:
            self._look(waiting)
            begin_s = self.clock()
            manifest = waiting.to_fetch(begin_s, self.source.bytes_here)
            if manifest and (facts := self._tried(manifest, waiting)):
                return facts, begin_s
            now_s = self.clock()
            if why := waiting.why_end(now_s):
                hint = "start again when peers are there: exports go on after the newest"
                raise NobodyReachable(why, hint=hint)
            if line := waiting.line(now_s):
                self.say(line)
            self.sleep(self.source.pause_s)

    def _look(self, waiting: Waiting) -> None:
        try:
            found = self.source.newest(waiting.least_round(self.clock()))
        except NobodyReachable as error:
            waiting.unheard(error, self.clock())
        else:
            waiting.heard(found, self.clock())

    def _tried(self, manifest: Manifest, waiting: Waiting) -> ExportFacts | None:
        """The model, if one attempt succeeds."""
        try:
            return self.source.bring(manifest, self.form, waiting.left_s(self.clock()))
        except NobodyReachable as error:
            line = waiting.failed(error, self.clock(), self.source.bytes_here(manifest))
        if line:
            self.say(line)
        return None

    def _write(self, facts: ExportFacts, begin_s: float, due: int) -> None:
        manifest = facts.model.manifest

        def write(folder: Path) -> None:
            write_export(folder, facts, self.extras)

        path = self.manager.add(manifest.round, write)
        self.source.store.collect(manifest.blobs)
        late = "" if manifest.round == due else f" instead of {due}, which was over"
        self.say(
            f"exported round {manifest.round}{late} (manifest {manifest.digest[:12]}) to {path} "
            f"in {duration(self.clock() - begin_s)}"
        )
        try:
            self.published(path, facts)
        except SwarmError as error:
            self.say(str(error))
