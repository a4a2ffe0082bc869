"""The parts of a private state that workers write themselves.

The controller deals the tensors out to the workers of its own machine, by what each says to hold.
What none of them holds, as workers of other machines have it, comes over their answers and goes
into the controller's own file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from swarm.background import Helpers
from swarm.train.hashed_file import HashedFile
from swarm.train.parallel.exchange import Message
from swarm.train.tensor_file import Form, LazyTensors, Place


def part_name(stem: str, rank: int) -> str:
    """The file name of what a rank writes."""
    return f"{stem}.{rank}"


def flags_of(names: Collection[str], chosen: Collection[str]) -> str:
    """Which of some names are chosen, as hex digits."""
    return f"{sum((name in chosen) << k for k, name in enumerate(names)):x}"


def flagged(names: Collection[str], flags: str) -> list[str]:
    """The names that `flags_of` has marked."""
    bits = int(flags, 16)
    return [name for k, name in enumerate(names) if bits >> k & 1]


def held(tensors: Mapping[str, Tensor], forms: Mapping[str, Form]) -> set[str]:
    """The tensors that a rank has in memory as a whole: what it may write by itself."""
    if isinstance(tensors, LazyTensors):
        return set()
    return {n for n, each in tensors.items() if forms.get(n) == (each.dtype, tuple(each.shape))}


def deal_out(forms: Mapping[str, Form], holders: Sequence[Collection[str]]) -> list[list[str]]:
    """Which rank writes what: as evenly as the largest allow, masters with their moments.

    Args:
        forms: of all tensors of the state.
        holders: the names that each rank has.

    Returns:
        The names for each rank; names that nobody has are in none.
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
        stem: of the saving that it belongs to.
    """

    def __init__(self, stem: str, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Begins; nothing is written where there are no tensors."""
        self.stem, self._name = stem, path.name
        self._file = HashedFile(path, lambda: [tensors]) if tensors else None
        self._pool = Helpers("swarm-part", 1)
        self._done = self._pool.submit(self._finish)

    def answer(self) -> Message:
        """How far it is, for JSON."""
        if not self._done.done():
            return {"is": "going"}
        try:
            return {"is": "done", "part": self._done.result()}
        except OSError as error:
            return {"is": "refused", "errno": error.errno, "text": error.strerror or str(error)}

    def give_up(self) -> None:
        """Returns when nothing is read any more; see `HashedFile.give_up`."""
        if self._file is not None:
            self._file.give_up()
        self._pool.end()

    def _finish(self) -> list[object] | None:
        if self._file is None:
            return None
        written = self._file.finish(seal=False)
        return [self._name, written.num_bytes, written.digest.hex()]


def num_bytes_of(form: Form) -> int:
    """Bytes of a tensor of this form."""
    return Place(0, *form).num_bytes
