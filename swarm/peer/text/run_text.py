"""The text and the tokenizer of this machine, compared with the run's."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swarm import errors
from swarm.config import RunConfig
from swarm.data.corpus import Corpus, Mixture, Shares, open_corpus, open_mixture
from swarm.data.encoders import require_package
from swarm.data.held_out import held_out_documents
from swarm.data.loader import require_a_batch
from swarm.data.shards import Prepared, Shards, is_prepared, open_prepared, open_shards
from swarm.data.tokenizer import BYTE, Tokenizer, require_vocabulary
from swarm.data.tokenizer_file import FileTokenizer, open_tokenizer
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.fetcher import Want
from swarm.network.runs.run_records import check_tokenizer_size
from swarm.peer.text.run_request import joiners_need, missing_text, require_text
from swarm.protocol.records.printable import printable
from swarm.protocol.values.digests import Buffer
from swarm.protocol.values.manifest import Manifest, PeerId
from swarm.protocol.values.texts import Text, TokenizerFile

logger = logging.getLogger(__name__)


FETCH_S = 600.0
"""Limit of the fetch; long enough for tokenizers of tens of megabytes."""


def require_kind(run: RunConfig, file: TokenizerFile | None) -> None:
    """Refuses a run whose manifest and configuration contradict each other about the tokenizer.

    Raises:
        BadManifest: reason `manifest_tokenizer`.
    """
    if (file is None) != (run.data.tokenizer == "byte"):
        raise errors.BadManifest(
            "manifest_tokenizer",
            f"manifest 0 contradicts data.tokenizer = {run.data.tokenizer!r}",
        )


def wanted_tokenizer(
    run: RunConfig, file: TokenizerFile | None, sources: Iterable[PeerId], store: BlobStore
) -> Want | None:
    """The tokenizer file that a joiner fetches before it opens its text; None for bytes.

    A damaged copy in the store is dropped.

    Raises:
        BadManifest: see `require_kind`; or the file is too large.
        CorruptState: there is no intact copy here, and no other peer is known.
    """
    require_kind(run, file)
    check_tokenizer_size(file)
    if file is None:
        return None
    known = tuple(sources)
    was_here = store.size(file.digest) is not None
    if store.verify([file.digest]) and not known:
        what = "was changed on this disk" if was_here else "is missing on this disk"
        raise errors.CorruptState(
            f"the run's tokenizer {what}, and no other peer of the run is known",
            hint="found a run with --run FILE --tokenizer DIR, on an export by --initialise-from",
        )
    return Want(file.digest, file.num_bytes, known)


def given_tokenizer(
    run: RunConfig, file: TokenizerFile | None, content: Buffer | None, asked: Path | None = None
) -> Tokenizer:
    """The tokenizer that a run gives its joiners.

    Args:
        run: configuration of the run.
        file: the tokenizer's entry in manifest 0. None for bytes.
        content: content of the file.
        asked: the tokenizer that a person named here, if any.

    Raises:
        BadBlob: the file is no tokenizer, or has more ids than the model.
        TokenizerError: the tokenizer cannot run here.
        RunMismatch: it is not the tokenizer that the person named.
    """
    tokenizer: Tokenizer = BYTE
    if file is not None and content is not None:
        require_package()
        try:
            tokenizer = FileTokenizer.of(bytes(content), file.end_of_text)
            require_vocabulary(run, tokenizer)
        except (errors.TokenizerError, errors.ConfigError) as error:
            raise errors.BadBlob("tokenizer", f"the run's tokenizer: {error}") from error
    if asked is not None and (mine := open_tokenizer(asked)).name != tokenizer.name:
        raise errors.RunMismatch(
            f"--tokenizer {asked} is {mine.name}, the run has {tokenizer.name}",
            hint="leave the option out: the run brings its tokenizer",
        )
    return tokenizer


def tokenizer_of(manifest: Manifest, store: BlobStore) -> Tokenizer:
    """The tokenizer of a run whose blobs are here; does not need the package tokenizers.

    Raises:
        CorruptState: the file of the tokenizer is missing.
        TokenizerError: the file is no tokenizer.
    """
    file = manifest.founding.tokenizer
    if file is None:
        return BYTE
    content = store.get(file.digest)
    if content is None:
        raise errors.CorruptState("the run's tokenizer is missing")
    return FileTokenizer.of(bytes(content), file.end_of_text)


@dataclass(frozen=True)
class FoundText:
    """The text that a founder gives its run.

    Attributes:
        common: the text that all peers share; None if every peer has its own.
        held_out: tokens of the held-out documents, each closed, little-endian uint32.
        held_out_bytes: size of these documents as text.
    """

    common: Text | None
    held_out: bytes
    held_out_bytes: int


class RunText:
    """The text on which a peer trains, available only once it is known to be the run's text.

    Attributes:
        folder: absolute path of the text; None for the standard library.
    """

    def __init__(
        self,
        given: str | None,
        cache: Path,
        say: Callable[[str], None],
        *,
        follow_links: bool = False,
        list_skipped: bool = False,
    ) -> None:
        """Reads nothing yet.

        Args:
            given: folder that a person named, if any.
            cache: folder of cached tokens.
            say: called once, with a sentence about the text that joiners need.
            follow_links: see `swarm.data.corpus.folder_corpus`.
            list_skipped: whether the log names all files that are not read.
        """
        self._follow_links, self._list_skipped = follow_links, list_skipped
        self._tell = say
        self.folder = os.path.abspath(os.path.expanduser(given)) if given else None
        self._is_given = given is not None
        self._cache = cache
        self._shards: Shards | None = None
        self._said = ""

    @property
    def shards(self) -> Shards:
        """The tokens to train on, once they are known to be the run's."""
        assert self._shards is not None, "neither found nor required"
        return self._shards

    def found(self, run: RunConfig, tokenizer: Tokenizer) -> FoundText:
        """The text that a founder gives its run.

        Raises:
            DataError: the text is missing, unusable or too small.
        """
        corpus = corpus_of(run, self.folder, follow_links=self._follow_links)
        shards = self._open(corpus, tokenizer)
        require_a_batch(shards, run)
        documents = held_out_documents(
            corpus.documents(),
            run.data.validation_bytes,
            are_held_out=isinstance(corpus, Prepared),
        )
        held_out = np.concatenate(list(tokenizer.encoded(documents)))
        common = text_of(corpus, shards, run, tokenizer) if run.data.mode == "common" else None
        self._shards = shards
        self._say(common)
        return FoundText(common, held_out.astype("<u4").tobytes(), sum(map(len, documents)))

    def require(
        self, run: RunConfig, tokenizer: Tokenizer, needed: Text | None, remembered: str | None
    ) -> None:
        """Opens this machine's text, which must be the run's text.

        Args:
            run: configuration of the run.
            tokenizer: tokenizer of the run.
            needed: the run's text; None if every peer has its own.
            remembered: the text's folder at an earlier start; a folder that the person named has
                precedence.

        Raises:
            TextMismatch: this machine has another text, or none. The message names the needed text.
            DataError: every peer of the run has its own text, and this machine has none.
            BadManifest: the run has a common text, but does not name it.
        """
        if (needed is None) != (run.data.mode == "own"):
            raise errors.BadManifest(
                "manifest_text", f"manifest 0 contradicts data.mode = {run.data.mode!r} on the text"
            )
        if not self._is_given:
            self.folder = remembered
        self._say(needed)
        try:
            corpus = corpus_of(run, self.folder, follow_links=self._follow_links)
            shards = self._open(corpus, tokenizer)
        except errors.DataError as error:
            if needed is None or isinstance(error, errors.TokenizerError):
                raise
            raise missing_text(needed, str(error)) from error
        if needed:
            require_text(needed, text_of(corpus, shards, run, tokenizer), corpus.root)
        self._shards = shards

    def _open(self, corpus: Corpus | Mixture | Prepared, tokenizer: Tokenizer) -> Shards:
        if isinstance(corpus, Prepared):
            shards = corpus.open(tokenizer)
        else:
            shards = open_shards(corpus, self._cache, tokenizer)
        logger.info("text %s in %s: %s", corpus.name, corpus.root, shards.summary())
        for each in shards.contents.tally.names() if self._list_skipped else ():
            logger.info("%s", printable(each))
        return shards

    def _say(self, text: Text | None) -> None:
        """Reports once which text a joiner needs."""
        line = joiners_need(text)
        if line != self._said:
            self._tell(line)
        self._said = line


