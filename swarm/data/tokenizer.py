"""The interface of a run's tokenizer, and the byte tokenizer.

The id of a byte is its value, and special tokens follow from 256 up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from swarm.config import RunConfig
from swarm.errors import ConfigError

Tokens = NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """Encodes documents as token ids."""

    @property
    def name(self) -> str:
        """The tokenizer's kind and 16 hex digits. Tokenizers with equal names give equal tokens."""

    @property
    def num_ids(self) -> int:
        """Upper bound of ids in use. A model's vocabulary may be larger, with unused ids."""

    @property
    def end_of_text(self) -> int:
        """Id of the token that closes a document. No text contains it."""

    def encoded(self, documents: Iterable[bytes]) -> Iterator[Tokens]:
        """Token ids of each document in order, closed by `end_of_text`.

        Raises:
            TokenizerError: the tokenizer cannot be run, or returned impossible ids.
        """

    def decoded(self, documents: Sequence[Tokens]) -> list[bytes]:
        """The text of each document in UTF-8, from tokens without the closing id.

        Tokens that encoding would not produce need not survive decoding and encoding.

        Raises:
            TokenizerError: it cannot be run.
        """

    def save(self, folder: Path, *, model_max_length: int) -> None:
        """Writes tokenizer.json and tokenizer_config.json for `AutoTokenizer`.

        The loaded tokenizer gives the ids of `encoded` without the closing id, even for text that
        spells a special token.

        Args:
            folder: existing folder for the two files.
            model_max_length: tokens that the model was trained to read at once.
        """


def token_dtype(num_ids: int) -> np.dtype[Any]:
    """The smaller of the two dtypes on disk that holds `num_ids` token ids."""
    return np.dtype("<u2") if num_ids <= 2**16 else np.dtype("<u4")


def require_vocabulary(run: RunConfig, tokenizer: Tokenizer) -> None:
    """Refuses a model whose vocabulary lacks an id. A larger vocabulary is padding.

    Raises:
        ConfigError: the vocabulary is too small.
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
    """An object as readable JSON."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an object as readable JSON."""
    path.write_text(readable_json(content), encoding="utf-8")


def tokenizer_config(end_of_text: str, *, pad: str | None, model_max_length: int) -> dict[str, Any]:
    """The contents of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "bos_token": None,
        "eos_token": end_of_text,
        "pad_token": pad,
        # "<|endoftext|>" inside a document is thirteen characters of text, not the special token.
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }


END_OF_TEXT = 256
PAD = 257
NUM_IDS = 258
"""Ids in use. A model's vocabulary may be larger, with unused ids."""

_SPECIALS = {"<|endoftext|>": END_OF_TEXT, "<|pad|>": PAD}


def document_tokens(content: bytes) -> NDArray[np.uint16]:
    """Token ids [number of bytes + 1] of one document, closed by `END_OF_TEXT`."""
    tokens = np.empty(len(content) + 1, dtype=np.uint16)
    tokens[:-1] = np.frombuffer(content, dtype=np.uint8)
    tokens[-1] = END_OF_TEXT
    return tokens


class ByteTokenizer:
    """The tokenizer of runs with `data.tokenizer = "byte"`."""

    num_ids = NUM_IDS
    end_of_text = END_OF_TEXT

    @property
    def name(self) -> str:
        """See `Tokenizer`: `byte-` and 16 hex digits over the file that is exported."""
        content = json.dumps(_tokenizer(), sort_keys=True).encode()
        return f"byte-{blake3(content).hexdigest()[:16]}"

    def encoded(self, documents: Iterable[bytes]) -> Iterator[Tokens]:
        """See `Tokenizer`."""
        return map(document_tokens, documents)

    def decoded(self, documents: Sequence[Tokens]) -> list[bytes]:
        """See `Tokenizer`. Leaves out ids that are no bytes."""
        return [np.asarray(d)[np.asarray(d) < 256].astype(np.uint8).tobytes() for d in documents]

    def save(self, folder: Path, *, model_max_length: int) -> None:
        """See `Tokenizer`."""
        write_json(folder / "tokenizer.json", _tokenizer())
        config = tokenizer_config("<|endoftext|>", pad="<|pad|>", model_max_length=model_max_length)
        write_json(folder / "tokenizer_config.json", config)


BYTE = ByteTokenizer()


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies.

    Source: openai/gpt-2, `encoder.py`, `bytes_to_unicode`: printable Latin-1 stands for itself,
    the rest is numbered from U+0100 up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def _tokenizer() -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for content, token in _SPECIALS.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }
