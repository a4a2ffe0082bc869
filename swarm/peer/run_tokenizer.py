"""The tokenizer of a run: what its founder names, and what a joiner is given by strangers."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from swarm.config import RunConfig
from swarm.data.encoders import require_package
from swarm.data.tokenise import BYTE
from swarm.data.tokenizer import Tokenizer, require_vocabulary
from swarm.data.tokenizer_file import FileTokenizer, open_tokenizer
from swarm.errors import BadBlob, BadManifest, ConfigError, RunMismatch, TokenizerError
from swarm.network.fetch import Downloads, Want
from swarm.network.foreign import check_tokenizer_size
from swarm.protocol.digests import Buffer
from swarm.protocol.manifest import PeerId
from swarm.protocol.texts import TokenizerFile

TOKENIZER_S = 600.0
"""Some tokenizers have tens of megabytes."""


def founders_tokenizer(run: RunConfig, folder: Path | None) -> Tokenizer:
    """The tokenizer that a founder gives its run.

    Raises:
        ConfigError: the run wants a file and none was named, or has bytes and one was named; or its
            vocabulary is too small.
        TokenizerError: what was named is none, or cannot be run here.
    """
    if run.data.tokenizer == "byte" and folder is None:
        return BYTE
    if run.data.tokenizer == "byte":
        raise ConfigError(
            f'{folder} was named as the tokenizer, and the run has data.tokenizer = "byte"',
            hint="--set data.tokenizer=file",
        )
    if folder is None:
        raise ConfigError(
            'data.tokenizer = "file": no tokenizer was named',
            hint="--tokenizer DIR, a folder with a tokenizer.json",
        )
    tokenizer = open_tokenizer(folder)
    require_vocabulary(run, tokenizer)
    require_package()
    return tokenizer


def files_of(tokenizer: Tokenizer) -> list[bytes]:
    """The blobs of manifest 0 that a tokenizer is: its file, or none for bytes."""
    return [tokenizer.content] if isinstance(tokenizer, FileTokenizer) else []


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


async def fetch_tokenizer(
    file: TokenizerFile, downloads: Downloads, sources: Collection[PeerId]
) -> Buffer:
    """The file of a run's tokenizer, from the store if it is whole there.

    Args:
        file: as manifest 0, or its announcement, names it.
        downloads: into a store that may have it.
        sources: peers that may have it.

    Raises:
        BadManifest: it would take too much memory.
        NobodyReachable: it did not come in time.
    """
    check_tokenizer_size(file)
    downloads.store.verify([file.digest])  # drops one that is damaged
    wanted = Want(file.digest, file.num_bytes, tuple(sources))
    return await downloads.fetch_one(wanted, timeout_s=TOKENIZER_S)


def given_tokenizer(run: RunConfig, file: TokenizerFile, content: Buffer) -> Tokenizer:
    """The tokenizer that a run gives those that join it.

    Raises:
        BadBlob: it is none, or has more ids than the model.
        TokenizerError: it cannot be run here.
    """
    require_package()
    try:
        tokenizer = FileTokenizer.of(bytes(content), file.end_of_text)
        require_vocabulary(run, tokenizer)
    except (TokenizerError, ConfigError) as error:
        raise BadBlob("tokenizer", f"the run's tokenizer: {error}") from error
    return tokenizer


def require_same(running: Tokenizer, asked: Path | None) -> None:
    """Refuses a run whose tokenizer is not the one that a joiner named.

    Raises:
        RunMismatch: names both.
    """
    if asked is None:
        return
    mine = open_tokenizer(asked)
    if mine.name != running.name:
        raise RunMismatch(
            f"--tokenizer {asked} is {mine.name}, the run has {running.name}",
            hint="leave the option out: the run brings its tokenizer",
        )
