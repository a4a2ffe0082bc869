"""TensorBoard as a sink of one peer: only on request, and a clear error without the package."""

import builtins
import errno
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from peers.actions import tensorboard
from peers.actions.participation import observer_of
from peers.actions.printed import Printed
from peers.actions.tensorboard import MAX_QUEUED, Drawn
from peers.command_line.options import Options
from swarm.errors import ConfigError
from swarm.train.engine.rank_figures import RankFigures
from tests.peer.status.test_round_account import report
from tests.peer.status.test_status import step


def test_losses_and_rounds_are_written_where_tensorboard_reads_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="the extra tensorboard is not installed")
    from tensorboardX.proto.event_pb2 import Event

    observer = Drawn(tmp_path / "new" / "folder")
    assert isinstance(observer, Printed)
    workers = (RankFigures(seconds=2.0, waited_s={"sums": 0.5}), RankFigures(seconds=2.0))
    observer.on_step(7, step(cross_entropy=2.5, masked=9, workers=workers))
    observer.on_step(8, step(cross_entropy=float("nan"), loss=float("nan"), skipped=True))
    observer.on_round(report(counted=True))
    observer.on_validation(3, 2.25, 3.25)
    observer.close()
    (path,) = (tmp_path / "new" / "folder").iterdir()
    found: dict[tuple[str, int], float] = {}
    data = path.read_bytes()
    while data:  # a record: length (8), its CRC (4), the event, its CRC (4)
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        found |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
        data = data[16 + size :]
    assert found["step/cross_entropy", 7] == 2.5 and found["step/masked", 7] == 9
    assert ("step/cross_entropy", 8) not in found and found["step/skipped", 8] == 1.0
    assert found["workers/step_s", 7] == 2.0 and found["workers/between", 7] == 0.125
    assert not {("workers/bubble", 7), ("workers/step_s", 8)} & found.keys()
    assert found["round/counted", 1] == 1.0
    assert found["held_out/loss", 3] == 2.25 and found["held_out/bits_per_byte", 3] == 3.25


class FileInMemory:
    """Records the steps with a drawn loss."""

    steps: ClassVar[list[int]] = []

    def __init__(self, _folder: Path) -> None:
        self.steps.clear()

    def write(self, name: str, _value: float, step: int) -> None:
        if name == "step/loss":
            self.steps.append(step)

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """Nothing is open."""


def test_the_file_of_weeks_of_steps_grows_by_their_logarithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "EventFile", FileInMemory)
    monkeypatch.setattr(tensorboard, "THINNED_AFTER", 10)
    monkeypatch.setattr(tensorboard, "MAX_QUEUED", 0)  # without a limit
    observer = Drawn(tmp_path)
    for number in range(1, 1001):
        observer.on_step(number, step())
    observer.close()
    drawn = FileInMemory.steps
    assert drawn[:13] == [*range(1, 11), 12, 14, 16]
    assert 60 < len(drawn) < 75
    assert drawn[-1] > 900, "the newest steps are there"


class FileOfAFullDisk:
    """Takes the first scalar only, or none until it is allowed to."""

    def __init__(self, _folder: Path) -> None:
        self.written = 0

    def write(self, _name: str, _value: float, _step: int) -> None:
        if self.written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.written += 1

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """Nothing is open."""


class FileThatHangs(FileOfAFullDisk):
    """Its disk answers once it is allowed to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.let = threading.Event()

    def write(self, _name: str, _value: float, _step: int) -> None:
        self.let.wait()
        self.written += 1


def draw_fifty_steps(observer: Drawn) -> float:
    """Returns the seconds that it took."""
    begin_s = time.monotonic()
    for number in range(50):
        observer.on_step(number, step())
    observer.on_validation(1, 2.25, 3.25)
    return time.monotonic() - begin_s


def test_training_goes_on_where_the_disk_is_full_and_one_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("peers.actions.tensorboard.EventFile", FileOfAFullDisk)
    observer = Drawn(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert draw_fifty_steps(observer) < 1
        assert observer._thread.stop(10)
        assert draw_fifty_steps(observer) < 1, "with nobody that takes anything from the queue"
    begin_s = time.monotonic()
    observer.close()
    assert time.monotonic() - begin_s < 1
    (said,) = [record.getMessage() for record in caplog.records if "left out" not in record.msg]
    assert "No space left on device; nothing more is drawn" in said


def test_training_waits_for_no_disk_that_hangs_and_one_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("peers.actions.tensorboard.EventFile", FileThatHangs)
    observer = Drawn(tmp_path)
    file = observer._file
    assert isinstance(file, FileThatHangs)
    try:
        with caplog.at_level(logging.WARNING):
            assert draw_fifty_steps(observer) < 1
        (said,) = [record.getMessage() for record in caplog.records]
        assert "too slow; some figures are left out" in said
    finally:
        file.let.set()
    observer.close()
    assert MAX_QUEUED <= file.written <= MAX_QUEUED + 1, "the one that hung, too"


def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def absent(name: str, *arguments: Any, **others: Any) -> Any:
        if name == "tensorboardX":
            raise ImportError(name)
        return real(name, *arguments, **others)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match=r"needs tensorboardX .*swarm\[tensorboard\]"):
        observer_of(Options(tensorboard=tmp_path), None)


def test_a_drill_s_observer_goes_with_no_tensorboard(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="swarm-peer alone"):
        observer_of(Options(tensorboard=tmp_path), Printed())


def test_nobody_who_does_not_ask_pays_for_it() -> None:
    code = "import sys, peers.actions.participation; sys.exit('tensorboardX' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
