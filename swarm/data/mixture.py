"""Several folders of text as one stream of documents, each with its share of the bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from swarm.data.corpus import Corpus, folder_corpus, printable_name
from swarm.data.documents import TEXT
from swarm.data.file_digests import FileDigests
from swarm.data.tally import Tally
from swarm.data.tokenizer import Tokenizer, Tokens
from swarm.errors import DataError

Shares = tuple[tuple[str, float], ...]
"""Folders and their weights, see `data.mixture`."""


@dataclass(frozen=True)
class Mixture:
    """Documents of several folders, in turn; see `swarm.data.shard_writer.Source`.

    The next document comes from the folder that has the fewest bytes by its weight so far, and of
    equal ones from the first. The mixture ends where that folder has no more, so nothing is in it
    twice and the shares hold up to a document; what the others still have is not read.

    Attributes:
        name: for people.
        root: the folder that holds the others.
        mixture: their names and weights.
        parts: their documents.
    """

    name: str
    root: Path
    mixture: Shares
    parts: tuple[Corpus, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """Paths below `root`."""
        pairs = zip(self.mixture, self.parts, strict=True)
        return tuple(f"{folder}/{file}" for (folder, _), part in pairs for file in part.files)

    @property
    def unread(self) -> tuple[tuple[str, str], ...]:
        """Paths below `root` that are not read for their names, each with the suffix."""
        pairs = zip(self.mixture, self.parts, strict=True)
        return tuple((f"{f}/{path}", kind) for (f, _), part in pairs for path, kind in part.unread)

    def fingerprint(self, digests: FileDigests | None = None) -> str:
        """See `Source`."""
        digests = digests or FileDigests()
        said = [self.mixture, [part.fingerprint(digests) for part in self.parts]]
        return blake3(json.dumps(said).encode()).hexdigest()

    def documents(self, tally: Tally | None = None) -> Iterator[bytes]:
        """See `Source`; the tally names folders that were not read to their end.

        Raises:
            DataError: see `Corpus.documents`.
        """
        tally = tally or Tally()
        streams = [part.documents(tally) for part in self.parts]
        weights = [weight for _, weight in self.mixture]
        taken = [0] * len(streams)
        while True:
            turn = min(range(len(streams)), key=lambda part: (taken[part] / weights[part], part))
            content = next(streams[turn], None)
            if content is None:
                break
            taken[turn] += len(content)
            yield content
        ended = self.mixture[turn][0]
        for (folder, _), stream in zip(self.mixture, streams, strict=True):
            if next(stream, None) is not None:
                tally.add(folder, f"not read to its end, since {ended} ended first")

    def tokens(self, documents: Iterable[bytes], tokenizer: Tokenizer) -> Iterator[Tokens]:
        """See `Source`."""
        return tokenizer.encoded(documents)


def open_mixture(
    folder: str | None,
    shares: Sequence[tuple[str, float]],
    column: str = TEXT,
    *,
    follow_links: bool = False,
) -> Mixture:
    """The mixture of folders that lie in one.

    Raises:
        DataError: there is no such folder, or it holds no text.
    """
    if folder is None:
        names = ", ".join(name for name, _ in shares)
        raise DataError(
            f"the run mixes the folders {names}, and none was named that holds them",
            hint="--corpus DIR",
        )
    root = Path(folder).expanduser().absolute()
    parts = tuple(
        folder_corpus(root / name, column, follow_links=follow_links) for name, _ in shares
    )
    return Mixture(
        printable_name(root.name) or TEXT,
        root,
        tuple((name, weight) for name, weight in shares),
        parts,
    )
