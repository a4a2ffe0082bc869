"""The controller's view of the workers' tensors, which workers can write to files."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from pathlib import Path

from torch import Tensor

from swarm.errors import StateError
from swarm.train.engine.engine import Counts
from swarm.train.engine.tensor_file import Form, LazyTensors
from swarm.train.saving.hashed_file import Part, PartedTensors, Parts
from swarm.train.workers.command_history import deal_out, flagged, flags_of, num_bytes_of
from swarm.train.workers.exchange import Message, dtype_named
from swarm.train.workers.workforce import TRIES, Workforce

POLL_S = 0.02
"""Seconds between two questions about progress; other questions can come between them."""


class WorkersTensors(PartedTensors):
    """Tensors of the private state of workers."""

    def __init__(self, force: Workforce, answer: Message) -> None:
        """`answer`: the first worker's description of the state."""
        self._force = force
        self.counts: Counts = _counts(answer)
        self._forms = _forms(answer)

    def forms(self) -> dict[str, Form]:
        """See `LazyTensors`."""
        return dict(self._forms)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._forms:
            raise KeyError(name)
        return self._force.read({"do": "read_state", "name": name})[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._forms)

    def __len__(self) -> int:
        return len(self._forms)

    def begin_parts(self, folder: Path, stem: str) -> Parts:
        """See `PartedTensors`."""
        return _WorkersParts(self, folder, stem)

    def begin(self, folder: Path, stem: str) -> set[str]:
        """Has workers begin to write; returns the names of the tensors that they do not write.

        Raises:
            StateError: the state has changed since the object was made.
        """
        answers = self._force.ask({"do": "state"})
        if _counts(answers[0]) != self.counts:
            raise StateError("the workers have changed their state since it was to be saved")
        self._forms = _forms(answers[0])
        holders = [set(flagged(self._forms, each["held"])) for each in answers[: self._force.here]]
        dealt = deal_out(self._forms, holders)
        flags = {rank: flags_of(self._forms, set(names)) for rank, names in enumerate(dealt)}
        self._force.ask({"do": "save", "folder": str(folder), "stem": stem, "flags": flags})
        return self._forms.keys() - {name for names in dealt for name in names}

    def written(self, stem: str) -> list[Message]:
        """The progress of each worker of this machine."""
        return self._force.ask({"do": "saved", "stem": stem})[: self._force.here]

    def within_s(self) -> float:
        """Time limit of saving."""
        return self._force.saves_within_s(sum(map(num_bytes_of, self._forms.values())))


class _WorkersParts(Parts):
    """Parts that workers write. New workers do not know of the saving, and begin it again."""

    def __init__(self, tensors: WorkersTensors, folder: Path, stem: str) -> None:
        self._tensors, self._folder, self._stem = tensors, folder, stem
        self._left = tensors.begin(folder, stem)
        self.rest = _Some(tensors, self._left)

    def finish(self) -> list[Part]:
        """See `Parts`."""
        tries, end_s = 1, time.monotonic() + self._tensors.within_s()
        while True:
            answers = self._tensors.written(self._stem)
            for answer in answers:
                if answer["is"] == "refused":
                    raise OSError(answer["errno"], answer["text"])
            if all(answer["is"] == "done" for answer in answers):
                return [Part(*answer["part"]) for answer in answers if answer["part"]]
            if any(answer["is"] == "unknown" for answer in answers):
                tries += 1
                if tries > TRIES or self._tensors.begin(self._folder, self._stem) != self._left:
                    raise StateError("other workers write the private state, with other parts")
            elif time.monotonic() > end_s:
                raise StateError("the workers do not finish the private state")
            time.sleep(POLL_S)


class _Some(LazyTensors):
    """Some of the tensors of a mapping."""

    def __init__(self, tensors: LazyTensors, names: Collection[str]) -> None:
        self._tensors, self._names = tensors, sorted(names)

    def forms(self) -> dict[str, Form]:
        """See `LazyTensors`."""
        forms = self._tensors.forms()
        return {name: forms[name] for name in self._names}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _counts(answer: Message) -> Counts:
    owned, updates, skipped, skipped_in_a_row = answer["counts"]
    return tuple(owned), updates, skipped, skipped_in_a_row


def _forms(answer: Message) -> dict[str, Form]:
    forms = answer["forms"].items()
    return {name: (dtype_named(dtype), tuple(shape)) for name, (dtype, shape) in forms}
