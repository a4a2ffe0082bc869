"""What workers were told since the newest private state: new ones come with it to where they were.

A command that changes something is kept with its tensors: those of steps and trained tensors in a
nameless file, lent ones where they were lent. A private state on disk makes all before it needless,
but for the frozen experts, which are in none: of these the newest values are kept.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from swarm.errors import CorruptState, StateError
from swarm.experts import expert_of
from swarm.train.checkpoint import load_newest, peek_counts
from swarm.train.engine import Counts, EngineState, StandIn
from swarm.train.parallel.exchange import Message, state_message
from swarm.train.parallel.parts import num_bytes_of
from swarm.train.tensor_file import JoinedFiles, TensorFile, forms_of

logger = logging.getLogger(__name__)

Stamp = tuple[int, int]
"""What tells a file from one that takes its place."""


@dataclass(frozen=True)
class Command:
    """Something that all workers shall do, and the tensors for it; None if it has none."""

    message: Message
    tensors: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Saved:
    """The private state of this machine, where the trainer saves it.

    Attributes:
        peek: counts of the newest one and what tells its file from others; None if there is none.
        load: the newest one, checked.
    """

    peek: Callable[[], tuple[Counts, Stamp] | None]
    load: Callable[[], EngineState | None]

    @classmethod
    def at(cls, path: Path | None) -> Saved:
        """The one at `path`; None for a machine that saves none."""

        def peek() -> tuple[Counts, Stamp] | None:
            counts = peek_counts(path) if path else None
            if path is None or counts is None:
                return None
            status = path.stat()
            return counts, (status.st_ino, status.st_mtime_ns)

        def load() -> EngineState | None:
            try:
                newest = load_newest(path) if path else None
            except CorruptState:  # the log has it
                return None
            return newest.state.engine if newest else None

        return cls(peek, load)


@dataclass
class _Stretch:
    """The commands after a private state was begun to be read.

    Attributes:
        counts: of that state; None before the first.
        before: the file that was on disk before that state; None if there was none.
        frozen: where the values of matrices lie that were frozen then, by name.
        commands: since.
    """

    counts: Counts | None
    before: Stamp | None
    frozen: dict[str, Mapping[str, Tensor]]
    commands: list[Command] = field(default_factory=list)


class History:
    """Remembers commands for as long as new workers would need them."""

    def __init__(self, folder: Path | None, saved: Saved) -> None:
        """Tensors go to files in `folder`; None for the system's folder for temporary files."""
        self._folder, self._saved = folder, saved
        self._stretches = [_Stretch(None, None, {})]
        self._frozen: dict[str, Mapping[str, Tensor]] = {}
        self._last: TensorFile | None = None

    def kept(self, tensors: Mapping[str, Tensor]) -> TensorFile:
        """Tensors in a file, to be sent now and, if the command is added, again."""
        self._last = self._filled(tensors, self._last)
        return self._last

    def aside(self, tensors: Mapping[str, Tensor]) -> TensorFile:
        """Tensors in a file of their own, to be sent once."""
        return self._filled(tensors, None)

    def _filled(self, tensors: Mapping[str, Tensor], last: TensorFile | None) -> TensorFile:
        try:
            file = last.behind() if last else TensorFile.temporary(self._folder)
            file.take(tensors)
        except StateError as error:
            # A full disk is waited for where the state is saved; until then there is memory.
            logger.warning("%s; held in memory instead", error)
            file = TensorFile.in_memory()
            file.take(tensors)
        return file

    def add(self, command: Command) -> None:
        """A command was carried out; what came before a state that is on disk by now goes."""
        self._stretches[-1].commands.append(command)
        if len(self._stretches) > 1:
            self._forget()

    def froze(self, names: Iterable[str], values: Mapping[str, Tensor]) -> None:
        """Frozen matrices have these values from now on; they stay where they are."""
        self._frozen |= dict.fromkeys(names, values)

    def mark(self, counts: Counts, trained: Callable[[str], bool]) -> None:
        """The private state is about to be saved; what came before the one on disk is forgotten.

        Args:
            counts: of the state.
            trained: whether the state holds a tensor, by name.
        """
        self._frozen = {n: values for n, values in self._frozen.items() if not trained(n)}
        self._forget()
        peeked = self._saved.peek()
        self._stretches.append(_Stretch(counts, peeked and peeked[1], dict(self._frozen)))
        self._last = None

    def commands(self) -> list[Command]:
        """What new workers are to do, in order.

        Raises:
            CorruptState: the private state that it begins with was damaged or exchanged.
        """
        index = self._index()
        first = self._stretches[index]
        commands: list[Command] = []
        if first.counts is not None:
            state = self._saved.load()
            if state is None or state.counts != first.counts:
                raise CorruptState(
                    "the private state is not the one that was saved last",
                    hint="start this peer again: it goes on from the agreed values",
                )
            commands += load_commands(state)
            commands += [Command({"do": "write"}, one) for one in _by_expert(first.frozen)]
        for stretch in self._stretches[index:]:
            commands += stretch.commands
        return commands

    def _forget(self) -> None:
        """Drops what new workers would not be told, and with it the files that nobody else has."""
        self._stretches = self._stretches[self._index() :]

    def _index(self) -> int:
        """The first stretch that may begin with the state on disk; the oldest if none does.

        The first: what was written between two states with the same counts may be written twice.
        """
        peeked = self._saved.peek()
        if peeked is not None:
            counts, stamp = peeked
            for index, stretch in enumerate(self._stretches):
                if stretch.counts == counts and stretch.before != stamp:
                    return index
        return 0


class Found(Mapping[str, Tensor]):
    """Tensors that are looked up, by their names, where each of them is."""

    def __init__(self, sources: Mapping[str, StandIn]) -> None:
        """Names and what gives the tensor of a name."""
        self._sources = sources

    def __getitem__(self, name: str) -> Tensor:
        return self._sources[name](name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def _by_expert(frozen: Mapping[str, Mapping[str, Tensor]]) -> Iterator[Found]:
    """The matrices of one expert after the other, so that few are on their way at once."""
    for _, names in itertools.groupby(sorted(frozen, key=_expert), _expert):
        yield Found({name: frozen[name].__getitem__ for name in names})


def _expert(name: str) -> int:
    expert = expert_of(name)
    return -1 if expert is None else expert


def load_commands(state: EngineState) -> list[Command]:
    """Has workers take over a private state, whose files are all read with the last of them."""
    tensors = state.tensors
    *parts, last = tensors.files if isinstance(tensors, JoinedFiles) else (tensors,)
    size = sum(map(num_bytes_of, forms_of(tensors).values()))
    message = {"do": "load", "parts": len(parts), "bytes": size, **state_message(state)}
    return [*(Command({"do": "part"}, each) for each in parts), Command(message, last)]
