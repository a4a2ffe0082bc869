"""What a run's tokenizer has to do, whichever it is: bytes, or a file of somebody's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from swarm.config import RunConfig
from swarm.errors import ConfigError

Tokens = NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """Makes documents into token ids."""

    @property
    def name(self) -> str:
        """Its kind and 16 hex digits: equal where all that it does is."""

    @property
    def num_ids(self) -> int:
        """Ids in use are below it. A model's vocabulary may be larger; the rest is never seen."""

    @property
    def end_of_text(self) -> int:
        """Id of the token that closes a document and that no text contains."""

    def encoded(self, documents: Iterable[bytes]) -> Iterator[Tokens]:
        """Token ids of each document in order, closed by `end_of_text`.

        Raises:
            TokenizerError: it cannot be run, or made something impossible of a document.
        """

    def decoded(self, documents: Sequence[Tokens]) -> list[bytes]:
        """The text of each document, whose tokens are not closed, in UTF-8.

        Tokens that the tokenizer would not make of a text need not give back what they were.

        Raises:
            TokenizerError: it cannot be run.
        """

    def save(self, folder: Path, *, model_max_length: int) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which `AutoTokenizer` loads unmodified.

        What is loaded gives the ids of `encoded` without the last, also for text that spells a
        special token.

        Args:
            folder: where the two files go; it must exist.
            model_max_length: tokens that the model was trained to read at once.
        """


def token_dtype(num_ids: int) -> np.dtype[Any]:
    """The smallest of our two dtypes on disk that holds `num_ids` token ids."""
    return np.dtype("<u2") if num_ids <= 2**16 else np.dtype("<u4")


def require_vocabulary(run: RunConfig, tokenizer: Tokenizer) -> None:
    """Refuses a model whose vocabulary does not hold every id; a larger one is padding.

    Raises:
        ConfigError: it does not.
    """
    if run.model.vocab_size < tokenizer.num_ids:
        padded = -(-tokenizer.num_ids // 64) * 64
        exact = f"{tokenizer.num_ids}, or " if padded > tokenizer.num_ids else ""
        raise ConfigError(
            f"model.vocab_size = {run.model.vocab_size}: the tokenizer {tokenizer.name} has ids "
            f"up to {tokenizer.num_ids - 1}",
            hint=f"--set model.vocab_size={exact}{padded}, a multiple of 64",
        )


def readable_json(content: Mapping[str, Any]) -> str:
    """An object as people read it."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an object as people read it."""
    path.write_text(readable_json(content), encoding="utf-8")


def tokenizer_config(end_of_text: str, *, pad: str | None, model_max_length: int) -> dict[str, Any]:
    """The contents of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "bos_token": None,
        "eos_token": end_of_text,
        "pad_token": pad,
        # Text is data: "<|endoftext|>" inside a document is thirteen characters, not the special.
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
