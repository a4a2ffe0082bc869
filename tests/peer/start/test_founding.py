"""Nothing is left of a run whose founder ended before its record was on disk."""

import errno
from asyncio import run as run_now
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from swarm.config import PeerConfig, RunConfig
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.rounds.record_file import RecordFile
from swarm.peer.machine.machine_survey import Room
from swarm.peer.machine.state_directory import StateDirectory
from swarm.peer.start.entry import Started, Starter
from swarm.peer.start.founding import found
from swarm.peer.start.host import Reception
from swarm.peer.status.observing import UNOBSERVED
from swarm.peer.text.run_request import Wanted
from swarm.peer.text.run_text import FoundText, RunText
from swarm.peer.training.leaving import Stop, Stopped
from tests.train.runs import tiny_run

RUN = tiny_run()


class Founder:
    """A machine that founds a run alone. After a kill, its disk is left."""

    def __init__(self, folder: Path) -> None:
        self.state, self.folder = StateDirectory(folder), folder

    def found(self, peer_id: str = "me", run: RunConfig = RUN) -> Started:
        starter, text = self.starter(peer_id), FoundText(None, bytes(8), 2)
        any_text: Any = SimpleNamespace(found=lambda *_: text, folder=None, shards=None)
        starter.text = any_text
        return found(starter, run)

    def starter(self, peer_id: str) -> Starter:
        node = SimpleNamespace(peer_id=peer_id, entrances=(), run=lambda work, _: run_now(work))
        host: Any = SimpleNamespace(
            node=node, state=self.state, config=PeerConfig(), stop=Stop(1.0), serve=lambda _: None,
            reception=Reception(),
        )  # fmt: skip
        return Starter(host, Wanted(), UNOBSERVED)

    def runs(self) -> set[str]:
        return {path.name for path in self.folder.glob("runs/*")}


@pytest.fixture
def founder(tmp_path: Path) -> Iterator[Founder]:
    founder = Founder(tmp_path)
    yield founder
    founder.state.close()


def killed_before_its_record(started: Started) -> None:
    started.directory.record_path.rename(started.directory.record_path.with_name("record.new"))


def test_a_founder_owns_what_fits_its_machine_from_the_start(
    founder: Founder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Room, "__call__", lambda _: 1)
    tip = founder.found().record.tip
    assert tip.members["me"].room == 1
    owned = [expert for expert, owners in tip.owners.items() if owners]
    assert len(owned) == 1 and len(tip.ownerless) == RUN.model.num_experts - 1


@pytest.mark.parametrize("step", ["sync", "write"])
def test_a_disk_that_fills_up_while_a_run_is_founded_is_as_it_was(
    founder: Founder, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr({"sync": BlobStore, "write": RecordFile}[step], step, full)
    with pytest.raises(OSError, match="No space left"):
        founder.found()
    assert founder.runs() == set() and founder.state.current_run is None


def test_what_a_killed_founding_stored_is_removed_by_the_next_one(founder: Founder) -> None:
    killed_before_its_record(founder.found())
    started = founder.found()
    assert founder.runs() == {started.run_id} == {founder.state.current_run}


@pytest.mark.parametrize("file", ["record", "record.previous", "private", "events.jsonl"])
def test_a_run_that_lived_is_kept(founder: Founder, file: str) -> None:
    lived = founder.found()
    killed_before_its_record(lived)
    (lived.directory.path / file).write_bytes(b"damaged")
    founder.found()
    assert lived.run_id in founder.runs()


def test_what_comes_of_a_run_that_another_peer_founded_is_kept(founder: Founder) -> None:
    theirs = founder.found("another")
    killed_before_its_record(theirs)
    founder.found()
    assert theirs.run_id in founder.runs()


def test_a_founder_that_is_stopped_while_it_reads_has_founded_nothing(founder: Founder) -> None:
    """A signal need not wait for the end of the text, which may take hours."""
    starter, read = founder.starter("me"), list[int]()

    def reading(*_: object) -> FoundText:
        for shard in range(3):
            read.append(shard)
            if starter.stop.ends_at_once:  # as the handler of signals does
                raise Stopped
        return FoundText(None, bytes(8), 2)

    starter.text = cast(RunText, SimpleNamespace(found=reading))
    with pytest.raises(Stopped):
        found(starter, RUN)
    assert read == [0] and founder.runs() == set() and not starter.stop.ends_at_once
