"""A tokenizer.json of the packages tokenizers and Transformers, perhaps a stranger's.

This module only reads the file as JSON, in bounded memory, for the ids in use and the end-of-text
token. Separate processes run the tokenizer (`swarm.data.encoders`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from swarm.data.encoders import decode, encode, require_package
from swarm.data.tokenizer import Tokens, tokenizer_config, write_json
from swarm.errors import ConfigError, TokenizerError

FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
MAX_FILE_BYTES = 64 * 2**20
"""The largest file in wide use, Gemma 3's, has 33 MB."""
MAX_IDS = 2**20
"""The largest `model.vocab_size`."""
_MAX_BRACKETS = 2 * MAX_IDS
_MAX_COMMAS = 8 * MAX_IDS
_MAX_CONFIG_BYTES = 2**20
_MODELS = ("BPE", "Unigram", "WordLevel", "WordPiece")
_END_OF_TEXT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[SEP]",
)
"""End-of-text tokens of GPT and Qwen, Llama 3, SentencePiece, Gemma, DeepSeek and BERT. The first
of these tokens that a file has is used."""


@dataclass(frozen=True)
class FileTokenizer:
    """The tokenizer of a run with `data.tokenizer = "file"`; see `Tokenizer`.

    Attributes:
        content: the file.
        end_of_text: id of the token that closes a document.
        end_of_text_token: spelling of that token.
        num_ids: upper bound of ids in use.
        name: determines the content and the closing id.
    """

    content: bytes
    end_of_text: int
    end_of_text_token: str
    num_ids: int
    name: str

    @staticmethod
    def of(content: bytes, end_of_text: int | str | None = None) -> FileTokenizer:
        """Reads a tokenizer's file.

        Args:
            content: content of a tokenizer.json.
            end_of_text: id or spelling of the token that closes a document. By default the first of
                the widely used tokens that the file has.

        Raises:
            TokenizerError: the content is no tokenizer, or no run can use it. The error names the
                reason.
        """
        values = _parsed(content)
        added = _added_tokens(values)
        num_ids = 1 + max([*_ids(values), *(number for _, number, _ in added)], default=-1)
        special = {spelled: number for spelled, number, is_special in added if is_special}
        token = _end_of_text(special, end_of_text)
        named = blake3(content)
        named.update(f"end of text {special[token]}".encode())
        name = f"file-{named.hexdigest()[:16]}"
        return FileTokenizer(content, special[token], token, num_ids, name)

    def encoded(self, documents: Iterable[bytes]) -> Iterator[Tokens]:
        """See `Tokenizer`."""
        yield from encode(self.content, self.end_of_text, documents)

    def decoded(self, documents: Sequence[Tokens]) -> list[bytes]:
        """See `Tokenizer`."""
        rows = [np.asarray(document, dtype=np.uint32) for document in documents]
        return decode(self.content, self.end_of_text, rows)

    def save(self, folder: Path, *, model_max_length: int) -> None:
        """See `Tokenizer`.

        Leaves out settings that would add tokens which the run's documents lack.
        """
        values = json.loads(self.content)
        after = values.get("post_processor")
        adds = isinstance(after, dict) and after.get("type") != "ByteLevel"
        if adds or values.get("truncation") or values.get("padding"):
            values |= {"truncation": None, "padding": None}
            values["post_processor"] = None if adds else after
            (folder / FILE).write_text(json.dumps(values), encoding="utf-8")
        else:
            (folder / FILE).write_bytes(self.content)
        config = tokenizer_config(
            self.end_of_text_token, pad=None, model_max_length=model_max_length
        )
        write_json(folder / CONFIG_FILE, config)


def open_tokenizer(folder: Path) -> FileTokenizer:
    """The tokenizer in a folder: its tokenizer.json, and `eos_token` of tokenizer_config.json.

    Raises:
        TokenizerError: there is no tokenizer, or no run can use it.
    """
    folder = folder.expanduser()
    path = folder if folder.name == FILE else folder / FILE
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise TokenizerError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB")
        content = path.read_bytes()
    except OSError as error:
        raise TokenizerError(
            f"{path}: {error.strerror}",
            hint="name a folder with a tokenizer.json; swarm-data train-tokenizer makes one, and "
            "Transformers' save_pretrained",
        ) from error
    try:
        return FileTokenizer.of(content, _configured(path.with_name(CONFIG_FILE)))
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error


