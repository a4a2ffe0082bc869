"""Follows a run, and writes an export for each round that is due until the last one."""

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
from swarm.export.folder import Extra, nothing_more, write_export
from swarm.export.manager import ExportManager
from swarm.network.blobs import BlobStore
from swarm.progress import duration
from swarm.protocol.manifest import Manifest
from swarm.protocol.merging import merge_due

logger = logging.getLogger(__name__)

SAY_S = 60.0
"""How often a line says what is waited for."""
LOST_S = 1800.0
"""A run of which no peer answers for so long is given up."""
STILL_S = 24 * 3600.0
"""A run that agrees on nothing for so long as well."""
EARLY_S = 3600.0
"""So often a manifest of an earlier round than the one that is due is asked for: it shows that the
run goes on, and its proof costs peers too much to be asked for at each look."""


class Source(Protocol):
    """Where agreed models come from."""

    run_id: str
    run: RunConfig
    store: BlobStore

    @property
    def pause_s(self) -> float:
        """Seconds to wait before `newest` is asked again: each time it reads what all peers say."""
        ...

    def newest(self, least_round: int) -> Manifest | None:
        """The newest agreed manifest; None while nobody says to have this round.

        Raises:
            NobodyReachable: no peer of the run answered.
        """
        ...

    def bring(self, manifest: Manifest, form: Form) -> ExportFacts:
        """Fetches what of a manifest is not here yet.

        Raises:
            NobodyReachable: it did not come; a newer manifest may be asked for.
        """
        ...


def next_due(every: int, exported: int, rounds: int) -> int:
    """The next round to export: the next multiple, or the run's last.

    Args:
        every: rounds from one export to the next.
        exported: the newest round that is exported; 0 before the first.
        rounds: of the run.
    """
    return min((exported // every + 1) * every, rounds)


def is_ready(manifest: Manifest, due: int, run: RunConfig) -> bool:
    """Whether a manifest is to be exported for the round that is due.

    It is of this round, or of a later one where that was missed. While the round's merge is to
    come, that is waited for: nothing else can follow.
    """
    return manifest.round >= due and not merge_due(manifest, run.merging)


@dataclass
class Follower:
    """See the module; all waits are bounded, and each has its reason."""

    source: Source
    manager: ExportManager
    every: int
    form: Form
    extras: Sequence[Extra] = ()
    published: Extra = nothing_more
    """Told of each export once it is in its place; a `SwarmError` of it is said and passed over."""
    say: Callable[[str], None] = logger.info
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def follow(self) -> None:
        """Exports until the run's last round is there; goes on after the newest that is.

        Raises:
            NobodyReachable: nobody answered for `LOST_S`, or nothing was agreed for `STILL_S`.
            ConfigError: the folder holds another run's exports.
            OSError: the disk refused; the exports that are there stay.
        """
        self.manager.require_run(self.source.run_id)
        # What a disk has spoiled since is fetched again.
        self.source.store.verify(self.source.store.digests())
        rounds = self.source.run.run.rounds
        while (exported := self._exported()) < rounds:
            due = next_due(self.every, exported, rounds)
            manifest, begin_s = self._await(due), self.clock()
            if (facts := self._fetched(manifest)) is not None:
                self._write(facts, due, begin_s)
        self.say(f"the run's last round {rounds} is exported")

    def _exported(self) -> int:
        exports = self.manager.exports
        return exports[-1].round if exports else 0

    def _await(self, due: int) -> Manifest:
        begin_s = said_s = heard_s = early_s = self.clock()
        newest: Manifest | None = None
        while True:
            why, least_round = f"the swarm has not agreed on round {due} yet", due
            if self.clock() - early_s >= EARLY_S:
                least_round, early_s = 0, self.clock()
            try:
                found = self.source.newest(least_round)
                heard_s = self.clock()
            except NobodyReachable as error:
                found, why = None, str(error)
            if found is not None and is_ready(found, due, self.source.run):
                return found
            if found is not None and found.round >= due:
                why = f"the merge of round {found.round} is still to come"
            if found is not None and (newest is None or found.digest != newest.digest):
                newest, begin_s = found, self.clock()
            now_s = self.clock()
            if now_s - heard_s > LOST_S or now_s - begin_s > STILL_S:
                raise NobodyReachable(
                    f"waited {duration(now_s - min(begin_s, heard_s))} for round {due}: {why}",
                    hint="start again when peers are there: exports go on after the newest",
                )
            if now_s - said_s >= SAY_S:
                said_s = now_s
                self.say(f"waiting for round {due}: {why}")
            self.sleep(self.source.pause_s)

    def _fetched(self, manifest: Manifest) -> ExportFacts | None:
        """The model; None where it is no longer to be had, and a newer one is to be asked for."""
        try:
            return self.source.bring(manifest, self.form)
        except NobodyReachable as error:
            self.say(f"round {manifest.round} cannot be had any more: {error}")
            return None

    def _write(self, facts: ExportFacts, due: int, begin_s: float) -> None:
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
