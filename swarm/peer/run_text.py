"""The text of this machine: found, tokenised, and held against the one that the run trains on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from swarm.config import RunConfig
from swarm.data.corpus import Corpus, open_corpus
from swarm.data.loader import held_out_sequences, held_out_tokens, require_a_batch
from swarm.data.shards import Shards, open_shards
from swarm.data.tokenise import tokenizer_name
from swarm.errors import BadManifest, DataError
from swarm.peer.agreement import joiners_need, missing_text, require_text
from swarm.protocol.manifest import Text

logger = logging.getLogger(__name__)


class RunText:
    """What a peer trains on. Nothing is handed out that is not the run's.

    Attributes:
        folder: where the text comes from, absolute; None for the standard library.
    """

    def __init__(self, given: str | None, cache: Path, say: Callable[[str], None]) -> None:
        """Reads nothing yet.

        Args:
            given: folder that the person named, if they did.
            cache: where tokens are kept.
            say: told once, in a sentence, which text joiners need.
        """
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

    def found(self, run: RunConfig) -> tuple[Text | None, bytes]:
        """The text that a founder gives its run, and the held-out tokens, little-endian uint32.

        Returns:
            None in place of the text where every peer has its own.

        Raises:
            DataError: it is missing, unfit or too small.
        """
        corpus = corpus_of(run, self.folder)
        shards = self._open(corpus)
        require_a_batch(shards, run)
        held_out = held_out_tokens(corpus.documents(), run.data.validation_tokens)
        held_out_sequences(held_out, run.data.sequence_length)
        common = text_of(corpus, shards, run) if run.data.mode == "common" else None
        self._shards = shards
        self._say(common)
        return common, held_out.astype("<u4").tobytes()

    def require(self, run: RunConfig, needed: Text | None, remembered: str | None) -> None:
        """Opens this machine's text, which must be the one that a run needs.

        Args:
            run: its configuration.
            needed: its text; None where every peer has its own.
            remembered: folder that the text came from before; what the person named wins.

        Raises:
            TextMismatch: this machine has another text, or none; says what is needed.
            DataError: the run asks every peer to bring its own, and there is none.
            BadManifest: the run has a common text and does not say which.
        """
        if (needed is None) != (run.data.mode == "own"):
            raise BadManifest(
                "manifest_text", f"manifest 0 contradicts data.mode = {run.data.mode!r} on the text"
            )
        if not self._is_given:
            self.folder = remembered
        self._say(needed)
        try:
            corpus = corpus_of(run, self.folder)
            shards = self._open(corpus)
        except DataError as error:
            if needed is None:
                raise
            raise missing_text(needed, str(error)) from error
        if needed:
            require_text(needed, text_of(corpus, shards, run), corpus.root)
        self._shards = shards

    def _open(self, corpus: Corpus) -> Shards:
        shards = open_shards(corpus, self._cache)
        logger.info("text %s in %s: %s", corpus.name, corpus.root, shards.summary())
        return shards

    def _say(self, text: Text | None) -> None:
        """Says, once, which text a joiner needs."""
        line = joiners_need(text)
        if line != self._said:
            self._tell(line)
        self._said = line


def corpus_of(run: RunConfig, folder: str | None) -> Corpus:
    """The files in a folder, or the standard library.

    Raises:
        DataError: they are missing, or the run asks every peer to bring its own.
    """
    if run.data.mode == "own" and folder is None:
        raise DataError(
            "in this run every peer trains on its own text", hint="name a folder: --corpus DIR"
        )
    return open_corpus(folder)


def text_of(corpus: Corpus, shards: Shards, run: RunConfig) -> Text:
    """What manifest 0 says about a corpus."""
    return Text(
        name=corpus.name,
        tokenizer=tokenizer_name(),
        digest=shards.contents.digest,
        documents=shards.contents.documents,
        tokens=shards.num_tokens,
        windows=sum(shards.windows(run.data.sequence_length)),
    )
