"""The commands since the newest private state, which a restarted worker replays.

Workers write parts of that state themselves.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from swarm.background import Helpers
from swarm.errors import CorruptState, StateError
from swarm.experts import expert_of
from swarm.train.engine import tensor_file
from swarm.train.engine.engine import Counts, EngineState, StandIn
from swarm.train.saving.checkpoint import load_newest, peek_counts
from swarm.train.saving.hashed_file import HashedFile
from swarm.train.workers.exchange import Message, state_message

logger = logging.getLogger(__name__)


def part_name(stem: str, rank: int) -> str:
    """The file name of a rank's part."""
    return f"{stem}.{rank}"


def flags_of(names: Collection[str], chosen: Collection[str]) -> str:
    """The chosen names as a bit mask over all names, in hex digits."""
    return f"{sum((name in chosen) << k for k, name in enumerate(names)):x}"


def flagged(names: Collection[str], flags: str) -> list[str]:
    """The names that `flags_of` has chosen."""
    bits = int(flags, 16)
    return [name for k, name in enumerate(names) if bits >> k & 1]


def held(tensors: Mapping[str, Tensor], forms: Mapping[str, tensor_file.Form]) -> set[str]:
    """Tensors that a rank holds whole in memory, so that no other rank is needed to write them."""
    if isinstance(tensors, tensor_file.LazyTensors):
        return set()
    return {n for n, each in tensors.items() if forms.get(n) == (each.dtype, tuple(each.shape))}


def deal_out(
    forms: Mapping[str, tensor_file.Form], holders: Sequence[Collection[str]]
) -> list[list[str]]:
    """Assigns tensors to writing ranks, evenly by bytes, and masters together with their moments.

    Args:
        forms: of all tensors of the state.
        holders: the names that each rank has.

    Returns:
        The names for each rank. Names that no rank has are left out.
    """
    kinds: dict[str, list[str]] = {}
    for name in forms:
        kinds.setdefault(name.partition(".")[2], []).append(name)
    sizes = {base: sum(num_bytes_of(forms[name]) for name in kinds[base]) for base in kinds}
    dealt: list[list[str]] = [[] for _ in holders]
    filled = [0] * len(holders)
    for base in sorted(kinds, key=lambda base: (-sizes[base], base)):
        able = [r for r, names in enumerate(holders) if all(n in names for n in kinds[base])]
        if able:
            rank = min(able, key=lambda r: filled[r])
            dealt[rank] += kinds[base]
            filled[rank] += sizes[base]
    return dealt


