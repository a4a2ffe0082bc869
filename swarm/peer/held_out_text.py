"""The held-out text of a run: the tokens that its manifest 0 names, and what they spell."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from swarm.config import RunConfig
from swarm.data.held_out import HeldOut, held_out_windows, split_documents
from swarm.data.tokenise import END_OF_TEXT
from swarm.errors import BadBlob, DataError
from swarm.network.blobs import BlobStore
from swarm.peer.agreed_model import AgreedModel
from swarm.protocol.manifest import Founding, Manifest


def held_out_text(model: AgreedModel) -> list[str]:
    """The founder's held-out documents.

    Raises:
        DataError: the tokens are not those that the run's tokenizer makes of a text of as many
            bytes, so the text is not known; some tokenizers forget how a text was written.
        TokenizerError: the tokenizer cannot be run here.
        BadBlob: the tokens are not of the run's vocabulary.
    """
    tokens, end, num_bytes = held_out_tokens(model.manifest, model.run, model.store)
    tokenizer = model.tokenizer()
    documents = list(split_documents(tokens, end))
    found = tokenizer.decoded(documents)
    again = tokenizer.encoded(found)
    same = sum(map(len, found)) == num_bytes and all(
        ours is not None and theirs is not None and np.array_equal(ours, theirs[:-1])
        for ours, theirs in itertools.zip_longest(documents, again)
    )
    try:
        text = [document.decode() for document in found]
    except UnicodeDecodeError:
        same = False
    if not same:
        raise DataError(
            "the run's tokenizer does not give back the held-out text, so other programs cannot "
            "be handed it"
        )
    return text


def held_out_tokens(
    manifest: Manifest, run: RunConfig, store: BlobStore
) -> tuple[NDArray[np.int64], int, int]:
    """Tokens of the founder's held-out documents, the one that closes each, and their bytes.

    Raises:
        BadBlob: they are not of this run's vocabulary.
    """
    founding = manifest.founding
    blob = store.get(founding.validation)
    assert blob is not None, "the held-out tokens are part of every fetched state"
    tokens = np.frombuffer(bytes(blob), dtype="<u4").astype(np.int64)
    if len(tokens) and tokens.max() >= run.model.vocab_size:
        raise BadBlob("held_out_tokens", "the founder's held-out tokens are not of the vocabulary")
    used, end = founding.tokenizer, end_of_text(founding)
    return tokens, end, used.held_out_bytes if used else int((tokens != end).sum())


def end_of_text(founding: Founding) -> int:
    """The token that closes a document of a run."""
    return founding.tokenizer.end_of_text if founding.tokenizer else END_OF_TEXT


def held_out_of(manifest: Manifest, run: RunConfig, store: BlobStore) -> HeldOut:
    """The founder's held-out text.

    Raises:
        BadBlob: it has no tokens of this run's vocabulary.
    """
    tokens, end, num_bytes = held_out_tokens(manifest, run, store)
    try:
        return held_out_windows(tokens, end, run.data.sequence_length, num_bytes)
    except DataError as error:
        raise BadBlob("held_out_tokens", f"the founder's: {error}") from error
