"""The texts of a data set in the Hugging Face format, row by row, without keeping it on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from blake3 import blake3

from swarm.data.corpus import printable_name
from swarm.data.documents import TEXT, row_documents
from swarm.data.input_files import FileDigests
from swarm.data.tally import Tally
from swarm.data.tokenizer import Tokenizer, Tokens
from swarm.errors import DataError


@dataclass(frozen=True)
class DatasetText:
    """A split of a data set; see `swarm.data.shard_writer.Source`.

    Each reading is a new stream, from the hub or from a folder.

    Attributes:
        path: name of the data set on the hub, or a folder.
        config: a configuration of the data set. None for the only configuration.
        split: the split, such as "train".
        column: column of the text in rows.
    """

    path: str
    config: str | None = None
    split: str = "train"
    column: str = TEXT
    mixture: ClassVar[tuple[tuple[str, float], ...]] = ()

    @property
    def name(self) -> str:
        """The name for people."""
        return printable_name(Path(self.path).name) or TEXT

    @property
    def root(self) -> Path:
        """The data set's name in place of a folder, which it may not have."""
        return Path(self.path)

    @property
    def files(self) -> tuple[str, ...]:
        """Empty, because the size of a stream is unknown."""
        return ()

    def fingerprint(self, _: FileDigests | None = None) -> str:
        """See `Source`. It is a digest that `datasets` has without reading the files.

        Raises:
            DataError: see `documents`.
        """
        with self._opened() as builder:
            files = builder.config.data_files or {}
            known = sorted((str(part), list(of), of.origin_metadata) for part, of in files.items())
            said = [self.path, builder.config.name, self.split, self.column, known]
        return blake3(json.dumps(said).encode()).hexdigest()

    def documents(self, tally: Tally | None = None) -> Iterator[bytes]:
        """See `Source`. Texts are cut as texts of files are.

        Raises:
            DataError: there is no such data set, split or column, it cannot be read, or the package
                `datasets` is not installed.
        """
        tally = tally or Tally()
        with self._opened() as builder:
            rows = builder.as_streaming_dataset(split=self.split)
            yield from row_documents(self._texts(rows), self.name, tally)
        tally.finished(0)  # the size is unknown

    def tokens(self, documents: Iterable[bytes], tokenizer: Tokenizer) -> Iterator[Tokens]:
        """See `Source`."""
        return tokenizer.encoded(documents)

    def _texts(self, rows: Iterable[dict[str, Any]]) -> Iterator[str | None]:
        for row in rows:
            text = row.get(self.column)
            if self.column not in row or not isinstance(text, str | None):
                what = "no text" if self.column in row else "no column"
                raise DataError(
                    f"{self.path}: {what} {self.column!r}, but {', '.join(map(repr, row))}",
                    hint="swarm-data tokenize --column NAME",
                )
            yield text

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        try:
            import datasets  # optional, from the extra hf-data
        except ImportError as error:
            raise DataError(
                f"{self.path}: the package datasets reads it, and is not installed",
                hint="pip install datasets, or 'moe-swarm[hf-data]'",
            ) from error
        try:
            yield datasets.load_dataset_builder(self.path, self.config)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            said = str(error).split("\n", maxsplit=1)[0]
            raise DataError(
                f"{self.path}: cannot be read: {said}",
                hint="--dataset is a name on the hub or a folder; --dataset-config, --split",
            ) from error