def corpus_of(
    run: RunConfig, folder: str | None, *, follow_links: bool = False
) -> Corpus | Mixture | Prepared:
    """The files in a folder, the shards that `swarm-data tokenize` made, or the standard library.

    Raises:
        DataError: they are missing, or have another mixture than the run's; or every peer of the
            run has its own text, and no folder was named.
    """
    if run.data.mode == "own" and folder is None:
        raise errors.DataError(
            "in this run every peer trains on its own text", hint="name a folder: --corpus DIR"
        )
    if folder is not None and is_prepared(path := Path(folder).expanduser().absolute()):
        prepared = open_prepared(path)
        if prepared.mixture != run.data.mixture:
            raise errors.DataError(
                f"{path}: its shards have data.mixture = {_shown(prepared.mixture)}, the run has "
                f"{_shown(run.data.mixture)}",
                hint="swarm-data tokenize --run FILE with the run's file, into another folder",
            )
        fitting = (run.data.sequence_length, "document")
        if prepared.pack and (prepared.pack, run.data.attention) != fitting:
            raise errors.DataError(
                f"{path}: documents were packed into sequences of {prepared.pack} tokens, and the "
                f"run has data.sequence_length = {run.data.sequence_length} and data.attention = "
                f'"{run.data.attention}"',
                hint='a run on packed shards has their length, and data.attention = "document"',
            )
        return prepared
    if run.data.mixture:
        return open_mixture(folder, run.data.mixture, follow_links=follow_links)
    return open_corpus(folder, follow_links=follow_links)


def _shown(mixture: Shares) -> str:
    return str([list(share) for share in mixture])


def text_of(
    corpus: Corpus | Mixture | Prepared, shards: Shards, run: RunConfig, tokenizer: Tokenizer
) -> Text:
    """A corpus as manifest 0 describes it."""
    return Text(
        name=corpus.name,
        tokenizer=tokenizer.name,
        digest=shards.contents.digest,
        documents=shards.contents.documents,
        tokens=shards.num_tokens,
        windows=sum(shards.windows(run.data.sequence_length)),
    )