def _configured(path: Path) -> str | None:
    """The end-of-text token that a tokenizer_config.json names, if any."""
    try:
        with path.open("rb") as file:
            named = json.loads(file.read(_MAX_CONFIG_BYTES)).get("eos_token")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    if isinstance(named, dict):
        named = named.get("content")
    return named if isinstance(named, str) else None


def _parsed(content: bytes) -> dict[str, Any]:
    """The file's JSON object. Limits of its size and number of values bound its memory."""
    if len(content) > MAX_FILE_BYTES:
        raise TokenizerError(f"a tokenizer of {len(content)} bytes (limit {MAX_FILE_BYTES})")
    brackets = content.count(b"[") + content.count(b"{")
    if brackets > _MAX_BRACKETS or content.count(b",") > _MAX_COMMAS:
        raise TokenizerError("a tokenizer with too many values")
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"not a tokenizer.json: {type(error).__name__}") from error
    if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
        raise TokenizerError("not a tokenizer.json: it has no model")
    if values["model"].get("dropout"):
        raise TokenizerError("a tokenizer with dropout encodes a text differently each time")
    return values


def _ids(values: Mapping[str, Any]) -> Iterator[int]:
    """Ids of the model's own vocabulary."""
    kind, vocabulary = values["model"].get("type"), values["model"].get("vocab")
    if kind not in _MODELS:
        raise TokenizerError(f"a tokenizer's model is one of {', '.join(_MODELS)}")
    if isinstance(vocabulary, list):
        yield from range(len(vocabulary))
    elif isinstance(vocabulary, dict):
        yield from map(_checked_id, vocabulary.values())
    else:
        raise TokenizerError("a tokenizer without its vocabulary")


def _added_tokens(values: Mapping[str, Any]) -> list[tuple[str, int, bool]]:
    """Spelling and id of each added token, and whether it is special.

    Text never contains special tokens.
    """
    added = values.get("added_tokens")
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise TokenizerError("a tokenizer without added tokens, so without an end of text")
    found = []
    for token in added:
        number, spelled = _checked_id(token.get("id")), token.get("content")
        if not isinstance(spelled, str) or not spelled.encode(errors="ignore"):
            raise TokenizerError(f"the added token {number} has no spelling")
        if spelled.encode(errors="ignore").decode() != spelled:
            raise TokenizerError(f"the added token {number} is no text")
        found.append((spelled, number, token.get("special") is True))
    return found


def _checked_id(number: object) -> int:
    if type(number) is not int or not 0 <= number < MAX_IDS:
        raise TokenizerError(f"a token's id is no number below {MAX_IDS}")
    return number


def _end_of_text(special: Mapping[str, int], wanted: int | str | None) -> str:
    candidates = [token for token, number in special.items() if wanted in (token, number)]
    if wanted is None:
        candidates = [token for token in _END_OF_TEXT if token in special]
    if candidates:
        return candidates[0]
    named = f"{wanted!r}" if wanted is not None else f"any of {', '.join(_END_OF_TEXT)}"
    raise TokenizerError(
        f"it has no special token {named[:120]} to close a document with",
        hint='add one to "added_tokens", or name it as eos_token in tokenizer_config.json',
    )


END_OF_TEXT = "<|endoftext|>"
MIN_VOCABULARY = 257
"""256 bytes and the end of text."""


def train_tokenizer(documents: Iterable[bytes], vocab_size: int) -> FileTokenizer:
    """Trains a tokenizer with at most `vocab_size` ids: fewer if the text has no more pairs.

    Equal documents in equal order give an equal file. Memory grows with the number of different
    words.

    Documents are UTF-8. The 256 bytes and the end of text are among the ids.

    Raises:
        TokenizerError: the package tokenizers is not installed.
        ConfigError: too few ids.

    Source: R. Sennrich et al., arXiv 1508.07909; bytes and the splitting of words as in GPT-2.
    """
    if vocab_size < MIN_VOCABULARY:
        raise ConfigError(f"--vocab-size {vocab_size}: at least {MIN_VOCABULARY}")
    require_package()
    import tokenizers  # optional: only this and the processes that encode need it

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(_texts(documents), trainer)
    return FileTokenizer.of(made.to_str(pretty=True).encode())


def _texts(documents: Iterable[bytes]) -> Iterator[str]:
    for document in documents:
        yield document.decode()
