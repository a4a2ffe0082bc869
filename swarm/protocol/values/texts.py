"""The facts in manifest 0 about a run's text, and about the tokenizer that makes its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from swarm.config.section import Strict

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
TextCount = Annotated[int, Field(ge=1, le=2**48)]


@dataclass(frozen=True)
class Text(Strict):
    """The common text of a run, by its founder; every peer must have the same text.

    All fields but the name must be equal. Documents and tokens are those of the training text.
    """

    # Terminals show the name, so it must have no control characters.
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
    """A name for people: the folder's name, or the version of the standard library."""
    tokenizer: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]
    digest: Digest
    """Digest of all its training tokens, in order."""
    documents: TextCount
    tokens: TextCount
    windows: TextCount
    """Windows of the run's sequence length: the samples of one lap."""


@dataclass(frozen=True)
class TokenizerFile(Strict):
    """The tokenizer of a run that does not use bytes: its file, and facts that follow from it."""

    digest: Digest
    """The blob that is a tokenizer.json."""
    num_bytes: Annotated[int, Field(ge=1, le=2**40)]
    end_of_text: Annotated[int, Field(ge=0, lt=2**20)]
    """Id of the token that closes a document."""
    held_out_bytes: Annotated[int, Field(ge=1, le=2**40)]
    """Bytes of the held-out text in UTF-8; with the byte tokenizer, the number of its tokens."""
