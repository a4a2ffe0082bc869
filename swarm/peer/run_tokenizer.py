"""The tokenizer of a run: what its founder names, and what a joiner is given by strangers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from swarm.config import RunConfig
from swarm.data.encoders import require_package
from swarm.data.tokenise import BYTE
from swarm.data.tokenizer import Tokenizer, require_vocabulary
from swarm.data.tokenizer_file import FileTokenizer, open_tokenizer
from swarm.errors import (
    BadBlob,
    BadManifest,
    ConfigError,
    CorruptState,
    RunMismatch,
    TokenizerError,
)
from swarm.network.blobs import BlobStore
from swarm.network.fetch import Want
from swarm.network.foreign import check_tokenizer_size
from swarm.protocol.digests import Buffer
from swarm.protocol.manifest import Manifest, PeerId
from swarm.protocol.texts import TokenizerFile

FETCH_S = 600.0
"""Some tokenizers have tens of megabytes."""


def require_kind(run: RunConfig, file: TokenizerFile | None) -> None:
    """Refuses a run that says two things about its tokenizer.

    Raises:
        BadManifest: reason `manifest_tokenizer`.
    """
    if (file is None) != (run.data.tokenizer == "byte"):
        raise BadManifest(
            "manifest_tokenizer",
            f"manifest 0 contradicts data.tokenizer = {run.data.tokenizer!r}",
        )


def wanted_tokenizer(
    run: RunConfig, file: TokenizerFile | None, sources: Iterable[PeerId], store: BlobStore
) -> Want | None:
    """What a joiner fetches before it opens its text; None for bytes.

    A copy in the store that is damaged is dropped.

    Raises:
        BadManifest: see `require_kind`; or the file is too large.
        CorruptState: there is no whole copy here, and no other peer that has one.
    """
    require_kind(run, file)
    check_tokenizer_size(file)
    if file is None:
        return None
    known = tuple(sources)
    was_here = store.size(file.digest) is not None
    if store.verify([file.digest]) and not known:
        what = "was changed on this disk" if was_here else "is missing on this disk"
        raise CorruptState(
            f"the run's tokenizer {what}, and no other peer of the run is known",
            hint="found a run with --run FILE --tokenizer DIR, on an export by --initialise-from",
        )
    return Want(file.digest, file.num_bytes, known)


def given_tokenizer(
    run: RunConfig, file: TokenizerFile | None, content: Buffer | None, asked: Path | None = None
) -> Tokenizer:
    """The tokenizer that a run gives those that join it.

    Args:
        run: its configuration.
        file: what manifest 0 says of it; None for bytes.
        content: of the file.
        asked: what this machine's person named, if anything.

    Raises:
        BadBlob: it is none, or has more ids than the model.
        TokenizerError: it cannot be run here.
        RunMismatch: it is not the one that was asked for.
    """
    tokenizer: Tokenizer = BYTE
    if file is not None and content is not None:
        require_package()
        try:
            tokenizer = FileTokenizer.of(bytes(content), file.end_of_text)
            require_vocabulary(run, tokenizer)
        except (TokenizerError, ConfigError) as error:
            raise BadBlob("tokenizer", f"the run's tokenizer: {error}") from error
    if asked is not None and (mine := open_tokenizer(asked)).name != tokenizer.name:
        raise RunMismatch(
            f"--tokenizer {asked} is {mine.name}, the run has {tokenizer.name}",
            hint="leave the option out: the run brings its tokenizer",
        )
    return tokenizer


def tokenizer_of(manifest: Manifest, store: BlobStore) -> Tokenizer:
    """The tokenizer of a run whose blobs are here; the package tokenizers is not needed.

    Raises:
        CorruptState: its file is missing.
        TokenizerError: it is none.
    """
    file = manifest.founding.tokenizer
    if file is None:
        return BYTE
    content = store.get(file.digest)
    if content is None:
        raise CorruptState("the run's tokenizer is missing")
    return FileTokenizer.of(bytes(content), file.end_of_text)
