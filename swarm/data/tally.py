"""A report on reading a corpus: the amount read, and skipped input with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_NAMED = 10_000
"""Most files, folders and lines that are named. Further names are only counted."""
_MAX_SUFFIXES = 100
_SHOWN = 8
HIDDEN = "hidden"
NO_SUFFIX = "without suffix"
_OTHERS = "others"


@dataclass
class Tally:
    """Counts read and skipped input. `summary` reports it in a line.

    Attributes:
        files: files that were read to their end.
        num_bytes: size of these files on disk.
        skipped: number of files, folders, lines and rows by the reason why they are no text.
        unread: number of files that were not read because of their suffix, by suffix; see `HIDDEN`,
            `NO_SUFFIX`.
        named: the first `max_named` skipped names, with the reason.
        left: the first `max_named` files that were not read because of their suffix.
    """

    files: int = 0
    num_bytes: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)
    named: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    max_named: int = MAX_NAMED

    @property
    def count(self) -> int:
        """Number of skipped files, folders, lines and rows."""
        return sum(self.skipped.values())

    def add(self, what: str, reason: str) -> None:
        """Counts a skipped file, folder, line or row."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        if len(self.named) < self.max_named:
            self.named.append(f"{what}: {reason}")

    def leave(self, what: str, suffix: str) -> None:
        """Counts a file or folder that is not read because of its name."""
        known = suffix in self.unread or len(self.unread) < _MAX_SUFFIXES
        kind = suffix if known else _OTHERS
        self.unread[kind] = self.unread.get(kind, 0) + 1
        if len(self.left) < self.max_named:
            self.left.append(f"{what}: not read, {suffix}")

    def finished(self, num_bytes: int) -> None:
        """Counts a file of this size that was read to its end."""
        self.files += 1
        self.num_bytes += num_bytes

    def summary(self) -> str:
        """Read input, unread input by suffix, and skipped input by reason, in a line."""
        parts = [f"{_counted(self.files, 'file')} of {_size(self.num_bytes)} read"]
        if self.unread:
            parts.append(f"not read by suffix: {_listed(self.unread)}")
        if self.skipped:
            parts.append(f"skipped: {_listed(self.skipped)}")
        return "; ".join(parts)

    def examples(self) -> str:
        """The summary and the first three unread names, for an error."""
        names = self.names()
        more = ["swarm-data info FOLDER --list-skipped names all"] if names[3:] else []
        return "; ".join([self.summary(), *names[:3], *more])

    def names(self) -> list[str]:
        """The names of all unread input, and the number of further names."""
        named = [*self.named, *self.left]
        more = self.count + sum(self.unread.values()) - len(named)
        return [*named, *([f"... and {more:,} more"] if more else [])]


def _listed(counts: Mapping[str, int]) -> str:
    """The reasons or suffixes as text, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = [f"{count:,} {what}" for what, count in ordered[:_SHOWN]]
    rest = sum(count for _, count in ordered[_SHOWN:])
    return ", ".join([*shown, *([f"{rest:,} {_OTHERS}"] if rest else [])])


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 10**5 else f"{num_bytes:,} bytes"
