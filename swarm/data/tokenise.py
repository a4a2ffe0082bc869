"""The byte tokenizer: id = byte value, specials from 256 up; and the files that export it.

No token is put before a document; `END_OF_TEXT` closes each one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from swarm.data.tokenizer import Tokens, tokenizer_config, write_json

END_OF_TEXT = 256
PAD = 257
NUM_IDS = 258
"""Ids in use. A model's vocabulary may be larger; the rest is never seen."""

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
        """See `Tokenizer`; ids that are no bytes are left out."""
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