class PartSaving:
    """One rank's part while it is written.

    Attributes:
        stem: stem of the saving that the part belongs to.
    """

    def __init__(self, stem: str, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Begins to write. Without tensors it writes nothing."""
        self.stem, self._name = stem, path.name
        self._file = HashedFile(path, lambda: [tensors]) if tensors else None
        self._pool = Helpers("swarm-part", 1)
        self._done = self._pool.submit(self._finish)

    def answer(self) -> Message:
        """The progress, for JSON."""
        if not self._done.done():
            return {"is": "going"}
        try:
            return {"is": "done", "part": self._done.result()}
        except OSError as error:
            return {"is": "refused", "errno": error.errno, "text": error.strerror or str(error)}

    def give_up(self) -> None:
        """Returns once no tensor is being read; see `HashedFile.give_up`."""
        if self._file is not None:
            self._file.give_up()
        self._pool.end()

    def _finish(self) -> list[object] | None:
        if self._file is None:
            return None
        written = self._file.finish(seal=False)
        return [self._name, written.num_bytes, written.digest.hex()]


def num_bytes_of(form: tensor_file.Form) -> int:
    """Bytes of a tensor of this form."""
    return tensor_file.Place(0, *form).num_bytes


Stamp = tuple[int, int]
"""Identifies a file, as distinct from a file that replaces it."""


@dataclass(frozen=True)
class Command:
    """A command for all workers, with its tensors, if any."""

    message: Message
    tensors: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Saved:
    """Access to this machine's private state, as the trainer saves it.

    Attributes:
        peek: returns counts and stamp of the newest state. None if there is no state.
        load: returns the newest state, checked.
    """

    peek: Callable[[], tuple[Counts, Stamp] | None]
    load: Callable[[], EngineState | None]

    @classmethod
    def at(cls, path: Path | None) -> Saved:
        """The state at `path`. None for a machine that saves none."""

        def peek() -> tuple[Counts, Stamp] | None:
            counts = peek_counts(path) if path else None
            if path is None or counts is None:
                return None
            status = path.stat()
            return counts, (status.st_ino, status.st_mtime_ns)

        def load() -> EngineState | None:
            try:
                newest = load_newest(path) if path else None
            except CorruptState:  # already logged
                return None
            return newest.state.engine if newest else None

        return cls(peek, load)


@dataclass
class _Stretch:
    """The commands given since the saving of a private state began.

    Attributes:
        counts: counts of that state. None before the first saving.
        before: the file on disk before that saving. None if there was none.
        frozen: where the values of the matrices that were frozen then can be read, by name.
        commands: the commands since then.
    """

    counts: Counts | None
    before: Stamp | None
    frozen: dict[str, Mapping[str, Tensor]]
    commands: list[Command] = field(default_factory=list)


class History:
    """Keeps the commands that new workers would need."""

    def __init__(self, folder: Path | None, saved: Saved) -> None:
        """Writes tensors to files in `folder`. None for the system's folder for temporary files."""
        self._folder, self._saved = folder, saved
        self._stretches = [_Stretch(None, None, {})]
        self._frozen: dict[str, Mapping[str, Tensor]] = {}
        self._last: tensor_file.TensorFile | None = None

    def kept(self, tensors: Mapping[str, Tensor]) -> tensor_file.TensorFile:
        """A file with tensors, to send now and, if the command is added, to new workers."""
        self._last = self._filled(tensors, self._last)
        return self._last

    def aside(self, tensors: Mapping[str, Tensor]) -> tensor_file.TensorFile:
        """A separate file with tensors, to send once."""
        return self._filled(tensors, None)

    def _filled(
        self, tensors: Mapping[str, Tensor], last: tensor_file.TensorFile | None
    ) -> tensor_file.TensorFile:
        try:
            file = last.behind() if last else tensor_file.TensorFile.temporary(self._folder)
            file.take(tensors)
        except StateError as error:
            # Saving the state waits for a full disk. Until then the tensors stay in memory.
            logger.warning("%s; held in memory instead", error)
            file = tensor_file.TensorFile.in_memory()
            file.take(tensors)
        return file

    def add(self, command: Command) -> None:
        """Records an executed command; drops commands older than a state that is on disk by now."""
        self._stretches[-1].commands.append(command)
        if len(self._stretches) > 1:
            self._forget()

    def froze(self, names: Iterable[str], values: Mapping[str, Tensor]) -> None:
        """Notes that frozen matrices have these values from now on; does not copy the values."""
        self._frozen |= dict.fromkeys(names, values)

    def mark(self, counts: Counts, trained: Callable[[str], bool]) -> None:
        """Notes that the private state will be saved; drops commands before the one on disk.

        Args:
            counts: counts of the state.
            trained: whether the state holds a tensor, by name.
        """
        self._frozen = {n: values for n, values in self._frozen.items() if not trained(n)}
        self._forget()
        peeked = self._saved.peek()
        self._stretches.append(_Stretch(counts, peeked and peeked[1], dict(self._frozen)))
        self._last = None

    def commands(self) -> list[Command]:
        """The commands for new workers, in order.

        Raises:
            CorruptState: the private state that precedes the commands was damaged or replaced.
        """
        index = self._index()
        first = self._stretches[index]
        commands: list[Command] = []
        if first.counts is not None:
            state = self._saved.load()
            if state is None or state.counts != first.counts:
                raise CorruptState(
                    "the private state is not the one that was saved last",
                    hint="start this peer again: it resumes from the agreed values",
                )
            commands += load_commands(state)
            commands += [Command({"do": "write"}, one) for one in _by_expert(first.frozen)]
        for stretch in self._stretches[index:]:
            commands += stretch.commands
        return commands

    def _forget(self) -> None:
        """Drops commands that new workers will not need, and the files that only these refer to."""
        self._stretches = self._stretches[self._index() :]

    def _index(self) -> int:
        """The first stretch that may begin with the state on disk; the oldest if none does.

        Two states may have equal counts. The writes between them can be repeated without harm, so
        the first stretch is right for both.
        """
        peeked = self._saved.peek()
        if peeked is not None:
            counts, stamp = peeked
            for index, stretch in enumerate(self._stretches):
                if stretch.counts == counts and stretch.before != stamp:
                    return index
        return 0


class Found(Mapping[str, Tensor]):
    """Tensors in several places, which are read on look-up."""

    def __init__(self, sources: Mapping[str, StandIn]) -> None:
        """Takes the names, and the function that returns the tensor of a name."""
        self._sources = sources

    def __getitem__(self, name: str) -> Tensor:
        return self._sources[name](name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def _by_expert(frozen: Mapping[str, Mapping[str, Tensor]]) -> Iterator[Found]:
    """The matrices of experts, expert by expert, so that few matrices are in flight at once."""
    for _, names in itertools.groupby(sorted(frozen, key=_expert), _expert):
        yield Found({name: frozen[name].__getitem__ for name in names})


def _expert(name: str) -> int:
    expert = expert_of(name)
    return -1 if expert is None else expert


def load_commands(state: EngineState) -> list[Command]:
    """Commands that load a private state. The last command makes the workers read all its files."""
    tensors = state.tensors
    *parts, last = tensors.files if isinstance(tensors, tensor_file.JoinedFiles) else (tensors,)
    size = sum(map(num_bytes_of, tensor_file.forms_of(tensors).values()))
    message = {"do": "load", "parts": len(parts), "bytes": size, **state_message(state)}
    return [*(Command({"do": "part"}, each) for each in parts), Command(message, last)]
